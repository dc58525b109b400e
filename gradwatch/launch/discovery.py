"""Which models does an unmodified script train, and what are their parameters called?

One scan of the garbage collector's objects at the first optimizer step finds every live module and optimizer;
no hook on construction is needed, so models from `torch.load`, `deepcopy` or a factory are found alike.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


class LooseParameters(nn.Module):
    """Holds parameters that no live module owns, under made-up names, so that they can be watched.

    Happens for bare tensors given to an optimizer, and for every model after `gc.freeze()`, which hides all
    older objects from a scan. Names: the optimizer's own (`add_param_group({"param_names": …})`), else
    `opt0.group0.3[64x64]` (optimizer, param group, position, shape).
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        for name, tensor in named:
            # Straight into the dict: names hold dots, and a bare leaf tensor is no nn.Parameter.
            self._parameters[name] = tensor  # type: ignore[assignment]


def discover(
    optimizer: Optimizer, covered: Callable[[Optimizer], bool]
) -> tuple[list[nn.Module], list[Optimizer]]:
    """(root modules, optimizers) of the training that `optimizer` belongs to; at least one of each.

    Optimizers that are `covered` (somebody watches them already) stay out of it; `optimizer` comes first.
    Roots are modules that are no live module's child and own a parameter of some such optimizer, the one that
    owns most first; a root that adds no parameter (a second view of a part) is left out. What no root owns
    comes as one `LooseParameters` at the end.
    """
    modules, live = _scan()
    optimizers = [optimizer, *(each for each in live if each is not optimizer and not covered(each))]
    wanted = {id(tensor) for each in optimizers for tensor in parameters_of(each)}
    roots = _roots(modules, wanted)
    owned = {id(parameter) for root in roots for parameter in root.parameters()}
    loose = [pair for pair in _made_up_names(optimizers) if id(pair[1]) not in owned]
    return [*roots, *([LooseParameters(loose)] if loose else [])], optimizers


def stepping() -> list[Optimizer]:
    """Every live optimizer that has a gradient to step with."""
    return [each for each in _scan()[1] if any(tensor.grad is not None for tensor in parameters_of(each))]


def trainable() -> list[nn.Module]:
    """Every live root module that has a parameter of its own which wants a gradient, the largest one first."""
    modules = [module for module in _scan()[0] if not isinstance(module, LooseParameters)]
    own = (param for module in modules for param in module._parameters.values() if param is not None)
    return _roots(modules, {id(param) for param in own if param.requires_grad})


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Every tensor in every param group, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _scan() -> tuple[list[nn.Module], list[Optimizer]]:
    modules: list[nn.Module] = []
    optimizers: list[Optimizer] = []
    for thing in gc.get_objects():
        # `type`, never `isinstance`: a proxy's __class__ may run code of its own. The dict is looked at
        # because an object may be seen half-built, before nn.Module.__init__.
        kind = type(thing)
        if issubclass(kind, nn.Module) and "_parameters" in thing.__dict__:
            modules.append(thing)
        elif issubclass(kind, Optimizer) and "param_groups" in thing.__dict__:
            optimizers.append(thing)
    return modules, optimizers


def _roots(modules: list[nn.Module], wanted: set[int]) -> list[nn.Module]:
    children = {id(child) for module in modules for child in module._modules.values()}
    tops = [(module, _owned(module, wanted)) for module in modules if id(module) not in children]
    tops.sort(key=lambda pair: -len(pair[1]))
    roots, covered = [], set[int]()
    for module, owned in tops:
        if not owned <= covered:
            roots.append(module)
            covered |= owned
    return roots


def _owned(module: nn.Module, wanted: set[int]) -> set[int]:
    return {id(parameter) for parameter in module.parameters()} & wanted


def _made_up_names(optimizers: list[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for o, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            given: Any = group.get("param_names") or ()
            for i, tensor in enumerate(group["params"]):
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                shape = "x".join(str(size) for size in tensor.shape)
                yield given[i] if i < len(given) else f"opt{o}.group{g}.{i}[{shape}]", tensor
