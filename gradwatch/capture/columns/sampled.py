"""Columns that cost a second look: zero fraction, max|g|, weight norm, update ratio.

What a rule asks for at steps of its own is read from whole tensors (an update ratio then costs a copy of the weights).
What is read in bursts of three consecutive steps (0-2, then every 100) is read from a fixed strided sample of at most
4,096 elements per tensor, but for max|g|, which no sample knows: whole tensors would cost 13 times the floor. Samples
of equally many elements are stacked, so a burst costs a few operations however many parameters there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.engine.columns_needed import BURSTS, PERIOD, Needs
from gradwatch.reading.device import AsyncCopy, Floats, Number
from gradwatch.reading.layouts import dense, flat
from gradwatch.records.snapshot import BoolArray, Column

SAMPLE = 4096
AWAITING = 8  # steps whose verdict may be due; more than a device's queue of windows
GRADIENT_COLUMNS = frozenset({"zero_fraction", "max_abs"})
WEIGHT_COLUMNS = frozenset({"weight_norm", "update_ratio"})
COLUMNS = GRADIENT_COLUMNS | WEIGHT_COLUMNS
# A weight matrix that starts at zero (LoRA B, zero-init residuals) has a huge first ratio and no problem.
WEIGHT_NORM_FLOOR = 0.1


class Ratio:
    """‖Δw‖ / max(‖w‖, 0.1) of K parameters, from two norms on their way."""

    def __init__(self, change: AsyncCopy, size: AsyncCopy) -> None:
        self._change = change
        self._size = size

    def ready(self) -> bool:
        """True if `values()` would return at once."""
        return self._change.ready() and self._size.ready()

    def size(self) -> Floats:
        """float32[K]: ‖w‖."""
        return self._size.values()

    def values(self) -> Floats:
        """float32[K]."""
        return np.divide(self._change.values(), np.maximum(self.size(), np.float32(WEIGHT_NORM_FLOOR)))


@dataclass(slots=True)
class Moved:
    """Parameters that the optimizer moved at one step: known once that step has been judged."""

    step: int
    present: BoolArray | None = None


@dataclass(slots=True)
class Sampled:
    """Sampled columns of one step, possibly still on their way from a device; K positions."""

    count: int
    parts: dict[str, AsyncCopy | Ratio] = field(default_factory=dict)
    present: dict[str, BoolArray | Moved] = field(default_factory=dict)

    def ready(self) -> bool:
        """True if `columns()` would return at once."""
        return all(part.ready() for part in self.parts.values())

    def columns(self) -> dict[str, Column]:
        """The columns measured this step."""
        found = {}
        for name, part in self.parts.items():
            known = self.present[name]
            present = known.present if isinstance(known, Moved) else known
            if present is not None:  # else the step before was never judged
                found[name] = Column(part.values(), present)
        return found


class Sampler:
    """Reads what `needs` says of the tensors of one capture, whole or sampled."""

    def __init__(self, needs: Needs) -> None:
        self.wanted = frozenset(name for name in needs.columns if name.removesuffix(BURSTS) in COLUMNS)
        self._needs = needs
        self._weights = {"": Weights(strided=False), BURSTS: Weights(strided=True)}
        # Weights of steps not judged yet, to be compared with those of the next.
        self.awaiting: deque[Moved] = deque(maxlen=AWAITING)
        self.idle = range(0)  # steps at which nothing is due

    def discard(self) -> None:
        """Discard the weights kept for a comparison: other weights come next."""
        self.awaiting.clear()
        for weights in self._weights.values():
            weights.discard()

    def due(self, column: str, step: int) -> bool:
        """True if a column is read at this step."""
        return column in self.wanted and self._needs.due(column, step)

    def _keeps(self, suffix: str, step: int) -> bool:
        """True if the weights of this step are compared with those of the next."""
        return self.due("update_ratio" + suffix, step + 1)

    def _next(self, step: int) -> int:
        """The first step after this one at which something is read, or kept for the next one."""
        found = []
        for name in self.wanted:
            later = self._needs.next_due(name, step)
            if later is not None:  # what an update ratio compares is kept one step earlier
                found.append(later - (name.removesuffix(BURSTS) == "update_ratio"))
        return min(found, default=step + PERIOD)

    def collect(
        self,
        step: int,
        params: Sequence[Tensor],
        grads: Callable[[], Sequence[Tensor | None]],
        scale: Number = 1.0,
    ) -> Sampled | None:
        """Everything due at this boundary, before the optimizer moves the weights; None if nothing is.

        `scale` is the loss scale still in the gradients here.
        """
        due = {name for name in self.wanted if self.due(name, step)}
        keeping = [suffix for suffix in self._weights if self._keeps(suffix, step)]
        for suffix, weights in self._weights.items():
            if suffix not in keeping and "update_ratio" + suffix not in due:
                weights.discard()
        if not due and not keeping:
            self.idle = range(step, self._next(step))
            return None
        sampled = Sampled(len(params))
        if any(name.removesuffix(BURSTS) in GRADIENT_COLUMNS for name in due):
            _gradients(sampled, due, grads(), scale)
        moved = Moved(step)
        if keeping:
            self.awaiting.append(moved)
        for suffix, weights in self._weights.items():
            asked = {name for name in WEIGHT_COLUMNS if name + suffix in due}
            # A rule on the ratio asks what it is relative to, also on a step that would not be due for it.
            if "update_ratio" in asked and "weight_norm" + suffix in self.wanted:
                asked.add("weight_norm")
            if asked or suffix in keeping:
                weights.read(sampled, asked, suffix, params, moved if suffix in keeping else None, step)
        return sampled

    def moved(self, present: BoolArray, step: int | None = None) -> None:
        """Note the parameters for which the optimizer got a non-zero gradient at `step` (None = the oldest kept).

        None of them on a skipped step. Steps are judged in order, but on a device some steps after they were
        sampled.
        """
        while self.awaiting and step is not None and self.awaiting[0].step < step:
            self.awaiting.popleft()
        if self.awaiting and (step is None or self.awaiting[0].step == step):
            self.awaiting.popleft().present = present


class Weights:
    """The weights of one capture, whole or `strided`, and as they were one step before."""

    def __init__(self, strided: bool) -> None:
        self._strided = strided
        self._previous: tuple[int, list[Tensor], Moved] | None = None

    def discard(self) -> None:
        """The weights of this step are not needed at the next."""
        self._previous = None

    def read(
        self,
        sampled: Sampled,
        asked: set[str],
        suffix: str,
        params: Sequence[Tensor],
        kept: Moved | None,
        step: int,
    ) -> None:
        """Put the columns `asked` into `sampled`; keep the weights where `kept` says which of them this step moves."""
        rows, positions = _rows(params) if self._strided else _whole(params)
        factor = _blown_up(params) if self._strided else None
        if "weight_norm" in asked:
            norms = [_norms(row) for row in rows]
            sampled.parts["weight_norm" + suffix] = _async_copy(norms, positions, sampled.count, factor)
            sampled.present["weight_norm" + suffix] = np.ones(sampled.count, bool)
        before, self._previous = self._previous, None
        if "update_ratio" in asked and before is not None and before[0] == step - 1:
            _, old, moved = before
            if [row.shape for row in rows] == [row.shape for row in old]:
                changes = [_norms(row - was) for row, was in zip(rows, old, strict=True)]
                sizes = [_norms(was) for was in old]
                # Divided on the host: a factor sent to the device would make it wait.
                sampled.parts["update_ratio" + suffix] = Ratio(
                    _async_copy(changes, positions, sampled.count, factor),
                    _async_copy(sizes, positions, sampled.count, factor),
                )
                sampled.present["update_ratio" + suffix] = moved
        if kept is not None:
            self._previous = (step, [row.clone() for row in rows], kept)


def _gradients(sampled: Sampled, due: Iterable[str], grads: Sequence[Tensor | None], scale: Number) -> None:
    # A shard may be empty though the gradient is not.
    have = [k for k, grad in enumerate(grads) if grad is not None and dense(grad).numel()]
    tensors: list[Tensor] = [grads[k] for k in have]  # type: ignore[misc]
    present = np.zeros(sampled.count, bool)
    present[have] = True
    for name in due:
        plain = name.removesuffix(BURSTS)
        if plain not in GRADIENT_COLUMNS:
            continue
        rows, order = _rows(tensors) if name == "zero_fraction" + BURSTS else _whole(tensors)
        positions = np.array(have, np.intp)[order]
        if plain == "zero_fraction":
            parts = [(row.shape[1] - torch.count_nonzero(row, dim=1)).float() / row.shape[1] for row in rows]
            sampled.parts[name] = _async_copy(parts, positions, sampled.count)
        else:
            parts = [torch.linalg.vector_norm(row, float("inf"), dim=1).to(_wide(row)) for row in rows]
            sampled.parts[name] = _async_copy(parts, positions, sampled.count, scale=scale)
        sampled.present[name] = present


def _norms(row: Tensor) -> Tensor:
    """[n] L2 norms of the rows of a matrix [n, m]."""
    norms: Tensor = torch.linalg.vector_norm(row, dim=1, dtype=_wide(row))
    return norms


def _wide(row: Tensor) -> torch.dtype:
    """float32, or float64 for a float64 tensor."""
    return torch.promote_types(row.dtype, torch.float32)


def _async_copy(
    parts: Sequence[Tensor],
    positions: NDArray[np.intp],
    count: int,
    factor: NDArray[np.float32] | None = None,
    scale: Number = 1.0,
) -> AsyncCopy:
    """Numbers on their way to the host, in one copy from each device and of each dtype."""
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, NDArray[np.intp]]]] = {}
    start = 0
    for part in parts:
        alike.setdefault((part.device, part.dtype), []).append((part, positions[start : start + len(part)]))
        start += len(part)
    places = [place for group in alike.values() for _, place in group]
    joined = [torch.cat([part for part, _ in group]) for group in alike.values()]
    return AsyncCopy(joined, np.concatenate(places) if places else positions[:0], count, factor, scale)


def _blown_up(params: Sequence[Tensor]) -> NDArray[np.float32]:
    """By what the norm of a strided sample is multiplied to stand for that of its tensor."""
    numels = np.array([max(1, dense(param).numel()) for param in params], np.float64)
    strides = np.maximum(1, np.ceil(numels / SAMPLE))
    taken = np.ceil(numels / strides)
    return np.sqrt(np.maximum(numels / np.minimum(numels, taken), 1)).astype(np.float32)


def _whole(tensors: Sequence[Tensor]) -> tuple[list[Tensor], NDArray[np.intp]]:
    """(each tensor as one row [1, m], its position)."""
    return [flat(dense(tensor)).unsqueeze(0) for tensor in tensors], np.arange(len(tensors))


def _rows(tensors: Sequence[Tensor]) -> tuple[list[Tensor], NDArray[np.intp]]:
    """(stacks [n, m] of samples with equal m, dtype and device, the position of every row)."""
    buckets: dict[tuple[int, torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
    for k, tensor in enumerate(tensors):
        vector = flat(dense(tensor))
        stride = max(1, -(-vector.numel() // SAMPLE))
        sample = vector[::stride]
        key = (sample.numel(), sample.dtype, sample.device)
        buckets.setdefault(key, []).append((k, sample))
    order = np.array([k for bucket in buckets.values() for k, _ in bucket], np.intp)
    return [torch.stack([sample for _, sample in bucket]) for bucket in buckets.values()], order
