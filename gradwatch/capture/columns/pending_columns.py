"""Columns of one step that may still be on their way from a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gradwatch.reading.device import AsyncCopy, Floats, Number
from gradwatch.records.snapshot import BoolArray, Column

FLOAT32 = np.finfo(np.float32)


class PendingValues(Protocol):
    """[K] numbers on their way to the host."""

    def ready(self) -> bool:
        """True if `values()` would return at once."""
        ...

    def values(self) -> Floats:
        """[K]; waits for them."""
        ...


class Numbers:
    """Numbers by position, as they are taken: those of tensors on the CPU at once, others as 0-dim tensors."""

    __slots__ = ("_of_devices", "_of_host")

    def __init__(self) -> None:
        self._of_host: dict[int, float] = {}
        self._of_devices: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}

    def put(self, position: int, number: float | Tensor) -> None:
        """Take one number."""
        if isinstance(number, Tensor):
            self._of_devices.setdefault((number.device, number.dtype), []).append((position, number))
        else:
            self._of_host[position] = number

    def present(self, count: int) -> BoolArray:
        """bool[K]: the positions that have a number."""
        present = np.zeros(count, np.bool_)
        present[self._positions()] = True
        return present

    def send(self, count: int, scale: Number = 1.0) -> AsyncCopy:
        """float[K] on their way to the host, divided there by `scale`; one copy from each device."""
        parts = [torch.stack([number for _, number in group]) for group in self._of_devices.values()]
        if self._of_host:
            values = np.array(list(self._of_host.values()))
            size = np.abs(values[np.isfinite(values) & (values != 0)])
            # In float32, as norms are, unless that would make 0 or infinity of a number.
            fits = not len(size) or (size.min() >= FLOAT32.tiny and size.max() <= FLOAT32.max)
            parts.append(torch.from_numpy(values.astype(np.float32) if fits else values))
        return AsyncCopy(parts, np.array(self._positions(), np.intp), count, scale=scale)

    def _positions(self) -> list[int]:
        return [*(k for group in self._of_devices.values() for k, _ in group), *self._of_host]


@dataclass(slots=True)
class MovedParameters:
    """Parameters that the optimizer moved at one step: known once that step has been judged."""

    step: int
    present: BoolArray | None = None


@dataclass(slots=True)
class PendingColumns:
    """Columns of one step by name, with the positions of K at which each has a value.

    A column in `moved` has one only where the optimizer has moved the parameter: none while that is not known.
    """

    count: int
    parts: dict[str, PendingValues] = field(default_factory=dict)
    present: dict[str, BoolArray] = field(default_factory=dict)
    moved: dict[str, MovedParameters] = field(default_factory=dict)

    def ready(self) -> bool:
        """True if `columns()` would return at once."""
        return all(part.ready() for part in self.parts.values())

    def columns(self) -> dict[str, Column]:
        """The columns measured this step."""
        found = {}
        for name, part in self.parts.items():
            present, moved = self.present[name], self.moved.get(name)
            if moved is None:
                found[name] = Column(part.values(), present)
            elif moved.present is not None:  # else the step before was never judged
                found[name] = Column(part.values(), present & moved.present)
        return found
