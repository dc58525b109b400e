"""Values of a tensor: finite or not by one reduction, and counted for a report.

Everything here waits for the device. It runs while a step is replayed or recorded, never in a step that is
only watched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradwatch.reading.layouts import dense
from gradwatch.records.finding import Operand
from gradwatch.taps import nested_containers
from gradwatch.taps.muted_forwards import batched


class State(NamedTuple):
    """Flags of a tensor: it has NaN, it has Inf elements (Inf is not looked for beside NaN)."""

    nan: bool = False
    inf: bool = False

    @property
    def finite(self) -> bool:
        """True if it has neither NaN nor Inf elements."""
        return not (self.nan or self.inf)


FINITE = State()
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial, type, nn.Module)
SETTINGS = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, *FUNCTIONS)
"""Types of arguments that stand for no batch of their own."""


def tensors(tree: Any) -> list[Tensor]:
    """Every tensor in nested containers, in order; objects with attributes (a dataclass) are opened too."""
    found = []
    for leaf in nested_containers.leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif _is_dataclass(leaf):
            found += tensors(_fields(leaf))
    return found


def all_readable(tree: Any) -> bool:
    """True if `tensors` finds all the numbers there are: beside tensors there are only settings."""
    for leaf in nested_containers.leaves(tree):
        if _is_dataclass(leaf):
            if not all_readable(_fields(leaf)):
                return False
        elif not (isinstance(leaf, Tensor) or _is_setting(leaf, depth=3)):
            return False
    return True


def _is_setting(leaf: Any, depth: int) -> bool:
    """True for a plain value, a function, a module, and an object (a configuration) with nothing else in it."""
    if leaf is None or isinstance(leaf, SETTINGS):
        return True
    kept = {} if hasattr(leaf, "__len__") else getattr(leaf, "__dict__", {})  # an array subclass has one, too
    return bool(kept and depth) and all(_is_setting(one, depth - 1) for one in nested_containers.leaves(kept))


def _is_dataclass(leaf: Any) -> bool:
    return hasattr(leaf, "__dataclass_fields__") and not isinstance(leaf, type)


def _fields(leaf: Any) -> list[Any]:
    return [getattr(leaf, name) for name in leaf.__dataclass_fields__]


def readable(tensor: Tensor) -> bool:
    """True if it holds numbers that may be NaN or Inf and that can be read here."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return False
    return tensor.device.type != "meta" and not batched(tensor)


def state(tensor: Tensor) -> State:
    """NaN, Inf or finite; one pass over the numbers. What cannot be read counts as finite."""
    if not readable(tensor):
        return FINITE
    numbers = _numbers(tensor)
    if numbers.numel() == 0:
        return FINITE
    low, high = (float(bound) for bound in torch.aminmax(numbers))  # sync: the next operation depends on it
    if math.isnan(low) or math.isnan(high):
        return State(nan=True)
    return State(inf=math.isinf(low) or math.isinf(high))


def states(tree: Any) -> State:
    """The worst of all tensors in a tree."""
    found = [state(tensor) for tensor in tensors(tree)]
    return State(any(one.nan for one in found), any(one.inf for one in found))


def finite(grads: Iterable[Tensor | None]) -> bool:
    """True if every element of every gradient is finite; None is no gradient."""
    return all(grad is None or state(grad).finite for grad in grads)


def describe(name: str, tensor: Tensor) -> Operand:
    """Type and shape of a tensor, its odd elements counted, the range of the rest."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    bare = Operand(name, dtype, tuple(tensor.shape), tensor.numel())
    if not readable(tensor):
        return bare
    numbers = _numbers(tensor).reshape(-1).double()
    sound = numbers[torch.isfinite(numbers)]
    low, high = torch.aminmax(sound) if sound.numel() else (math.nan, math.nan)
    return Operand(
        name,
        dtype,
        tuple(tensor.shape),
        tensor.numel(),
        nan=int(torch.isnan(numbers).sum()),
        inf=int(torch.isinf(numbers).sum()),
        zeros=int((numbers == 0).sum()),
        smallest=float(low),
        largest=float(high),
        first=_first(numbers, tensor.shape) if sound.numel() < numbers.numel() else (),
    )


def _first(numbers: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The position of the first element that is not finite."""
    if numbers.numel() != math.prod(shape):  # of a sparse tensor the values only
        return ()
    place, position = int((~torch.isfinite(numbers)).to(torch.uint8).argmax()), []
    for size in reversed(shape):
        place, at = divmod(place, size)
        position.append(at)
    return tuple(reversed(position))


@torch.no_grad()
def _numbers(tensor: Tensor) -> Tensor:
    numbers = dense(tensor)
    # float8 and the like have no reductions of their own.
    return numbers if numbers.dtype.itemsize > 1 else numbers.float()
