"""Sampled columns agree with whole tensors where the sample is the tensor, and are due when they should be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gradwatch.hooks.sampling import COLUMNS, SAMPLE, Sampler


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(8, 8), (8, 8), (5,), (100, 100), (), (300, 41)]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.relu(torch.randn_like(param))
    return params


def test_due_in_bursts() -> None:
    """Steps 0-2 and then 100-102; the update ratio one step later, because the update follows the boundary."""
    sampler = Sampler(COLUMNS)
    fractions = [step for step in range(210) if sampler.due("zero_fraction", step)]
    assert fractions == [0, 1, 2, 100, 101, 102, 200, 201, 202]
    assert [step for step in range(110) if sampler.due("update_ratio", step)] == [1, 2, 3, 101, 102, 103]
    assert [step for step in range(9) if Sampler(COLUMNS, {"max_abs": 4}).due("max_abs", step)] == [0, 4, 8]
    ratios = Sampler(COLUMNS, {"update_ratio": 4})
    assert [step for step in range(9) if ratios.due("update_ratio", step)] == [4, 8]
    assert sampler.collect(50, parameters(), lambda: [None] * 6) is None


def test_small_tensors_are_sampled_whole() -> None:
    """Up to 4,096 elements the statistics are exact; above, of a strided sample."""
    params = parameters()
    sampled = Sampler(COLUMNS).collect(0, params, lambda: [param.grad for param in params])
    assert sampled is not None
    columns = sampled.columns()
    for k, param in enumerate(params):
        exact = param.numel() <= SAMPLE
        grad = param.grad
        assert grad is not None
        assert columns["zero_fraction"].values[k] == pytest.approx(
            float((grad == 0).float().mean()), rel=1e-5 if exact else 0.1
        )
        assert columns["weight_norm"].values[k] == pytest.approx(
            float(param.detach().norm()), rel=1e-5 if exact else 0.1
        )
        if exact:
            assert columns["max_abs"].values[k] == grad.abs().max()


def test_update_ratio_is_the_last_update_over_the_weight_before_it() -> None:
    """‖Δw‖/‖w‖ of exactly the parameters that were given a gradient; none after a skipped step."""
    params = parameters()
    sampler = Sampler(frozenset({"update_ratio"}))
    grads = [param.grad for param in params]
    moved = torch.ones(6, dtype=torch.bool).numpy()
    sampler.collect(0, params, lambda: grads)
    sampler.moved(moved)
    before = [param.detach().clone() for param in params]
    with torch.no_grad():
        for param in params:
            param.mul_(0.75)
    sampled = sampler.collect(1, params, lambda: grads)
    assert sampled is not None
    column = sampled.columns()["update_ratio"]
    for k, old in enumerate(before):
        assert column.values[k] == pytest.approx(
            0.25 * float(old.norm()) / max(float(old.norm()), 0.1), rel=1e-4
        )
    sampler.moved(~moved)
    later = sampler.collect(2, params, lambda: grads)
    assert later is not None
    assert not later.columns()["update_ratio"].present.any()


def test_late_verdicts_find_the_step_they_belong_to() -> None:
    """On a device steps are judged after later ones were sampled: each update is matched with its own verdict."""
    params = parameters()
    sampler = Sampler(frozenset({"update_ratio"}))
    grads = [param.grad for param in params]
    everyone = torch.ones(6, dtype=torch.bool).numpy()
    sampled = [sampler.collect(step, params, lambda: grads) for step in (100, 101, 102)]
    sampler.moved(~everyone, 99)  # nothing of step 99 was kept
    sampler.moved(everyone, 100)
    sampler.moved(~everyone, 101)
    present = [None if one is None else one.columns().get("update_ratio") for one in sampled]
    assert present[0] is None
    assert present[1] is not None
    assert present[1].present.all()
    assert present[2] is not None
    assert not present[2].present.any()


def test_an_update_without_a_verdict_is_absent() -> None:
    """Where the step before was never judged (a fault of ours), there is no update ratio rather than a wrong one."""
    params = parameters()
    sampler = Sampler(frozenset({"update_ratio", "weight_norm"}))
    grads = [param.grad for param in params]
    sampler.collect(100, params, lambda: grads)
    later = sampler.collect(101, params, lambda: grads)
    assert later is not None
    assert later.columns().keys() == {"weight_norm"}


def test_missing_gradients_are_absent() -> None:
    """A parameter without a gradient has no zero fraction."""
    params = parameters()
    grads = [None if k == 2 else param.grad for k, param in enumerate(params)]
    sampled = Sampler(frozenset({"zero_fraction"})).collect(0, params, lambda: grads)
    assert sampled is not None
    assert sampled.columns()["zero_fraction"].present.tolist() == [True, True, False, True, True, True]


def test_a_ratio_never_comes_without_the_norm_it_is_relative_to() -> None:
    """In each burst a rule on both columns has its three samples, and so `for: 3` is met within it."""
    sampler, weights = Sampler(frozenset({"update_ratio", "weight_norm"})), [torch.ones(4, 4)]
    both = []
    for step in range(120):
        sampled = sampler.collect(step, weights, lambda: [None])
        sampler.moved(np.ones(1, np.bool_), step)
        columns = {} if sampled is None else sampled.columns()
        if "update_ratio" in columns:
            assert "weight_norm" in columns
            both.append(step)
        weights[0] += 0.1
    assert both == [1, 2, 3, 101, 102, 103]
