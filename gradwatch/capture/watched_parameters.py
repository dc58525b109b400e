"""Slots: every watched parameter with its name, its hook and its place in the order of the models.

A parameter has one slot from the scan that found it until it is released; then another may take the slot. What is held
of a slot elsewhere (arrivals, captures) is held by its number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from gradwatch.capture import parameter_names
from gradwatch.capture.coverage import Coverage
from gradwatch.capture.fsdp2_unreduced_backwards import UnreducedBackwards
from gradwatch.capture.parameter_names import (
    Named,
    WatchedModels,
    is_lazy,
    named_parameters,
    uniquely_named,
)
from gradwatch.capture.parameter_shards import as_sharded, fsdp2_in, gathered_in, is_shard, offloaded_in
from gradwatch.records.snapshot import Sites
from gradwatch.runtime.weak_references import HeldByOwner
from gradwatch.taps import module_tree
from gradwatch.taps.grad_ready import GradReadyHooks
from gradwatch.taps.optimizers.param_groups import params_of

_numel: Callable[[torch.Tensor], int] = torch.Tensor.numel
_second: Callable[[tuple[str, nn.Parameter]], nn.Parameter] = operator.itemgetter(1)
_dim: Callable[[torch.Tensor], int] = torch.Tensor.dim
GONE = nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False)  # whatever the default device is


class Slots:
    """The parameters of some models, by slot: `params` and `names`; `of` gives the slot by id.

    `ready` takes the slots whose gradients are ready, by graph task, and `arm` is called by the first of each task.
    """

    def __init__(
        self, models: Iterable[nn.Module], ready: dict[int, list[int]], arm: Callable[[], None]
    ) -> None:
        self.watched = WatchedModels()
        # Held as long as the model lives that it is of, or the optimizer: then it is `GONE`, until it is released.
        self.params: HeldByOwner[nn.Parameter] = HeldByOwner(GONE)
        self.ids: list[int] = []  # by slot: `id()` of its parameter; 0 where the slot is free
        self.names: list[str] = []
        self.since: list[int] = []  # by slot: how many parameters came before its own, whatever slot was free
        self.of: dict[int, int] = {}
        self.arrival: dict[int, int] = {}  # position of each slot among the first gradients to arrive
        self.changes = 0  # how often slots were taken or released
        # Of tensors that no module holds, trained without an optimizer. Never another set: taps look at this one.
        self.held_by_script: set[int] = set()
        self.hooks = GradReadyHooks(ready, arm)
        self.coverage = Coverage(self.of)
        self.unreduced = UnreducedBackwards()
        self.sharded = False  # a model of FSDP2 has been among the watched ones
        self._came = 0
        self._free: dict[int, None] = {}  # slots of parameters that were released
        self._left: dict[str, int] = {}  # the last of them by name
        self._registrations = self.coverage.registrations
        self._scanned = self._registrations[0]  # in the models, when these were last walked
        self.add_models(models)

    def models(self) -> list[nn.Module]:
        """The watched models that are still alive."""
        return self.watched.all()

    def add_models(
        self, models: Iterable[nn.Module], prefixes: Mapping[int, str] | None = None
    ) -> list[nn.Module]:
        """Watch further models; those of them that were not watched yet. `prefixes`: as another watch named them."""
        disturbed = self.disturbed
        if disturbed and self.params:  # else what is added would hide it
            self.scan()
        fresh: list[nn.Module] = []
        listed: list[tuple[str, Named]] = []
        for prefix, model, named in self.watched.add(models, prefixes):
            fresh.append(model)
            listed.append((prefix, named))
        if fresh:
            self._take_all(fresh, uniquely_named(listed), anew=False)
        return fresh

    def add_loose(
        self, named: Iterable[tuple[str, nn.Parameter]], optimizers: Sequence[Optimizer] = ()
    ) -> None:
        """Watch parameters that no module holds: of one of these optimizers, or of none: the script holds them."""
        owners = {id(param): optimizer for optimizer in optimizers for param in params_of(optimizer)}
        for name, param in named:
            if param.numel() or is_shard(param):
                slot = self.slot(param, name, owners.get(id(param)))
                if not optimizers:
                    self.held_by_script.add(slot)

    def dropped_by_script(self, holders: Sequence[set[int] | dict[int, int]]) -> set[int]:
        """Slots `held_by_script` whose tensor only gradwatch refers to: here, and once in each holder of the slot."""
        gone = set()
        for slot in self.held_by_script:
            ours = 1 + sum(slot in holder for holder in holders)
            if self.params.references(slot) <= ours:
                gone.add(slot)
        return gone

    @property
    def disturbed(self) -> bool:
        """True if something was put into the models since they were last walked."""
        return self._scanned != self._registrations[0]

    def scan(self) -> None:
        """Give every parameter of the models a slot and a hook; parameters already known keep theirs."""
        prefixed = self.watched.prefixed()
        self.hooks.spared.clear()
        self.unreduced.groups.clear()
        self._take_all([model for _, model in prefixed], named_parameters(prefixed), anew=True)

    def _take_all(
        self, models: Sequence[nn.Module], named: Iterable[tuple[str, nn.Parameter]], anew: bool
    ) -> None:
        """Slots and hooks of the parameters of some models, or (`anew`) of all of them."""
        modules: list[nn.Module] = []
        for model in models:
            modules += module_tree.modules(model)
        sharded = fsdp2_in(modules)
        if sharded:
            self.sharded = True
            self.hooks.spared.update(offloaded_in(sharded))
            self.unreduced.find(sharded)
        slots, params = [], []
        new: list[tuple[str, nn.Parameter]] = []
        for name, param in as_sharded(list(named), models) if sharded else named:
            if type(param) is not nn.Parameter and is_lazy(param):
                continue
            slot = self.of.get(id(param))
            if slot is None:
                new.append((name, param))
                continue
            if anew and not (name.endswith(self.names[slot]) or self.names[slot].endswith(name)):
                # Moved within its model, as adapters are merged; not a prefix that distinguishes two models.
                self.names[slot] = name
            slots.append(slot)
            params.append(param)
        for model, own in self._by_model(models, new):
            slots += self._take(own, model)
            params += map(_second, own)
        self.hooks.put(slots, params)
        self.coverage.scanned(modules, params, added=not anew)
        self._scanned = self._registrations[0]

    def slot(self, param: nn.Parameter, name: str, owner: Optimizer | None) -> int:
        """The slot of a parameter that no module holds, made (and hooked) where it is new."""
        slot = self.of.get(id(param))
        if slot is None:
            (slot,) = self._take([(name, param)], owner)
        self.hooks.put([slot], [param])
        return slot

    def _by_model(self, models: Sequence[nn.Module], named: Named) -> Iterator[tuple[nn.Module, Named]]:
        """Parameters of these models, for each of them its own: those that no model before it has."""
        if len(models) == 1 and named:
            yield models[0], named
            return
        for model in models if named else ():
            present = set(map(id, module_tree.parameters(model)))
            present.update(map(id, gathered_in(module_tree.modules(model)).values()))
            own = [pair for pair in named if id(pair[1]) in present]
            named = [pair for pair in named if id(pair[1]) not in present]
            yield model, own

    def _take(
        self, new: Sequence[tuple[str, nn.Parameter]], owner: nn.Module | Optimizer | None
    ) -> list[int]:
        """Slots of parameters that were released, so that what comes and goes takes no more room; else new ones.

        For each first that of the one which had its name. They are held as long as `owner` lives.
        """
        slots = []
        for name, param in new:
            slot = self._left.pop(name, -1)
            if slot in self._free:
                del self._free[slot]
            elif self._free:
                slot, _ = self._free.popitem()
            else:
                slot = self.params.reserve()
                self.ids.append(0)
                self.names.append(name)
                self.since.append(0)
            if self.names[slot] != name:
                self.arrival.pop(slot, None)
            identity = id(param)
            self.of[identity] = slot
            self.ids[slot], self.names[slot], self.since[slot] = identity, name, self._came
            self._came += 1
            slots.append(slot)
        self.params.hold(slots, list(map(_second, new)), owner)
        self.changes += 1
        return slots

    def exchange(self, slot: int, param: nn.Parameter) -> None:
        """Put another parameter of the same shape into a slot, name and hook included; the one before is not held."""
        self._exchange(slot, param, self.params.owner(slot))

    def _exchange(self, slot: int, param: nn.Parameter, owner: object | None) -> None:
        self.of.pop(self.ids[slot], None)
        self.hooks.free([slot])
        self.of[id(param)], self.ids[slot] = slot, id(param)
        self.params.hold([slot], [param], owner)
        self.hooks.put([slot], [param])

    def take_over(self, slot: int, successor: int) -> None:
        """Move the parameter of another slot into this one, whose successor it is: the other slot becomes free."""
        param, owner = self.params[successor], self.params.owner(successor)
        self.coverage.places.take_over(slot, successor)
        self.release([successor])
        self._exchange(slot, param, owner)

    def knows(self, param: nn.Parameter) -> bool:
        """True if a parameter belongs to the watched models."""
        return id(param) in self.of

    def unoptimized(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of those of the models that are not trained here: frozen, or put in since the last scan."""
        for name, param in named_parameters(self.watched.prefixed()):
            if not (param.requires_grad and id(param) in self.of):
                yield name, param

    def wanting(self) -> list[nn.Parameter]:
        """Parameters that want a gradient."""
        held = map(self.params.__getitem__, range(len(self.params)))
        return [param for param in held if param.requires_grad]

    def covers_id(self, identity: int) -> bool:
        """True if the parameter with this `id()` has a slot."""
        return identity in self.of

    def covers_any(self, identities: Iterable[int]) -> bool:
        """True if some parameter of these, given by `id()`, has a slot."""
        return not self.of.keys().isdisjoint(identities)

    def covers_all(self, identities: Iterable[int]) -> bool:
        """True if all parameters of these, given by `id()`, have slots."""
        return self.of.keys() >= set(identities)

    def all_sites(self) -> Sites:
        """Every parameter that wants a gradient, whatever optimizer it has or will have."""
        slots = [slot for slot in range(len(self.params)) if self.params[slot].requires_grad]
        sites = self.sites(np.array(slots, np.intp), [self.params[slot] for slot in slots])
        lazy = self.lazy_names()  # a rule may name them already; their shape is not known
        return Sites(
            names=sites.names + lazy,
            kinds=sites.kinds + ("param",) * len(lazy),
            numels=np.append(sites.numels, [0] * len(lazy)).astype(np.int64),
            ndims=np.append(sites.ndims, [2] * len(lazy)).astype(np.int64),
            depths=np.append(sites.depths, np.arange(len(lazy)) + len(sites)).astype(np.int64),
        )

    def lazy_names(self) -> tuple[str, ...]:
        """Parameters of lazy modules that have no shape before their first forward."""
        return tuple(name for name, param in named_parameters(self.watched.prefixed()) if is_lazy(param))

    @property
    def hooked(self) -> int:
        """Number of parameters that have a hook now."""
        return len(self.hooks)

    @property
    def can_be_reached(self) -> bool:
        """True if any hook is left to see a backward."""
        return len(self.hooks) > 0 or bool(self.hooks.spared)

    def in_model_order(
        self,
        fresh: list[nn.Parameter],
        fallback: Callable[[nn.Parameter], str],
        owner: Optimizer | None = None,
    ) -> tuple[list[nn.Parameter], np.ndarray]:
        """(parameters that want a gradient, their slots) in the order in which they stand in the models.

        Those that no model has are called by `fallback`, and held as long as their `owner` lives.
        """
        known = self.of
        if self._scanned != self._registrations[0] or not known.keys() >= set(map(id, fresh)):
            self.scan()  # where a parameter was replaced, added or moved, its name is in the model
        named: list[nn.Parameter] = []
        slots: list[int] = []
        for param in fresh:
            # Those on the meta device, which have no values, lower the coverage.
            if not param.requires_grad or parameter_names.valueless(param):
                continue
            # Of a differentiable optimizer some may be results of operations, whose `.grad` no backward fills.
            if type(param) is not nn.Parameter and (is_lazy(param) or not param.is_leaf):
                continue
            # A shard may be empty here and hold something on other ranks, which must see the same parameters.
            if param.numel() or is_shard(param):
                slot = known.get(id(param))
                slots.append(self._take([(fallback(param), param)], owner)[0] if slot is None else slot)
                named.append(param)
        if not self.hooks.hooked.keys() >= set(slots):
            self.hooks.put(slots, named)
        since = list(map(self.since.__getitem__, slots))
        distinct = len(set(map(self.names.__getitem__, slots))) == len(slots)
        if not distinct or since != sorted(since):
            # One name, one site: an optimizer may still hold what a module of the same name replaced.
            latest = {self.names[slots[k]]: k for k in sorted(range(len(slots)), key=since.__getitem__)}
            order = sorted(latest.values(), key=since.__getitem__)
            named, slots = [named[k] for k in order], [slots[k] for k in order]
        return named, np.array(slots, np.intp)

    def learn_arrival(self, slots: Iterable[int]) -> None:
        """Keep the order in which the gradients of a first backward arrived in these slots."""
        self.arrival = {slot: k for k, slot in enumerate(dict.fromkeys(slots))}

    def freed(self, lost: list[int], held: Container[int]) -> list[int]:
        """Slots of parameters that were freed with their owner. `held`: `id` of those that others hold."""
        return [slot for slot in lost if self.ids[slot] not in held and not self.hooks.lives(slot)]

    def hold_on(self, slot: int, having: Sequence[nn.Parameter]) -> None:
        """Hold the parameter of a slot whose owner has died, where others are `having` it, or one at the same address.

        The latter, or what cannot be told from it, is released: a scan finds it anew.
        """
        param = next(param for param in having if id(param) == self.ids[slot])
        owner = next(model for model in self.models() if any(param is one for one in model.parameters()))
        if self.hooks.is_on(slot, param):
            self.params.hold([slot], [param], owner)
        else:
            self.release([slot])
            self._scanned = -1

    def release(self, gone: list[int]) -> None:
        """Release the parameters in these slots, which stay for others, so that the rest keep theirs."""
        self.hooks.free(gone)
        self.hooks.discard_arrivals(gone)
        self.changes += 1
        # What replaces a parameter of a living model arrives as that did.
        for slot in self.coverage.remove(gone):
            self.arrival.pop(slot, None)
        self.held_by_script.difference_update(gone)
        for slot in gone:
            identity = self.ids[slot]
            self.of.pop(identity, None)
            self.hooks.spared.discard(identity)
            self.params.drop(slot)
            self.ids[slot] = 0
            self._free[slot] = None
            self._left[self.names[slot]] = slot

    def sites(self, slots: np.ndarray, params: list[nn.Parameter], known: Sites | None = None) -> Sites:
        """The sites of these parameters; those `known` where they are the same, whose rules are bound already."""
        # The first gradient to arrive is the deepest; parameters not seen yet go by registration order.
        latest, places = len(self.params), slots.tolist()  # sync: numpy
        keys = [(-self.arrival.get(slot, latest), self.since[slot]) for slot in places]
        depths = [0] * len(places)
        for depth, k in enumerate(sorted(range(len(places)), key=keys.__getitem__)):
            depths[k] = depth
        names, numels, ndims = (
            tuple(map(self.names.__getitem__, places)),
            list(map(_numel, params)),
            list(map(_dim, params)),
        )
        if (
            known is not None
            and known.names == names
            and known.numels.tolist() == numels  # sync: numpy
            and known.ndims.tolist() == ndims  # sync: numpy
            and known.depths.tolist() == depths  # sync: numpy
        ):
            return known
        return Sites(
            names=names,
            kinds=("param",) * len(places),
            numels=np.array(numels, np.int64),
            ndims=np.array(ndims, np.int64),
            depths=np.array(depths, np.int64),
        )

    def alive_modules(self) -> list[nn.Module]:
        """Discard the models that are gone; the modules of the others."""
        modules = []
        for model in self.watched.note_gone():
            modules += module_tree.modules(model)
        self.watched.released()
        return modules

    @property
    def count(self) -> int:
        """Number of slots that have a parameter."""
        return len(self.params) - len(self._free)

    def close(self) -> None:
        """Remove every hook and release every parameter."""
        self.hooks.close()
        self.of.clear()
        self.params.clear()
        self.coverage.close()
