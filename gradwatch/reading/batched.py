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
from gradwatch.reading.row_sums_by_blas import SquareRows, silently, vecdot
from gradwatch.reading.row_sums_by_torch import NormRows

FEW = 2048  # row norms whose squares float32 may add up
PATIENCE = 3  # reads off the plan before a new one is made; doubled each time
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
    total = _dot(norms.to(torch.float64) if rows > FEW else norms)
    return total + _dot(vector.narrow(0, numel - rest, rest)) if rest else total


def _dot(vector: Tensor) -> float:
    return torch.dot(vector, vector).item()  # sync: CPU tensor


class RowNorms:
    """One read of K gradients whose sums are still to be taken."""

    __slots__ = ("_missed", "_plan", "_quick_total", "_row_buffer", "_single", "_squares")

    def __init__(self, plan: Plan, row_buffer: RowBuffer) -> None:
        self._plan = plan
        self._row_buffer: RowBuffer | None = row_buffer
        self._quick_total = 0.0  # the root sum of squares of all rows
        self._single: dict[int, float] = {}
        self._missed: list[int] = []
        self._squares: Squares | None = None

    @classmethod
    def of(cls, squares: Squares) -> RowNorms:
        """Sums that were taken elsewhere."""
        plan = Plan([None] * len(squares), NormRows)
        rows = cls(plan, plan.row_buffer())
        rows._quick_total, rows._squares = math.sqrt(silently(squares.sum)), squares
        return rows

    def read(self, grads: Sequence[Tensor | None]) -> list[int]:
        """Read what is as planned, then the rest one by one; positions that were planned for and are not so."""
        plan, row_buffer = self._plan, self._row_buffer
        assert row_buffer is not None
        parts, matrices, missed = _matrices(plan, row_buffer, grads)
        self._quick_total = silently(row_buffer.read, parts, matrices)
        if missed or plan.others:
            self._missed, self._single = missed, {k: _alone(grads[k]) for k in (*missed, *plan.others)}
        return missed

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
        row_buffer = self._row_buffer
        if row_buffer is not None and not self._missed:
            try:
                return row_buffer.norms(list(map(self._plan.row.__getitem__, chosen)))
            except KeyError:
                pass  # some have more than one row, or none
        return list(map(self._norm_of, chosen))

    def _norm_of(self, k: int) -> float:
        if k in self._single:
            return math.sqrt(self._single[k])
        if self._row_buffer is not None and not self._missed and k in self._plan.row:
            return self._row_buffer.norms([self._plan.row[k]])[0]
        return math.sqrt(self.squares()[k])

    def is_ordinary(self, low: float, high: float, grads: Sequence[Tensor | None], floor: Squares) -> bool:
        """True if the total is from `low` to `high`, and no gradient `may_underflow`."""
        row_buffer = self._row_buffer
        if row_buffer is None or self._missed or self._single:
            return low <= self.total() <= high and not self.may_underflow(grads, floor)
        return low <= self._quick_total <= high and (
            row_buffer.min_row() > self._plan.may_underflow or not self.may_underflow(grads, floor)
        )

    def may_underflow(self, grads: Sequence[Tensor | None], floor: Squares) -> bool:
        """True if the sum of squares of some gradient is below `floor[K]` (numel * UNDERFLOW).

        One operation says that none is, or a second one where some rows are zero, as in an embedding; sums are
        taken only where neither does.
        """
        plan, row_buffer = self._plan, self._row_buffer
        if (
            row_buffer is not None
            and not self._missed
            and (row_buffer.min_row() > plan.may_underflow or self._lifted(floor))
        ):
            singles = self._single
            return bool(singles) and any(
                value < floor[k] and grads[k] is not None for k, value in singles.items()
            )
        return any(grads[k] is not None for k in map(int, np.flatnonzero(self.squares() < floor)))

    def _lifted(self, floor: Squares) -> bool:
        """True if one row alone lifts each gradient above its floor."""
        plan, row_buffer = self._plan, self._row_buffer
        assert row_buffer is not None
        # Compared so that NaN is not above.
        return bool((np.maximum.reduceat(row_buffer.squares(), plan.starts) >= floor[plan.order]).all())

    def _added(self) -> Squares:
        plan, row_buffer = self._plan, self._row_buffer
        assert row_buffer is not None
        found: Squares = np.zeros(plan.count)
        if len(plan.order):
            found[plan.order] = np.add.reduceat(row_buffer.squares(), plan.starts, dtype=np.float64)
        for index in self._missed:
            found[index] = 0.0
        for index, value in self._single.items():
            found[index] = value
        self._row_buffer = None
        plan.spare.append(row_buffer)
        return found


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
            self._patience = PATIENCE if plan is None else min(self._patience * 2, 1 << 12)
            varying = plan is not None and plan.count == len(grads)
            plan, self._off = Plan(grads, self._kind(), varying), 0
            self._plan = plan
        rows = RowNorms(plan, plan.row_buffer())  # made in warm caches
        missed = rows.read(grads)
        if missed or (plan.absent and any(grads[k] is not None for k in plan.absent)):
            self._off += 1
        return rows


def _matrices(
    plan: Plan, row_buffer: RowBuffer, grads: Sequence[Tensor | None]
) -> tuple[list[int], list[Any], list[int]]:
    """Parts of the row buffer, the matrices to be read into them, and the positions planned for that are not so."""
    missed: list[int] = []
    parts: list[int] = []
    matrices: list[Any] = []
    for packed_group in plan.packed_groups:
        if packed_group.laid(grads):
            parts += packed_group.parts
            matrices += packed_group.matrices
        else:
            missed += packed_group.indices
    matrix = row_buffer.matrix
    for part, (index, shape, order) in enumerate(plan.singles, plan.first_single):
        grad: Any = grads[index]
        try:
            matrices.append(matrix(grad, shape, order))
            parts.append(part)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            missed.append(index)  # absent, or of another size, layout or dtype this time
    return parts, matrices, missed


def _alone(grad: Tensor | None) -> float:
    return 0.0 if grad is None else sum_of_squares(grad)


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
        """Every element is finite and yet the norm exceeds float32."""
        return not self.nonfinite and self.norm > FLOAT32_MAX


def suspicious(squares: Squares, floor: NDArray[np.float64]) -> NDArray[np.intp]:
    """Positions where the fast sum cannot be trusted: non-finite, or so small that squares were flushed.

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
