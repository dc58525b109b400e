"""One optimizer's gradients between two of its steps: what arrived, what was read, what changed since.

K parameters of one optimizer. How many backwards make a step is learned (`AccumulationSchedule`), so that later steps
are read once, at the end of the last backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import get_ident

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.capture.columns.loss import Root, WindowLoss
from gradwatch.capture.loop_faults.loop_events import LoopEvents
from gradwatch.capture.optimizer_parameters import OptimizerParameters, grad_of
from gradwatch.capture.window.accumulation_steps import AccumulationSchedule
from gradwatch.capture.window.arrivals import ArrivalCounts
from gradwatch.capture.window.gradient_reader import NOTHING, GradientReader, Grads
from gradwatch.capture.window.hook_pruning import HookPruning, PrunedCount
from gradwatch.capture.window.manual_gradients import ManualGradients
from gradwatch.capture.window.norm_after_user_clip import KnownScaling, known_factor
from gradwatch.capture.window.window_norms import WindowNorms, is_finite, root_of_squares
from gradwatch.reading.cpu import CpuNorms
from gradwatch.reading.device import CopiedNumber, DeviceNorms, Number
from gradwatch.reading.foreach import multiply
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
from gradwatch.records.columns import SCALED_BY
from gradwatch.records.snapshot import Sites
from gradwatch.runtime.locks import ForkSafeLock
from gradwatch.taps.clip_functions import Clip

UNTOUCHED = 1  # version of a gradient that compiled autograd made and nothing wrote to since
GONE = -2  # in place of an id
KEPT = 1 << 24  # elements of a capture whose gradients may be held until the step, on the host


class OptimizerCapture(OptimizerParameters):
    """The parameters of one optimizer and everything read of them since its last step."""

    def __init__(
        self,
        index: int,
        optimizer: Optimizer | None,
        params: list[nn.Parameter],
        sites: Sites,
        slots: NDArray[np.intp] | None = None,
        given: Sequence[nn.Parameter] = (),
        *,
        inside_backward: bool = False,
        without_optimizer: bool = False,
        like: OptimizerCapture | None = None,
    ) -> None:
        """`slots[K]` are those of `params`, `given` every parameter of the optimizer, frozen ones included.

        One `like` it, whose place it takes, hands its reader over where that has the same sites: what is made of their
        sizes alone, and the total that is usual.

        `inside_backward`: its optimizers step inside the backward; `without_optimizer`: its weights are moved by the
        loop's own code. Both are observed only.
        """
        super().__init__(
            index,
            sites,
            slots,
            params,
            inside_backward=inside_backward,
            without_optimizer=without_optimizer,
        )
        self.step = 0
        kind = sites, self.on_cpu, self.distributed
        alike = like is not None and (like.sites, like.on_cpu, like.distributed) == kind
        self._reader: GradientReader = like._reader if like is not None and alike else GradientReader(*kind)
        self._keeps = self.on_cpu and self._reader.elements <= KEPT
        self._hook_silenced: Callable[[int, nn.Parameter], bool] = _not_silenced  # of a slot, by a swap
        # A clip reads for all threads: one that ended its read after the owner's clip would keep what the clip left.
        self._reading: ForkSafeLock = ForkSafeLock() if like is None else like._reading
        self.losses = WindowLoss()
        self.arrivals = ArrivalCounts(params, self.position)
        self.last_calls: NDArray[np.int32] | None = (
            None  # arrivals of the last step whose coverage was looked at
        )
        self._begin(optimizer, params, given)

    def _begin(
        self, optimizer: Optimizer | None, params: list[nn.Parameter], given: Sequence[nn.Parameter]
    ) -> None:
        """Hold the parameters of one optimizer, and begin all that is learned of its steps and read of them."""
        self.hold(optimizer, params, given)
        self.pruning = HookPruning(len(params))
        self.spans_two_steps = False  # this window cannot be one step's alone
        self.hook_missed = False  # a gradient arrived and its hook was not called
        self.backward_end_missed = False  # the end of its last backward was missed: read at the step boundary
        self.closed_at = -1  # backwards when the window was closed; -1 while it is open
        self.reduced_total: float | None = None  # over all ranks, where this one's total is not all of it
        self.scale_removed: Number | None = (
            None  # what a GradScaler has divided its gradients by since its last step
        )
        self.known_scalings: list[KnownScaling] = []  # clips since the read, by the one who clips
        self._norms: Reading | None = None
        self._after: Reading | None = None
        self.kept: list[Tensor | None] | None = None  # a second walk finds them faster while they are held
        self._assumed = False  # the versions at the read were taken to be those foreseen
        self._storages: list[Storage | None] = []  # of gradients too large to be held until the step
        self._left_alone = False  # no code changed a gradient between the end of backward and the last step
        # Norms that gradwatch's hooks have taken inside the backward: they need not be read again.
        self.norms_from_hooks: Callable[[Grads], Mapping[int, float]] | None = None
        self._read_at = 0
        self._manual = ManualGradients()
        self._schedule = AccumulationSchedule()
        self.loop_events = LoopEvents(params, self.arrivals)
        self._ids: list[int] = []
        self._versions: list[int] = []
        self._last: State | None = None
        # Made in the middle of a window, until a window has been closed.
        self.attached_mid_window = not self.without_optimizer

    def succeeded_by(
        self,
        optimizer: Optimizer,
        params: list[nn.Parameter],
        given: Sequence[nn.Parameter],
        sites: Sites,
        slots: NDArray[np.intp],
    ) -> bool:
        """Go on with an optimizer over parameters of the same layout, if that of before is gone; else False.

        What depends on the layout alone stays, and so does the count of steps.
        """
        if not self.takes_over(params, sites, slots):
            return False
        awaiting = self.loop_events.uncleared.awaiting
        self._begin(optimizer, params, given)
        self.loop_events.uncleared.awaiting = awaiting
        self.losses.clear()
        self.arrivals.hold(params)
        self.succeeds = True
        return True

    def follows(self, before: OptimizerCapture) -> None:
        """Stand in the place of another capture, and count on from there."""
        self.step, self.last_calls, self.scale_removed = before.step, before.last_calls, before.scale_removed
        self.loop_events.altered = before.loop_events.altered

    def takes_place(self, index: int, before: OptimizerCapture | None) -> None:
        """Stand at `index` from now on, and count on from the capture that was there."""
        self.index = index
        self.step = self.step if before is None else before.step

    def no_longer_arrived(self, calls: NDArray[np.int32]) -> Sequence[int]:
        """Positions with a gradient in the step before and none in this one, which had `calls[K]`."""
        before, self.last_calls = self.last_calls, calls
        if before is None or len(before) != len(calls) or before.tobytes() == calls.tobytes():
            return ()
        gone: list[int] = np.flatnonzero((before > 0) & (calls == 0)).tolist()  # sync: numpy
        return gone

    @property
    def backwards(self) -> int:
        """Backwards since the last step, whatever became of their gradients."""
        return self.arrivals.count

    @property
    def unread(self) -> bool:
        """True if a backward has ended whose gradients have not been read."""
        return self._read_at != self.backwards

    @property
    def overdue(self) -> bool:
        """True if a clip is about to change gradients that were not read, or that others have taken the place of."""
        if self.unread or self._norms is None:
            return self.backwards > 0 or self._set_by_hand
        return not (self.known_scalings or self.distributed) and replaced(
            self.kept or self._storages, self.params
        )

    @property
    def _set_by_hand(self) -> bool:
        """True if the script assigns `.grad`, as far as is known, and no backward fills it."""
        return self._schedule.expected == 0 and self.backwards == 0 and bool(self.params)

    # -- what others know of it --------------------------------------------------------------------------

    def attached_in_time(self) -> None:
        """Note that it was made before the first gradient of its window."""
        self.attached_mid_window = False

    def resume_at(self, step: int) -> None:
        """Count the open window as that of this step: saved, or counted by another rank."""
        self.step = step
        self.loop_events.altered.resumed(step)

    def interrupt(self) -> None:
        """Discard the window: gradients came and went unseen (a pause)."""
        self.discard()
        self.spans_two_steps = True

    def missed_end(self) -> None:
        """Note that the end of its last backward was not seen: it is read at the step boundary."""
        self.backward_end_missed = self.backwards > 0

    def reset_hook_missed(self) -> None:
        """Note that a gradient which arrived without a call of its hook has been dealt with."""
        self.hook_missed = False

    def expect_manual_allreduce(self, expected: bool) -> None:
        """Expect that the loop's own code averages over ranks: gradients are read again at the step."""
        self._reader.manual_allreduce = expected

    def use_hook_norms(self, norms: Callable[[Grads], Mapping[int, float]] | None) -> None:
        """Use norms, by position, that hooks inside the backward have taken; None: read all of them."""
        self.norms_from_hooks = norms

    def ask_hooks(self, silenced: Callable[[int, nn.Parameter], bool]) -> None:
        """Ask `silenced(slot, parameter)` from now on whether a swap has silenced the hook of a slot."""
        self._hook_silenced = silenced

    def know_reduced_total(self, total: float | None) -> None:
        """Know the total norm over all ranks, where this one's is not all of it."""
        self.reduced_total = total

    def know_total(self, total: float, ordinary: bool) -> None:
        """Know the total of a step that was judged; while steps are `ordinary` a quick look at the total is enough."""
        self._reader.know_total(total, ordinary)

    def as_usual(self, raw: Reading, after: Reading) -> bool:
        """True if norms that were read on a device are as usual, before any clipping and after; waits for them."""
        return self._reader.as_usual(raw) and (after is raw or bool(np.isfinite(after.norms()).all()))

    # -- during backward ---------------------------------------------------------------------------------

    def add_arrivals(self, touched: list[int], root: Root | None = None, thread: int = 0) -> bool:
        """Add a backward from `root`, of a thread, that has reached these slots; True if any of them is here."""
        if not self.arrivals.add(touched):
            return False
        self.thread = thread
        self.losses.add(root)
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
            if self.overdue and (clip is None or not self._set_by_hand or self.is_of(clip)):
                self.read()

    def clipped(self, clip: Clip) -> None:
        """Note a clip, by the script, of some of its gradients, or of parameters of it that have none."""
        inside_step = self.closed_at >= 0
        self.loop_events.clipped(clip, self.backwards > 0 or self._set_by_hand or inside_step)

    def read(self) -> None:
        """Read every gradient of the capture, with whatever loss scale they carry; `unscaled` takes it out."""
        with self._reading.held:
            grads = parts(self.params) if self.distributed else list(map(grad_of, self.params))
            # A loop that is learned and lets gradients be: `close_window` finds out soon enough if it changed.
            self._assumed = self.pruning.pruned and self._left_alone
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

    def unscaled(self, scale: Number) -> None:
        """Remove `scale`, by which the gradients are being divided, from what was read of them before."""
        self.scale_removed = scale
        self._divide_read(scale)

    def _divide_read(self, scale: Number) -> None:
        self.loop_events.scale_removed(scale)
        if self._norms is not None:  # what is read later no longer carries it
            self._norms = unscaled(self._norms, scale)

    # -- at the step boundary ----------------------------------------------------------------------------

    def close_window(self, scale: Number = 1.0) -> WindowNorms:
        """Close the window just before `optimizer.step()`: read what is unread, notice what changed.

        `scale` is the loss scale the gradients still carry here (fused optimizers under a GradScaler).
        """
        if self.threads.several:
            self.thread = get_ident()
        with self._reading.held:
            grads = parts(self.params) if self.distributed else list(map(grad_of, self.params))
            ids, versions = list(map(id, grads)), versions_of(grads)
            if self._storages:
                self._mark_replaced(grads)
            unread = self._norms is None or self._read_at != self.arrivals.count
            if unread:
                self._ids, self._versions, self._assumed = ids, versions, False
                self._norms = self._reader.read(grads, scale)
            elif type(scale) is not float or scale != 1.0:
                self._divide_read(scale)
            raw = self._norms
            assert raw is not None
            after, explained = raw, True
            moved = ids != self._ids or versions != self._versions
            if moved or not (unread or self._reader.untouched(grads, raw, scale)):
                now, at_read = (ids, versions), (self._ids, self._versions)
                clipped = self._reader.clipped(grads, now, at_read, raw, scale, self.known_scalings)
                after, explained = (
                    clipped or self._reader.changed(grads, now, at_read, raw, scale),
                    bool(clipped),
                )
            clips = self.loop_events.clips.used
            window = self._closed(grads, (ids, versions, raw), after, unread, scale)
            if not explained or self.loop_events.altered.begun:
                self._note_altered(window, ids, versions, explained, clips)
            return window

    def _note_altered(
        self, window: WindowNorms, ids: list[int], versions: list[int], explained: bool, clips: int
    ) -> None:
        """Note that something has changed gradients, or, once that had begun, that only clips of torch's have."""
        altered = self.loop_events.altered
        if explained or window.after is window.raw:
            if altered.begun:
                window.add_facts({SCALED_BY: 1.0})
        elif not self._reader.manual_allreduce:
            factor = known_factor(self.known_scalings, ids, versions, clips)
            if factor is not None and altered.altered(self.step):
                window.altered_beside(factor)

    def _mark_replaced(self, grads: Grads) -> None:
        """Mark gradients that others have taken the place of, which may have the ids of those that are gone."""
        for k in replaced_in(self._storages, grads):
            self._ids[k] = GONE

    def _closed(self, grads: Grads, state: State, after: Reading, unread: bool, scale: Number) -> WindowNorms:
        """The window whose gradients have this state, and these norms `after` what other code made of them."""
        _, versions, raw = state
        arrivals = self.arrivals
        backwards = arrivals.count
        current = backwards - arrivals.cleared
        # The quick total was enough for these gradients, and shows that they are finite.
        ordinary = not (unread or self.spans_two_steps or raw.looked) and (after is raw or is_finite(after))
        if self._manual.seen:
            self._manual.step()
        pruned: PrunedCount | None = None
        if self.pruning.pruned:
            pruned = self.pruning.count(self._versions, current, self._assumed, state, self._last, ordinary)
            calls = arrivals.by_versions(pruned.versions)
        else:
            calls = arrivals.counted()
            # A custom Function may return None: its hook is called, and no gradient has arrived.
            if not arrivals.complete or -1 in versions:
                calls = self._corrected(calls, grads, state, current)
        miscounted = pruned is not None and not pruned.right
        uncertain = (
            unread or self.backward_end_missed or self.spans_two_steps or self.distributed or miscounted
        )
        events, last, facts = self.loop_events, self._last, None
        if uncertain or self.attached_mid_window:
            events.discard()
        elif events.pending or -1 in versions or (last is not None and versions != last[1]):
            facts = events.at_step(state, last, calls, self._versions)
        window = WindowNorms(
            self.sites,
            self.step,
            raw,
            after,
            calls,
            current,
            uncertain and (miscounted or self._provisional(unread, versions)),
            scale,
            ordinary and not miscounted,
            pruned,
            self.scale_removed,
            loss=self.losses.total() if self.on_cpu else (_sent_with(raw) or self.losses.total()),
            facts=facts,
        )
        if self.attached_mid_window or self.spans_two_steps:
            self.attached_mid_window = False  # what arrived is not the whole of one step, or that of two
        else:
            self._schedule.count(self.step, backwards)
            if self.pruning.possible and not self.pruning.pruned:
                self.pruning.note(self._versions, calls, current)
        self._last = state
        self._after = after
        self.kept = self.scale_removed = None
        self._left_alone = after is raw and not self.known_scalings
        self.closed_at = backwards
        return window

    def _provisional(self, unread: bool, versions: list[int]) -> bool:
        """True if the norms of the window that closes may be wrong: they are shown, and never learned."""
        # A loop whose hooks are never called is read at the boundary by design; any other unread window ended early.
        unread_before_schedule = unread and not (self._schedule.expected == 0 and self.backwards == 0)
        end_missed = self.backward_end_missed and max(versions, default=0) > UNTOUCHED
        partial = self.distributed and bool(self.partial())
        return unread_before_schedule or end_missed or self.spans_two_steps or partial

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
                self._last = None
            self._read_at -= over

    def discard(self) -> None:
        """Discard a window that ended without a step (a GradScaler overflow); nothing is learned from it."""
        self.advance()
        self.step -= 1
        self.loop_events.discard()

    def observed(self) -> WindowNorms:
        """The window of a loop without an optimizer: what its last backward left, and what was made of that since.

        Nothing announces the move of the weights, so what they were moved by is known only where the gradients are
        still there when the window closes; else its `after` is None.
        """
        raw = self._norms
        assert raw is not None
        left: Grads = self.kept or self._left_in_place()
        gone = self.distributed and self.kept is None
        with self._reading.held:  # one read of a capture at a time: they share a buffer
            self._after = after = None if gone else self._reader.left(left, self._versions, raw)
        calls, current = self.arrivals.counted().copy(), self.arrivals.current
        calls[np.array(self._versions) < 0] = 0
        return WindowNorms(
            self.sites,
            self.step,
            raw,
            raw if after is None else after,
            calls,
            current,
            self.backward_end_missed,
            loss_scale=self.scale_removed,
            applied_known=after is not None,
            loss=self.losses.total(),
        )

    def _left_in_place(self) -> Grads:
        """The gradients that were not held since they were read, those that are still there."""
        pairs = zip(self._storages, self.grads(), strict=False)
        return [grad if storage is not None and lies_in(storage, grad) else None for storage, grad in pairs]

    def divide_applied(self, window: WindowNorms, divisor: Number) -> None:
        """Divide the norms as the optimizer itself will divide the gradients: a clip, not a loss scale."""
        self._after = window.divide_applied(divisor)

    def total_applied(self, instead: Mapping[int, float] | None = None) -> float:
        """Root sum of squares of the gradients at the boundary, after the user's clipping; norms `instead` of some."""
        if self.reduced_total is not None:
            return self.reduced_total
        assert self._after is not None
        norms = self._after.norms()
        if instead:
            norms = norms.copy()
            norms[list(instead)] = list(instead.values())
        return root_of_squares(norms)

    def surely_within(self, max_norm: float) -> bool:
        """True if the quick total proves that a clip at `max_norm` would leave these gradients alone."""
        return isinstance(self._after, CpuNorms) and self._after.surely_within(max_norm)

    def norms_read(self) -> NDArray[np.float64]:
        """float64[K] what this window's last backward left, read now where it is unread."""
        if self._norms is None or self.unread:
            self.read()
        assert self._norms is not None
        return self._norms.norms()

    def written(self) -> bool:
        """True if any code has written to the gradients since the window was closed."""
        return self._last is not None and versions_of(self.grads()) != self._last[1]

    def multiply(self, coefficient: np.float32) -> None:
        """Multiply every gradient in place; a coefficient of 1 touches nothing."""
        present = [grad for grad in self.grads() if grad is not None]
        if coefficient != 1.0 and present:
            # As a tensor, which is how torch multiplies: the result is then bit-equal to clip_grad_norm_.
            multiply(present, torch.tensor(coefficient, device="cpu"))

    @property
    def on_device(self) -> DeviceNorms | None:
        """The norms of the gradients as they stand at the boundary, where they were read on a device."""
        return self._after if isinstance(self._after, DeviceNorms) else None

    def release(self) -> None:
        """Release the parameters of an optimizer that is gone; index and step are kept for a successor."""
        super().release()
        self._norms = self._after = self._last = self.kept = None
        self._storages = []
        self.arrivals.release()
        self.loop_events.uncleared.release()

    # -- inside ------------------------------------------------------------------------------------------

    def _corrected(
        self, calls: NDArray[np.int32], grads: Grads, state: State, current: int
    ) -> NDArray[np.int32]:
        """Arrivals of each gradient, by the hooks on all of them (`calls[K]`) and by what they missed."""
        _, versions, _ = state
        absent = [k for k, version in enumerate(versions) if version == -1]
        by_hand = []
        for k in np.flatnonzero(calls == 0).tolist():  # sync: numpy
            grad = grads[k]
            if grad is None:
                continue
            silenced = self._hook_silenced(int(self.slots[k]), self.params[k])
            if self._manual.is_new(k, grad, state, self._last, current, silenced):
                by_hand.append(k)
        self.hook_missed = self.hook_missed or bool(by_hand)
        return self.arrivals.corrected(absent, by_hand)


def _not_silenced(slot: int, param: nn.Parameter) -> bool:
    return False


def _sent_with(raw: Reading) -> CopiedNumber | None:
    """The loss, where it is on its way together with these norms."""
    return raw.loss if isinstance(raw, DeviceNorms) else None
