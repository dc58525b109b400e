"""Columns of parameters that cost a read of whole tensors: of gradients, weights, updates and an optimizer's moments.

Each is read exactly, and only of the parameters that some rule judges at this step (`Needs`); of a staggered rule
these are about one in `every`, by elements, and those that had no value when it was their turn. An update ratio costs
a copy of the weights, made one step before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.capture.columns.gradient_values import GRADIENT_COLUMNS, read_gradient_values
from gradwatch.capture.columns.optimizer_moments import STATE_COLUMNS, has_moment, read_optimizer_state
from gradwatch.capture.columns.pending_columns import (
    NO_SITES_OVERDUE,
    MovedParameters,
    OverdueSites,
    PendingColumns,
)
from gradwatch.capture.columns.update_ratio import WEIGHT_COLUMNS, WeightReader
from gradwatch.engine.columns_needed import OF_UPDATES, Needs
from gradwatch.engine.judged_steps.staggered_reads import ByResidue, Staggering
from gradwatch.reading.async_copy import Number
from gradwatch.records.snapshot import BoolArray

AWAITING = 64  # steps whose verdict may be due; more than those that wait to be judged
COLUMNS = GRADIENT_COLUMNS | WEIGHT_COLUMNS | STATE_COLUMNS
NEVER = 1 << 62
Zero = Callable[[], BoolArray | None]


class ColumnReader:
    """Reads what `needs` says of the K tensors of one capture, whose phases are in `staggering`; both are of all sites.

    `own[K]` are the sites of these tensors; None = all.
    """

    def __init__(self, needs: Needs, staggering: Staggering, own: NDArray[np.intp] | None = None) -> None:
        self.wanted = needs.columns & COLUMNS
        own = np.arange(len(staggering)) if own is None else own
        self._needs = needs.of(own)
        self._staggering = staggering.of(own)
        self._own = own
        self._count = len(own)
        self._names = sorted(self.wanted)
        self._compared = sorted(OF_UPDATES & self.wanted)
        self._reads_weights = bool(WEIGHT_COLUMNS & self.wanted)
        self._weights = WeightReader()
        self._due = ByResidue(needs.cadences, self._due_at)
        self._copied = ByResidue(needs.cadences, self._copied_at)
        self._idle_for = ByResidue(needs.cadences, lambda step: self._next(step) - step)
        # What is overdue, by its columns, with the positions of its sites.
        self._late: tuple[OverdueSites, list[tuple[tuple[str, ...], list[int]]]] = (NO_SITES_OVERDUE, [])
        # Weights of steps not judged yet, to be compared with those of the next.
        self.awaiting: deque[MovedParameters] = deque(maxlen=AWAITING)
        self.idle = range(0)  # steps at which nothing is due

    def discard(self) -> None:
        """Discard the weights kept for a comparison, before other weights come."""
        self.awaiting.clear()
        self._weights.discard()

    def _next(self, step: int) -> int:
        """The first step after this one at which something is read, or kept for the next one."""
        found = []
        for name in self.wanted:
            later = self._needs.next_due(name, step, self._staggering)
            if later is not None:
                found.append(later)
        for name in self._compared:  # what it compares is kept one step before
            later = self._needs.next_due(name, step + 1, self._staggering)
            found += [] if later is None else [later - 1]
        return min(found, default=NEVER)

    def collect(
        self,
        step: int,
        params: Sequence[Tensor],
        grads: Callable[[], Sequence[Tensor | None]],
        scale: Number = 1.0,
        optimizer: Optimizer | None = None,
        overdue: OverdueSites = NO_SITES_OVERDUE,
        zero: Zero = lambda: None,
    ) -> PendingColumns | None:
        """Everything due at this boundary, before the optimizer moves the weights; None if nothing is.

        Also copies the weights whose update is due at the next step. `params[K]` and `grads()[K]` are the capture's, in
        its order; `scale` is the loss scale still in the gradients; `optimizer` keeps the moments. `overdue` bool[S]
        are sites to be read whatever the step, where that can be had. `zero()` is bool[K], the gradients of zeros;
        None where unknown.
        """
        if len(params) != self._count:  # parameters of a loop without an optimizer that are gone
            self._weights.discard()
            return None
        due: dict[str, list[int]] = self._due.at(step)
        copied = self._copied.at(step)
        if not due and not copied:
            self.idle = range(step, step + self._idle_for.at(step))
        gradients = grads() if due or copied or overdue else ()
        late = self._positions(overdue) if overdue else []
        if overdue:
            now = self._overdue(late, step, params, gradients, optimizer)
            due = {name: at for name in self._names if (at := _joined(due.get(name, []), now.get(name, [])))}
            copied = _joined(copied, _updates(late, gradients, zero))
        if not due and not copied:
            self._weights.discard()
            return None
        pending = PendingColumns(len(params))
        of_gradients = {name: at for name, at in due.items() if name in GRADIENT_COLUMNS}
        if of_gradients:
            read_gradient_values(pending, of_gradients, gradients, scale)
        of_state = {name: at for name, at in due.items() if name in STATE_COLUMNS}
        if of_state:
            read_optimizer_state(pending, of_state, params, optimizer, gradients)
        if self._reads_weights:
            of_weights = {name: at for name, at in due.items() if name in WEIGHT_COLUMNS}
            self._weights.read(pending, step, params, of_weights)
        if pending.copy is not None:
            pending.copy.leave()
        if copied:
            moved = MovedParameters(step)
            self.awaiting.append(moved)
            # No optimizer moves a parameter without a gradient.
            self._weights.keep(step, params, [k for k in copied if gradients[k] is not None], moved)
        if not due:
            return None
        if not _has_all(pending, due, late):
            pending.lacks_values()
        return pending

    def _positions(self, overdue: OverdueSites) -> list[tuple[tuple[str, ...], list[int]]]:
        if self._late[0] is not overdue:
            self._late = overdue, [(columns, _at(mask[self._own])) for columns, mask in overdue.items()]
        return self._late[1]

    def _overdue(
        self,
        late: Iterable[tuple[tuple[str, ...], list[int]]],
        step: int,
        params: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        optimizer: Optimizer | None,
    ) -> dict[str, list[int]]:
        """The positions, by column, that are overdue and can be read now: what they are of is there."""
        found: dict[str, list[int]] = {}
        for columns, positions in late:
            judged, now = columns[0], positions
            if judged in OF_UPDATES:
                kept = self._weights.copied(step - 1)
                now = [k for k in positions if k in kept]
            elif judged in GRADIENT_COLUMNS:
                now = [k for k in positions if gradients[k] is not None]
            elif judged in STATE_COLUMNS:
                now = [k for k in positions if has_moment(judged, optimizer, params[k], gradients[k])]
            for name in columns if now else ():
                found.setdefault(name, []).extend(now)
        return found

    def _due_at(self, step: int) -> dict[str, list[int]]:
        """The positions of the parameters of which each column is due."""
        asked = {name: self._needs.due(name, step, self._staggering) for name in self._names}
        return {name: _at(mask) for name, mask in asked.items() if mask is not None}

    def _copied_at(self, step: int) -> list[int]:
        """The positions of the parameters whose update is due at the next step."""
        due = self._due.at(step + 1)
        return sorted({k for name in self._compared for k in due.get(name, ())})

    def moved(self, stepped: BoolArray, zero: BoolArray, step: int | None = None) -> None:
        """Note what the optimizer got at `step` (None = the oldest kept): bool[K], a gradient at all, and one of zeros.

        Nothing on a skipped step. Steps are judged in order, but on a device some steps after they were
        measured.
        """
        while self.awaiting and step is not None and self.awaiting[0].step < step:
            self.awaiting.popleft()
        if self.awaiting and (step is None or self.awaiting[0].step == step):
            self.awaiting.popleft().step_judged(stepped, zero)


def _has_all(
    pending: PendingColumns,
    due: Mapping[str, Sequence[int]],
    late: Iterable[tuple[tuple[str, ...], list[int]]],
) -> bool:
    """True if all that is due has a value, but for what had none before: at its turn either."""
    for name, at in due.items():
        without = set(at).difference(pending.positions(name))
        if without and not without.issubset(
            k for columns, positions in late if name in columns for k in positions
        ):
            return False
    return True


def _joined(some: list[int], others: list[int]) -> list[int]:
    return sorted({*some, *others}) if others else some


def _updates(
    late: Iterable[tuple[tuple[str, ...], list[int]]], gradients: Sequence[Tensor | None], zero: Zero
) -> list[int]:
    """The positions of the weights to be copied for an overdue update.

    None without a gradient; none with a gradient of zeros, by which most optimizers leave it where it is.
    """
    found = {
        k
        for columns, positions in late
        if columns[0] in OF_UPDATES
        for k in positions
        if gradients[k] is not None
    }
    zeros = zero() if found else None
    return [k for k in found if zeros is None or not zeros[k]]


def _at(mask: BoolArray) -> list[int]:
    return np.flatnonzero(mask).tolist()  # sync: numpy
