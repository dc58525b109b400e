"""Columns of parameters that cost a second read: zero fraction, max|g|, weight norm, update ratio.

What a rule asks for at steps of its own is read from whole tensors (an update ratio then costs a copy of the weights).
What is read in bursts of three consecutive steps (0-2, then every 100) is read from a fixed strided sample of at most
4,096 elements per tensor, but for max|g|, which no sample knows: whole tensors would cost 13 times the floor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from gradwatch.capture.columns.gradient_values import GRADIENT_COLUMNS, read_gradient_values
from gradwatch.capture.columns.pending_columns import MovedParameters, PendingColumns
from gradwatch.capture.columns.update_ratio import WEIGHT_COLUMNS, WeightReader
from gradwatch.engine.columns_needed import BURSTS, PERIOD, Needs
from gradwatch.reading.device import Number
from gradwatch.records.snapshot import BoolArray

AWAITING = 8  # steps whose verdict may be due; more than a device's queue of windows
COLUMNS = GRADIENT_COLUMNS | WEIGHT_COLUMNS


class ColumnReader:
    """Reads what `needs` says of the tensors of one capture, whole or sampled."""

    def __init__(self, needs: Needs) -> None:
        self.wanted = frozenset(name for name in needs.columns if name.removesuffix(BURSTS) in COLUMNS)
        self._needs = needs
        self._weights = {"": WeightReader(strided=False), BURSTS: WeightReader(strided=True)}
        # Weights of steps not judged yet, to be compared with those of the next.
        self.awaiting: deque[MovedParameters] = deque(maxlen=AWAITING)
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
    ) -> PendingColumns | None:
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
        pending = PendingColumns(len(params))
        if any(name.removesuffix(BURSTS) in GRADIENT_COLUMNS for name in due):
            read_gradient_values(pending, due, grads(), scale)
        moved = MovedParameters(step)
        if keeping:
            self.awaiting.append(moved)
        for suffix, weights in self._weights.items():
            asked = {name for name in WEIGHT_COLUMNS if name + suffix in due}
            # A rule on the ratio asks what it is relative to, also on a step that would not be due for it.
            if "update_ratio" in asked and "weight_norm" + suffix in self.wanted:
                asked.add("weight_norm")
            if asked or suffix in keeping:
                weights.read(pending, asked, suffix, params, moved if suffix in keeping else None, step)
        return pending

    def moved(self, present: BoolArray, step: int | None = None) -> None:
        """Note the parameters for which the optimizer got a non-zero gradient at `step` (None = the oldest kept).

        None of them on a skipped step. Steps are judged in order, but on a device some steps after they were
        sampled.
        """
        while self.awaiting and step is not None and self.awaiting[0].step < step:
            self.awaiting.popleft()
        if self.awaiting and (step is None or self.awaiting[0].step == step):
            self.awaiting.popleft().present = present
