"""Probes: a NaN or Inf seen in a backward between two reads of the local norms is kept until the next one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwatch.capture.columns.norm_local import LocalNorms

TENTH = frozenset({10})


def failed(component: str, error: BaseException) -> None:
    """Nothing is to fail."""
    raise error


def norms_on(params: list[Tensor], before: LocalNorms | None = None) -> LocalNorms:
    return LocalNorms(params, failed, before, TENTH, probing=True)


def backward(param: Tensor, factor: float) -> None:
    (param * factor).sum().backward()


def found_at(norms: LocalNorms, step: int) -> list[float]:
    pending = norms.take(step, 1.0, lambda: True)
    assert pending is not None
    return pending.columns()["norm_local"].values.tolist()


def test_what_was_kept_follows_its_parameter() -> None:
    """A parameter that joins within ten steps changes places: the NaN stays with the one that had it."""
    first, second = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    before = norms_on([first])
    backward(first, math.nan)
    before.take(13, 1.0, lambda: True)
    after = norms_on([second, first], before)
    before.close()
    assert math.isnan(found_at(after, 20)[1])


def test_what_was_seen_since_the_last_step_follows_its_parameter() -> None:
    """A parameter that joins is noticed at the boundary, after the backward that has the NaN."""
    first, second = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    before = norms_on([first])
    before.take(12, 1.0, lambda: True)
    backward(first, math.nan)
    after = norms_on([second, first], before)
    before.close()
    after.take(13, 1.0, lambda: True)
    assert math.isnan(found_at(after, 20)[1])


def test_an_inf_between_two_reads_is_kept() -> None:
    """Not NaN alone is not finite."""
    param = torch.ones(3, requires_grad=True)
    norms = norms_on([param])
    norms.take(0, 1.0, lambda: True)
    backward(param, math.inf)
    norms.take(13, 1.0, lambda: True)
    assert found_at(norms, 20) == [math.inf]


def test_inf_does_not_take_the_place_of_nan() -> None:
    """Neither in one step, nor at a later one, nor at the step of the read."""
    param = torch.ones(3, requires_grad=True)
    norms = norms_on([param])
    norms.take(0, 1.0, lambda: True)
    backward(param, math.nan)
    backward(param, math.inf)
    norms.take(13, 1.0, lambda: True)
    backward(param, math.inf)
    norms.take(19, 1.0, lambda: True)
    backward(param, math.inf)
    assert math.isnan(found_at(norms, 20)[0])
