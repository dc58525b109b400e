"""Columns that cost a second look: zero fraction, max|g|, weight norm, update ratio, from a strided sample.

A fixed strided sample of at most 4,096 elements per tensor, in bursts of three consecutive steps (0-2, then
every 100): whole tensors would cost 13 times the floor and a copy of the weights. Tensors with equally many
sampled elements are stacked, so a burst costs a few operations however many parameters there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.hooks.dense import dense, flat
from gradwatch.hooks.device import Arriving, Floats, Number
from gradwatch.snapshot import BoolArray, Column

SAMPLE = 4096
PERIOD = 100
BURST = 3
AWAITING = 8  # steps whose verdict may be due; more than a device's queue of windows
GRADIENT_COLUMNS = frozenset({"zero_fraction", "max_abs"})
WEIGHT_COLUMNS = frozenset({"weight_norm", "update_ratio"})
COLUMNS = GRADIENT_COLUMNS | WEIGHT_COLUMNS
# A weight matrix that starts at zero (LoRA B, zero-init residuals) has a huge first ratio and no problem.
WEIGHT_NORM_FLOOR = 0.1


class Ratio:
    """‖Δw‖ / max(‖w‖, 0.1) of K parameters, from two norms on their way."""

    def __init__(self, change: Arriving, size: Arriving) -> None:
        self._change = change
        self._size = size

    def ready(self) -> bool:
        """Whether `values()` would return at once."""
        return self._change.ready() and self._size.ready()

    def size(self) -> Floats:
        """float32[K]: ‖w‖."""
        return self._size.values()

    def values(self) -> Floats:
        """float32[K]."""
        return np.divide(self._change.values(), np.maximum(self.size(), np.float32(WEIGHT_NORM_FLOOR)))


@dataclass(slots=True)
class Moved:
    """Which parameters the optimizer moved at one step: known once that step has been judged."""

    step: int
    present: BoolArray | None = None


@dataclass(slots=True)
class Sampled:
    """Sampled columns of one step, possibly still on their way from a device; K positions."""

    count: int
    parts: dict[str, Arriving | Ratio] = field(default_factory=dict)
    present: dict[str, BoolArray | Moved] = field(default_factory=dict)

    def ready(self) -> bool:
        """Whether `columns()` would return at once."""
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
    """Samples the tensors of one lane; `wanted` columns, `every` overrides the period of a column."""

    def __init__(self, wanted: frozenset[str], every: Mapping[str, int] | None = None) -> None:
        self.wanted = wanted & COLUMNS
        self._every = dict(every or {})
        self._previous: tuple[int, list[Tensor], Moved] | None = None
        # Weights of steps not judged yet, to be compared with those of the next.
        self.awaiting: deque[Moved] = deque(maxlen=AWAITING)
        self.idle = range(0)  # steps at which nothing is due

    def due(self, column: str, step: int) -> bool:
        """Whether a column is measured at this step."""
        if column not in self.wanted:
            return False
        # The update of step s is seen at the boundary of s + 1, so there is none at step 0.
        first = 1 if column == "update_ratio" else 0
        every = self._every.get(column, 1)
        if every > 1:  # asked for by a rule, which looks at these very steps
            return step >= first and step % every == 0
        return step >= first and (step - first) % PERIOD < BURST  # bursts, so that `for: 3` can be met

    def _next(self, step: int) -> int:
        """The first step after this one at which something is due; looks ahead a period at most."""
        return next(
            (
                later
                for later in range(step + 1, step + PERIOD)
                if self.due("update_ratio", later + 1) or any(self.due(name, later) for name in self.wanted)
            ),
            step + PERIOD,
        )

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
        due = [name for name in self.wanted if self.due(name, step)]
        keep = self.due("update_ratio", step + 1)
        if not due and not keep:
            self._previous = None
            self.idle = range(step, self._next(step))
            return None
        sampled = Sampled(len(params))
        if GRADIENT_COLUMNS.intersection(due):
            self._gradients(sampled, due, grads(), scale)
        if WEIGHT_COLUMNS.intersection(due) or keep:
            self._weights(sampled, due, step, params)
        return sampled

    def moved(self, present: BoolArray, step: int | None = None) -> None:
        """Which parameters the optimizer was given a non-zero gradient for at `step` (None = the oldest kept).

        None of them on a skipped step. Steps are judged in order, but on a device some steps after they were
        sampled.
        """
        while self.awaiting and step is not None and self.awaiting[0].step < step:
            self.awaiting.popleft()
        if self.awaiting and (step is None or self.awaiting[0].step == step):
            self.awaiting.popleft().present = present

    def _gradients(
        self, sampled: Sampled, due: list[str], grads: Sequence[Tensor | None], scale: Number
    ) -> None:
        # A shard may be empty though the gradient is not.
        have = [k for k, grad in enumerate(grads) if grad is not None and dense(grad).numel()]
        rows, order = _rows([grads[k] for k in have])  # type: ignore[misc]
        positions = np.array(have, np.intp)[order]
        present = np.zeros(sampled.count, bool)
        present[positions] = True
        if "zero_fraction" in due:
            parts = [(row == 0).float().mean(1) for row in rows]
            sampled.parts["zero_fraction"] = Arriving(parts, positions, sampled.count)
            sampled.present["zero_fraction"] = present
        if "max_abs" in due:
            parts = [row.abs().amax(1).float() for row in rows]
            sampled.parts["max_abs"] = Arriving(parts, positions, sampled.count, scale=scale)
            sampled.present["max_abs"] = present

    def _weights(self, sampled: Sampled, due: list[str], step: int, params: Sequence[Tensor]) -> None:
        rows, positions = _rows(params)
        scale = [torch.linalg.vector_norm(row.float(), dim=1) for row in rows]
        numels = np.array([max(1, dense(param).numel()) for param in params], np.float64)
        blown_up = np.sqrt(np.maximum(numels / np.minimum(numels, _taken(numels)), 1)).astype(np.float32)
        # A rule on the ratio asks what it is relative to, also on a burst's last step, which would not be due for it.
        if "weight_norm" in due or ("weight_norm" in self.wanted and "update_ratio" in due):
            sampled.parts["weight_norm"] = Arriving(scale, positions, sampled.count, blown_up)
            sampled.present["weight_norm"] = np.ones(sampled.count, bool)
        previous = self._previous
        if "update_ratio" in due and previous is not None and previous[0] == step - 1:
            self._ratio(sampled, rows, previous, positions, blown_up)
        self._previous = (step, [row.clone() for row in rows], Moved(step))
        self.awaiting.append(self._previous[2])

    def _ratio(
        self,
        sampled: Sampled,
        rows: list[Tensor],
        previous: tuple[int, list[Tensor], Moved],
        positions: NDArray[np.intp],
        blown_up: NDArray[np.float32],
    ) -> None:
        _, before, moved = previous
        if [row.shape for row in rows] != [row.shape for row in before]:
            return
        changes = [
            torch.linalg.vector_norm((row - old).float(), dim=1)
            for row, old in zip(rows, before, strict=True)
        ]
        sizes = [torch.linalg.vector_norm(old.float(), dim=1) for old in before]
        # Divided on the host: a factor sent to the device would make it wait.
        sampled.parts["update_ratio"] = Ratio(
            Arriving(changes, positions, sampled.count, blown_up),
            Arriving(sizes, positions, sampled.count, blown_up),
        )
        sampled.present["update_ratio"] = moved


def _taken(numels: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many elements a strided sample of each tensor holds."""
    strides = np.maximum(1, np.ceil(numels / SAMPLE))
    return np.ceil(numels / strides)


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
