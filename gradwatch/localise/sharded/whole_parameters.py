"""Parameters that are sharded over ranks, put together for one replay, whatever sharded them.

A sharded model's own forward communicates layer by layer, and a rank that failed in the midst of it would leave the
others waiting for ever. So parameters are gathered before anything is run, in a fixed order, by ranks that have agreed
to; the replay then runs the modules inside, on whole parameters and without communication.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.sharded import fsdp1, fsdp2
from gradwatch.localise.sharded.tensor_parallel import parallelised, without_parallelism
from gradwatch.runtime.interruption import not_ours
from gradwatch.taps import module_tree

HOST_BYTES = 4 << 30  # of whole parameters, gathered on the host
OF_FREE = 0.4  # of the free memory of a device: activations and gradients want as much again


def is_spread(model: nn.Module) -> bool:
    """True if its parameters are sharded over ranks."""
    modules = module_tree.modules(model)
    return fsdp1.has_wrappers(modules) or are_spread(module_tree.parameters_in(modules))


def are_spread(params: Iterable[Tensor]) -> bool:
    """True if one of these is a DTensor."""
    params = list(params)
    plain = set(map(type, params)) <= {nn.Parameter}  # nearly every model: by types alone
    return not plain and any(map(fsdp2.is_dtensor, params))


def computes_apart(model: nn.Module) -> bool:
    """True if whole parameters give its outputs only but for rounding: each rank computes a part of a layer."""
    return parallelised(model)


def ungatherable(model: nn.Module) -> str:
    """Reason why gathered parameters cannot stand in for what its forward uses; "" where they can."""
    if fsdp1.has_wrappers(module_tree.modules(model)):
        if are_spread(module_tree.parameters(model)):
            return "FSDP1 and DTensors share its parameters"
        return fsdp1.ungatherable(model)
    return fsdp2.ungatherable(model, parallelised(model))


def gradients_to_gather(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradients `gather_gradients` gives; none where it cannot, or has no room."""
    try:
        if computes_apart(model):  # a rank's own gradient is of its part of a layer
            return []
        refuse_gathering([model, model])
    except Refused:
        return []
    if fsdp1.has_wrappers(module_tree.modules(model)):
        return fsdp1.gradients_to_gather(model)
    return [name for name, param in model.named_parameters() if param.grad is not None]


def gather_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of each of `gradients_to_gather`, whole, by name. All ranks must call it together."""
    if fsdp1.has_wrappers(module_tree.modules(model)):
        return fsdp1.gather_gradients(model)
    return fsdp2.gather_gradients(model)


def refuse_gathering(models: Sequence[nn.Module]) -> None:
    """Raise `Refused` where the whole parameters do not fit into memory."""
    for device in {param.device for model in models for param in model.parameters()}:
        wanted = sum(_whole_bytes(model, device) for model in models)
        free = HOST_BYTES if device.type != "cuda" else int(OF_FREE * torch.cuda.mem_get_info(device)[0])
        if wanted > free:
            raise Refused(
                f"its parameters, gathered, take {wanted >> 20} MiB, and {free >> 20} MiB is what there is"
            )
        try:
            # What gathering takes is there.
            torch.empty(wanted + (wanted >> 2), dtype=torch.uint8, device=device)
        except RuntimeError as error:
            if not_ours(error):
                raise
            raise Refused(f"no memory to gather its parameters: {error}") from error


def _whole_bytes(model: nn.Module, device: torch.device) -> int:
    params = [p for p in model.parameters() if p.device == device and fsdp2.is_dtensor(p)]
    return fsdp1.whole_bytes(model, device) + sum(param.numel() * param.element_size() for param in params)


def gather(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter whole, by name, in the type that the forward computes in. All ranks must call it together."""
    return fsdp1.gather(model) if fsdp1.has_wrappers(module_tree.modules(model)) else fsdp2.gather(model)


@contextlib.contextmanager
def without_sharding(model: nn.Module) -> Iterator[None]:
    """The model computes with whole parameters, as if nothing was sharded; no collective is called."""
    with fsdp1.without_wrappers(model), fsdp2.without_fsdp(model), without_parallelism(model):
        yield
