"""Names: what a parameter is called, whatever wraps the model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.taps import module_tree
from gradwatch.taps.module_registry import WRAPPERS

# No Python calls: a model joins a watch in caches that a backward has left cold.
_first: Callable[[tuple[str, nn.Parameter]], str] = operator.itemgetter(0)
_second: Callable[[tuple[str, nn.Parameter]], nn.Parameter] = operator.itemgetter(1)


def canonical(fqn: str) -> str:
    """The name without wrapper prefixes: `module._orig_mod.fc.weight` -> `fc.weight`."""
    parts = fqn.split(".")
    if WRAPPERS.isdisjoint(parts):
        return fqn
    kept = [part for part in parts if part not in WRAPPERS]
    return ".".join(kept or parts[-1:])


def named_parameters(
    models: Iterable[nn.Module], only: Sequence[nn.Module] | None = None
) -> list[tuple[str, nn.Parameter]]:
    """(unique canonical name, parameter) over several models, shared parameters once; of `only` some of them.

    Several models get their class name (numbered where it repeats) as a prefix, one model none.
    """
    found: list[tuple[str, nn.Parameter]] = []
    seen: set[int] = set()
    used: set[str] = set()
    chosen = None if only is None else set(map(id, only))
    for prefix, model in _prefixes(list(models)):
        if chosen is not None and id(model) not in chosen:
            continue
        named = module_tree.named_parameters(model)
        plain = not (found or prefix or module_tree.lists_itself(model))
        if plain and WRAPPERS.isdisjoint(".".join(map(_first, named)).split(".")):
            # One model without a wrapper, as nearly all are: no name changes, and none is there twice.
            found = named
            seen.update(map(id, map(_second, named)))
            used.update(map(_first, named))
            continue
        for fqn, parameter in named:
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
