"""The bytes that `rules check --cost` announces are those that the reader of columns reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwatch.capture.columns.column_reader import COLUMNS, ColumnReader
from gradwatch.capture.columns.histograms import HistogramReader, HistogramTurns
from gradwatch.engine import Engine, read_cost
from gradwatch.engine.read_cost import column_costs, step_cost
from gradwatch.engine.selected_parameters import matching
from gradwatch.reading import chunked_statistics
from gradwatch.records.snapshot import Sites
from gradwatch.rules.files import load_rules, parse_rules

OWN = """version: 1
rules:
  a: {detect: {kind: above, of: max_abs, threshold: 1}, every: 3}
  b: {detect: {kind: above, of: std, threshold: 1}, every: 1}
  c: {detect: {kind: above, of: zero_fraction, threshold: 0.5}, scope: total, every: 4}
  d: {detect: {kind: above, of: weight_norm, threshold: 9}, every: 6, groups: [some]}
  e: {detect: {kind: above, of: update_norm, threshold: 9}, every: 5}
  f: {detect: {kind: above, of: weight_std, threshold: 9}, every: 4}
  g: {detect: {kind: above, of: moment_norm, threshold: 9}, every: 5}
  h: {detect: {kind: above, of: second_moment_near_zero, threshold: 0.9}, every: 2}
  i: {detect: {kind: below, of: moment_cosine, threshold: -0.5}, every: 3}
groups: {some: {params: ["p1", "p3"]}}
modules: {tap: output}
histograms: {of: [activations, gradients], every: 6, params: ["p2", "p3", "p4"]}
"""


@pytest.mark.parametrize("rules", ["default", OWN])
def test_what_is_announced_is_read(rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean and the most of 60 steps of a reader, counted where it asks for the memory of a tensor."""
    sizes = [(400, 300), (5000,), (500, 200), (70, 1000), (90, 90)]  # each more than is read with others
    params = [torch.randn(size) for size in sizes]
    optimizer = torch.optim.Adam(params)
    for param in params:
        optimizer.state[param] = {"exp_avg": param.clone(), "exp_avg_sq": param.square()}
    names = tuple(f"p{k}" for k in range(len(params)))
    numels = np.array([param.numel() for param in params])
    sites = Sites(
        names, ("param",) * len(params), numels, np.array([p.ndim for p in params]), np.arange(len(params))
    )
    ruleset = load_rules(rules) if rules == "default" else parse_rules(rules)
    plan = Engine(ruleset).bind(sites).plan
    read, blocks, copy = [0], chunked_statistics.blocks, chunked_statistics.copy

    def counted(tensor: Tensor) -> Any:
        read[0] += tensor.nbytes
        return blocks(tensor)

    def copied(tensor: Tensor, onto: Tensor) -> None:
        read[0] += tensor.nbytes
        copy(tensor, onto)

    monkeypatch.setattr(chunked_statistics, "blocks", counted)
    monkeypatch.setattr(chunked_statistics, "copy", copied)
    own = np.arange(len(params))
    reader = ColumnReader(plan.needs.only(COLUMNS), plan.staggering, own)
    found = []
    for step in range(180):
        read[0] = 0
        reader.collect(step, params, lambda: params, optimizer=optimizer)
        if ruleset.histograms is not None:
            of = ruleset.histograms
            turns = HistogramTurns(of.every, plan.staggering.phases(of.every), matching(sites, of.params))
            HistogramReader(turns).collect(step, lambda: params, 1.0)
        reader.moved(np.ones(len(params), np.bool_), np.zeros(len(params), np.bool_), step)
        found.append(read[0])
    cost = step_cost(plan, np.full(len(params), 4), ruleset.histograms)
    assert cost.norms == 4 * numels.sum()
    assert cost.mean == pytest.approx(np.mean(found[60:]))
    assert cost.most == max(found[60:])


@pytest.mark.parametrize("scope", ["param", "total"])
def test_a_cadence_of_many_steps_costs_its_share(scope: str) -> None:
    """At every: 20,000 a step reads a 20,000th of what a rule at each step reads, but for the copy of an update."""
    numels = np.array([120_000, 5_000, 100_000])
    sites = Sites(("a", "b", "c"), ("param",) * 3, numels, np.array([2, 1, 2]), np.arange(3))
    text = "version: 1\nrules: {{r: {{detect: {{kind: above, of: {}, threshold: 1}}, every: {}, scope: {}}}}}"
    for column, passes in (("max_abs", 1), ("update_norm", 3)):
        plan = Engine(parse_rules(text.format(column, 20_000, scope))).bind(sites).plan
        cost = step_cost(plan, np.full(3, 4))
        assert cost.mean == pytest.approx(passes * 4 * numels.sum() / 20_000)
        assert cost.most > 0
    two = "version: 1\nrules:\n" + "".join(
        f"  r{every}: {{detect: {{kind: above, of: max_abs, threshold: 1}}, every: {every}, scope: total}}\n"
        for every in (4_999, 5_003)
    )
    cost = step_cost(Engine(parse_rules(two)).bind(sites).plan, np.full(3, 4))
    assert cost.mean == pytest.approx(4 * numels.sum() * (1 / 4_999 + 1 / 5_003))
    assert cost.most == 2 * 4 * numels.sum()  # of each cadence alone: the steps at which they meet are rare


def test_the_most_is_a_bound_where_cadences_rarely_meet() -> None:
    """Of staggered rules whose common period is 6,930 steps: no step reads more than is announced."""
    numels = np.random.default_rng(0).integers(20_000, 200_000, 40)
    names = tuple(f"p{k}" for k in range(40))
    sites = Sites(names, ("param",) * 40, numels, np.full(40, 2), np.arange(40))
    rules = "version: 1\nrules:\n" + "".join(
        f"  r{every}: {{detect: {{kind: above, of: {of}, threshold: 1}}, every: {every}}}\n"
        for every, of in ((70, "max_abs"), (99, "update_norm"))
    )
    plan, nbytes = Engine(parse_rules(rules)).bind(sites).plan, 4 * numels
    cost = step_cost(plan, np.full(40, 4))
    reads = [read_cost._bytes(plan, plan.needs.only(COLUMNS), step, nbytes) for step in range(6930, 2 * 6930)]
    assert max(reads) <= cost.most <= 2 * max(reads)
    assert np.mean(reads) <= cost.mean <= 1.2 * np.mean(reads)


def test_cadences_in_words() -> None:
    """Each column with what is read of it, how often, and for which rules."""
    found = {one.column: (one.cadences, one.rules) for one in column_costs(parse_rules(OWN).rules)}
    assert found == {
        "zero_fraction": (("all every 4 steps",), ("c",)),
        "max_abs": (("each every 3 steps",), ("a",)),
        "std": (("all at each step",), ("b",)),
        "weight_norm": (("each every 6 steps",), ("d",)),
        "weight_std": (("each every 4 steps",), ("f",)),
        "update_norm": (("each every 5 steps",), ("e",)),
        "moment_norm": (("each every 5 steps",), ("g",)),
        "second_moment_near_zero": (("each every 2 steps",), ("h",)),
        "moment_cosine": (("each every 3 steps",), ("i",)),
    }
