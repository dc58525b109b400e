"""Names: what a parameter is called, whatever wraps the model, and whatever models come and go beside it.

A model keeps the prefix of its parameters' names as long as it lives. One that comes later takes up that of one that is
gone: with it come the names, series and baselines of its parameters.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.capture.parameter_shards import as_sharded
from gradwatch.runtime.weak_references import noted
from gradwatch.taps import module_tree
from gradwatch.taps.module_registry import WRAPPERS

# No Python calls: a model joins a watch in caches that a backward has left cold.
_first: Callable[[tuple[str, nn.Parameter]], str] = operator.itemgetter(0)
_second: Callable[[tuple[str, nn.Parameter]], nn.Parameter] = operator.itemgetter(1)
_shape: Callable[[nn.Parameter], torch.Size] = operator.attrgetter("shape")
Named = list[tuple[str, nn.Parameter]]
"""The parameters of a model by the names that they have in it."""


def canonical(fqn: str) -> str:
    """The name without wrapper prefixes: `module._orig_mod.fc.weight` -> `fc.weight`."""
    parts = fqn.split(".")
    if WRAPPERS.isdisjoint(parts):
        return fqn
    kept = [part for part in parts if part not in WRAPPERS]
    return ".".join(kept or parts[-1:])


def named_parameters(models: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Parameter]]:
    """(unique canonical name, parameter) over several models, shared parameters once; each model with its prefix."""
    listed = [(prefix, model, module_tree.named_parameters(model)) for prefix, model in models]
    return uniquely_named([(prefix, as_sharded(named, [model])) for prefix, model, named in listed])


def uniquely_named(
    models: Sequence[tuple[str, Sequence[tuple[str, nn.Parameter]]]],
) -> list[tuple[str, nn.Parameter]]:
    """`named_parameters`, of models whose parameters have been listed: each with its prefix."""
    if len(models) == 1 and not models[0][0]:
        named = list(models[0][1])
        names = list(map(_first, named))
        plain = len(set(names)) == len(names) == len(set(map(id, map(_second, named))))
        if plain and WRAPPERS.isdisjoint(".".join(names).split(".")):
            # One model without a wrapper, as nearly all are: no name changes, and none is there twice.
            return named
    found: list[tuple[str, nn.Parameter]] = []
    seen: set[int] = set()
    used: set[str] = set()
    for prefix, listed in models:
        for fqn, parameter in listed:
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = prefix + (fqn if WRAPPERS.isdisjoint(fqn.split(".")) else canonical(fqn))
            # Two wrapped copies of one module would otherwise end up with one name.
            name = prefix + fqn if name in used else name
            used.add(name)
            found.append((name, parameter))
    return found


valueless: Callable[[Tensor], bool] = operator.attrgetter("is_meta")
"""True if there are no numbers behind a parameter, and so behind its gradient: it is on the meta device."""


def has_values(param: Tensor) -> bool:
    """True if there are numbers behind a parameter."""
    return not valueless(param)


def is_lazy(param: nn.Parameter) -> bool:
    """True if a parameter has no shape yet (a lazy module before its first forward)."""
    return isinstance(param, nn.UninitializedParameter)


def named_modules(models: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """(canonical name, module) over several models; a root is called by its class name."""
    for prefix, model in _prefixes(list(models)):
        for fqn, module in model.named_modules():
            if fqn and fqn.split(".")[-1] in WRAPPERS:
                continue
            yield (prefix + canonical(fqn)) if fqn else (prefix.rstrip(".") or type(model).__name__), module


def _prefixes(models: list[nn.Module]) -> list[tuple[str, nn.Module]]:
    if len(models) == 1:
        return [("", models[0])]
    taken: dict[str, int] = {}
    prefixed = []
    for model in models:
        kind = type(model).__name__
        number = taken.get(kind, 0)
        taken[kind] = number + 1
        prefixed.append((f"{kind}{number or ''}.", model))
    return prefixed


def fallback_name(optimizer: Optimizer, param: nn.Parameter) -> str:
    """`group0.3[64x64]` for a parameter no watched model owns."""
    for group, settings in enumerate(optimizer.param_groups):
        for position, candidate in enumerate(settings["params"]):
            if candidate is param:
                names = settings.get("param_names")
                return str(names[position]) if names else f"group{group}.{position}[{shape_of(param)}]"
    return f"unnamed[{shape_of(param)}]"


def shape_of(param: nn.Parameter) -> str:
    """`64x64`, or `scalar`."""
    return "x".join(map(str, param.shape)) or "scalar"


@dataclass(slots=True, eq=False)
class _Watched:
    """One model: its class, its prefix, and the layout of its parameters when it came."""

    model: weakref.ref[nn.Module]
    kind: str
    prefix: str
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...] | None  # None where some have none yet
    left: int = 0  # which look at the models found it gone


class WatchedModels:
    """The live models, in the order in which they came, and the prefixes that those before them have left.

    The prefix of one model alone is empty; of several it is the name of the class, numbered where that repeats.
    """

    def __init__(self) -> None:
        self._alive: list[_Watched] = []
        self._gone: list[_Watched] = []  # in the order in which they went, until others take their prefixes
        self._looks = 0
        self._unreleased = False  # some are known to be gone, and their parameters may be held
        self.undecided: tuple[str, ...] = ()
        """Prefixes left at one time by models alike, of which it cannot be told which successor is whose."""

    def all(self) -> list[nn.Module]:
        """Models that are still alive."""
        alive = []
        for one in self._alive:
            model = one.model()
            if model is not None:
                alive.append(model)
        return alive

    def prefixed(self) -> list[tuple[str, nn.Module]]:
        """(prefix, model) of those that are still alive."""
        return [(one.prefix, model) for one in self._alive if (model := one.model()) is not None]

    @property
    def any_gone(self) -> bool:
        """True if one has been freed since `released`."""
        return self._unreleased or any(one.model() is None for one in self._alive)

    def released(self) -> None:
        """Note that nothing is held any more of those that are gone."""
        self._unreleased = False

    @property
    def childless(self) -> bool:
        """True if no model is alive."""
        if self._alive and self._alive[0].model() is not None:  # almost every backward: no generator
            return False
        return all(one.model() is None for one in self._alive)

    def note_gone(self) -> list[nn.Module]:
        """Models that are still alive; the prefixes of the others are free from now on."""
        models: list[nn.Module] = []
        alive, gone = [], []
        for one in self._alive:
            model = one.model()
            if model is None:
                gone.append(one)
            else:
                alive.append(one)
                models.append(model)
        if gone:
            self._unreleased = True
            self._looks += 1
            for one in gone:
                one.left = self._looks
            self._alive = alive
            self._gone += gone
        return models

    def add(
        self, models: Iterable[nn.Module], prefixes: Mapping[int, str] | None = None
    ) -> list[tuple[str, nn.Module, Named]]:
        """Watch these too: (prefix, model, its parameters) of each that was not watched.

        `prefixes` are those that another watch has given some of them, by `id()`.
        """
        prefixes = prefixes or {}
        known = set(map(id, self.note_gone()))
        fresh = [model for model in models if id(model) not in known]
        alone = not self._alive and len(fresh) == 1
        added = []
        for model in fresh:
            named = module_tree.named_parameters(model)
            names, params = tuple(map(_first, named)), list(map(_second, named))
            plain = {nn.Parameter}.issuperset(map(type, params))  # nearly always, and asked without a call
            shapes = tuple(map(_shape, params)) if plain else _shapes(params)
            one = _Watched(noted(model), type(model).__name__, "", names, shapes)
            given = prefixes.get(id(model))
            one.prefix = self._prefix(one, alone) if given is None else given
            self._alive.append(one)
            added.append((one.prefix, model, named))
        return added

    def _prefix(self, one: _Watched, alone: bool) -> str:
        """The prefix of a model that comes: that of the first to go of those most like it, else a new one."""
        before, most = None, -1
        for other in self._gone:
            if other.kind == one.kind or not other.prefix:
                likeness = (other.names == one.names) + (
                    other.names == one.names and other.shapes == one.shapes
                )
                if likeness > most:
                    before, most = other, likeness
        if before is not None:
            self._gone.remove(before)
            if self._gone:
                self._note_undecided(before)
            return before.prefix
        taken = {other.prefix for other in (*self._alive, *self._gone)}
        number = sum(other.kind == one.kind for other in self._alive)
        prefix = "" if alone else f"{one.kind}{number or ''}."
        while prefix in taken:
            number += 1
            prefix = f"{one.kind}{number}."
        return prefix

    def _note_undecided(self, before: _Watched) -> None:
        """Note other candidates for what the successor of this one was before, which went at the same time."""
        same = [
            other.prefix
            for other in self._gone
            if (other.left, other.names, other.shapes) == (before.left, before.names, before.shapes)
        ]
        if same and not self.undecided:
            self.undecided = (before.prefix, *same)


def _shapes(params: list[nn.Parameter]) -> tuple[torch.Size, ...] | None:
    """None where some have no shape yet (a lazy module before its first forward)."""
    if any(isinstance(param, nn.UninitializedParameter) for param in params):
        return None
    return tuple(map(_shape, params))
