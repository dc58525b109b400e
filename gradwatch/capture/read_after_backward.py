"""Hooks and the end-of-backward read: which gradients arrived, and their norms before anybody touches them.

`register_post_accumulate_grad_hook` only counts an arrival. The first of a graph task queues a callback
that queues another: the nested one runs after DDP and FSDP have finished their reduction, on the caller's
streams, and reads every gradient that arrived in one batch. Neither hook keeps a gradient alive (that would defeat
autograd's buffer stealing), and none holds a weak reference to a parameter (`swap_tensors` would raise).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from gradwatch.capture.columns.loss import Losses, Root
from gradwatch.capture.loop_faults.uncleared_gradients import UnclearedGradients
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.parameter_names import fallback_name, shape_of
from gradwatch.capture.watched_parameters import GONE, Slots
from gradwatch.capture.window_norms import WindowNorms
from gradwatch.records.snapshot import Sites
from gradwatch.runtime.held_weakly import died
from gradwatch.runtime.locks import ForkSafeLock
from gradwatch.runtime.own_time import OwnTime
from gradwatch.taps import backward, backward_entry, dispatch_modes, module_tree
from gradwatch.taps.optimizers.param_groups import params_of

# By name: to walk torch's module from cold caches costs microseconds.
_numel: Callable[[torch.Tensor], int] = torch.Tensor.numel
_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, dispatch_modes.set_grad_enabled
PATTERNS = 64  # lists of arrivals that are kept, to be compared with those of later backwards
REINSTALL_EVERY = 16  # steps between looks for parameters that want a gradient again


class Waiting(Protocol):
    """Optimizers that are known but have no capture yet: `wanted` is empty where there are none."""

    wanted: list[Any]

    def waiting(self, capture: Capture) -> list[Optimizer]:
        """Those of `wanted` that are alive and have no capture."""


class Capture:
    """The slots of one Watch, and the captures (optimizers) they belong to.

    `ended` is called at the end of every backward that touched a watched parameter, before anything is read, with the
    captures that it reached; it runs inside autograd and must not raise. `waiting` names optimizers that are known but
    have no capture yet: they get one at the end of the first backward, when the order of arrival is known.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        ended: Callable[[list[OptimizerCapture]], None],
        failed: Callable[[str, BaseException], None],
        spent: OwnTime,
        waiting: Waiting | None = None,
    ) -> None:
        self._waiting = waiting
        self._awaited: list[Any] = [] if waiting is None else waiting.wanted
        self._ended = ended
        self._failed = failed
        self.captures: list[OptimizerCapture] = []
        self._unhooked: set[int] = set()
        self._ends = backward.Ends(self._backward_end, self._abandon)
        # A strong reference would tie parameter -> hook -> Capture -> parameter.
        self._itself = weakref.ref(self)
        self.ready = self._ends.ready  # by graph task of the backwards that have not ended
        self.slots = Slots(models, self.ready, functools.partial(_arm, self._itself))
        self.params, self.names, self.coverage = self.slots.params, self.slots.names, self.slots.coverage
        self.arranging = ForkSafeLock()  # held while captures are made or replaced, and rules bound to them
        self.spent = spent
        self.after_backward: Callable[[], None] = _nothing  # boundary: steps taken inside the backward
        self.cleared: Callable[[OptimizerCapture], None] = _nothing  # gradients of earlier backwards are gone
        self.unowned: Callable[[list[int], Root | None], None] = (
            _nothing  # reached parameters of no optimizer
        )
        self.before_drop: Callable[[], None] = _nothing  # parameters are about to be released
        self.stepped_inside: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.losses = Losses(failed)
        self.backwards_without_hook = 0  # that the few hooks left did not see, known by their gradients
        self._by_hand: weakref.WeakSet[OptimizerCapture] = weakref.WeakSet()  # of loops without an optimizer
        self._patterns: dict[tuple[int, int], list[int]] = {}  # by how many arrived, and which first
        self.in_no_optimizer: int | None = None  # parameters that get gradients and are trained by nothing
        self._uncleared: list[UnclearedGradients] = []  # those to be looked at before the next backward
        self._unlisten = backward_entry.listen(self._about_to_run, self._uncleared)
        self.replaced = False  # a capture was replaced: some of its parameters may have no optimizer now

    # -- parameters --------------------------------------------------------------------------------------

    def join(self, optimizers: Sequence[Optimizer], loose: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Have the next backward announce the parameters of these optimizers."""
        if loose:
            self.slots.add_loose(loose, by_hand=not optimizers)
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
        if self._by_hand and all(captured.without_optimizer for captured in self.captures):
            # From this backward on, and no optimizer could be given them.
            self.coverage.measured_by_loop(known.symmetric_difference(self.slots.of.values()))

    def holds(self, optimizer: Optimizer) -> bool:
        """True if an optimizer owns a parameter of the watched models, also one that joined them unseen."""
        params = params_of(optimizer)
        if any(id(param) in self.slots.of for param in params):
            return True
        return self.coverage.joined(optimizer, params, self.slots.models())

    def reinstall(self, captured: OptimizerCapture) -> None:
        """Hook the parameters of a capture with all its hooks that have come to want a gradient again."""
        if not captured.pruning.pruned:
            slots = captured.slots.tolist()  # sync: numpy
            self.slots.hooks.put(slots, list(map(self.params.__getitem__, slots)))

    # -- coverage ----------------------------------------------------------------------------------------

    def count_coverage(self) -> float:
        """The share of the models' parameters that is measured, counted now."""
        return self.coverage.count(self.slots.watched.prefixed(), self.captures)

    def maintain_hooks(self, captured: OptimizerCapture, window: WindowNorms) -> bool:
        """At a step boundary: release what is gone, count coverage where it may have changed, reinstall lost hooks.

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
        if (died or self.slots.by_hand) and self.has_dead():
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
        return sum(self.slots.hooks.rehook(slot, self.params[slot]) for slot in map(int, captured.slots))

    @property
    def backwards(self) -> int:
        """Number of backwards that reached a watched parameter, parts of one (reentrant checkpointing) included."""
        return self._ends.begun + self.backwards_without_hook

    def close(self) -> None:
        """Remove every hook and release every parameter."""
        self.slots.close()
        self.losses.close()
        self._unlisten()
        self.captures.clear()
        self._ends.close()
        self.after_backward = self.before_drop = _nothing

    # -- captures -------------------------------------------------------------------------------------------

    def capture_of(self, optimizer: Optimizer) -> OptimizerCapture | None:
        """The capture of an optimizer seen before."""
        for captured in self.captures:
            if captured.optimizer is not None and captured.optimizer() is optimizer:
                return captured
        return None

    def adopt_waiting(self, from_first_backward: bool) -> list[OptimizerCapture]:
        """The captures of optimizers that waited for one; `from_first_backward`: none of their window was missed.

        Another thread's backward, or clip, waits until all of them stand: it may be the one that reached them.
        """
        made: list[OptimizerCapture] = []
        with self.arranging.held:
            awaited = len(self._awaited)
            try:
                for optimizer in () if self._waiting is None else self._waiting.waiting(self):
                    if optimizer not in self.stepped_inside:
                        made.append(self._adopt(optimizer, None))
            finally:  # only now: an empty list is not looked into
                del self._awaited[:awaited]
            for captured in made if from_first_backward else ():
                captured.attached_in_time()
        return made

    def adopt(self, optimizer: Optimizer, captured: OptimizerCapture | None = None) -> OptimizerCapture:
        """Build the capture of an optimizer (or rebuild it after its parameters changed, keeping its step)."""
        with self.arranging.held:
            return self._adopt(optimizer, captured)

    def _adopt(self, optimizer: Optimizer, captured: OptimizerCapture | None) -> OptimizerCapture:
        fresh = params_of(optimizer)
        params, kept = self.slots.in_model_order(fresh, lambda param: fallback_name(optimizer, param))
        known: Sites | None = None
        if captured is None:
            captured = self._predecessor(params, kept.tolist())  # sync: numpy
            if captured is not None and captured.optimizer is not None:
                known = captured.sites
        index = len(self.captures) if captured is None else captured.index
        self.slots.unowned = None
        sites = self.slots.sites(kept, params, known)
        if captured is not None and captured.succeeded_by(optimizer, params, fresh, sites, kept):
            self.coverage.adopted()
            return captured
        built = OptimizerCapture(index, optimizer, params, sites, kept, fresh, like=captured)
        built.ask_hooks(self.slots.hooks.swapped)
        built.use_threads(self.losses.threads)
        built.loop_events.uncleared.awaiting = self._uncleared
        if captured is None:
            self.captures.append(built)
        else:
            built.follows(captured)
            if captured.params:
                self.restore(captured)
            self.replaced = self.replaced or bool(captured.params)
            self.captures[self.captures.index(captured)] = built
        self.coverage.adopted()
        return built

    def adopt_inside(self, fresh: list[nn.Parameter], before: OptimizerCapture | None) -> OptimizerCapture:
        """The one capture of all optimizers that step inside backward; it counts no arrivals and reads no `.grad`."""
        params, kept = self.slots.in_model_order(fresh, lambda param: f"unnamed[{shape_of(param)}]")
        index = len(self.captures) if before is None else before.index
        sites = self.slots.sites(kept, params)
        captured = OptimizerCapture(index, None, params, sites, None, fresh, inside_backward=True)
        self.slots.unowned = None
        if before is None:
            self.captures.append(captured)
        else:
            captured.takes_place(index, before)
            self.captures[self.captures.index(before)] = captured
            self.replaced = True
        self.coverage.adopted()
        return captured

    def adopt_unowned(self, before: OptimizerCapture | None, touched: list[int]) -> OptimizerCapture:
        """The capture of a loop without an optimizer, not among `captures` unless it replaces `before` there.

        It has the parameters, but for those of optimizers, of every model of which some were `touched`, now or before.
        """
        unowned = self.unowned_slots()
        reached = unowned.intersection({*touched, *(() if before is None else map(int, before.slots))})
        within: set[int] = set()
        for model in self.slots.models():
            slots = unowned.intersection(
                self.slots.of[id(param)]
                for param in module_tree.parameters(model)
                if id(param) in self.slots.of
            )
            within |= set() if slots.isdisjoint(reached) else slots
        lost = self.coverage.places.lost  # parameters that others, of another shape, have taken the place of
        found = sorted(within | reached, key=self.slots.since.__getitem__)
        wanting = [self.params[slot] for slot in found if not lost(slot, self.params[slot])]
        params, kept = self.slots.in_model_order(wanting, lambda param: f"unnamed[{shape_of(param)}]")
        index = len(self.captures) if before is None else before.index
        sites = self.slots.sites(kept, params)
        captured = OptimizerCapture(index, None, params, sites, kept, without_optimizer=True)
        captured.use_threads(self.losses.threads)
        self._by_hand.add(captured)
        if before is not None:
            captured.takes_place(index, before)
            self.captures[self.captures.index(before)] = captured
            self.replaced = True
            self.coverage.adopted()
        return captured

    def claim(self, captured: OptimizerCapture) -> None:
        """A capture that `adopt_unowned` made has no optimizer; it takes the place of one whose model is gone."""
        self.drop_dead()
        gone = (k for k, one in enumerate(self.captures) if one.without_optimizer and not one.params)
        index = next(gone, len(self.captures))
        captured.takes_place(index, self.captures[index] if index < len(self.captures) else None)
        self.captures[index : index + 1] = [captured]
        self.restore(captured)

    def unowned_slots(self) -> frozenset[int]:
        """The slots of parameters that no living optimizer has, as far as one has been watched here."""
        if self.slots.unowned is None:
            unowned = self.slots.of.copy()
            for captured in self.captures:
                optimizer = None if captured.optimizer is None else captured.optimizer()
                if captured.inside_backward or optimizer is not None:
                    for identity in (*captured.param_ids, *captured.watched_ids):
                        unowned.pop(identity, None)
            self.slots.unowned = frozenset(unowned.values())
        return self.slots.unowned

    def trained_by_nothing(self, count: int) -> None:
        """So many parameters receive gradients, do not move and belong to no optimizer; None until there are any."""
        if count or self.in_no_optimizer is not None:
            self.in_no_optimizer = count

    def _predecessor(self, params: list[nn.Parameter], slots: list[int]) -> OptimizerCapture | None:
        """The capture of an optimizer that is gone, whose index and series a new one takes over.

        Best one of the same parameters, else of the same names and sizes: a model that comes later has those of the
        one before it (`WatchedModels`). Else one of these names, or the first that there is.
        """
        wanted, sizes = set(map(id, params)), list(map(_numel, params))
        names = tuple(map(self.slots.names.__getitem__, slots))
        likeness: dict[OptimizerCapture, tuple[bool, ...]] = {}
        for captured in self.captures:
            gone = captured.optimizer is not None and captured.optimizer() is None
            shares = (gone or captured.without_optimizer) and not wanted.isdisjoint(captured.param_ids)
            if gone or shares:
                named = captured.sites.names == names
                sized = named and captured.sites.numels.tolist() == sizes  # sync: numpy
                likeness[captured] = shares and gone, shares, sized, named
        return max(likeness, key=likeness.__getitem__, default=None)

    def has_dead(self) -> bool:
        """True if an optimizer, or a model trained without one, is gone whose parameters are still held."""
        for captured in self.captures:
            if captured.params and captured.optimizer is not None and captured.optimizer() is None:
                return True
            if captured.params and captured.without_optimizer and self.slots.watched.any_gone:
                return True
        return bool(self.slots.by_hand) and self._has_let_go()

    def _has_let_go(self) -> bool:
        """True if the script refers no more to any tensor that a loop without an optimizer or a module had."""
        gone = self.slots.let_go([one.position for one in self._by_hand if one.params])
        held = set(self.slots.by_hand).difference(gone)
        kept = {slot for one in self.captures if not held.isdisjoint(one.position) for slot in one.position}
        return not gone <= kept

    def release_dead(self) -> None:
        """`drop_dead` where it is needed."""
        if self.has_dead():
            self.drop_dead()

    def release(self) -> None:
        """Let go of every parameter that no living optimizer has."""
        self.release_dead()
        if self.slots.count > sum(len(captured.params) for captured in self.captures):
            self.drop_dead()

    def drop_dead(self) -> None:
        """Let go of parameters that belong to no living optimizer and to no model any more."""
        self.before_drop()
        self.replaced, self.slots.unowned = False, None
        modules = self.slots.alive_modules()
        wanted = set(map(id, module_tree.parameters_in(modules)))
        if self.slots.by_hand:
            let_go = self.slots.let_go([one.position for one in self._by_hand if one.params])
            wanted.update(id(self.params[slot]) for slot in self.slots.by_hand - let_go)
        for captured in self.captures:
            if not captured.params:  # released before
                continue
            gone = captured.optimizer is not None and captured.optimizer() is None
            if gone or (captured.without_optimizer and wanted.isdisjoint(captured.param_ids)):
                captured.release()
        for captured in self.captures:
            wanted.update(map(id, captured.params))
        leaving = []
        for slot, param in enumerate(self.params):
            if id(param) not in wanted and param is not GONE:
                leaving.append(slot)
        if leaving:
            self._unhooked.difference_update(leaving)
            released = set(leaving)
            for slots in self.ready.values():  # of a backward that raised
                slots[:] = [each for each in slots if each not in released]
            self.slots.release(leaving)
        self.coverage.left(modules)

    # -- backwards ---------------------------------------------------------------------------------------

    def _about_to_run(self, call: backward_entry.BackwardCall) -> None:
        """A backward is about to run, and gradients of some step may still be there."""
        if call.accumulates and not call.nested:
            try:
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
        """Another backward of an open window begins: discard what was captured of gradients that have been cleared."""
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
            touched += self._manual_arrivals(touched)
        if not self.slots.arrival:
            self.slots.arrival = {slot: k for k, slot in enumerate(dict.fromkeys(touched))}
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
        if self.after_backward is not _nothing and not backward.nested():
            self.after_backward()
        # Last: optimizers that have stepped inside the backward own theirs by now.
        unowned = self.slots.unowned
        if unowned is None:
            unowned = self.unowned_slots()
        if unowned and touched:
            without_owner = [slot for slot in touched if slot in unowned]
            if without_owner:
                self.unowned(without_owner, self.losses.latest())

    def expect(self, params: list[nn.Parameter]) -> None:
        """A backward has begun that will reach parameters whose hooks are not called (FSDP1)."""
        if backward.current() not in self.ready:
            _arm(self._itself)
        self._unhooked.update(self.slots.of[id(param)] for param in params if id(param) in self.slots.of)

    def _manual_arrivals(self, touched: list[int]) -> list[int]:
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

    # -- removing hooks ----------------------------------------------------------------------------------

    def prune(self, captured: OptimizerCapture) -> None:
        """Remove all but a few hooks of a capture whose loop is learned."""
        keep = {int(captured.slots[k]) for k in captured.pruning.prune()}
        keep.update(int(slot) for other in self.captures if other is not captured for slot in other.slots)
        self.slots.hooks.free([slot for slot in map(int, captured.slots) if slot not in keep])

    def mute(self, captured: OptimizerCapture, keep: int) -> None:
        """Keep one hook, of the slot `keep`, of a capture that nothing seems to train; `restore` undoes it."""
        self.slots.hooks.free([slot for slot in map(int, captured.slots) if slot != keep])

    def restore(self, captured: OptimizerCapture) -> None:
        """Reinstall every hook of a capture."""
        captured.pruning.undo(captured.step)
        self.reinstall(captured)


def _arm(owner: weakref.ref[Capture]) -> None:
    capture = owner()
    if capture is not None:
        capture.arm()


def _nothing(*_: object) -> None:
    pass
