"""FSDP1 (`use_orig_params=True`): its flat parameters gathered into whole ones, and its wrappers set aside.

Each wrapper keeps its parameters flattened into one, of which every rank has an equal part. The parts are read and
nothing of FSDP's is changed: no parameter is gathered in its place, as `summon_full_params` would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwatch.taps import nested_containers

KIND = "FullyShardedDataParallel"
READ = ("_param_infos", "_shapes", "_shared_param_infos", "_unpadded_unsharded_size")
"""Attributes of a flat parameter that are read, beside `_local_shard`, which the first forward sets."""


def is_wrapper(module: nn.Module) -> bool:
    """True for a module that FSDP1 put around another one."""
    return any(base.__name__ == KIND for base in type(module).__mro__)


def has_wrappers(modules: Iterable[nn.Module]) -> bool:
    """True if FSDP1 put one of these around another one."""
    for kind in set(map(type, modules)):  # no generator: asked of every model that joins, in cold caches
        for base in kind.__mro__:
            if base.__name__ == KIND:
                return True
    return False


def ungatherable(model: nn.Module) -> str:
    """Reason why gathered parameters cannot stand in for what its forward uses; "" where they can."""
    for handle in _handles(model):
        if not getattr(handle, "_use_orig_params", False):
            return "FSDP1 has flattened its parameters (`use_orig_params=True` leaves them)"
        if getattr(handle, "_offload_params", False):
            return "its parameters are offloaded to the host"
        if not hasattr(handle, "_fwd_bwd_param_dtype") or not all(
            hasattr(handle.flat_param, name) for name in READ
        ):
            return "FSDP1 in this torch version is not supported"
    return ""


def whole_bytes(model: nn.Module, device: torch.device) -> int:
    """Bytes of its whole parameters on this device."""
    flats = [handle.flat_param for handle in _handles(model)]
    here = [flat for flat in flats if flat._local_shard.device == device]
    return sum(flat._unpadded_unsharded_size.numel() * flat._local_shard.element_size() for flat in here)


@torch.no_grad()
def gather(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter whole, by name, in the type that the forward computes in. All ranks must call it together."""
    whole: dict[tuple[int, str], Tensor] = {}
    for handle in _handles(model):
        flat = handle.flat_param
        full = _whole(flat, handle)
        kind = full.dtype if handle._force_full_precision else handle._fwd_bwd_param_dtype
        for info, shape, part in zip(flat._param_infos, flat._shapes, _parts(full, flat), strict=True):
            given = getattr(info.module, info.param_name, None)
            trained = True if given is None else bool(given.requires_grad)
            made = part.reshape(shape).clone().to(kind or full.dtype)
            whole[id(info.module), info.param_name] = nn.Parameter(made, trained)
        for info in flat._shared_param_infos:
            whole[id(info.module), info.param_name] = whole[id(info.prim_module), info.prim_param_name]
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for own, param in module._parameters.items():
            if param is not None:
                name = f"{path}.{own}" if path else own
                key = id(module), own
                if key not in whole:
                    whole[key] = nn.Parameter(param.detach(), param.requires_grad)
                found[name] = whole[key]
    return found


def gradients_to_gather(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradients `gather_gradients` gives, as far as this rank can tell."""
    own = ((handle, handle.sharded_grad) for handle in _handles(model))
    flats = [handle.flat_param for handle, grad in own if grad is not None]
    infos = (info for flat in flats for info in flat._param_infos)
    names = _names(model)
    return [names[id(info.module), info.param_name] for info in infos]


@torch.no_grad()
def gather_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of each of `gradients_to_gather`, whole, by name. All ranks must call it together."""
    names = _names(model)
    found: dict[str, Tensor] = {}
    for handle in _handles(model):
        flat, own = handle.flat_param, handle.sharded_grad
        if own is not None:
            full = _of_all_ranks(own, flat, handle)
            for info, shape, part in zip(flat._param_infos, flat._shapes, _parts(full, flat), strict=True):
                found[names[id(info.module), info.param_name]] = part.reshape(shape).clone()
    return found


def _names(model: nn.Module) -> dict[tuple[int, str], str]:
    """The name of each parameter, by the `id` of its module and its name there."""
    return {
        (id(module), own): f"{path}.{own}" if path else own
        for path, module in model.named_modules()
        for own in module._parameters
    }


def _whole(flat: Any, handle: Any) -> Tensor:
    """The flat parameter of all ranks, without the padding at its end."""
    return _of_all_ranks(flat._local_shard, flat, handle)


def _of_all_ranks(own: Tensor, flat: Any, handle: Any) -> Tensor:
    """A flat parameter, or its gradient, of all ranks, without the padding at its end."""
    size = flat._unpadded_unsharded_size.numel()
    if not handle.uses_sharded_strategy:
        return own.detach()[:size]
    count = dist.get_world_size(handle.process_group)
    full = torch.empty(own.numel() * count, dtype=own.dtype, device=own.device)
    dist.all_gather_into_tensor(full, own.detach().contiguous(), handle.process_group)
    return full[:size]


def _parts(full: Tensor, flat: Any) -> Iterator[Tensor]:
    """The parameters in a flat one, without the padding between them."""
    parts = torch.split(full, list(flat._numels_with_padding))
    padding = flat._is_padding_mask
    return (part for part, is_padding in zip(parts, padding, strict=True) if not is_padding)


@contextlib.contextmanager
def without_wrappers(model: nn.Module) -> Iterator[None]:
    """A wrapper only casts its inputs, as it does, and calls what is inside."""
    changed = [module for module in model.modules() if is_wrapper(module)]
    try:
        for wrapper in changed:
            wrapper.__dict__["forward"] = _passing_on(wrapper)
        yield
    finally:
        for wrapper in changed:
            wrapper.__dict__.pop("forward", None)


def _passing_on(wrapper: Any) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        policy, handle = wrapper.mixed_precision, wrapper._handle
        casts = policy.cast_root_forward_inputs if wrapper._is_root else policy.cast_forward_inputs
        if casts and policy.param_dtype is not None and not (handle and handle._force_full_precision):
            args, kwargs = nested_containers.replaced(partial(_cast, policy.param_dtype), (args, kwargs))
        return wrapper._fsdp_wrapped_module(*args, **kwargs)

    return forward


def _cast(dtype: torch.dtype, leaf: Any) -> Any:
    floats = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(dtype) if floats else leaf


def _handles(model: nn.Module) -> list[Any]:
    found = (getattr(module, "_handle", None) for module in model.modules() if is_wrapper(module))
    return [handle for handle in found if handle is not None]
