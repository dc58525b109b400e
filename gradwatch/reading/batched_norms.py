"""The one batched read of every gradient: L2 norms, exact to 1e-5, at memory bandwidth.

What decides it: one `vector_norm` or `dot` over a whole large tensor adds up to 2^20 squares in one float32
accumulator, and loses digits by that (4e-4 where all elements are equal, which is what a bias of a summed
loss gets). Rows of at most 2^13 elements cost the same bandwidth or less (`row_sums`), and are off by 7e-6 at the
very worst. Many small tensors cost one dispatch each, so they are laid end to end first (`read_plan`). All rows land in
one buffer, which is added up in float64 on demand: numpy finds cold caches after a backward, and
costs less for many steps at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.reading.layouts import REDUCED, dense, flat
from gradwatch.reading.read_plan import Plan
from gradwatch.reading.row_sums import ROW, RowBuffer
from gradwatch.reading.row_sums_by_blas import NO_WARNINGS, SquareRows, silently, vecdot
from gradwatch.reading.row_sums_by_torch import NormRows
from gradwatch.runtime.interruption import not_ours

FEW_FOR_FLOAT32 = 2048  # row norms whose squares float32 may add up
PATIENCE = 3  # reads off the plan before a new one is made; doubled each time
NEAR = 4.0
"""A total within this factor of the usual one (and so finite) lets the closer look wait a few steps."""
FLOAT32_MAX = float(np.finfo(np.float32).max)

Squares = NDArray[np.float64]


def fastest() -> type[RowBuffer]:
    """The fastest reader with the threads that torch has now; torchrun starts its ranks with one.

    Never decided by a clock, so that two runs of a script read the same digits.
    """
    return NormRows if vecdot is None or torch.get_num_threads() > 1 else SquareRows


def sum_of_squares(grad: Tensor) -> float:
    """Sum of squared elements of one CPU gradient of any layout and dtype, accumulated in float64."""
    vector = flat(dense(grad))
    if vector.dtype in REDUCED:
        return math.fsum(_blocks(chunk.float()) for chunk in vector.split(1 << 18))
    return _blocks(vector) if vector.dtype is torch.float32 else _dot(vector)


def _blocks(vector: Tensor) -> float:
    """Sum of squares of a contiguous float32 vector, no more than 2 * ROW of them in one accumulator."""
    numel = vector.numel()
    if numel < 2 * ROW:
        return _dot(vector)
    if fastest() is SquareRows and (square := SquareRows.of(vector)) is not None:
        return square
    rows, rest = divmod(numel, ROW)
    body = vector.narrow(0, 0, numel - rest) if rest else vector
    norms = torch.linalg.vector_norm(body.view(rows, ROW), dim=1)
    total = _dot(norms.to(torch.float64) if rows > FEW_FOR_FLOAT32 else norms)
    return total + _dot(vector.narrow(0, numel - rest, rest)) if rest else total


def _dot(vector: Tensor) -> float:
    return torch.dot(vector, vector).item()  # sync: CPU tensor


class RowNorms:
    """One read of K gradients whose sums are still to be taken."""

    __slots__ = (
        "_kept",
        "_missed",
        "_plan",
        "_quick_total",
        "_read",
        "_rows",
        "_single",
        "_squares",
        "min_row",
    )

    def __init__(
        self, plan: Plan, rows: NDArray[np.float32], quick_total: float, min_row: float, missed: list[int]
    ) -> None:
        """`rows` of the buffer, their root sum of squares and the least square; not those of gradients `missed`."""
        self._plan = plan
        self._read = plan.reads
        self._rows: NDArray[np.float32] | None = rows
        self._quick_total = quick_total
        self.min_row = min_row
        self._missed = missed
        self._kept = _NONE_KEPT
        self._single: dict[int, float] = {}
        self._squares: Squares | None = None

    @classmethod
    def of(cls, squares: Squares) -> RowNorms:
        """Sums that were taken elsewhere."""
        rows = cls(_NO_PLAN, _NO_ROWS, math.sqrt(silently(squares.sum)), 0.0, [])
        rows._rows, rows._squares = None, squares
        return rows

    def read_alone(self, grads: Sequence[Tensor | None]) -> None:
        """Read one by one what could not be planned, or is not as planned."""
        self._single = {k: _alone(grads[k]) for k in (*self._missed, *self._plan.others)}

    def keep(self, chosen: Sequence[int]) -> None:
        """Have every read like this one keep what `same_bits` compares."""
        self._plan.keep(chosen)

    def keep_matrices(self, matrices: Sequence[Any]) -> None:
        """Keep what is in those single gradients that were chosen for that."""
        self._kept, content = {}, self._plan.kind.content
        for place, part in self._plan.kept:
            self._kept[place] = content(matrices[part])

    def total(self) -> float:
        """Root sum of squares over all gradients, good to 1e-4, in one operation."""
        if self._missed:
            return math.sqrt(float(self.squares().sum()))
        singles = self._single
        return (
            math.hypot(self._quick_total, *map(math.sqrt, singles.values())) if singles else self._quick_total
        )

    def squares(self) -> Squares:
        """float64[K] sums of squares; 0 where a gradient was None."""
        if self._squares is None:
            self._squares = self._added()
        return self._squares

    def norms_of(self, chosen: Sequence[int]) -> list[float]:
        """Root sums of squares of a few gradients, without those of the others where they are single rows."""
        rows, plan = self._rows, self._plan
        if rows is not None and not self._missed:
            try:
                places = [plan.row[k] for k in chosen]
            except KeyError:
                pass  # some have more than one row, or none
            else:
                return [plan.kind.norm(rows.item(place)) for place in places]  # sync: numpy
        squares = self.squares()
        return [math.sqrt(squares[k]) for k in chosen]

    def same_bits(self, chosen: Sequence[int], grads: Sequence[Tensor | None]) -> bool | None:
        """True if a few gradients are what was read; None where that was not kept, or not any more, or is all zeros.

        What was kept of single gradients is compared once, and then let go; uncompared it stays with this read.
        """
        plan, kept, self._kept = self._plan, self._kept, _NONE_KEPT
        if self._missed or self._read != plan.reads:
            return None
        nonzero: bool | bytes = False
        try:
            for k in chosen:
                content, grad = kept[k] if k in kept else plan.copies[k].tobytes(), grads[k]
                # Zero stays zero whatever it is multiplied by, and says nothing.
                nonzero = nonzero or content.strip(b"\0")
                # numpy knows what a gradient is at a third of what torch's dispatcher asks in cold caches.
                now: Any = grad.detach() if grad is not None and grad.requires_grad else grad
                if now.numpy().tobytes() != content:  # sync: CPU tensor
                    return False
        except (KeyError, AttributeError, TypeError, RuntimeError) as error:
            if not_ours(error):
                raise
            return None  # some are large or have gaps, or there are none now, or others than numpy knows
        return True if nonzero else None

    def is_ordinary(self, usual: float, grads: Sequence[Tensor | None], floor: Squares) -> bool:
        """True if the quick total is `NEAR` the `usual` one, and no gradient `may_underflow`."""
        total = self._quick_total
        if self._missed or self._single or self._squares is not None:
            total = self.total()
        elif self.min_row > self._plan.may_underflow:
            return usual / NEAR <= total <= usual * NEAR
        return usual / NEAR <= total <= usual * NEAR and not self.may_underflow(grads, floor)

    def may_underflow(self, grads: Sequence[Tensor | None], floor: Squares) -> bool:
        """True if the sum of squares of some gradient is below `floor[K]` (numel * UNDERFLOW).

        One operation says that none is, or a second one where some rows are zero, as in an embedding; sums are
        taken only where neither does.
        """
        if (
            self._rows is not None
            and not self._missed
            and (self.min_row > self._plan.may_underflow or self._lifted(floor))
        ):
            singles = self._single
            return bool(singles) and any(
                value < floor[k] and grads[k] is not None for k, value in singles.items()
            )
        return any(grads[k] is not None for k in map(int, np.flatnonzero(self.squares() < floor)))

    def _lifted(self, floor: Squares) -> bool:
        """True if one row alone lifts each gradient above its floor."""
        plan, rows = self._plan, self._rows
        assert rows is not None
        # Compared so that NaN is not above.
        lifting = np.maximum.reduceat(plan.kind.squares(rows), plan.starts)
        return bool((lifting >= floor[plan.order]).all())

    def _added(self) -> Squares:
        plan, rows = self._plan, self._rows
        assert rows is not None
        found: Squares = np.zeros(plan.count)
        if len(plan.order):
            found[plan.order] = np.add.reduceat(plan.kind.squares(rows), plan.starts, dtype=np.float64)
        for index in self._missed:
            found[index] = 0.0
        for index, value in self._single.items():
            found[index] = value
        self._rows = None
        return found


def add_up(reads: Sequence[RowNorms]) -> None:
    """Take the sums of several reads at once: of those read as planned, by the same plan as the first."""
    plan = reads[0]._plan if reads else None
    left = [
        (read, read._rows)
        for read in reads
        if read._plan is plan and read._rows is not None and not (read._missed or read._single)
    ]
    if plan is None or not left or len(plan.order) < plan.count:
        return
    rows = plan.kind.squares(np.array([rows for _, rows in left]))
    found: Squares = np.empty((len(left), plan.count))
    found[:, plan.order] = np.add.reduceat(rows, plan.starts, axis=1, dtype=np.float64)
    for (read, _), squares in zip(left, found, strict=True):
        read._squares, read._rows = squares, None


class CpuReader:
    """Reads the sums of squares of a fixed list of CPU gradients; plans once, then one pass per read."""

    def __init__(self, kind: Callable[[], type[RowBuffer]] = fastest) -> None:
        self._kind = kind
        self._plan: Plan | None = None
        self._off = 0
        self._patience = PATIENCE

    def read(self, grads: Sequence[Tensor | None]) -> RowNorms:
        """The squares of every gradient that is there, whatever its layout and dtype."""
        plan = self._plan
        if plan is None or plan.count != len(grads) or self._off >= self._patience:
            self._plan = plan = self._planned(grads)
        matrices, missed = plan.matrices(grads)
        parts = plan.parts(missed) if missed else None
        # As by `silently`, without its frame.
        rows, total, min_row = NO_WARNINGS.copy().run(plan.row_buffer.read, matrices, parts)
        found = RowNorms(plan, rows, total, min_row, missed)
        if plan.kept and not missed:
            found.keep_matrices(matrices)
        if missed or plan.others:
            found.read_alone(grads)
            if missed or (plan.absent and any(grads[k] is not None for k in plan.absent)):
                self._off += 1
        return found

    def _planned(self, grads: Sequence[Tensor | None]) -> Plan:
        before = self._plan
        varying = before is not None and before.count == len(grads)
        self._patience = PATIENCE if before is None else min(self._patience * 2, 1 << 12)
        self._off = 0
        plan = Plan(grads, self._kind(), varying)
        if before is not None and varying:
            plan.keep(before.chosen)
        return plan


def _alone(grad: Tensor | None) -> float:
    return 0.0 if grad is None else sum_of_squares(grad)


_NO_PLAN = Plan((), NormRows)
_NONE_KEPT: dict[int, bytes] = {}
_NO_ROWS: NDArray[np.float32] = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Detail:
    """The second look at one suspicious gradient; counts are elements, `norm` the true L2 norm (float64)."""

    norm: float
    nan: int
    inf: int

    @property
    def nonfinite(self) -> int:
        return self.nan + self.inf

    @property
    def overflow(self) -> bool:
        """True if every element is finite and yet the norm exceeds float32."""
        return not self.nonfinite and self.norm > FLOAT32_MAX


def suspicious(squares: Squares, floor: NDArray[np.float64]) -> NDArray[np.intp]:
    """Positions where the fast sum may be wrong: non-finite, or so small that squares were flushed.

    `floor` is numel * UNDERFLOW of every tensor.
    """
    # Negated, so that NaN counts as untrusted; two reductions while all is well.
    if np.logical_and.reduce(squares >= floor) and np.add.reduce(squares) < np.inf:
        return _NOWHERE
    return np.flatnonzero(~((squares >= floor) & (squares < np.inf)))


_NOWHERE: NDArray[np.intp] = np.zeros(0, np.intp)


def inspect(grad: Tensor) -> Detail:
    """Count NaN and Inf elements and take the norm in float64, scaled so that nothing over- or underflows."""
    vector = flat(dense(grad)).detach()
    vector = vector.float() if vector.dtype in REDUCED else vector
    if not vector.numel():
        return Detail(0.0, 0, 0)
    # NaN if any element is; one cheap pass settles the common all-zero case.
    low, high = torch.aminmax(vector)
    largest = max(float(high), -float(low))  # sync: only on suspicion
    if largest == 0.0:
        return Detail(0.0, 0, 0)
    values = vector.cpu().numpy()  # sync: only on suspicion
    if not math.isfinite(largest):
        nan = int(np.count_nonzero(np.isnan(values)))
        return Detail(math.nan if nan else math.inf, nan, int(np.count_nonzero(np.isinf(values))))
    total = 0.0
    for start in range(0, values.size, 1 << 20):
        chunk = values[start : start + (1 << 20)].astype(np.float64) / largest
        total += float(np.dot(chunk, chunk))
    return Detail(largest * math.sqrt(total), 0, 0)
