"""Hooks and the end-of-backward read: which gradients arrived, and their norms before other code touches them.

`register_post_accumulate_grad_hook` only counts an arrival. The first of a graph task queues a callback
that queues another: the nested one runs after DDP and FSDP have finished their reduction, on the caller's
streams, and reads every gradient that arrived in one batch. Neither hook keeps a gradient alive (that would defeat
autograd's buffer stealing), and none holds a weak reference to a parameter (`swap_tensors` would raise).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from gradwatch.capture.capture_lifetimes import Captures, Waiting
from gradwatch.capture.columns.loss import Losses, Root
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.watched_parameters import Slots
from gradwatch.capture.window.window_norms import WindowNorms
from gradwatch.runtime.overhead_timer import OverheadTimer
from gradwatch.runtime.weak_references import died
from gradwatch.taps import backward_end, backward_entry, dispatch_modes
from gradwatch.taps.optimizers.param_groups import params_of

# By name: to walk torch's module from cold caches costs microseconds.
_numel: Callable[[torch.Tensor], int] = torch.Tensor.numel
_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, dispatch_modes.set_grad_enabled
PATTERNS = 64  # lists of arrivals that are kept, to be compared with those of later backwards
REINSTALL_EVERY = 16  # steps between looks for parameters that want a gradient again


class Capture(Captures):
    """The captures of one watch, and the reads of their gradients after each backward.

    `ended` is called at the end of every backward that touched a watched parameter, before anything is read, with the
    captures that it reached; it runs inside autograd and must not raise. Optimizers that are `waiting` for a capture
    get one at the end of the first backward, when the order of arrival is known.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        ended: Callable[[list[OptimizerCapture]], None],
        failed: Callable[[str, BaseException], None],
        spent: OverheadTimer,
        waiting: Waiting | None = None,
    ) -> None:
        self._ends = backward_end.Ends(self._backward_end, self._abandon)
        self.ready = self._ends.ready  # by graph task of the backwards that have not ended
        # A strong reference would tie parameter -> hook -> Capture -> parameter.
        self._itself = weakref.ref(self)
        slots = Slots(models, self.ready, functools.partial(_arm, self._itself))
        super().__init__(slots, Losses(failed), waiting)
        self.names = slots.names
        self._ended = ended
        self._failed = failed
        self.spent = spent
        self.after_backward: Callable[[], None] = _nothing  # boundary: steps taken inside the backward
        self.cleared: Callable[[OptimizerCapture], None] = _nothing  # gradients of earlier backwards are gone
        self.unowned: Callable[[list[int], Root | None], None] = (
            _nothing  # reached parameters of no optimizer
        )
        self.backwards_without_hook = 0  # that the few hooks left did not see, known by their gradients
        self._patterns: dict[tuple[int, int], list[int]] = {}  # by how many arrived, and which first
        self._unlisten = backward_entry.listen(
            self._about_to_run, self._uncleared, self.slots.unreduced.groups
        )

    def call_when_cleared(self, call: Callable[[OptimizerCapture], None]) -> None:
        """Call this when gradients of earlier backwards are gone, with the capture that they were of."""
        self.cleared = call

    def call_after_backward(self, call: Callable[[], None]) -> None:
        """Call this after each backward that is no part of another: optimizers have stepped inside it."""
        self.after_backward = call

    def call_when_unowned(
        self, arrived: Callable[[list[int], Root | None], None], before_drop: Callable[[], None]
    ) -> None:
        """Call `arrived` with the slots of parameters of no optimizer that a backward has reached, and its root.

        `before_drop` is called when parameters are about to be released.
        """
        self.unowned, self.before_drop = arrived, before_drop

    # -- parameters --------------------------------------------------------------------------------------

    def join(self, optimizers: Sequence[Optimizer], loose: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Have the next backward announce the parameters of these optimizers."""
        if loose:
            self.slots.add_loose(loose, optimizers)
        # Without an optimizer it is for models, perhaps known ones, that hold what is not watched.
        if not optimizers:
            self.release_dead()
            self.scan_without_optimizer()
        elif not self.slots.of.keys() >= set(map(id, params_of(*optimizers))):
            self.slots.scan()

    def scan_without_optimizer(self) -> None:
        """Scan for what was put into models; the loops without an optimizer have it, where no other trains here."""
        known = set(self.slots.of.values())
        self.slots.scan()
        if self._loops.alive() and all(captured.without_optimizer for captured in self.captures):
            # From this backward on, and no optimizer could be given them.
            self.coverage.measured_by_loop(known.symmetric_difference(self.slots.of.values()))

    # -- coverage ----------------------------------------------------------------------------------------

    def count_coverage(self) -> float:
        """The share of the models' parameters that is measured, counted now."""
        return self.coverage.count(self.slots.watched.prefixed(), self.captures)

    def maintain_hooks(self, captured: OptimizerCapture, window: WindowNorms) -> bool:
        """Release what is gone, count coverage where it may have changed, reinstall lost hooks, at a step boundary.

        True if hooks of this capture were lost (`swap_tensors`): other hooks on its parameters are, too.
        """
        hook_missed = captured.hook_missed
        if hook_missed:
            captured.reset_hook_missed()
        if window.pruned is not None and not window.pruned.right:
            self.restore(captured)
            hook_missed = True
        if hook_missed and not captured.backwards:
            self.backwards_without_hook += 1
        if (died or self.slots.held_by_script) and self.has_dead():
            self.drop_dead()
        if captured.step % REINSTALL_EVERY == 0:
            self.reinstall(captured)
        swapped_hooks = self._rehook(captured) if hook_missed else 0
        if self.coverage.due(captured, window.calls):
            self.count_coverage()
        if swapped_hooks:
            self.coverage.hooks_lost(swapped_hooks / len(captured))
        return swapped_hooks > 0

    def _rehook(self, captured: OptimizerCapture) -> int:
        """Hook those parameters again whose contents were swapped; how many there were."""
        pairs = zip(captured.slots.tolist(), captured.params, strict=False)  # sync: numpy
        return sum([self.slots.hooks.rehook(slot, param) for slot, param in pairs])

    @property
    def backwards(self) -> int:
        """Number of backwards that reached a watched parameter, parts of one (reentrant checkpointing) included."""
        begun = self._ends.begun
        return begun + self.backwards_without_hook + self.slots.unreduced.count(begun)

    def close(self) -> None:
        """Remove every hook and release every parameter."""
        self.slots.close()
        self.losses.close()
        self._unlisten()
        self.captures.clear()
        self._ends.close()
        self.after_backward = self.before_drop = _nothing

    # -- backwards ---------------------------------------------------------------------------------------

    def _about_to_run(self, call: backward_entry.BackwardCall) -> None:
        """Look, before a backward, at gradients of some step that may still be there."""
        if call.accumulates and not call.nested:
            try:
                if self.slots.unreduced.groups:
                    self.slots.unreduced.begins(self._ends.begun)
                with torch.no_grad():
                    for uncleared in tuple(self._uncleared):
                        if self.losses.threads.may_look(uncleared.thread):
                            uncleared.look()
            except Exception as error:
                self._failed("capture", error)

    def arm(self) -> None:
        """Arm the end of the running backward, also where no hook is called in it."""
        for captured in self.captures:
            if (captured.arrivals.count or captured.kept) and not captured.without_optimizer:
                dispatch_modes.unseen(self._begins_again)
                break
        self._ends.arm(self.losses.reached())

    def _begins_again(self) -> None:
        """Discard what was captured of gradients that were cleared, as another backward of an open window begins."""
        for captured in self.captures:
            if not captured.without_optimizer and captured.begins():
                self.cleared(captured)

    def _abandon(self) -> None:
        """A backward before this one raised, so its callback never ran: its arrivals do not count."""
        self.after_backward()  # a step taken inside it has happened all the same

    def _backward_end(self, touched: list[int]) -> None:
        graded = _grad_enabled()  # where the backward makes a graph of its own
        try:
            try:
                mark = self.spent.begin()
                _set_grad_enabled(False)  # a tenth of `with torch.no_grad()` in cold caches
                self._end(touched)
                self.spent.end(mark)
            finally:
                _set_grad_enabled(graded)
        except Exception as error:
            self._failed("capture", error)
        finally:
            _set_grad_enabled(graded)  # once more, as in Boundary

    def _end(self, touched: list[int]) -> None:
        if self._unhooked:
            touched += self._arrivals_without_hook(touched)
        if not self.slots.arrival:
            self.slots.learn_arrival(touched)
        if self._awaited:
            self.adopt_waiting(from_first_backward=True)
        # The list of an earlier backward where it is the same: it is then known to every capture.
        pattern = len(touched), touched[0] if touched else -1
        if self._patterns.get(pattern) == touched:
            touched = self._patterns[pattern]
        else:
            if len(self._patterns) >= PATTERNS:
                self._patterns.clear()
            self._patterns[pattern] = touched
        root, reached = self.losses.latest(), []
        thread = self.losses.thread() if self.losses.threads.several else 0
        for captured in self.captures:
            if captured.add_arrivals(touched, root, thread):
                reached.append(captured)
        self._ended(reached)
        if self.after_backward is not _nothing and not backward_end.nested():
            self.after_backward()
        # Last: optimizers that have stepped inside the backward own theirs by now.
        unowned = self._unowned
        if unowned is None or self._unowned_at != self.slots.changes:
            unowned = self.unowned_slots()
        if unowned and touched:
            without_owner = [slot for slot in touched if slot in unowned]
            if without_owner:
                self.unowned(without_owner, self.losses.latest())

    def expect(self, params: list[nn.Parameter]) -> None:
        """Expect parameters whose hooks are not called (FSDP1) in the backward that has begun."""
        if backward_end.current() not in self.ready:
            _arm(self._itself)
        self._unhooked.update(self.slots.of[id(param)] for param in params if id(param) in self.slots.of)

    def _arrivals_without_hook(self, touched: list[int]) -> list[int]:
        """The slots that `expect` told of, and that have a gradient now; without those whose hook was called."""
        hook_missed = self._unhooked.difference(touched)
        self._unhooked.clear()
        return sorted(slot for slot in hook_missed if self.params[slot].grad is not None)

    def drain(self) -> None:
        """Count arrivals whose callback never ran as one backward: compiled autograd has none, or it raised."""
        touched = self._ends.left_over(self.losses.thread())
        if touched:
            self._backward_end(touched)
            for captured in self.captures:
                captured.missed_end()


def _arm(owner: weakref.ref[Capture]) -> None:
    capture = owner()
    if capture is not None:
        capture.arm()


def _nothing(*_: object) -> None:
    pass
