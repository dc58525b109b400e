"""Columns of the values that go into a module or come out: mean, spread, extremes, shares near zero or saturated.

An element is saturated where the slope of its function is less than 5 % of the largest, so that hardly any gradient
comes through: of Tanh above 0.975 in magnitude, of Sigmoid within 0.0127 of 0 or 1, of Hardtanh, ReLU6 and Hardsigmoid
at their bounds. Other modules have no such column: the slope of GELU or SiLU does not follow from their output, and a
ReLU that is 0 is `activation_near_zero`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

NEAR_ZERO = 1e-6
LEAST_SLOPE = 0.05
"""Of the largest slope of a function."""
_TANH = math.sqrt(1 - LEAST_SLOPE)  # its slope at an output y is 1 - y²
_SIGMOID = math.sqrt(0.25 - 0.25 * LEAST_SLOPE)  # its slope at an output y is 0.25 - (y - 0.5)²


def _saturated(module: nn.Module, values: Tensor, dtype: torch.dtype) -> Tensor | None:
    """bool: the elements at which the module's function is flat; None where its output does not show that."""
    if isinstance(module, nn.Tanh):
        return values.abs() > _TANH
    if isinstance(module, nn.Sigmoid):
        return (values - 0.5).abs() > _SIGMOID
    if isinstance(module, nn.Hardtanh):  # ReLU6 is one
        low, high = torch.tensor(
            [module.min_val, module.max_val], dtype=dtype, device="cpu"
        ).tolist()  # sync: CPU
        outside: Tensor = (values <= low) | (values >= high)
        return outside
    if isinstance(module, nn.Hardsigmoid):
        return (values <= 0) | (values >= 1)
    return None


def _saturation(module: nn.Module, values: Tensor, dtype: torch.dtype) -> Tensor | None:
    saturated = _saturated(module, values, dtype)
    return None if saturated is None else saturated.float().mean()


Statistic = Callable[[nn.Module, Tensor, torch.dtype], "Tensor | None"]
"""The value of a module and its elements: at least one, in float32 or float64, of this type before."""

_STATISTICS: Mapping[str, Statistic] = {
    "mean": lambda module, values, dtype: values.mean(),
    "std": lambda module, values, dtype: values.std(correction=0),
    "min": lambda module, values, dtype: values.amin(),
    "max": lambda module, values, dtype: values.amax(),
    "near_zero": lambda module, values, dtype: (values.abs() < NEAR_ZERO).float().mean(),
}
OF_INPUTS: Mapping[str, Statistic] = {f"input_{name}": one for name, one in _STATISTICS.items()}
"""The columns of the inputs of modules."""
OF_OUTPUTS: Mapping[str, Statistic] = {
    **{f"activation_{name}": one for name, one in _STATISTICS.items()},
    "activation_saturation": _saturation,
}
"""The columns of the outputs of modules."""
