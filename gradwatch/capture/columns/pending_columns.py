"""Columns of one step that may still be on their way from a device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.reading.async_copy import Floats, Number, host_value, is_ready
from gradwatch.reading.joint_copy import JointCopy, Place
from gradwatch.records.snapshot import BoolArray, Column

OverdueSites = Mapping[tuple[str, ...], BoolArray]
"""Sites that no step has had a value of since their turn, by the columns that a rule reads, the judged one first."""
NO_SITES_OVERDUE: OverdueSites = MappingProxyType({})
TINY, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class PendingValues(Protocol):
    """[K] numbers on their way to the host."""

    def ready(self) -> bool:
        """True if `values()` would return at once."""
        ...

    def values(self) -> Floats:
        """[K]; waits for them."""
        ...


class HostNumbers:
    """[K] numbers that are here already; arrays are made of them when they are asked for, in warm caches."""

    __slots__ = ("_by_position", "_count", "_scale", "_values")

    def __init__(self, by_position: Mapping[int, float], count: int, scale: Number) -> None:
        self._by_position = by_position
        self._count = count
        self._scale = scale
        self._values: NDArray[Any] | None = None

    def ready(self) -> bool:
        """True if `values()` would return at once."""
        return is_ready(self._scale)

    def values(self) -> Floats:
        """[K]."""
        if self._values is None:
            self._values = self._spread()
        scale = host_value(self._scale)
        if scale == 1.0:
            return self._values
        with np.errstate(divide="ignore", invalid="ignore"):
            divided: Floats = np.divide(self._values, self._values.dtype.type(scale))
        return divided

    def _spread(self) -> NDArray[Any]:
        numbers = self._by_position
        # In float32, as norms are, unless that would make 0 or infinity of a number.
        narrow = True
        for size in map(abs, numbers.values()):
            if not (TINY <= size <= LARGEST or size in (0.0, math.inf) or size != size):
                narrow = False
                break
        values: NDArray[Any] = np.zeros(self._count, np.float32 if narrow else np.float64)
        values[list(numbers)] = list(numbers.values())
        return values


class SentNumbers:
    """[K] numbers of which some come from devices, at these `places` of a joint copy, divided by `scale` when here."""

    __slots__ = ("_copy", "_count", "_of_host", "_places", "_scale")

    def __init__(
        self,
        copy: JointCopy,
        places: Sequence[tuple[list[int], Place]],
        of_host: Mapping[int, float],
        count: int,
        scale: Number,
    ) -> None:
        self._copy = copy
        self._places = places
        self._of_host = of_host
        self._count = count
        self._scale = scale

    def ready(self) -> bool:
        """True if `values()` would return at once."""
        for _, place in self._places:
            if not self._copy.ready(place):
                return False
        return is_ready(self._scale)

    def values(self) -> Floats:
        """[K], float64 if any of them is; waits for them."""
        parts = [(positions, self._copy.numbers(place)) for positions, place in self._places]
        wide = bool(self._of_host) or any(part.dtype == np.float64 for _, part in parts)
        out: NDArray[Any] = np.zeros(self._count, np.float64 if wide else np.float32)
        for positions, part in parts:
            out[positions] = part
        out[list(self._of_host)] = list(self._of_host.values())
        scale = host_value(self._scale)
        if scale != 1.0:
            with np.errstate(divide="ignore", invalid="ignore"):
                out /= scale
        return out


class Numbers:
    """Numbers by position, as they are taken: those of tensors on the CPU at once, others as 0-dim tensors."""

    __slots__ = ("_of_devices", "_of_host")

    def __init__(self) -> None:
        self._of_host: dict[int, float] = {}
        self._of_devices: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}

    def put(self, position: int, number: float | Tensor) -> None:
        """Put one number in its place."""
        if isinstance(number, Tensor):
            self._of_devices.setdefault((number.device, number.dtype), []).append((position, number))
        else:
            self._of_host[position] = number

    def send(self, pending: PendingColumns, scale: Number = 1.0) -> PendingValues:
        """float[K] on their way to the host with everything of `pending`, divided there by `scale`."""
        if not self._of_devices:
            return HostNumbers(self._of_host, pending.count, scale)
        copy = pending.joint_copy()
        places = [
            ([k for k, _ in group], copy.add([number for _, number in group]))
            for group in self._of_devices.values()
        ]
        return SentNumbers(copy, places, self._of_host, pending.count, scale)

    def positions(self) -> list[int]:
        """The positions that have a number."""
        return [*(k for group in self._of_devices.values() for k, _ in group), *self._of_host]


@dataclass(slots=True)
class MovedParameters:
    """Parameters that the optimizer moved at one step: known once that step has been judged.

    `stepped` bool[K]: it got a gradient for them, and was not kept from its step; `zero` bool[K]: a gradient of zeros,
    which moves a weight only by momentum or decay.
    """

    step: int
    stepped: BoolArray | None = None
    zero: BoolArray | None = None

    def step_judged(self, stepped: BoolArray, zero: BoolArray) -> None:
        """Keep which parameters got a step, bool[K], and of which the gradient was zeros."""
        self.stepped, self.zero = stepped, zero

    def of(self, changes: Floats) -> BoolArray:
        """bool[K]: those that have moved, of which these are the changes (or ratios of them)."""
        if self.stepped is None or self.zero is None:
            return np.zeros(len(changes), np.bool_)
        moved: BoolArray = self.stepped & (~self.zero | (changes != 0))  # NaN is a change
        return moved


@dataclass(slots=True)
class PendingColumns:
    """Columns of one step by name, with the positions of K at which each has a value, or a mask bool[K] of those.

    A column in `moved` has one only where the optimizer has moved the parameter; it is left out while that is unknown.
    NaN is no value of a column in `defined`. Numbers of devices leave in `copy`, when all are there.
    """

    count: int
    parts: dict[str, PendingValues] = field(default_factory=dict)
    present: dict[str, BoolArray | Sequence[int]] = field(default_factory=dict)
    moved: dict[str, MovedParameters] = field(default_factory=dict)
    defined: set[str] = field(default_factory=set)
    copy: JointCopy | None = None
    complete: bool = True
    """Nothing that was due for the first time is without a value."""

    def lacks_values(self) -> None:
        """Note that something that was due for the first time has no value."""
        self.complete = False

    def joint_copy(self) -> JointCopy:
        """The one copy by which the numbers of this step leave a device."""
        if self.copy is None:
            self.copy = JointCopy()
        return self.copy

    def positions(self, name: str) -> Iterable[int]:
        """The positions of K at which a column has a value, those included that may turn out to have none."""
        present = self.present.get(name, ())
        return map(int, np.flatnonzero(present)) if isinstance(present, np.ndarray) else present

    def ready(self) -> bool:
        """True if `columns()` would return at once."""
        for part in self.parts.values():  # noqa: SIM110 (a generator makes one Python call more for each part)
            if not part.ready():
                return False
        return True

    def columns(self) -> dict[str, Column]:
        """The columns measured this step."""
        found = {}
        for name, part in self.parts.items():
            present, moved = self._mask(name), self.moved.get(name)
            if name in self.defined:
                values = part.values()
                found[name] = Column(values, present & ~np.isnan(values))
            elif moved is None:
                found[name] = Column(part.values(), present)
            elif moved.stepped is not None:  # else the step before was never judged
                values = part.values()
                found[name] = Column(values, present & moved.of(values))
        return found

    def _mask(self, name: str) -> BoolArray:
        present = self.present[name]
        if isinstance(present, np.ndarray):
            return present
        mask = np.zeros(self.count, np.bool_)
        mask[list(present)] = True
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class ArrivedColumns:
    """Columns that are on the host, as `PendingColumns` gives them."""

    found: Mapping[str, Column]

    def ready(self) -> bool:
        """True: the numbers are on the host."""
        return True

    def columns(self) -> dict[str, Column]:
        """Columns, by name."""
        return dict(self.found)
