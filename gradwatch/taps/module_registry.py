"""Every module and what it holds, known by torch's own events: registration, copying and unpickling.

Parameters and modules put into a module pass torch's global registration hooks. A copied or unpickled module passes
none, but its `__setstate__` is looked up: the class attribute is replaced by a descriptor that notes the instance and
gives torch's own function. Everything is held by weak references without callbacks, to modules only (a weak reference
to a parameter makes `torch.utils.swap_tensors` raise); what is found is compared with the module as it is now.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from gradwatch.runtime import guard
from gradwatch.taps.dynamo import untraced
from gradwatch.taps.hook_ids import own_ids
from gradwatch.taps.patch import OnLookup, Patch

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names under which DDP, torch.compile, FSDP1 and activation checkpointing hold what they wrap."""
_SMALL = 256  # entries below which nothing is pruned


class Place(NamedTuple):
    """A module, the name of a parameter or module in it, and `ModuleRegistry.clock` when it was put there."""

    module: weakref.ref[nn.Module]
    name: str
    since: int


class ModuleRegistry:
    """The live modules; `clock` counts what was registered so far, `made` the modules that it became known of.

    A module made before this began is known from its first registration, copy or unpickling after it.
    """

    def __init__(self) -> None:
        self.clock = self.made = 0
        self.registrations = 0  # of `clock`, without copies
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._fresh: list[weakref.ref[nn.Module]] = []  # since they were last asked for
        self._unread: list[tuple[weakref.ref[nn.Module], int]] = []  # copied, their contents not looked at
        self._offered = 0  # of these, by `fresh_roots`
        self._owners: dict[int, Place] = {}  # by id of the parameter
        self._parents: dict[int, tuple[Place, ...]] = {}  # by id of the module
        self._prune_at = _SMALL
        with own_ids:
            self._removes: list[Callable[[], None]] = [
                register_module_parameter_registration_hook(self._parameter).remove,
                register_module_module_registration_hook(self._module).remove,
                _states.listen(self._state),
            ]

    def close(self) -> None:
        """Restore torch as found, and discard everything."""
        while self._removes:
            self._removes.pop()()
        for known in (self._modules, self._owners, self._parents):
            known.clear()
        self._fresh.clear()
        self._unread.clear()

    # -- asked -------------------------------------------------------------------------------------------

    def owners(self, params: Iterable[Tensor]) -> list[tuple[nn.Module, str] | None]:
        """(module, name in it) of each parameter; None where no known module holds it.

        All modules are walked only where a parameter was put into one without torch's knowledge (`.to()` may).
        """
        if self._unread:
            self._read()
        wanted = list(params)
        found = self._known_owners(wanted)
        if None in found:
            self._walk()
            found = self._known_owners(wanted)
        return found

    def root(self, module: nn.Module, before: int, known: Iterable[nn.Module] = ()) -> nn.Module:
        """The outermost module around this one, by what was registered up to `before`.

        Around them all, what wraps a whole model under the name that DDP, FSDP or torch.compile use, at any time.
        `known` are some that are outermost.
        """
        seen = {id(module)}
        while True:
            outer = self._outer(module, before)
            if outer is None or id(outer) in seen:
                return module
            for one in known:
                if one is outer:
                    return outer
            seen.add(id(outer))
            module = outer

    @property
    def news(self) -> bool:
        """True if any module was registered, copied or unpickled since `fresh_roots` was last asked."""
        return bool(self._fresh) or len(self._unread) > self._offered

    def fresh_roots(self) -> list[nn.Module]:
        """The outermost modules that were registered, copied or unpickled since this was last asked."""
        if not self._fresh:
            return self._copied_roots()
        self._read()
        fresh, self._fresh = self._fresh, []
        modules = {id(module): module for ref in fresh if (module := ref()) is not None}
        roots = {}
        for identity, module in modules.items():
            places = self._parents.get(identity, ())
            if len(places) == 1:  # nearly all that is copied, without a call
                held_by = places[0].module()
                if held_by is not None and id(held_by) in modules:
                    held, name = held_by._modules, places[0].name
                    if name in held and held[name] is module:
                        continue  # that one leads to the same root
            outer = self._outer(module, self.clock) if places else None
            if outer is None or id(outer) not in modules:
                root = module if outer is None else self.root(outer, self.clock)
                roots[id(root)] = root
        return list(roots.values())

    def __iter__(self) -> Iterator[nn.Module]:
        self._read()
        for ref in list(self._modules.values()):
            module = ref()
            if module is not None:
                yield module

    # -- inside ------------------------------------------------------------------------------------------

    def _copied_roots(self) -> list[nn.Module]:
        """`fresh_roots` where nothing but copies came: what they hold need not be written down for it."""
        refs, self._offered = self._unread[self._offered :], len(self._unread)
        copied: list[nn.Module] = []
        inside: set[int] = set()
        for ref, _ in refs:
            module = ref()
            held = None if module is None else module.__dict__.get("_modules")
            if module is not None and held is not None:
                copied.append(module)
                inside.update(map(id, held.values()))
        roots = {}
        for module in copied:
            if id(module) not in inside:
                root = self.root(module, self.clock) if id(module) in self._parents else module
                roots[id(root)] = root
        return list(roots.values())

    def _known_owners(self, params: list[Tensor]) -> list[tuple[nn.Module, str] | None]:
        found: list[tuple[nn.Module, str] | None] = []
        for param in params:
            place = self._owners.get(id(param))
            module = None if place is None else place.module()
            owner = None
            if place is not None and module is not None:
                held, name = module._parameters, place.name
                # Not by `get`: a scripted module that was loaded holds what is no dict.
                if name in held and (held[name] is param or _is_gathered(held[name], param)):
                    owner = module, name
            found.append(owner)
        return found

    def _outer(self, module: nn.Module, before: int) -> nn.Module | None:
        for place in self._parents.get(id(module), ()):
            outer, name = place.module(), place.name
            if outer is None or (place.since > before and name not in WRAPPERS):
                continue
            if name in outer._modules and outer._modules[name] is module:
                return outer
        return None

    def _read(self) -> None:
        """Look into the modules that were copied or unpickled."""
        (unread, self._unread), (offered, self._offered) = (self._unread, []), (self._offered, 0)
        fresh, self._fresh = self._fresh, []
        for k, (ref, since) in enumerate(unread):
            if k == offered:
                self._fresh = fresh  # those before it are none any more
            module = ref()
            if module is not None and _is_made(module):
                self._look_into(module, since)
        if offered >= len(unread):
            self._fresh = fresh

    def _walk(self) -> None:
        for module in self:
            for name, param in module._parameters.items():
                if param is not None and self._known_owners([param]) == [None]:
                    self._owners[id(param)] = Place(self._modules[id(module)], name, self.clock)

    def _look_into(self, module: nn.Module, since: int) -> None:
        ref = self._modules.get(id(module))
        if ref is None or ref() is not module:
            ref = self._know(module)
        for name, param in module._parameters.items():
            if param is not None:
                self._owners[id(param)] = Place(ref, name, since)
        for name, child in module._modules.items():
            if child is not None:
                held = self._modules.get(id(child))
                if held is None or held() is not child or id(child) in self._parents:
                    self._add_parent(child, Place(ref, name, since))
                else:  # nearly all that is copied: no other module holds it
                    self._parents[id(child)] = (Place(ref, name, since),)

    def _know(self, module: nn.Module) -> weakref.ref[nn.Module]:
        ref = self._modules.get(id(module))
        if ref is None or ref() is not module:
            self._modules[id(module)] = ref = weakref.ref(module)
            self.made += 1
            self._parents.pop(id(module), None)
            self._fresh.append(ref)
            if len(self._modules) > self._prune_at:
                self._prune()
        return ref

    def _add_parent(self, child: nn.Module, place: Place) -> None:
        ref = self._modules.get(id(child))
        if ref is None or ref() is not child:
            self._know(child)
        known = self._parents.get(id(child))
        if known:  # the first to hold it comes first; those that are gone give room
            self._parents[id(child)] = (*[one for one in known if one.module() is not None], place)
        else:
            self._parents[id(child)] = (place,)

    def _prune(self) -> None:
        """Discard what is about modules that are gone."""
        self._modules = {key: ref for key, ref in list(self._modules.items()) if ref() is not None}
        self._owners = {key: one for key, one in list(self._owners.items()) if one.module() is not None}
        self._parents = {key: v for key, v in list(self._parents.items()) if key in self._modules}
        self._fresh = [ref for ref in self._fresh if ref() is not None]
        self._prune_at = max(_SMALL, 2 * len(self._modules))

    # -- called by torch ---------------------------------------------------------------------------------

    @untraced
    def _parameter(self, module: nn.Module, name: str, param: Tensor | None) -> None:
        try:
            self.clock += 1
            self.registrations += 1
            ref = self._know(module)
            if param is not None and self._known_owners([param]) == [None]:
                self._owners[id(param)] = Place(ref, name, self.clock)
        except Exception as error:
            guard.fault("capture", error)

    @untraced
    def _module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        try:
            self.clock += 1
            self.registrations += 1
            ref = self._know(module)
            if isinstance(child, nn.Module):
                self._add_parent(child, Place(ref, name, self.clock))
        except Exception as error:
            guard.fault("capture", error)

    def _state(self, module: nn.Module | None) -> None:
        if module is None:  # looked up on the class
            return
        if self._unread and self._unread[-1][0]() is module:  # `copy` asks whether there is one, and takes it
            return
        self.clock += 1
        self.made += 1
        self._unread.append((weakref.ref(module), self.clock))
        if len(self._unread) > self._prune_at:
            alive = [each[0]() is not None for each in self._unread]
            self._offered = sum(alive[: self._offered])
            self._unread = [each for each, lives in zip(self._unread, alive, strict=True) if lives]
            self._prune_at = max(self._prune_at, 2 * len(self._unread))


def _is_made(module: nn.Module) -> bool:
    """True if a module has what `nn.Module.__init__`, or `__setstate__`, gives it."""
    return "_parameters" in vars(module) and "_modules" in vars(module)


_states: Patch[Callable[[nn.Module | None], object]] = Patch(
    nn.Module, "__setstate__", lambda layer: OnLookup(nn.Module, "__setstate__", layer)
)


def _is_gathered(held: Tensor | None, param: Tensor) -> bool:
    """True if FSDP2 shows the whole of the shard `param` in its place: between forward and backward."""
    if held is None or not hasattr(param, "to_local") or hasattr(held, "to_local"):
        return False
    return held.shape == param.shape
