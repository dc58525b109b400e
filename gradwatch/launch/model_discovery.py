"""Modules that name the parameters of an optimizer, known by torch's registration events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from gradwatch.taps.module_registry import ModuleRegistry
from gradwatch.taps.optimizers.param_groups import params_of


class Found(NamedTuple):
    """`roots` are the modules whose paths name parameters of optimizers; `loose` the parameters that no module holds.

    The name of a loose parameter is the one given to the optimizer (named parameters), else `opt0.group0.3[64x64]`:
    optimizer, param group, position, shape.
    """

    roots: list[nn.Module]
    loose: list[tuple[str, nn.Parameter]]


def discover(
    registered: ModuleRegistry,
    optimizers: Iterable[tuple[Optimizer, int]],
    first: int = 0,
    held: Callable[[AbstractSet[int]], nn.Module | None] = lambda _: None,
) -> Found:
    """Find models and names for the parameters of `optimizers`, each with the registrations counted when it was made.

    A root is the outermost module around an owner of parameters as it was when the optimizer was made; the root that
    owns most comes first. A module that was made later and contains it changes nothing. `first` is the number of the
    first optimizer in names of loose parameters. `held` gives an outermost module that is known to have all parameters
    with these `id`s, or None.
    """
    roots: dict[int, nn.Module] = {}
    owned: dict[int, int] = {}
    loose: list[tuple[str, nn.Parameter]] = []
    seen: set[int] = set()
    for number, (optimizer, made) in enumerate(optimizers, first):
        given = params_of(optimizer)
        params = dict(zip(map(id, given), given, strict=True))
        if seen:
            params = {identity: tensor for identity, tensor in params.items() if identity not in seen}
        seen.update(params)
        whole = held(params.keys())
        if whole is not None:
            outermost = registered.root(whole, made)
            roots[id(outermost)] = outermost
            owned[id(outermost)] = owned.get(id(outermost), 0) + len(params)
            continue
        owners = registered.owners(params.values())
        around: dict[int, nn.Module] = {}  # by id of the owner
        for owner in owners:
            if owner is not None:
                module = owner[0]
                root = around.get(id(module))
                if root is None:
                    root = around[id(module)] = registered.root(module, made, around.values())
                roots[id(root)] = root
                owned[id(root)] = owned.get(id(root), 0) + 1
        if None in owners:
            named = {id(tensor): name for name, tensor in made_up_names(optimizer, number)}
            pairs = zip(params.items(), owners, strict=True)
            loose += [
                (named[identity], tensor)
                for (identity, tensor), owner in pairs
                if owner is None and tensor.is_leaf
            ]
    found = list(roots.values())
    return Found(found if len(found) < 2 else sorted(found, key=lambda root: -owned[id(root)]), loose)


def trains(optimizer: Optimizer) -> bool:
    """True if an optimizer whose `__init__` is over has a parameter whose `.grad` a backward fills."""
    for group in vars(optimizer).get("param_groups", ()):
        for tensor in group["params"]:
            if tensor.requires_grad and tensor.is_leaf:
                return True
    return False


def steps_through(optimizer: Optimizer) -> bool:
    """True if an optimizer has only results of operations as parameters: its steps are part of a graph."""
    tensors = [tensor for group in vars(optimizer).get("param_groups", ()) for tensor in group["params"]]
    return bool(tensors) and not any(tensor.is_leaf for tensor in tensors)


def made_up_names(optimizer: Optimizer, number: int) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, tensor) of every parameter of an optimizer, for the case that no module holds it."""
    for g, group in enumerate(optimizer.param_groups):
        given: Any = group.get("param_names") or ()
        for i, tensor in enumerate(group["params"]):
            shape = "x".join(str(size) for size in tensor.shape)
            yield given[i] if i < len(given) else f"opt{number}.group{g}.{i}[{shape}]", tensor
