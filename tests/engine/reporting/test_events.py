"""Every Event of a rule that fires names the value that did it and the threshold it is compared with."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradwatch.capture.snapshot_assembly import appended
from gradwatch.detectors import DETECTORS, Detector
from gradwatch.engine import Engine
from gradwatch.engine.reporting.events import fill
from gradwatch.records.event import Event
from gradwatch.records.snapshot import Column
from gradwatch.rules.files import load_rules
from gradwatch.rules.packs import pack_names
from gradwatch.rules.rule_set import RuleSet
from tests.engine.cases import OptimizerRules, everywhere, make_sites, make_snapshot, rule

SIZE = 4
STEPS = 45

Fault = Callable[[int], dict[str, Any]]
"""Gives what is different in the i-th faulty step: `norms`, `scalars`, `columns` or `coef`."""


def norms(*values: float | None) -> Fault:
    """These norms in each faulty step."""
    return lambda i: {"norms": list(values)}


def scalar(name: str, value: float) -> Fault:
    """This value of one per step."""
    return lambda i: {"scalars": {name: value}}


def column(name: str, value: float) -> Fault:
    """This value at every parameter."""
    return lambda i: {"columns": {name: everywhere([value] * 2 * SIZE)}}


def by_rank(*values: float) -> Column:
    """A value a rank."""
    here = np.arange(2 * SIZE) >= SIZE
    return Column(np.array([*[0.0] * SIZE, *values], np.float64), here)


FAULTS: dict[str, Fault] = {
    "above": norms(100.0, 2.0, 2.0, 2.0),
    "above_recent_max": norms(100.0, 2.0, 2.0, 2.0),
    "all_zero": norms(0.0, 2.0, 2.0, 2.0),
    "below": norms(1e-3, 2.0, 2.0, 2.0),
    "below_recent_min": norms(1e-3, 2.0, 2.0, 2.0),
    "converged": scalar("loss", 1e-9),
    "above_usual": norms(1e6, 2.0, 2.0, 2.0),
    "below_usual": norms(1e-6, 2.0, 2.0, 2.0),
    "dead": column("zero_fraction", 0.95),
    "depth_ratio": norms(1e-6, 2.0, 2.0, 2.0),
    "drift": lambda i: {"norms": [2.0 * 1.3**i] * SIZE},
    "diverged": scalar("loss", 1e3),
    "drop": norms(1e-6, 2.0, 2.0, 2.0),
    "exploded": norms(1e6, 2.0, 2.0, 2.0),
    "fade": lambda i: {"norms": [0.002] * SIZE},
    "grown": lambda i: {"coef": np.full(2 * SIZE, 5.0, np.float32)},
    "jump": norms(1e6, 2.0, 2.0, 2.0),
    "loss_nonfinite": scalar("loss", math.nan),
    "loss_spike": scalar("loss", 1e6),
    "lr_jump": scalar("lr", 1.0),
    "never": norms(None, 2.0, 2.0, 2.0),
    "nonfinite": norms(math.nan, 2.0, 2.0, 2.0),
    "norm_overflow": column("norm_overflow", 1.0),
    "plateau": scalar("loss", 1e-3),  # progress: the constant loss around it is the fault
    "rank_mismatch": lambda i: {"columns": {"rank_mismatch": by_rank(0.0, 1.0, 0.0, 0.0)}},
    "rank_outlier": lambda i: {"columns": {"rank_norm": by_rank(2.0, 1e6, 2.0, 2.0)}},
    "rise": norms(1e6, 2.0, 2.0, 2.0),
    "same_batch": scalar("batch_hash", 7.0),
    "scaled": scalar("scaled_by", 0.5),
    "scale_collapse": lambda i: {"loss_scale": 65536.0 * 0.5**i},
    "spike": norms(100.0, 2.0, 2.0, 2.0),
    "stale": norms(None, 2.0, 2.0, 2.0),
    "stuck": column("update_ratio", 0.0),
    "update_ratio": column("update_ratio", 0.5),
}


def run(detector: Detector, fault: Fault, ruleset: RuleSet | None = None) -> list[Event]:
    """All Events of healthy steps, faulty ones (where a gradient `never` comes from the first on), healthy ones."""
    sites = appended(make_sites(SIZE), tuple(f"rank {k}" for k in range(SIZE)), "rank")
    ruleset = RuleSet(rules=(rule("r", detector),)) if ruleset is None else ruleset
    bound_rules = OptimizerRules(Engine(ruleset).bind(sites))
    for step in range(3 * STEPS):
        first = 0 if detector.kind == "never" else STEPS
        faulty = fault(step - STEPS) if first <= step < 2 * STEPS else {}
        found = faulty.pop("norms", [2.0 + 0.01 * (step % 5)] * SIZE)
        scalars = {
            "loss": 2.0 + 0.01 * (step % 3),
            "lr": 1e-3,
            "scaled_by": 1.0,
            "batch_hash": float(100 + step),
        }
        columns = {
            "zero_fraction": everywhere([0.1] * 2 * SIZE),
            "update_ratio": everywhere([1e-3] * 2 * SIZE),
            "weight_norm": everywhere([1.0] * 2 * SIZE),
            "rank_norm": by_rank(*(2.0 + 0.01 * (step % k) for k in range(1, SIZE + 1))),
            "rank_mismatch": by_rank(*[0.0] * SIZE),
        }
        snapshot = make_snapshot(
            sites,
            step,
            [*found, *[None] * SIZE],
            **{
                "loss_scale": 65536.0,
                **faulty,
                "scalars": {**scalars, **faulty.get("scalars", {})},
                "columns": {**columns, **faulty.get("columns", {})},
            },
        )
        bound_rules.take(snapshot)
    return bound_rules.events


def detector_of(kind: str) -> Detector:
    """A detector of this kind, as it is by default."""
    required = {
        "above": {"threshold": 50.0},
        "below": {"threshold": 0.5},
        "converged": {"half_life": 1},
        "drift": {"window": 10, "lag": 10, "warmup": 20},
        "fade": {"warmup": 20},
        "plateau": {"steps": 5},
    }
    return DETECTORS[kind](**required.get(kind, {}))


def every_number(value: float) -> Fault:
    """This value for everything that is measured."""
    names = ("zero_fraction", "update_ratio", "weight_norm")
    return lambda i: {
        "norms": [value] * SIZE,
        "scalars": dict.fromkeys(("loss", "lr"), value),
        "columns": {name: everywhere([value] * 2 * SIZE) for name in names},
        "coef": np.full(2 * SIZE, value, np.float32),
    }


@pytest.mark.parametrize("kind", sorted(FAULTS))
def test_value_and_threshold_stand_in_every_event(kind: str) -> None:
    """Of one fault of each kind, from where it is pending to where it is over, both are numbers."""
    events = run(detector_of(kind), FAULTS[kind])
    assert {"firing", "resolved"} <= {event.kind for event in events}
    for event in events:
        assert math.isfinite(event.threshold)
        assert math.isfinite(event.score)
        assert math.isfinite(event.value) or (kind == "loss_nonfinite" and event.kind == "firing")


def test_every_kind_has_its_fault() -> None:
    """A new kind of detector is held to the law above."""
    assert {kind for kind, one in DETECTORS.items() if one.__module__.startswith("gradwatch.")} == set(FAULTS)


def rules_of_packs() -> list[RuleSet]:
    """Each rule of the shipped packs on a detector, alone, so that none has told of a NaN before; equal ones once."""
    alone: dict[str, RuleSet] = {}
    for ruleset in map(load_rules, pack_names()):
        for one in ruleset.rules:
            if isinstance(one.detect, Detector):  # no condition on others
                by_itself = replace(one, inhibited_by=(), unless=(), do=())
                alone.setdefault(repr(by_itself), replace(ruleset, rules=(by_itself,)))
    return list(alone.values())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_compared_with_nothing(value: float) -> None:
    """No sentence of a pack's rule says that a NaN is above 1000."""
    told = [event for one in rules_of_packs() for event in run(one.rules[0].detect, every_number(value), one)]
    assert {"exploded", "loss-non-finite"} <= {event.rule for event in told if event.kind == "firing"}
    for event in told:
        assert not re.search(r"\b(nan|inf)\b[^.]*\b(above|below)\b", event.description), event.description


@pytest.mark.parametrize(("count", "said"), [("1", "1 parameter in all."), ("2", "2 parameters in all.")])
def test_one_is_no_plural(count: str, said: str) -> None:
    """As the packs write it; a name with such words in it is left as it is."""
    facts = {"count": count, "param": "1 parameters"}
    assert fill("{param}: {count} parameters in all.", facts) == f"1 parameters: {said}"
