"""Which modules name the parameters that an optimizer trains, as torch's own events told of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from gradwatch.taps.registered import Registered


class Found(NamedTuple):
    """The `roots` whose paths name parameters of some optimizers, and the parameters that no module holds, `loose`.

    Loose names are those given to the optimizer (named parameters), else `opt0.group0.3[64x64]`: optimizer, param
    group, position, shape.
    """

    roots: list[nn.Module]
    loose: list[tuple[str, nn.Parameter]]


def discover(registered: Registered, optimizers: Iterable[tuple[Optimizer, int]], first: int = 0) -> Found:
    """What is known of the parameters of `optimizers`, each with the registrations counted when it was made.

    A root is the outermost module around an owner as it stood when the optimizer was made, the one that owns most
    first; a module that came later and contains it changes nothing. `first` numbers the first optimizer in loose names.
    """
    roots: dict[int, nn.Module] = {}
    owned: dict[int, int] = {}
    loose: list[tuple[str, nn.Parameter]] = []
    seen: set[int] = set()
    for number, (optimizer, made) in enumerate(optimizers, first):
        named = [pair for pair in made_up_names(optimizer, number) if id(pair[1]) not in seen]
        seen.update(id(tensor) for _, tensor in named)
        for pair, owner in zip(named, registered.owners(tensor for _, tensor in named), strict=True):
            if owner is None:
                loose.append(pair)
                continue
            root = registered.root(owner[0], made)
            roots[id(root)] = root
            owned[id(root)] = owned.get(id(root), 0) + 1
    return Found(sorted(roots.values(), key=lambda root: -owned[id(root)]), loose)


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Every tensor in every param group, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def trains(optimizer: Optimizer) -> bool:
    """Whether an optimizer that is fully made has a parameter that wants a gradient."""
    return "param_groups" in vars(optimizer) and any(
        tensor.requires_grad for tensor in parameters_of(optimizer)
    )


def made_up_names(optimizer: Optimizer, number: int) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, tensor) of every parameter, should no module hold it."""
    for g, group in enumerate(optimizer.param_groups):
        given: Any = group.get("param_names") or ()
        for i, tensor in enumerate(group["params"]):
            shape = "x".join(str(size) for size in tensor.shape)
            yield given[i] if i < len(given) else f"opt{number}.group{g}.{i}[{shape}]", tensor
