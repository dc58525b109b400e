"""Modules and parameters below a module, without torch's generators.

`Module.modules()` and `Module.parameters()` are generators within generators, one level for each level of the model: a
microsecond for each module or parameter, paid several times whenever a model joins a watch. What they yield is
collected here by a plain loop, in the same order, each once. Parameters that a wrapper hides from `parameters()` are
found here all the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

WITH_RUNNING_STATISTICS = (_NormBase,)
"""BatchNorm and InstanceNorm, lazy ones too: they write a running mean and variance in their forward."""


def modules(root: nn.Module) -> list[nn.Module]:
    """`root` and all modules below it, each once, in the order of `root.modules()`."""
    if not root._modules:
        return [root]
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [root]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            if module._modules:
                waiting += reversed(list(module._modules.values()))
    return list(found.values())


def parameters(root: nn.Module) -> list[nn.Parameter]:
    """The parameters of all these modules, each once, in the order of `root.parameters()`."""
    return parameters_in(modules(root))


def parameters_in(walked: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters that these modules hold themselves, each once."""
    found: dict[int, nn.Parameter] = {}
    for module in walked:
        if module._parameters:
            for param in module._parameters.values():
                if param is not None:
                    found[id(param)] = param
    return list(found.values())


def parameters_at(module: nn.Module, name: str) -> list[nn.Parameter]:
    """The parameters that stand in a module under a name, or below it."""
    for held in (module._parameters, module._modules):
        one = held.get(name) if isinstance(held, dict) else None  # a scripted module holds another kind
        if one is not None:
            return parameters(one) if isinstance(one, nn.Module) else [one]
    return []


def lists_itself(root: nn.Module) -> bool:
    """True if the class of `root` says by methods of its own which parameters it has, and what they are called."""
    kind = type(root)
    return (
        kind.named_parameters is not nn.Module.named_parameters
        or kind.named_modules is not nn.Module.named_modules
    )


def named_parameters(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """`list(root.named_parameters())`, by way of the method where the class of `root` overrides it."""
    if lists_itself(root):
        return list(root.named_parameters())
    found: dict[int, tuple[str, nn.Parameter]] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module | None]] = [("", root)]
    while waiting:
        prefix, module = waiting.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        if module._parameters:
            for name, param in module._parameters.items():
                if param is not None and id(param) not in found:
                    found[id(param)] = prefix + name, param
        if module._modules:
            waiting += reversed([(f"{prefix}{name}.", child) for name, child in module._modules.items()])
    return list(found.values())
