"""Measured share of the models, counted again only when something may have changed.

Walking a model costs a microsecond per parameter, too much for every step. Two signs of change are nearly
free: torch's registration hooks (a parameter or module was put into a watched module: assignment,
`load_state_dict(assign=True)`, adapters, parametrizations), and a parameter that had a gradient in the last
step and has none in this one while its place in its module is taken by another (`.to()` that overwrites).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from gradwatch.capture import parameter_names
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.parameter_names import named_parameters
from gradwatch.capture.parameter_shards import gathered_in
from gradwatch.runtime import guard
from gradwatch.taps import module_tree
from gradwatch.taps.dynamo import untraced
from gradwatch.taps.hook_ids import own_ids

Replaced = Callable[[nn.Module, str, Any], bool]
"""A module is about to get a value under a name; True where that changes no share of what is measured."""
NO_VALUES = "(on the meta device, so it has no values)"
RECOUNT = 1000  # steps between counts that nothing asked for
BLIND = 16  # the same while something is not measured


class Registrations:
    """Counts what is put into the watched modules, wherever it happens; `close` removes the hooks."""

    def __init__(self) -> None:
        self._owners: set[int] = set()
        self.counted = [0]  # how many there were so far; a list, so that it is looked at without a call
        self._replaced: list[Replaced] = []  # at most one
        self._building: list[Callable[[], None]] = []
        # torch's dicts must not reach `self`
        owners, count, taken, building = self._owners, self.counted, self._replaced, self._building

        @untraced
        def noticed(module: nn.Module, name: str, value: Any) -> None:
            try:
                for built in building:
                    built()
                if id(module) in owners and not (taken and taken[0](module, name, value)):
                    count[0] += 1
            except Exception as error:
                guard.fault("capture", error)

        with own_ids:
            self._handles = [
                register_module_parameter_registration_hook(noticed),
                register_module_module_registration_hook(noticed),
            ]

    def announce(self, replaced: Replaced, built: Callable[[], None]) -> None:
        """Call `replaced` first, and count only what it does not take (False); neither may raise.

        `built` is called whatever module something is put into: memory is wanted.
        """
        self._replaced[:], self._building[:] = [replaced], [built]

    def watch(self, modules: Iterable[nn.Module], anew: bool) -> None:
        """Count these modules too, or (`anew`) only them; one that is gone may be counted by mistake, harmlessly."""
        if anew:
            self._owners.clear()
        self._owners.update(map(id, modules))

    def close(self) -> None:
        """Remove torch's two global hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._replaced.clear()
        self._building.clear()


