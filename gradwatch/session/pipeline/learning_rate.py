"""The learning rate of an optimizer as one number: the largest of the parameter groups that it trains."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.reading.async_copy import Number, host_value, on_host, start_copy


def learning_rate(optimizer: Optimizer) -> Number | None:
    """The largest learning rate of all groups that hold a parameter that wants a gradient, else of all groups.

    Parameters that want one, not those that have one: an expert or a branch that a step leaves out must not look like
    a jump of the rate. None where one of these groups has no rate that is one number, and might train by its own.
    """
    groups = optimizer.param_groups
    if len(groups) == 1:
        rate = groups[0].get("lr")
        return rate if type(rate) is float else one_number(rate)
    trained = [group for group in groups if any(param.requires_grad for param in group["params"])]
    rates = [group.get("lr") for group in trained or groups]
    floats: list[float] = [rate for rate in rates if type(rate) is float]
    if len(floats) == len(rates):
        return max(floats, key=_with_nan_first, default=None)
    return _largest([rate if _on_device(rate) else one_number(rate) for rate in rates])


def _with_nan_first(rate: float) -> float:
    return math.inf if math.isnan(rate) else rate


def one_number(rate: Any) -> Number | None:
    """A learning rate that is no float: a capturable optimizer's is a tensor, copied without waiting.

    None where it is not one real number: a schedule, None (an optimizer that finds its own), one for each dimension.
    """
    if isinstance(rate, Tensor):
        return start_copy(rate) if _is_one_real(rate) else None
    if not isinstance(rate, Real):
        return None
    try:
        return float(rate)
    except OverflowError:
        return math.inf


def _is_one_real(rate: Tensor) -> bool:
    return rate.numel() == 1 and not rate.is_complex() and not rate.is_meta


def _on_device(rate: Any) -> bool:
    return isinstance(rate, Tensor) and _is_one_real(rate) and not on_host(rate)


def _largest(rates: list[Any]) -> Number | None:
    """The largest of numbers here and of tensors on a device, compared there; None where one is not known."""
    if any(rate is None for rate in rates):
        return None
    there = [rate.detach().reshape(()) for rate in rates if isinstance(rate, Tensor)]
    here = [host_value(rate) for rate in rates if not isinstance(rate, Tensor)]
    if not there:
        return max(here, key=_with_nan_first, default=None)
    largest = there[0].float()
    for rate in there[1:]:
        largest = torch.maximum(largest, rate.to(largest))
    return start_copy(largest.clamp(min=max(here)) if here else largest)
