"""Captures: made as optimizers and loops appear, replaced as parameters change, released when these are gone.

An optimizer that takes the place of one that is gone takes over its capture's index, and so its series.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from gradwatch.capture.columns.loss import Losses
from gradwatch.capture.loop_faults.uncleared_gradients import UnclearedGradients
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.parameter_names import fallback_name, shape_of
from gradwatch.capture.parameter_shards import gathered_in
from gradwatch.capture.watched_parameters import GONE, Slots
from gradwatch.records.snapshot import Sites
from gradwatch.runtime.fork_safe_locks import ForkSafeLock
from gradwatch.runtime.weak_references import Refs, died, noted
from gradwatch.taps import module_tree
from gradwatch.taps.optimizers.param_groups import params_of

# By name: to walk torch's module from cold caches costs microseconds.
_numel: Callable[[torch.Tensor], int] = torch.Tensor.numel


class _Nothing:
    """The owner of what no optimizer and, as far as is known, no model has: it is gone at once."""

    __slots__ = ("__weakref__",)


class Waiting(Protocol):
    """Optimizers that are known but have no capture yet: `wanted` is empty where there are none."""

    wanted: list[Any]

    def waiting(self, capture: Captures) -> list[Optimizer]:
        """Optimizers of `wanted` that are alive and have no capture."""


class Captures:
    """The captures of one watch, whose parameters lie in its `slots`.

    `waiting` names optimizers that are known but have no capture yet.
    """

    def __init__(self, slots: Slots, losses: Losses, waiting: Waiting | None) -> None:
        self.slots, self.losses = slots, losses
        self.params, self.coverage = slots.params, slots.coverage
        self.captures: list[OptimizerCapture] = []
        self._waiting = waiting
        self._awaited: list[Any] = [] if waiting is None else waiting.wanted
        self.arranging = ForkSafeLock()  # held while captures are made or replaced, and rules bound to them
        self.stepped_inside: Refs[Optimizer] = Refs()
        self._last_death: weakref.ref[Any] | None = None  # of those after which nothing was found freed
        self._left_to_nothing: weakref.ref[Any] | None = None  # parameters may be of a model all the same
        self.replaced = False  # a capture was replaced: some of its parameters may have no optimizer now
        self._unowned: frozenset[int] | None = None  # slots of no living optimizer; None = to be found anew
        self._unowned_at = 0  # `slots.changes` as they were found
        self.before_drop: Callable[[], None] = _nothing  # parameters are about to be released
        self.in_no_optimizer: int | None = None  # parameters that get gradients and are trained by nothing
        self._loops: Refs[OptimizerCapture] = Refs()  # those without an optimizer
        self._uncleared: list[UnclearedGradients] = []  # those to be looked at before the next backward
        self._unhooked: set[int] = set()  # slots that the running backward reaches without calling their hook

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of all that are watched, in the order of their slots."""
        found = {slot: self.params[slot] for slot in self.slots.of.values()}
        for captured in self.captures:  # of some the model is gone
            found.update(zip(captured.slots.tolist(), captured.params, strict=False))  # sync: numpy
        names = self.slots.names
        return [(names[slot], found[slot]) for slot in sorted(found) if found[slot] is not GONE]

    def holds(self, optimizer: Optimizer) -> bool:
        """True if an optimizer owns a parameter of the watched models, also one that joined them unseen."""
        self.release_freed()
        params = params_of(optimizer)
        known = self.slots.of
        for param in params:
            if id(param) in known:
                return True
        return self.coverage.joined(optimizer, params, self.slots.models())

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
                    if weakref.ref(optimizer) not in self.stepped_inside:
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
        params, kept = self.slots.in_model_order(
            fresh, lambda param: fallback_name(optimizer, param), optimizer
        )
        known: Sites | None = None
        others = False
        if captured is None:
            captured = self._predecessor(params, kept.tolist())  # sync: numpy
            if captured is not None and captured.optimizer is not None:
                known = captured.sites
                others = set(map(id, params)).isdisjoint(captured.param_ids)
        index = len(self.captures) if captured is None else captured.index
        self._unowned = None
        sites = self.slots.sites(kept, params, known)
        if captured is not None and captured.succeeded_by(optimizer, params, fresh, sites, kept):
            captured.takes_over(others)
            self.coverage.adopted()
            return captured
        built = OptimizerCapture(
            index, optimizer, params, sites, kept, fresh, like=captured, uncleared=self._uncleared
        )
        built.ask_hooks(self.slots.hooks.swapped)
        built.use_threads(self.losses.threads)
        if captured is None:
            self.captures.append(built)
        else:
            built.follows(captured)
            built.takes_over(others)
            if captured.params:
                self.restore(captured)
            self.replaced = self.replaced or not captured.released
            self.captures[self.captures.index(captured)] = built
        self.coverage.adopted()
        return built

    def adopt_inside(self, fresh: list[nn.Parameter], before: OptimizerCapture | None) -> OptimizerCapture:
        """The one capture of all optimizers that step inside backward; it counts no arrivals and reads no `.grad`."""
        params, kept = self.slots.in_model_order(fresh, lambda param: f"unnamed[{shape_of(param)}]")
        index = len(self.captures) if before is None else before.index
        sites = self.slots.sites(kept, params)
        captured = OptimizerCapture(index, None, params, sites, None, fresh, inside_backward=True)
        captured.hold_with({self.slots.params.owner(slot) for slot in kept.tolist()})  # sync: numpy
        self._unowned = None
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
        self._loops.drop_dead()
        self._loops.add(weakref.ref(captured))
        if before is not None:
            captured.takes_place(index, before)
            self.captures[self.captures.index(before)] = captured
            self.replaced = True
            self.coverage.adopted()
        return captured

    def claim(self, captured: OptimizerCapture) -> None:
        """A capture that `adopt_unowned` made has no optimizer; it takes the place of one whose model is gone."""
        self.drop_dead()
        gone = (k for k, one in enumerate(self.captures) if one.without_optimizer and one.released)
        index = next(gone, len(self.captures))
        captured.takes_place(index, self.captures[index] if index < len(self.captures) else None)
        self.captures[index : index + 1] = [captured]
        self.restore(captured)

    def unowned_slots(self) -> frozenset[int]:
        """The slots of parameters that no living optimizer has, as far as one has been watched here."""
        if self._unowned is None or self._unowned_at != self.slots.changes:
            self._unowned_at = self.slots.changes
            unowned = self.slots.of.copy()
            for captured in self.captures:
                optimizer = None if captured.optimizer is None else captured.optimizer()
                if captured.inside_backward or optimizer is not None:
                    for identity in (*captured.param_ids, *captured.watched_ids):
                        unowned.pop(identity, None)
            self._unowned = frozenset(unowned.values())
        return self._unowned

    def trained_by_nothing(self, count: int) -> None:
        """Number of parameters that get gradients, do not move and belong to no optimizer; None until there are any."""
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
            if captured.released:
                continue
            if captured.optimizer is not None and captured.optimizer() is None:
                return True
            if captured.without_optimizer and self.slots.watched.any_gone:
                return True
        if self._left_to_nothing is not None or self.freed():
            return True
        return bool(self.slots.held_by_script) and self._script_dropped_some()

    def freed(self) -> list[int]:
        """The slots of parameters that were freed with their model, or optimizer; others may have their `id` by now."""
        lost = [] if died and died[-1] is self._last_death else self.slots.params.lost()
        if lost:
            held: set[int] = set()
            for captured in self.captures:
                if captured.params:
                    held.update(captured.param_ids)
                    held.update(captured.watched_ids)
            lost = self.slots.freed(lost, held)
        if died and not lost:
            self._last_death = died[-1]
        return lost

    def release_freed(self) -> None:
        """Note which models are gone by now, and release the slots of what was freed with them.

        No parameter is taken for another at its address then, and no model for the successor of one that went later.
        """
        self.slots.watched.note_gone()
        freed = self.freed()
        if freed:
            self._leave(freed)

    def make_way(self, module: nn.Module, name: str, value: Any) -> None:
        """Hold what makes way for `value` in a module only as long as its optimizer lives, if it has one.

        Where a model has it elsewhere, too, that holds it from the next `drop_dead` on.
        """
        stays = set(map(id, module_tree.parameters(value))) if isinstance(value, nn.Module) else {id(value)}
        for param in module_tree.parameters_at(module, name):
            slot = self.slots.of.get(id(param))
            if (
                slot is None
                or id(param) in stays
                or any(slot in loop.position for loop in self._loops.alive())
            ):
                continue
            optimizers = (one.optimizer() for one in self.captures if one.optimizer and slot in one.position)
            owner = next((optimizer for optimizer in optimizers if optimizer is not None), _Nothing())
            if isinstance(owner, _Nothing):
                self._left_to_nothing = noted(owner)
            self.params.hold([slot], [param], owner)
            del owner

    def _script_dropped_some(self) -> bool:
        """True if the script refers no more to any tensor that a loop without an optimizer or a module had."""
        gone = self.slots.dropped_by_script([one.position for one in self._loops.alive() if one.params])
        held = set(self.slots.held_by_script).difference(gone)
        kept = {slot for one in self.captures if not held.isdisjoint(one.position) for slot in one.position}
        return not gone <= kept

    def release_dead(self) -> None:
        """`drop_dead` where it is needed."""
        if self.has_dead():
            self.drop_dead()

    def drop_dead(self) -> None:
        """Release parameters that belong to no living optimizer and to no model any more."""
        self.before_drop()
        self.replaced, self._unowned, self._left_to_nothing = False, None, None
        modules = self.slots.alive_modules()
        here = module_tree.parameters_in(modules)
        if self.slots.sharded and (gathered := gathered_in(modules)):
            here = [gathered.get(id(param), param) for param in here]
        wanted = set(map(id, here))
        for slot in self.slots.params.lost():
            if (
                self.slots.ids[slot] in wanted
            ):  # its model is gone, and another that lives has the parameter, too
                self.slots.hold_on(slot, here)
        if self.slots.held_by_script:
            dropped = self.slots.dropped_by_script(
                [one.position for one in self._loops.alive() if one.params]
            )
            wanted.update(self.slots.ids[slot] for slot in self.slots.held_by_script - dropped)
        for captured in self.captures:
            if captured.released:
                continue
            gone = captured.optimizer is not None and captured.optimizer() is None
            if gone or (captured.without_optimizer and wanted.isdisjoint(captured.param_ids)):
                captured.release()
        for captured in self.captures:
            wanted.update(map(id, captured.params))
        ids = self.slots.ids
        leaving = [slot for slot, identity in enumerate(ids) if identity and identity not in wanted]
        if leaving:
            self._leave(leaving)
        self.coverage.left(modules)

    def _leave(self, leaving: list[int]) -> None:
        self._unhooked.difference_update(leaving)
        self.slots.release(leaving)
        known = self.slots.of.keys()
        for captured in self.captures:
            if not (captured.params or known >= set(captured.param_ids)):
                captured.release_freed(known)

    # -- their hooks -------------------------------------------------------------------------------------

    def reinstall(self, captured: OptimizerCapture) -> None:
        """Hook the parameters of a capture with all its hooks that have come to want a gradient again."""
        slots = captured.slots.tolist()  # sync: numpy
        if len(slots) == len(captured.params) and not captured.pruning.pruned:
            self.slots.hooks.put(slots, captured.params)

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


def _nothing(*_: object) -> None:
    pass
