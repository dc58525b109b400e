"""Clip groups that no parameter can reach, whatever the model."""

from __future__ import annotations

import numpy as np
import pytest

from gradwatch.engine.clipping.bind_clip_section import clip_groups_without_any
from gradwatch.engine.selected_parameters import labels
from gradwatch.records.snapshot import Sites
from gradwatch.rules.clip_order import clip_groups, never_reached
from gradwatch.rules.files import parse_rules
from gradwatch.rules.rule_set import RuleSet

NAMES = ("head.weight", "head.bias", "encoder.0.weight", "encoder.0.bias")


def clipping(*groups: str) -> RuleSet:
    """A file that clips groups a, b, …, each `params: …`, listed under `clip:` the other way round."""
    names = "abcd"[: len(groups)]
    said = "".join(f"  {name}: {{params: {globs}}}\n" for name, globs in zip(names, groups, strict=True))
    policies = "".join(f"    {name}: {{method: norm, max_norm: 1.0}}\n" for name in reversed(names))
    return parse_rules(f"version: 1\ngroups:\n{said}clip:\n  groups:\n{policies}")


CASES = {
    ('["*"]', '["head.*"]'): [("b", "a")],
    ('["head.*"]', '["*"]'): [],
    ('["*"], min_ndim: 2', '["head.*"]'): [],
    ('["*"], min_ndim: 2', '["head.*"], min_ndim: 2'): [("b", "a")],
    ('["encoder.*", "head.*"]', '["head.weight", "encoder.0.*"]'): [("b", "a")],
    ('["encoder.*"]', '["encoder.*", "head.*"]'): [],
    ('["encoder.*"]', '["head.*"]', '["encoder.0.*", "head.bias"]'): [("c", "a")],
    ('["encoder.?.weight"]', '["encoder.*.weight"]'): [],
    ('["[eh]*"]', '["[eh]*"]'): [],
}


@pytest.mark.parametrize("groups", CASES)
def test_what_is_never_reached(groups: tuple[str, ...]) -> None:
    """Named with the first group that has its parameters; only what is certain of every model."""
    found = [(group.name, first.name) for group, first in never_reached(clipping(*groups))]
    assert found == CASES[groups]


@pytest.mark.parametrize("groups", CASES)
def test_the_engine_clips_nothing_of_them(groups: tuple[str, ...]) -> None:
    """On a model that has parameters of each."""
    ruleset = clipping(*groups)
    ndim = np.array([2, 1, 2, 1])
    sites = Sites(NAMES, ("param",) * 4, np.full(4, 8), ndim, np.arange(4))
    idle = clip_groups_without_any(ruleset, sites.labelled(labels(ruleset.groups, sites)))
    assert {group.name for group, _ in never_reached(ruleset)} <= set(idle)


def test_the_order_is_that_of_groups() -> None:
    """Whatever the order under `clip: groups:`."""
    assert [group.name for group in clip_groups(clipping('["head.*"]', '["*"]'))] == ["a", "b"]
