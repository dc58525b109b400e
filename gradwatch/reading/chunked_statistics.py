"""Numbers taken of the elements of a CPU tensor a chunk at a time, so that several cost one pass over memory.

One thread, and float32 as far as it holds: sums of a row at most, added up in float64; float64 where squares would
underflow or overflow.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from gradwatch.reading.layouts import dense, flat
from gradwatch.reading.row_sums import ROW, UNDERFLOW
from gradwatch.reading.row_sums_by_blas import silently
from gradwatch.runtime.interruption import not_ours

ROWS = 16
CHUNK = ROWS * ROW
"""Elements; 512 KiB of float32."""
CONVERTED = 1 << 22
"""Elements of a type that numpy does not have that are converted at a time."""

Values = NDArray[Any]

_vecdot: Any = getattr(np, "vecdot", None)  # numpy 2.0


class _Scratch(threading.local):
    """Memory of this thread for one chunk: to find new memory costs as much as to read what is written to it."""

    def __init__(self) -> None:
        self.mask = np.empty(CHUNK, np.bool_)
        self.change = {dtype: np.empty((ROWS, ROW), dtype) for dtype in map(np.dtype, ("float32", "float64"))}


_SCRATCH = _Scratch()


def blocks(tensor: Tensor) -> Iterable[Values]:
    """The elements of a CPU tensor of any layout and dtype as vectors of float32, or float64 where they are.

    One vector, the memory of the tensor itself, but for types that numpy does not have.
    """
    if type(tensor) is Tensor or type(tensor) is Parameter:
        values = _without_gaps(tensor)
        if values is not None:
            return (values,)
    vector = flat(dense(tensor))
    if vector.dtype is torch.float32 or vector.dtype is torch.float64:
        return (vector.numpy(),)  # sync: CPU tensor
    return (part.float().numpy() for part in vector.split(CONVERTED))  # sync: CPU tensor


def _without_gaps(tensor: Tensor) -> Values | None:
    """The memory of a contiguous tensor of float32 or float64; None of any other."""
    try:
        values = (tensor.detach() if tensor.requires_grad else tensor).numpy()  # sync: CPU tensor
    except (TypeError, RuntimeError) as error:
        # sparse, negated lazily, or of a type that numpy does not have
        if not_ours(error):
            raise
        return None
    plain = values.dtype.char in "fd" and values.flags.c_contiguous
    return values.reshape(-1) if plain else None


def copy(tensor: Tensor, onto: Tensor) -> None:
    """Write the elements of a CPU tensor into a vector of its type and size."""
    values = _without_gaps(tensor) if type(tensor) is Tensor or type(tensor) is Parameter else None
    if values is None:
        with torch.no_grad():
            onto.copy_(flat(dense(tensor)))
    else:
        np.copyto(onto.numpy(), values)  # sync: CPU tensor


def zeros(tensor: Tensor) -> int:
    """Number of elements that are exactly zero."""
    return sum(map(_zeros, _chunks(tensor)))


def count_below(tensor: Tensor, bound: float) -> int:
    """Number of elements that are less than a bound, which must be a number of their type; NaN is not."""
    return sum(
        int(np.count_nonzero(np.less(values, bound, _SCRATCH.mask[: values.size])))
        for values in _chunks(tensor)
    )


def exponents(tensor: Tensor) -> tuple[NDArray[np.int64], int]:
    """(elements by the exponent field of their bits, exact zeros, which are among those of field 0), in one pass.

    There are 256 fields of float32, and 2,048 of float64.
    """
    counts, exact_zeros = np.zeros(0, np.int64), 0
    for values in _chunks(tensor):
        bits, mantissa, fields = (np.uint32, 23, 256) if values.itemsize == 4 else (np.uint64, 52, 2048)
        signed = _SCRATCH.change[np.dtype("float64")].reshape(-1)[: values.size].view(np.int64)
        np.right_shift(values.view(bits), bits(mantissa), out=signed, casting="same_kind")
        found = np.bincount(signed, minlength=2 * fields).reshape(2, fields).sum(axis=0)
        counts = counts + found if len(counts) else found
        exact_zeros += _zeros(values) if found[0] else 0
    return counts, exact_zeros


def zeros_and_extremes(tensor: Tensor) -> tuple[int, float, float]:
    """(number of elements that are exactly zero, smallest, largest: NaN if any element is), in one pass.

    `tensor` has at least one element.
    """
    count, lows, highs = 0, [], []
    for values in _chunks(tensor):
        count += _zeros(values)
        lows.append(values.min())
        highs.append(values.max())
    return count, float(np.min(lows)), float(np.max(highs))


def mean_and_std(tensor: Tensor) -> tuple[float, float]:
    """(mean, standard deviation with division by n), in one pass; `tensor` has at least one element.

    Deviations are summed about each chunk's own mean, and these sums merged (Chan, Golub and LeVeque 1983): a spread
    that is small beside the mean is not lost.
    """
    count, mean, squares = 0, 0.0, 0.0
    for values in _chunks(tensor):
        size = values.size
        part_mean, part_squares = silently(_moments, values)
        apart = part_mean - mean
        squares += part_squares + apart * apart * count * size / (count + size)
        mean += apart * size / (count + size)
        count += size
    return mean, math.sqrt(squares / count)


def norm(tensor: Tensor) -> float:
    """L2 norm."""
    return math.sqrt(sum(silently(_square, values) for values in blocks(tensor)))


def norms_of_change(new: Tensor, old: Tensor) -> tuple[float, float, float]:
    """(‖new − old‖, ‖old‖, ‖new‖) of two tensors of one shape and dtype, in one pass."""
    change = before = after = 0.0
    for now, was in zip(blocks(new), blocks(old), strict=True):
        three = silently(_squares_of_change, now, was)
        change, before, after = change + three[0], before + three[1], after + three[2]
    return math.sqrt(change), math.sqrt(before), math.sqrt(after)


def products(one: Tensor, other: Tensor) -> tuple[float, float, float]:
    """(one · other, one · one, other · other), in one pass; of two of one shape, with their memory in one order."""
    dot = square = other_square = 0.0
    for some, others in zip(_chunks(one), _chunks(other), strict=True):
        three = silently(_products, some, others)
        dot, square, other_square = dot + three[0], square + three[1], other_square + three[2]
    return dot, square, other_square


def _chunks(tensor: Tensor) -> Iterator[Values]:
    for values in blocks(tensor):
        if values.size <= CHUNK:
            yield values
            continue
        for start in range(0, values.size, CHUNK):
            yield values[start : start + CHUNK]


def _zeros(values: Values) -> int:
    nonzero = np.not_equal(values, 0, _SCRATCH.mask[: values.size])
    return values.size - int(np.count_nonzero(nonzero))


def _moments(values: Values) -> tuple[float, float]:
    """(mean, sum of squared deviations from it) of a chunk."""
    about = values.mean()
    apart = np.subtract(values, about, _SCRATCH.change[values.dtype].reshape(-1)[: values.size])
    offset, squares = float(np.add.reduce(apart)), _fast_square(apart)
    if _certain(squares, values.size):
        return float(about) + offset / values.size, max(0.0, squares - offset * offset / values.size)
    wide = values.astype(np.float64)
    mean = float(wide.mean())
    return mean, float(np.add.reduce(np.square(wide - mean)))


def _square(values: Values) -> float:
    """The sum of squares."""
    return _trusted(_fast_square(values), values)


def _fast_square(values: Values) -> float:
    return _fast_product(values, values)


def _squares_of_change(new: Values, old: Values) -> tuple[float, float, float]:
    """The sums of squares of the change, of the old and of the new."""
    (rows, rest), (old_rows, old_rest) = _in_rows(new), _in_rows(old)
    totals = [float(np.vdot(part, part)) for part in (rest - old_rest, old_rest, rest)]
    if len(rows):
        moved, sums = _SCRATCH.change[new.dtype], []
        for start in range(0, len(rows), ROWS):
            now, was = rows[start : start + ROWS], old_rows[start : start + ROWS]
            change = np.subtract(now, was, moved[: len(now)])
            sums.append((_squares(change), _squares(was), _squares(now)))
        for place, of_rows in enumerate(zip(*sums, strict=True)):
            totals[place] += float(np.add.reduce(np.concatenate(of_rows), dtype=np.float64))
    moved_by, before, after = totals
    if not _certain(moved_by, new.size):
        moved_by = 0.0 if np.array_equal(new, old) else _exact(new, old)
    return moved_by, _trusted(before, old), _trusted(after, new)


def _trusted(total: float, values: Values) -> float:
    """The sum of squares of these values, of which `total` is a fast one."""
    if _certain(total, values.size):
        return total
    return 0.0 if total == 0 and not values.any() else _exact(values)


def _products(one: Values, other: Values) -> tuple[float, float, float]:
    """(one · other, one · one, other · other); in float64 only where float32 may not hold the squares."""
    if one.dtype == other.dtype:
        square, other_square = _fast_square(one), _fast_square(other)
        if _certain(square, one.size) and _certain(other_square, other.size):
            return _fast_product(one, other), square, other_square
    one, other = one.astype(np.float64), other.astype(np.float64)
    return _fast_product(one, other), _fast_square(one), _fast_square(other)


def _fast_product(one: Values, other: Values) -> float:
    (rows, rest), (other_rows, other_rest) = _in_rows(one), _in_rows(other)
    total = float(np.vdot(rest, other_rest))
    if len(rows):
        total += float(np.add.reduce(_row_products(rows, other_rows), dtype=np.float64))
    return total


def _in_rows(values: Values) -> tuple[Values, Values]:
    """(as many whole rows as there are, the rest): numpy's BLAS shares longer ones out among threads of its own."""
    whole = values.size - values.size % ROW
    return values[:whole].reshape(-1, ROW), values[whole:]


def _squares(rows: Values) -> Any:
    """The sum of squares of each row."""
    return _row_products(rows, rows)


def _row_products(rows: Values, others: Values) -> Any:
    """The sum of the products of each pair of rows."""
    return _vecdot(rows, others) if _vecdot is not None else list(map(np.vdot, rows, others))


def _certain(total: float, size: int) -> bool:
    """True unless squares may have underflowed or overflowed."""
    return UNDERFLOW * size <= total < math.inf


def _exact(values: Values, less: Values | None = None) -> float:
    """The sum of squares in float64, which holds the square of every float32; of the difference to `less` if given."""
    total = 0.0
    for start in range(0, values.size, CHUNK):
        part = values[start : start + CHUNK].astype(np.float64)
        if less is not None:
            part -= less[start : start + CHUNK]
        total += float(np.add.reduce(np.square(part, out=part)))
    return total
