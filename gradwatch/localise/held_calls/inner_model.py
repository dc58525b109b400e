"""The model inside its wrappers, and whether its forward can be run by one rank alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwatch.localise.sharded.fsdp1 import has_wrappers
from gradwatch.localise.sharded.whole_parameters import are_spread, ungatherable
from gradwatch.taps import module_tree

TALKING = frozenset({"SyncBatchNorm"})


def shared(model: nn.Module, modules: Sequence[nn.Module] | None = None) -> str:
    """The reason why the forward of a model, of these `modules`, cannot be run by one rank alone; "" where it can."""
    modules = module_tree.modules(model) if modules is None else modules
    for kind in set(map(type, modules)):
        for base in kind.__mro__:
            if base.__name__ in TALKING:
                return f"the forward of {kind.__name__} communicates with other ranks"
    sharded = has_wrappers(modules) or are_spread(module_tree.parameters_in(modules))
    return ungatherable(model) if sharded else ""


def inner(model: nn.Module) -> nn.Module:
    """The module whose forward computes, inside what DDP and torch.compile wrap around it."""
    while True:
        wrapped = getattr(model, "_orig_mod", None)
        if isinstance(model, DistributedDataParallel):
            wrapped = model.module
        if not isinstance(wrapped, nn.Module):
            return model
        model = wrapped
