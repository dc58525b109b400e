"""One output of a call as training saw it and as the call run again gave it: the same, bit for bit, or by how much not.

Of a small one a copy was kept, of a large one the sums of its rows (`gradwatch.localise.held_calls.kept_row_sums`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from gradwatch.localise.diagnosis.tensor_values import describe, readable
from gradwatch.localise.held_calls.kept_row_sums import RowSums, row_sums, rows_of
from gradwatch.localise.held_calls.recorded_call import Call
from gradwatch.records.finding import Operand

ROUNDING = 0.1
"""Relative difference up to which two results may be two orders of the same sum, in half precision too."""

LOOKED_AT = 4096  # numbers of a large output that came again


class Output(Protocol):
    """One output of one call."""

    @property
    def call(self) -> Call:
        """The call that gave it."""

    @property
    def model(self) -> nn.Module:
        """The model that was called."""

    @property
    def position(self) -> int:
        """Place of the output among those of its call."""

    @property
    def device(self) -> torch.device:
        """The device it was computed on."""

    @property
    def is_same(self) -> bool:
        """True if it came again, bit for bit."""

    @property
    def rows_again(self) -> Tensor:
        """Finite numbers of the rows that are wholly the same; of a scalar that number."""

    @property
    def differs(self) -> bool:
        """True if it differs by more than rounding: finite here and not there, or by a part of the largest number."""

    @property
    def extent(self) -> str:
        """The part of it that is another: `3 of 15 elements`."""

    def came_alike(self, later: Output) -> bool:
        """True if a later run gave the same as this one, bit for bit."""

    def described(self, name: str) -> tuple[Operand, Operand]:
        """Values of the output in training, and run again."""


@dataclass(frozen=True, slots=True, eq=False)
class SmallOutput:
    """An output of which a copy was kept: as training `saw` it, and run `again`."""

    call: Call
    model: nn.Module
    position: int
    seen: Tensor
    again: Tensor

    @property
    def device(self) -> torch.device:
        """The device it was computed on."""
        return self.seen.device

    @property
    def is_same(self) -> bool:
        """Equal, NaN and NaN included."""
        return bool(_equal(self.seen, self.again).all())

    @property
    def rows_again(self) -> Tensor:
        """Numbers of the rows that are wholly the same."""
        rows = self.seen.reshape(self.seen.shape[0] if self.seen.dim() else 1, -1)
        kept = rows[_equal(self.seen, self.again).reshape(rows.shape).all(1)]
        return kept[torch.isfinite(kept)]

    @property
    def differs(self) -> bool:
        """True if it differs by more than rounding."""
        here, there = torch.isfinite(self.seen), torch.isfinite(self.again)
        if bool((here != there).any()):  # sync: an incident
            return True
        both = here & there
        if not bool(both.any()):
            return not self.is_same
        seen, again = self.seen[both].double(), self.again[both].double()
        largest = torch.maximum(seen.abs().max(), again.abs().max())
        return bool((seen - again).abs().max() > ROUNDING * largest)

    @property
    def extent(self) -> str:
        """`3 of 15 elements`."""
        return f"{int((~_equal(self.seen, self.again)).sum())} of {self.seen.numel()} elements"

    def came_alike(self, later: Output) -> bool:
        """True if a later run gave the same."""
        return isinstance(later, SmallOutput) and bool(_equal(self.again, later.again).all())

    def described(self, name: str) -> tuple[Operand, Operand]:
        """Values of the output in training, and run again."""
        return describe(name, self.seen), describe("run again", self.again)


@dataclass(frozen=True, slots=True, eq=False)
class LargeOutput:
    """An output of which sums were kept: those that training `saw`, and those of it run `again`, `numbers` its rows."""

    call: Call
    model: nn.Module
    position: int
    seen: RowSums
    again: RowSums
    numbers: Tensor

    @property
    def device(self) -> torch.device:
        """The device it was computed on."""
        return self.seen.bits.device

    @property
    def _same(self) -> Tensor:
        return self.seen.bits == self.again.bits

    @property
    def is_same(self) -> bool:
        """True if no bit of it is another."""
        return bool(self._same.all())

    @property
    def rows_again(self) -> Tensor:
        """Some of the numbers of rows that are wholly the same."""
        first = self._same.nonzero().flatten()[:8]
        kept = self.numbers[first].reshape(-1)[:LOOKED_AT]
        return kept[torch.isfinite(kept)]

    @property
    def differs(self) -> bool:
        """True if a row is finite only here or there, or its sum is another by more than rounding makes of it."""
        other = ~self._same
        seen, again = self.seen.values[other].double(), self.again.values[other].double()
        here, there = torch.isfinite(seen), torch.isfinite(again)
        if bool((here != there).any()):  # sync: an incident
            return True
        finite = torch.nan_to_num(self.numbers.detach(), 0.0, 0.0, 0.0)
        rounding = ROUNDING * float(finite.abs().max()) * math.sqrt(self.numbers.shape[1])
        both = here & there
        return bool(both.any()) and bool((seen - again)[both].abs().max() > rounding)

    @property
    def extent(self) -> str:
        """`1 of 4096 parts`."""
        return f"{int((~self._same).sum())} of {self._same.numel()} parts"

    def came_alike(self, later: Output) -> bool:
        """True if a later run gave the same."""
        return isinstance(later, LargeOutput) and bool((self.again.bits == later.again.bits).all())

    def described(self, name: str) -> tuple[Operand, Operand]:
        """Type and shape of what was in training, for its numbers were not kept; values run again."""
        dtype = str(self.seen.dtype).removeprefix("torch.")
        seen = Operand(name, dtype, tuple(self.seen.shape), self.seen.shape.numel())
        return seen, describe("run again", self.numbers)


def output_of(call: Call, model: nn.Module, position: int, again: Tensor) -> Output | None:
    """An output beside what was kept of it; None where nothing was, or it cannot be compared."""
    seen = (call.returned or {}).get(position)
    if isinstance(seen, RowSums):
        sums = row_sums(again)
        if sums is None or (sums.shape, sums.dtype, sums.order) != (seen.shape, seen.dtype, seen.order):
            return None
        return LargeOutput(call, model, position, seen, sums, rows_of(again, sums))
    if seen is None or not readable(seen) or seen.shape != again.shape:
        return None
    return SmallOutput(call, model, position, seen, again.detach().clone())


def _equal(one: Tensor, other: Tensor) -> Tensor:
    """Element by element: equal, NaN and NaN included."""
    return (one == other) | (one.isnan() & other.isnan())
