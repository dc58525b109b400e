"""Gradients that backwards have brought to one optimizer since its last step: counted, and read at their end.

K parameters of one optimizer. How many backwards make a step is learned (`AccumulationSchedule`), so that later steps
are read once, at the end of the last backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.capture.columns.loss import Root, WindowLoss
from gradwatch.capture.loop_faults.loop_events import LoopEvents
from gradwatch.capture.loop_faults.uncleared_gradients import UnclearedGradients
from gradwatch.capture.optimizer_parameters import OptimizerParameters, grad_of
from gradwatch.capture.window.accumulation_steps import AccumulationSchedule
from gradwatch.capture.window.arrival_counts import ArrivalCounts
from gradwatch.capture.window.gradient_reader import NOTHING, GradientReader, Grads
from gradwatch.capture.window.hook_pruning import HookPruning
from gradwatch.capture.window.norm_after_user_clip import KnownScaling
from gradwatch.reading.async_copy import Number
from gradwatch.reading.cpu_norms import CpuNorms
from gradwatch.reading.gradient_writes import (
    Reading,
    State,
    Storage,
    lies_in,
    replaced,
    replaced_in,
    storages_of,
    versions_of,
)
from gradwatch.reading.layouts import parts
from gradwatch.reading.loss_scale_removal import unscaled
from gradwatch.records.snapshot import Sites
from gradwatch.runtime.fork_safe_locks import ForkSafeLock
from gradwatch.taps.clip_functions import Clip

GONE = -2  # in place of an id
KEPT = 1 << 24  # elements of a capture whose gradients may be held until the step, on the host


class OptimizerGradients(OptimizerParameters):
    """Gradients of K parameters since the last step: how often they arrived, and their norms as they were read last.

    That they were last read at the step boundary, `norms_at_step` and `state_at_step`, is set by `OptimizerCapture`.
    """

    def __init__(
        self,
        index: int,
        sites: Sites,
        slots: NDArray[np.intp] | None,
        params: Sequence[nn.Parameter],
        *,
        inside_backward: bool,
        without_optimizer: bool,
        like: OptimizerGradients | None,
        uncleared: list[UnclearedGradients] | None,
    ) -> None:
        super().__init__(
            index,
            sites,
            slots,
            params,
            inside_backward=inside_backward,
            without_optimizer=without_optimizer,
        )
        kind = sites, self.on_cpu, self.distributed
        alike = like is not None and (like.sites, like.on_cpu, like.distributed) == kind
        self._reader: GradientReader = like._reader if like is not None and alike else GradientReader(*kind)
        self._keeps = self.on_cpu and self._reader.elements <= KEPT
        # A clip reads for all threads: one that ended its read after the owner's clip would keep what the clip left.
        self._reading: ForkSafeLock = ForkSafeLock() if like is None else like._reading
        self._uncleared = [] if uncleared is None else uncleared
        self.losses = WindowLoss()
        self.arrivals = ArrivalCounts(params, self.position)
        self.step = 0

    def hold(
        self, optimizer: Optimizer | None, params: list[nn.Parameter], given: Sequence[nn.Parameter]
    ) -> None:
        """Hold the parameters of one optimizer, and begin all that is learned of its backwards and read of them."""
        super().hold(optimizer, params, given)
        self.arrivals.hold(params)
        self.losses.clear()
        self.pruning = HookPruning(len(params))
        self.backward_end_missed = False  # the end of its last backward was missed: read at the step boundary
        self.spans_two_steps = False  # this window cannot be one step's alone
        self.closed_at = -1  # backwards when the window was closed; -1 while it is open
        self.reduced_total: float | None = None  # over all ranks, where this one's total is not all of it
        self.norms_at_step: Reading | None = (
            None  # as they stood at the last step boundary, after the user's clipping
        )
        self.state_at_step: State | None = None
        self.left_alone = False  # no code changed a gradient between the end of backward and the last step
        self.scale_removed: Number | None = (
            None  # what a GradScaler has divided its gradients by since its last step
        )
        self.known_scalings: list[KnownScaling] = []  # clips since the read, by the one who clips
        self.kept: list[Tensor | None] | None = None  # a second walk finds them faster while they are held
        # Norms that gradwatch's hooks have taken inside the backward: they need not be read again.
        self.norms_from_hooks: Callable[[Grads], Mapping[int, float]] | None = None
        self.loop_events = LoopEvents(params, self.arrivals, self._uncleared)
        self._weights_at: tuple[int, int] | None = None  # versions of two weights after the last step
        self._norms: Reading | None = None
        self._ids: list[int] = []
        self._versions: list[int] = []
        self._read_at = 0
        self._assumed = False  # the versions at the read were taken to be those foreseen
        self._storages: list[Storage | None] = []  # of gradients too large to be held until the step
        self._schedule = AccumulationSchedule()

    @property
    def backwards(self) -> int:
        """Backwards since the last step, whatever became of their gradients."""
        return self.arrivals.count

    @property
    def unread(self) -> bool:
        """True if a backward has ended whose gradients have not been read."""
        return self._read_at != self.backwards

    @property
    def weights_moved(self) -> bool:
        """True if weights were written to since the last step that was seen: an optimizer may have stepped unseen."""
        return self._weights_at is not None and self._weights_at != self._weight_versions()

    def _weight_versions(self) -> tuple[int, int] | None:
        return (self.params[0]._version, self.params[-1]._version) if self.params else None

    @property
    def left_nonfinite(self) -> bool:
        """True if what was read last holds NaN or Inf, where it was read on the host."""
        return isinstance(self._norms, CpuNorms) and not np.isfinite(self._norms.norms()).all()

    @property
    def overdue(self) -> bool:
        """True if a clip is about to change gradients that were not read, or that others have taken the place of."""
        if self.unread or self._norms is None:
            return self.backwards > 0 or self._set_manually
        return not (self.known_scalings or self.distributed) and replaced(
            self.kept or self._storages, self.params
        )

    @property
    def _set_manually(self) -> bool:
        """True if the script assigns `.grad`, as far as is known, and no backward fills it."""
        return self._schedule.expected == 0 and self.backwards == 0 and bool(self.params)

    def missed_end(self) -> None:
        """Note that the end of its last backward was not seen: it is read at the step boundary."""
        self.backward_end_missed = self.backwards > 0

    def expect_manual_allreduce(self, expected: bool) -> None:
        """Expect that the loop's own code averages over ranks: gradients are read again at the step."""
        self._reader.expect_manual_allreduce(expected)

    def use_hook_norms(self, norms: Callable[[Grads], Mapping[int, float]] | None) -> None:
        """Use norms, by position, that hooks inside the backward have taken; None: read all of them."""
        self.norms_from_hooks = norms

    def know_total(self, total: float, ordinary: bool) -> None:
        """Know the total of a step that was judged; while steps are `ordinary` a quick look at the total is enough."""
        self._reader.know_total(total, ordinary)

    def as_usual(self, raw: Reading, after: Reading) -> bool:
        """True if norms that were read on a device are as usual, before any clipping and after; waits for them."""
        return self._reader.as_usual(raw) and (after is raw or bool(np.isfinite(after.norms()).all()))

    # -- windows -----------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Start the next window; called once per `optimizer.step()`."""
        self.step += 1
        self.closed_at = -1
        self.spans_two_steps = self.backward_end_missed = False
        self.reduced_total = None
        self.arrivals.restart()
        self.losses.clear()
        self._read_at = 0
        self._norms = self.kept = self.scale_removed = None
        self._storages = []
        self.known_scalings.clear()
        params = self.params  # as `_weight_versions`, without a call
        self._weights_at = (params[0]._version, params[-1]._version) if params else None

    def resume(self) -> None:
        """Begin another step: the one whose window was closed last has raised.

        Where its gradients were not cleared the next window holds those of both, and nothing is learned from it.
        """
        self.step += 1
        over, self.closed_at = max(self.closed_at, 0), -1
        if self.arrivals.cleared < over:
            self.spans_two_steps = True
        else:
            self.arrivals.shift(over)
            if over:  # the weights have not moved: equal norms are no sign of an old gradient
                self.state_at_step = None
            self._read_at -= over

    def discard(self) -> None:
        """Discard a window that ended without a step (a GradScaler overflow); nothing is learned from it."""
        self.advance()
        self.step -= 1
        self.loop_events.discard()

    def interrupt(self) -> None:
        """Discard the window: gradients came and went unseen (a pause)."""
        self.discard()
        self.spans_two_steps = True

    def release(self) -> None:
        """Release the parameters of an optimizer that is gone; index and step are kept for a successor."""
        super().release()
        self._norms = self.norms_at_step = self.state_at_step = self.kept = None
        self._storages = []
        self.arrivals.release()
        self.loop_events.uncleared.release()

    # -- backwards ---------------------------------------------------------------------------------------

    def add_arrivals(self, touched: list[int], root: Root | None = None, thread: int = 0) -> bool:
        """Add a backward from `root`, of a thread, that has reached these slots; True if any of them is here."""
        if not self.arrivals.add(touched):
            return False
        self.thread = thread
        self.losses.add(root)
        if self._weights_at is None:  # before its first step: that may be one which is not seen
            params = self.params  # as `_weight_versions`, without a call
            self._weights_at = (params[0]._version, params[-1]._version) if params else None
        return True

    def begins(self) -> bool:
        """Release what a backward that begins may need; True if the gradients before it were cleared."""
        if not self.threads.may_look(self.thread):
            return False
        self.kept = None
        cleared = self.arrivals.begins()
        if cleared:
            self.losses.clear()
            self.loop_events.cleared()
        return cleared

    def stash(self) -> None:
        """Do not take it for `zero_grad()` that gradwatch has stashed `.grad` until this backward ends."""
        self.arrivals.stash()

    def due(self) -> bool:
        """True if the backward that just ended may have been the last of this step."""
        return self.arrivals.count >= self._schedule.may_end_from

    def read_overdue(self, clip: Clip | None = None) -> None:
        """Read what a clip (None: of any gradients), in whichever thread, must not find unread.

        Waits for a read that is under way. Gradients that the script assigns are read where they are among the
        clipped: before a clip of others (of the model they are copied from) they may be those of the last step.
        """
        alone = self.threads.may_look(self.thread)
        if not alone and (clip is None or not self.is_of(clip)):
            return
        with self._reading.held:
            if self.overdue and (clip is None or not self._set_manually or self.is_of(clip)):
                self.read()

    # -- reads -------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read every gradient of the capture, with whatever loss scale they carry; `remove_scale` takes it out."""
        with self._reading.held:
            grads = parts(self.params) if self.distributed else list(map(grad_of, self.params))
            # A loop that is learned and lets gradients be: `close_window` finds out soon enough if it changed.
            self._assumed = self.pruning.pruned and self.left_alone
            self._ids = list(map(id, grads))
            current = self.arrivals.count - self.arrivals.cleared
            self._versions = self.pruning.versions(current) if self._assumed else versions_of(grads)
            self.kept = grads if self._keeps else None
            self._storages = [] if self._keeps else storages_of(grads)
            known = NOTHING if self.norms_from_hooks is None else self.norms_from_hooks(grads)
            loss = None if self.on_cpu else self.losses.total()
            self._norms = self._reader.read(grads, 1.0, known, loss)
            self._read_at = self.arrivals.count
            self.known_scalings.clear()

    def go_on_from(self, before: OptimizerGradients) -> None:
        """Close the open window of another capture of the same optimizer, whose parameters have become others.

        What joined has not been read at the end of the backward. It is read now, and is what the backward made, where
        no code has written to any of the gradients since. A window that holds the gradients of a step that raised, too,
        stays one that nothing is learned from.
        """
        self.losses.follow(before.losses)
        self.spans_two_steps = before.spans_two_steps or before.arrivals.cleared < before.closed_at
        if self.spans_two_steps:
            return
        known = set(map(id, before.params))
        joined = [param.grad for param in self.params if id(param) not in known]
        if before._is_as_read() and not any(grad is not None and grad._version for grad in joined):
            self.read()

    def _is_as_read(self) -> bool:
        """True if the gradients are those that were read as the last backward ended."""
        if self._norms is None or self.unread or self.known_scalings or self.distributed:
            return False
        grads = self.grads()
        if replaced_in(self._storages, grads) or versions_of(grads) != self._versions:
            return False
        same = bool(self._storages) or list(map(id, grads)) == self._ids
        return same and self._reader.untouched(grads, self._norms, 1.0)

    def remove_scale(self, scale: Number) -> None:
        """Remove `scale`, by which the gradients are being divided, from what was read of them before."""
        self.scale_removed = scale
        self._divide_read(scale)

    def _read_now(self, grads: Grads, ids: list[int], versions: list[int], scale: Number) -> None:
        """Read these gradients, with their state and a loss scale that they carry, where no end of a backward did."""
        self._ids, self._versions, self._assumed = ids, versions, False
        self._norms = self._reader.read(grads, scale)

    def _divide_read(self, scale: Number) -> None:
        self.loop_events.scale_removed(scale)
        if self._norms is not None:  # what is read later no longer carries it
            self._norms = unscaled(self._norms, scale)

    def norms_read(self) -> NDArray[np.float64]:
        """float64[K] what this window's last backward left, read now where it is unread."""
        if self._norms is None or self.unread:
            self.read()
        assert self._norms is not None
        return self._norms.norms()

    def _mark_replaced(self, grads: Grads) -> None:
        """Mark gradients that others have taken the place of, which may have the ids of those that are gone."""
        for k in replaced_in(self._storages, grads):
            self._ids[k] = GONE

    def _left_in_place(self) -> Grads:
        """The gradients that were not held since they were read, those that are still there."""
        pairs = zip(self._storages, self.grads(), strict=False)
        return [grad if storage is not None and lies_in(storage, grad) else None for storage, grad in pairs]
