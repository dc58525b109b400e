"""Sampled columns agree with whole tensors where the sample is the tensor, and are due when they should be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from gradwatch.capture.columns.column_reader import COLUMNS, ColumnReader
from gradwatch.capture.columns.strided_samples import SAMPLE
from gradwatch.engine.columns_needed import BURSTS, Needs


def bursts(*columns: str) -> ColumnReader:
    """As rules read them that leave `every` out."""
    return ColumnReader(Needs(frozenset(name + BURSTS for name in columns)))


def exactly(every: int, *columns: str) -> ColumnReader:
    """As rules read them that say how often."""
    return ColumnReader(Needs(frozenset(columns), dict.fromkeys(columns, frozenset({every}))))


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(8, 8), (8, 8), (5,), (100, 100), (), (300, 41)]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.relu(torch.randn_like(param))
    return params


def test_due_in_bursts() -> None:
    """Steps 0-2 and then 100-102; the update ratio one step later, because the update follows the boundary."""
    reader = bursts(*COLUMNS)
    fractions = [step for step in range(210) if reader.due("zero_fraction:bursts", step)]
    assert fractions == [0, 1, 2, 100, 101, 102, 200, 201, 202]
    assert [step for step in range(110) if reader.due("update_ratio:bursts", step)] == [
        1,
        2,
        3,
        101,
        102,
        103,
    ]
    assert reader.collect(50, parameters(), lambda: [None] * 6) is None


def test_due_at_each_rule_s_own_steps() -> None:
    """Rules of every 4 and every 6 on one column: it is read on the steps of either, and no rule's bursts hide them."""
    every = {"max_abs": frozenset({4, 6}), "update_ratio": frozenset({4})}
    reader = ColumnReader(Needs(frozenset({"max_abs", "max_abs:bursts", "update_ratio"}), every))
    assert [step for step in range(13) if reader.due("max_abs", step)] == [0, 4, 6, 8, 12]
    assert [step for step in range(13) if reader.due("max_abs:bursts", step)] == [0, 1, 2]
    assert [step for step in range(9) if reader.due("update_ratio", step)] == [4, 8]


def test_the_next_step_is_the_first_that_is_due() -> None:
    """`next_due` is the first step after that `due` finds, and a reader reads nothing before it."""
    columns = ("max_abs", "update_ratio", "zero_fraction:bursts", "update_ratio:bursts")
    needs = Needs(frozenset(columns), {"max_abs": frozenset({4, 6}), "update_ratio": frozenset({7})})
    for column, step in itertools.product(columns, range(210)):
        assert needs.next_due(column, step) == next(
            s for s in itertools.count(step + 1) if needs.due(column, s)
        )
    assert needs.next_due("weight_norm", 0) is None
    reader, params = ColumnReader(needs), parameters()
    read = [s for s in range(210) if s not in reader.idle and reader.collect(s, params, lambda: [None] * 6)]
    assert read == [
        s
        for s in range(210)
        if any(needs.due(c, s) or ("ratio" in c and needs.due(c, s + 1)) for c in columns)
    ]


@pytest.mark.parametrize("suffix", ["", BURSTS])
def test_whole_tensors_and_samples(suffix: str) -> None:
    """Up to 4,096 elements the statistics are exact; above, in bursts, of a strided sample, but for the maximum."""
    params = parameters()
    reader = bursts(*COLUMNS) if suffix else exactly(1, *COLUMNS)
    sampled = reader.collect(0, params, lambda: [param.grad for param in params])
    assert sampled is not None
    columns = {name.removesuffix(BURSTS): column for name, column in sampled.columns().items()}
    for k, param in enumerate(params):
        exact = not suffix or param.numel() <= SAMPLE
        grad = param.grad
        assert grad is not None
        assert columns["zero_fraction"].values[k] == pytest.approx(
            float((grad == 0).float().mean()), rel=1e-5 if exact else 0.1
        )
        assert columns["weight_norm"].values[k] == pytest.approx(
            float(param.detach().norm()), rel=1e-5 if exact else 0.1
        )
        assert columns["max_abs"].values[k] == grad.abs().max()


def test_update_ratio_is_the_last_update_over_the_weight_before_it() -> None:
    """‖Δw‖/‖w‖ of exactly the parameters that were given a gradient; none after a skipped step."""
    params = parameters()
    reader = exactly(1, "update_ratio")
    grads = [param.grad for param in params]
    moved = torch.ones(6, dtype=torch.bool).numpy()
    reader.collect(0, params, lambda: grads)
    reader.moved(moved)
    before = [param.detach().clone() for param in params]
    with torch.no_grad():
        for param in params:
            param.mul_(0.75)
    sampled = reader.collect(1, params, lambda: grads)
    assert sampled is not None
    column = sampled.columns()["update_ratio"]
    for k, old in enumerate(before):
        assert column.values[k] == pytest.approx(
            0.25 * float(old.norm()) / max(float(old.norm()), 0.1), rel=1e-4
        )
    reader.moved(~moved)
    later = reader.collect(2, params, lambda: grads)
    assert later is not None
    assert not later.columns()["update_ratio"].present.any()


def test_late_verdicts_find_the_step_they_belong_to() -> None:
    """On a device steps are judged after later ones were sampled: each update is matched with its own verdict."""
    params = parameters()
    reader = bursts("update_ratio")
    grads = [param.grad for param in params]
    everyone = torch.ones(6, dtype=torch.bool).numpy()
    sampled = [reader.collect(step, params, lambda: grads) for step in (100, 101, 102)]
    reader.moved(~everyone, 99)  # nothing of step 99 was kept
    reader.moved(everyone, 100)
    reader.moved(~everyone, 101)
    present = [None if one is None else one.columns().get("update_ratio:bursts") for one in sampled]
    assert present[0] is None
    assert present[1] is not None
    assert present[1].present.all()
    assert present[2] is not None
    assert not present[2].present.any()


def test_an_update_without_a_verdict_is_absent() -> None:
    """Where the step before was never judged (a fault of ours), there is no update ratio rather than a wrong one."""
    params = parameters()
    reader = bursts("update_ratio", "weight_norm")
    grads = [param.grad for param in params]
    reader.collect(100, params, lambda: grads)
    later = reader.collect(101, params, lambda: grads)
    assert later is not None
    assert later.columns().keys() == {"weight_norm:bursts"}


def test_missing_gradients_are_absent() -> None:
    """A parameter without a gradient has no zero fraction."""
    params = parameters()
    grads = [None if k == 2 else param.grad for k, param in enumerate(params)]
    sampled = exactly(1, "zero_fraction").collect(0, params, lambda: grads)
    assert sampled is not None
    assert sampled.columns()["zero_fraction"].present.tolist() == [True, True, False, True, True, True]


def test_a_ratio_never_comes_without_the_norm_it_is_relative_to() -> None:
    """In each burst a rule on both columns has its three samples, and so `for: 3` is met within it."""
    reader, weights = bursts("update_ratio", "weight_norm"), [torch.ones(4, 4)]
    both = []
    for step in range(120):
        sampled = reader.collect(step, weights, lambda: [None])
        reader.moved(np.ones(1, np.bool_), step)
        columns = {} if sampled is None else sampled.columns()
        if "update_ratio:bursts" in columns:
            assert "weight_norm:bursts" in columns
            both.append(step)
        weights[0] += 0.1
    assert both == [1, 2, 3, 101, 102, 103]
