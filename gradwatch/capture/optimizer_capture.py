"""One optimizer's gradients from step to step: the window that ends at each, and what changed in it since the read.

K parameters of one optimizer, whose gradients `OptimizerGradients` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import get_ident

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from gradwatch.capture.loop_faults.uncleared_gradients import UnclearedGradients
from gradwatch.capture.optimizer_gradients import OptimizerGradients
from gradwatch.capture.optimizer_parameters import grad_of
from gradwatch.capture.window.gradient_reader import Grads
from gradwatch.capture.window.hook_pruning import PrunedCount
from gradwatch.capture.window.manual_gradients import ManualGradients
from gradwatch.capture.window.norm_after_user_clip import known_factor
from gradwatch.capture.window.window_norms import WindowNorms, is_finite, root_of_squares
from gradwatch.reading.async_copy import CopiedNumber, Number
from gradwatch.reading.cpu_norms import CpuNorms
from gradwatch.reading.foreach_functions import multiply
from gradwatch.reading.foreach_norms import DeviceNorms
from gradwatch.reading.gradient_writes import (
    Reading,
    State,
    versions_of,
)
from gradwatch.reading.layouts import parts
from gradwatch.records.columns import SCALED_BY
from gradwatch.records.snapshot import Sites
from gradwatch.taps.clip_functions import Clip

UNTOUCHED = 1  # version of a gradient that compiled autograd made and nothing wrote to since


class OptimizerCapture(OptimizerGradients):
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
        uncleared: list[UnclearedGradients] | None = None,
    ) -> None:
        """`slots[K]` are those of `params`, `given` every parameter of the optimizer, frozen ones included.

        One `like` it, whose place it takes, hands its reader over where that has the same sites: what is made of their
        sizes alone, and the total that is usual.

        `inside_backward`: its optimizers step inside the backward; `without_optimizer`: its weights are moved by the
        loop's own code. Both are observed only. `uncleared` is shared by all captures of a watch.
        """
        super().__init__(
            index,
            sites,
            slots,
            params,
            inside_backward=inside_backward,
            without_optimizer=without_optimizer,
            like=like,
            uncleared=uncleared,
        )
        self._hook_silenced: Callable[[int, nn.Parameter], bool] = _not_silenced  # of a slot, by a swap
        self.last_calls: NDArray[np.int32] | None = (
            None  # arrivals of the last step whose coverage was looked at
        )
        self.hold(optimizer, params, given)

    def hold(
        self, optimizer: Optimizer | None, params: list[nn.Parameter], given: Sequence[nn.Parameter]
    ) -> None:
        """Hold the parameters of one optimizer, and begin all that is learned of its steps."""
        super().hold(optimizer, params, given)
        self.hook_missed = False  # a gradient arrived and its hook was not called
        self._manual = ManualGradients()
        # Made in the middle of a window, until a window has been closed.
        self.attached_mid_window = not self.without_optimizer

    def follows(self, before: OptimizerCapture) -> None:
        """Stand in the place of another capture, and count on from there."""
        self.step, self.last_calls, self.scale_removed = before.step, before.last_calls, before.scale_removed
        self.loop_events.go_on_from(before.loop_events)
        own = None if self.optimizer is None else self.optimizer()
        if (
            before.backwards
            and own is not None
            and before.optimizer is not None
            and before.optimizer() is own
        ):
            self.go_on_from(before)

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

    # -- what others know of it --------------------------------------------------------------------------

    def attached_in_time(self) -> None:
        """Note that it was made before the first gradient of its window."""
        self.attached_mid_window = False

    def resume_at(self, step: int) -> None:
        """Count the open window as that of this step: saved, or counted by another rank."""
        self.step = step
        self.loop_events.altered.resumed(step)

    def reset_hook_missed(self) -> None:
        """Note that a gradient which arrived without a call of its hook has been dealt with."""
        self.hook_missed = False

    def ask_hooks(self, silenced: Callable[[int, nn.Parameter], bool]) -> None:
        """Ask `silenced(slot, parameter)` from now on whether a swap has silenced the hook of a slot."""
        self._hook_silenced = silenced

    def know_reduced_total(self, total: float | None) -> None:
        """Know the total norm over all ranks, where this one's is not all of it."""
        self.reduced_total = total

    def clipped(self, clip: Clip) -> None:
        """Note a clip, by the script, of some of its gradients, or of parameters of it that have none."""
        inside_step = self.closed_at >= 0
        self.loop_events.clipped(clip, self.backwards > 0 or self._set_manually or inside_step)

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
                self._read_now(grads, ids, versions, scale)
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
            pruned = self.pruning.count(
                self._versions, current, self._assumed, state, self.state_at_step, ordinary
            )
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
        events, last, facts = self.loop_events, self.state_at_step, None
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
        self.state_at_step = state
        self.norms_at_step = after
        self.kept = self.scale_removed = None
        self.left_alone = after is raw and not self.known_scalings
        self.closed_at = backwards
        return window

    def _provisional(self, unread: bool, versions: list[int]) -> bool:
        """True if the norms of the window that closes may be wrong: they are shown, and never learned."""
        # A loop whose hooks are never called is read at the boundary by design; any other unread window ended early.
        unread_before_schedule = unread and not (self._schedule.expected == 0 and self.backwards == 0)
        end_missed = self.backward_end_missed and max(versions, default=0) > UNTOUCHED
        partial = self.distributed and bool(self.partial())
        return unread_before_schedule or end_missed or self.spans_two_steps or partial

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
            self.norms_at_step = after = None if gone else self._reader.left(left, self._versions, raw)
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

    def divide_applied(self, window: WindowNorms, divisor: Number) -> None:
        """Divide the norms as the optimizer itself will divide the gradients: a clip, not a loss scale."""
        self.norms_at_step = window.divide_applied(divisor)

    def total_applied(self, instead: Mapping[int, float] | None = None) -> float:
        """Root sum of squares of the gradients at the boundary, after the user's clipping; norms `instead` of some."""
        if self.reduced_total is not None:
            return self.reduced_total
        assert self.norms_at_step is not None
        norms = self.norms_at_step.norms()
        if instead:
            norms = norms.copy()
            norms[list(instead)] = list(instead.values())
        return root_of_squares(norms)

    def surely_within(self, max_norm: float) -> bool:
        """True if the quick total proves that a clip at `max_norm` would leave these gradients alone."""
        return isinstance(self.norms_at_step, CpuNorms) and self.norms_at_step.surely_within(max_norm)

    def written(self) -> bool:
        """True if any code has written to the gradients since the window was closed."""
        return self.state_at_step is not None and versions_of(self.grads()) != self.state_at_step[1]

    def multiply(self, coefficient: np.float32) -> None:
        """Multiply every gradient in place; a coefficient of 1 touches nothing."""
        present = [grad for grad in self.grads() if grad is not None]
        if coefficient != 1.0 and present:
            # As a tensor, which is how torch multiplies: the result is then bit-equal to clip_grad_norm_.
            multiply(present, torch.tensor(coefficient, device="cpu"))

    @property
    def on_device(self) -> DeviceNorms | None:
        """The norms of the gradients as they stand at the boundary, where they were read on a device."""
        return self.norms_at_step if isinstance(self.norms_at_step, DeviceNorms) else None

    # -- inside ------------------------------------------------------------------------------------------

    def _corrected(
        self, calls: NDArray[np.int32], grads: Grads, state: State, current: int
    ) -> NDArray[np.int32]:
        """Arrivals of each gradient, by the hooks on all of them (`calls[K]`) and by what they missed."""
        _, versions, _ = state
        absent = [k for k, version in enumerate(versions) if version == -1]
        manual = []
        for k in np.flatnonzero(calls == 0).tolist():  # sync: numpy
            grad = grads[k]
            if grad is None:
                continue
            silenced = self._hook_silenced(int(self.slots[k]), self.params[k])
            if self._manual.is_new(k, grad, state, self.state_at_step, current, silenced):
                manual.append(k)
        self.hook_missed = self.hook_missed or bool(manual)
        return self.arrivals.corrected(absent, manual)


def _not_silenced(slot: int, param: nn.Parameter) -> bool:
    return False


def _sent_with(raw: Reading) -> CopiedNumber | None:
    """The loss, where it is on its way together with these norms."""
    return raw.loss if isinstance(raw, DeviceNorms) else None