class Places:
    """Place of each slot's parameter: a module (held weakly) and the attribute name in it."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[nn.Module], str]] = {}

    def note(self, modules: Iterable[nn.Module], slot_of: dict[int, int]) -> None:
        """Remember the first place of every parameter that has a slot."""
        for module in modules:
            for name, param in module._parameters.items():
                slot = None if param is None else slot_of.get(id(param))
                if slot is not None and slot not in self._of:
                    self._of[slot] = weakref.ref(module), name

    def remove(self, slots: Iterable[int]) -> list[int]:
        """Remove parameters that were released; returns the slots of those whose module is gone too."""
        gone = []
        for slot in slots:
            place = self._of.pop(slot, None)
            if place is not None and place[0]() is None:
                gone.append(slot)
        return gone

    def lost(self, slot: int, param: nn.Parameter) -> bool:
        """True if something else stands there now."""
        if slot not in self._of:  # only an optimizer knows it: no model can have lost it
            return False
        module, name = self._of[slot]
        owner = module()
        return owner is None or owner._parameters.get(name) is not param

    def at(self, slot: int) -> tuple[nn.Module, str] | None:
        """The module and the name in it; None where there is no such module, or no more."""
        place = self._of.get(slot)
        owner = None if place is None else place[0]()
        return None if place is None or owner is None else (owner, place[1])

    def left(self, slot: int) -> bool:
        """True if the module is gone that the parameter stood in."""
        place = self._of.get(slot)
        return place is not None and place[0]() is None

    def take_over(self, slot: int, other: int) -> None:
        """Give a slot the place of another one."""
        if other in self._of:
            self._of[slot] = self._of.pop(other)


class Coverage:
    """The share of parameters that is measured, 0..1, as last counted, and the names of the others.

    Wanted are parameters of the models that want a gradient. Measured are those of an optimizer that has
    stepped, and those that were there at attach (an optimizer may leave some out on purpose); what joined
    later must have reached an optimizer.
    """

    def __init__(self, slot_of: dict[int, int]) -> None:
        self.ratio = 1.0
        self.missing: tuple[str, ...] = ()
        self._slot_of = slot_of
        self._at_attach: set[int | None] = set()
        self._registrations = Registrations()
        self.places = Places()
        # Not by a WeakKeyDictionary, whose callbacks are Python.
        self._strangers: dict[weakref.ref[Optimizer], tuple[int, int]] = {}
        self._counted = 0  # registrations at the last count
        self._left = RECOUNT  # steps until the next one

    def scanned(self, modules: list[nn.Module], params: list[nn.Parameter], added: bool) -> None:
        """Count these parameters of all modules of the models, or of the models `added`, as they have got slots."""
        self.places.note(modules, self._slot_of)
        self._registrations.watch(modules, anew=not added)
        if added:
            self._at_attach.update(map(self._slot_of.__getitem__, map(id, params)))
            if any(map(parameter_names.valueless, params)):
                self._left = 0

    def measured_by_loop(self, slots: Iterable[int]) -> None:
        """Count parameters that have joined a loop without an optimizer as those that were there at attach."""
        self._at_attach.update(slots)

    def left(self, modules: list[nn.Module]) -> None:
        """Watch only these modules, of the models that are still alive."""
        self._registrations.watch(modules, anew=True)

    def remove(self, slots: list[int]) -> list[int]:
        """Remove parameters that were released; returns the slots of those whose module is gone too."""
        self._at_attach.difference_update(slots)
        return self.places.remove(slots)

    def count(self, models: Sequence[tuple[str, nn.Module]], captures: Iterable[OptimizerCapture]) -> float:
        """Walk the models, each given with its prefix; the ratio, which stays until the next count."""
        stepped: set[int] = set()
        for captured in captures:
            if captured.optimizer is None or captured.optimizer() is not None:
                stepped.update(captured.param_ids)
        if self._whole([model for _, model in models], stepped):
            self.missing, self.ratio, self._left = (), 1.0, RECOUNT
            return self.ratio
        wanted = [(name, param) for name, param in named_parameters(models) if param.requires_grad]
        self.missing = tuple(
            name if parameter_names.has_values(param) else f"{name} {NO_VALUES}"
            for name, param in wanted
            if not (parameter_names.has_values(param) and self._measured(param, stepped))
        )
        self.ratio = 1 - len(self.missing) / len(wanted) if wanted else 1.0
        self._left = BLIND if self.missing else RECOUNT
        return self.ratio

    def _whole(self, models: list[nn.Module], stepped: set[int]) -> bool:
        """True if nothing is missing, found out without names; False also where a model lists its parameters itself."""
        slot_of, at_attach = self._slot_of, self._at_attach
        for model in models:
            if module_tree.lists_itself(model):
                return False
            for param in module_tree.parameters(model):
                if not param.requires_grad or (id(param) in stepped and parameter_names.has_values(param)):
                    continue
                if not parameter_names.has_values(param) or slot_of.get(id(param)) not in at_attach:
                    return False
        return True

    def _measured(self, param: nn.Parameter, stepped: set[int]) -> bool:
        return id(param) in stepped or self._slot_of.get(id(param)) in self._at_attach

    def due(self, captured: OptimizerCapture, calls: NDArray[np.int32]) -> bool:
        """True if this step, with `calls[K]` gradients arrived, asks for a new count."""
        self._left -= 1
        gone = () if captured.last_calls is calls else captured.no_longer_arrived(calls)
        replaced = gone and any(self._replaced(captured.params[k]) for k in gone)
        if not replaced and self._left > 0 and self._counted == self._registrations.counted[0]:
            return False
        self._counted = self._registrations.counted[0]
        return True

    def adopted(self) -> None:
        """Count again at the next step, where it matters that an optimizer has come, perhaps in the place of another.

        It does not where nothing is missing and every parameter was there at attach.
        """
        if self.missing or self.ratio < 1 or len(self._at_attach) < len(self._slot_of):
            self._left = 0

    def hooks_lost(self, share: float) -> None:
        """Take a share of a capture off that was measured at this boundary with no hook called during its backward."""
        self.ratio *= 1 - share
        self._left = 0

    def announce(self, replaced: Replaced, built: Callable[[], None]) -> None:
        """Call `replaced` when something is put into a watched module; what it takes (True) asks for no new count.

        `built`: when something is put into any module.
        """
        self._registrations.announce(replaced, built)

    @property
    def registrations(self) -> list[int]:
        """Number of times that something was put into the models, as the only item of a list."""
        return self._registrations.counted

    def joined(self, optimizer: Optimizer, params: list[nn.Parameter], models: list[nn.Module]) -> bool:
        """True if parameters without a slot belong to the models all the same; each is looked up once."""
        state = len(params), self._registrations.counted[0]
        if self._strangers.get(weakref.ref(optimizer)) == state:
            return False
        present = {id(param) for model in models for param in module_tree.parameters(model)}
        modules = (module for model in models for module in module_tree.modules(model))
        present.update(map(id, gathered_in(modules).values()))
        if any(id(param) in present for param in params):
            return True
        self._strangers = {ref: looked for ref, looked in self._strangers.items() if ref() is not None}
        self._strangers[weakref.ref(optimizer)] = state
        return False

    def close(self) -> None:
        """Remove torch's registration hooks."""
        self._registrations.close()

    def _replaced(self, param: nn.Parameter) -> bool:
        """True if something else stands where this parameter stood in its model."""
        return self.places.lost(self._slot_of.get(id(param), -1), param)
