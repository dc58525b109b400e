"""The one batched read of every gradient: L2 norms, exact to 1e-5, at memory bandwidth.

What decides it: one `vector_norm` or `dot` over a whole large tensor adds up to 2^20 squares in one float32
accumulator, and loses digits by that (4e-4 where all elements are equal, which is what a bias of a summed
loss gets). Rows of at most 2^13 elements cost the same bandwidth or less (`rows`), and are off by 7e-6 at the
very worst. Many small tensors cost one dispatch each, so equal shapes are stacked first. All rows land in
one buffer, which is added up in float64 when somebody asks: numpy finds cold caches after a backward, and
costs less for many steps at once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.hooks.dense import REDUCED, dense, flat
from gradwatch.hooks.rows import HERE, ROW, NormRows, Sheet, SquareRows, divided, fastest, silently

FEW = 2048  # row norms whose squares float32 may add up
SMALL = 2048  # elements; above this a stack costs more than the dispatch it saves
BUCKET = 4  # equal shapes needed before stacking pays
PATIENCE = 3  # reads off the plan before a new one is made; doubled each time
# Squares below 2^-126 may be flushed to zero: 1e-5 relative is only certain above this mean square.
UNDERFLOW = 2.0**-126 * 1e5
FLOAT32_MAX = float(np.finfo(np.float32).max)

Squares = NDArray[np.float64]


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


class _Bucket(NamedTuple):
    """Small float32 gradients of one shape, stacked before they are read as a matrix of `shape`."""

    indices: list[int]
    pick: operator.itemgetter[Any]
    stacked: Tensor
    shape: tuple[int, int]


class _Single(NamedTuple):
    """One dense float32 gradient, read as a matrix of `shape` after `permute(order)` (None = contiguous)."""

    place: int
    shape: tuple[int, int]
    order: tuple[int, ...] | None


class _Plan:
    """How a list of gradients is read: in buckets, as matrices, and whatever is neither one by one."""

    def __init__(self, grads: Sequence[Tensor | None], kind: type[Sheet]) -> None:
        self._kind = kind
        self.count = len(grads)
        self.buckets, alone = _buckets(grads)
        self.singles = [one for k in alone if (one := _single(k, grads[k])) is not None]
        planned = {single.place for single in self.singles}
        self.others = [k for k in alone if k not in planned]
        self.absent = [k for k in self.others if grads[k] is None]  # nothing could be planned for them
        self.shapes = [bucket.shape for bucket in self.buckets]
        self.shapes += [single.shape for single in self.singles]
        # A sum below its floor (numel * UNDERFLOW) has a row below its own; squares may have been flushed there.
        self.faint = max((columns for _, columns in self.shapes), default=0) * UNDERFLOW * (1 + 1e-5)
        order = [k for bucket in self.buckets for k in bucket.indices]
        lengths = [1] * len(order) + [single.shape[0] for single in self.singles]
        self.order = np.array(order + [single.place for single in self.singles], np.intp)
        self.starts = (
            np.concatenate([[0], np.cumsum(lengths[:-1])]).astype(np.intp) if lengths else self.order
        )
        # Where the only row of a gradient lies that has no more than one.
        self.row = {
            int(k): int(start)
            for k, start, length in zip(self.order, self.starts, lengths, strict=True)
            if length == 1
        }
        self.spare: list[Sheet] = []

    def sheet(self) -> Sheet:
        """One that nobody uses."""
        return self.spare.pop() if self.spare else self._kind(self.shapes)


class RowNorms:
    """One read of K gradients whose sums are still to be taken."""

    __slots__ = ("_apart", "_glance", "_missed", "_plan", "_sheet", "_squares")

    def __init__(
        self, plan: _Plan, sheet: Sheet, glance: float, apart: dict[int, float], missed: list[int]
    ) -> None:
        self._plan = plan
        self._sheet: Sheet | None = sheet
        self._glance = glance  # the root sum of squares of all rows
        self._apart = apart
        self._missed = missed
        self._squares: Squares | None = None

    @classmethod
    def of(cls, squares: Squares) -> RowNorms:
        """Sums that were taken elsewhere."""
        plan = _Plan([None] * len(squares), NormRows)
        rows = cls(plan, plan.sheet(), math.sqrt(silently(squares.sum)), {}, [])
        rows._squares = squares
        return rows

    def total(self) -> float:
        """Root sum of squares over all gradients, good to 1e-4: at a glance, in one operation."""
        if self._missed:
            return math.sqrt(float(self.squares().sum()))
        apart = self._apart
        return math.hypot(self._glance, *map(math.sqrt, apart.values())) if apart else self._glance

    def squares(self) -> Squares:
        """float64[K] sums of squares; 0 where a gradient was None."""
        if self._squares is None:
            self._squares = self._added()
        return self._squares

    def norms_of(self, chosen: Sequence[int]) -> list[float]:
        """Root sums of squares of a few gradients, without those of the others where they are single rows."""
        sheet = self._sheet
        if sheet is not None and not self._missed:
            try:
                return sheet.norms(list(map(self._plan.row.__getitem__, chosen)))
            except KeyError:
                pass  # some have more than one row, or none
        return list(map(self._norm_of, chosen))

    def _norm_of(self, k: int) -> float:
        if k in self._apart:
            return math.sqrt(self._apart[k])
        if self._sheet is not None and not self._missed and k in self._plan.row:
            return self._sheet.norms([self._plan.row[k]])[0]
        return math.sqrt(self.squares()[k])

    def faint(self, grads: Sequence[Tensor | None], floor: Squares) -> bool:
        """Whether the sum of squares of some gradient is below `floor[K]` (numel * UNDERFLOW).

        One operation says that none is, or a second one where some rows are zero, as in an embedding; sums are
        taken only where neither does.
        """
        plan, sheet = self._plan, self._sheet
        if sheet is not None and not self._missed and (sheet.least() > plan.faint or self._lifted(floor)):
            apart = self._apart
            return bool(apart) and any(
                value < floor[k] and grads[k] is not None for k, value in apart.items()
            )
        return any(grads[k] is not None for k in map(int, np.flatnonzero(self.squares() < floor)))

    def _lifted(self, floor: Squares) -> bool:
        """Whether one row alone lifts each gradient above its floor."""
        plan, sheet = self._plan, self._sheet
        assert sheet is not None
        # Compared so that NaN is not above.
        return bool((np.maximum.reduceat(sheet.squares(), plan.starts) >= floor[plan.order]).all())

    def _added(self) -> Squares:
        plan, sheet = self._plan, self._sheet
        assert sheet is not None
        found: Squares = np.zeros(plan.count)
        if len(plan.order):
            found[plan.order] = np.add.reduceat(sheet.squares(), plan.starts, dtype=np.float64)
        for index in self._missed:
            found[index] = 0.0
        for index, value in self._apart.items():
            found[index] = value
        self._sheet = None
        plan.spare.append(sheet)
        return found


class CpuReader:
    """Reads the sums of squares of a fixed list of CPU gradients; plans once, then one pass per read."""

    def __init__(self, kind: Callable[[], type[Sheet]] = fastest) -> None:
        self._kind = kind
        self._plan: _Plan | None = None
        self._off = 0
        self._patience = PATIENCE

    def read(self, grads: Sequence[Tensor | None]) -> RowNorms:
        """The squares of every gradient that is there, whatever its layout and dtype."""
        plan = self._plan
        if plan is None or plan.count != len(grads) or self._off >= self._patience:
            self._patience = PATIENCE if plan is None else min(self._patience * 2, 1 << 12)
            plan, self._off = _Plan(grads, self._kind()), 0
            self._plan = plan
        sheet = plan.sheet()
        glance, missed = silently(_fill, plan, sheet, grads)
        if missed or (plan.absent and any(grads[k] is not None for k in plan.absent)):
            self._off += 1
        apart = {k: _alone(grads[k]) for k in (*missed, *plan.others)} if missed or plan.others else {}
        return RowNorms(plan, sheet, glance, apart, missed)


def _fill(plan: _Plan, sheet: Sheet, grads: Sequence[Tensor | None]) -> tuple[float, list[int]]:
    """Read what is as planned; its root sum of squares at a glance, and the positions planned for that are not so."""
    missed: list[int] = []
    for part, bucket in enumerate(plan.buckets):
        if _stacked(bucket, grads):
            sheet.read(part, bucket.stacked, bucket.shape, None)
        else:
            missed += bucket.indices
    for part, (index, shape, order) in enumerate(plan.singles, len(plan.buckets)):
        grad: Any = grads[index]
        try:
            sheet.read(part, grad, shape, order)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            missed.append(index)  # absent, or of another size, layout or dtype this time
    return sheet.total(), missed


def _stacked(bucket: _Bucket, grads: Sequence[Tensor | None]) -> bool:
    """Whether all members could be put together."""
    members = bucket.pick(grads)
    try:
        # `stack` refuses unequal shapes itself, but would resize `out` if all had changed alike.
        if members[0].shape != bucket.stacked.shape[1:]:
            return False
        torch.stack(members, out=bucket.stacked)
    except (AttributeError, TypeError, RuntimeError):
        return False  # some are missing, sparse or of another shape this time
    return True


def _alone(grad: Tensor | None) -> float:
    return 0.0 if grad is None else sum_of_squares(grad)


def _buckets(grads: Sequence[Tensor | None]) -> tuple[list[_Bucket], list[int]]:
    """The buckets worth making, and the positions that are in none."""
    shapes: dict[torch.Size, list[int]] = {}
    for index, grad in enumerate(grads):
        if grad is not None and _plain(grad) and grad.numel() <= SMALL:
            shapes.setdefault(grad.shape, []).append(index)
    buckets = [_bucket(shape, members) for shape, members in shapes.items() if len(members) >= BUCKET]
    bucketed = {k for bucket in buckets for k in bucket.indices}
    return buckets, [k for k in range(len(grads)) if k not in bucketed]


def _bucket(shape: torch.Size, members: list[int]) -> _Bucket:
    stacked = torch.empty((len(members), *shape), **HERE)
    return _Bucket(members, operator.itemgetter(*members), stacked, (len(members), shape.numel()))


def _plain(grad: Tensor) -> bool:
    usual = grad.layout is torch.strided and grad.dtype is torch.float32 and type(grad) is Tensor
    return usual and grad.numel() > 0 and grad.device.type == "cpu"


def _single(index: int, grad: Tensor | None) -> _Single | None:
    """How to read one gradient as a matrix; None when it has to be read by itself."""
    if grad is None or not _plain(grad):
        return None
    shape = divided(grad.numel())
    if shape is None:
        return None
    if grad.is_contiguous():
        return _Single(index, shape, None)
    order = tuple(sorted(range(grad.dim()), key=grad.stride, reverse=True))  # channels_last
    return _Single(index, shape, order) if grad.permute(order).is_contiguous() else None


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
    low, high = torch.aminmax(
        vector
    )  # NaN if any element is; one cheap pass settles the common all-zero case
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
