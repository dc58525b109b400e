"""DTensors that FSDP2 or tensor parallelism has spread over ranks, put together for one replay.

FSDP2's own forward gathers them layer by layer, and a rank that failed in the midst of it would leave the others
waiting for ever. So they are gathered before anything is run, in a fixed order, by ranks that have agreed to; the
replay then runs the module inside, on whole parameters and without FSDP's hooks and without communication.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.capture.parameter_shards import fsdp2_groups

Hook = Callable[..., Any]


def ungatherable(model: nn.Module, parallelised: bool) -> str:
    """Reason why gathered parameters cannot stand in for what its forward uses; "" where they can.

    `parallelised`: modules of it compute on DTensors, whoever made these.
    """
    states = [state for module in model.modules() if (state := _state(module)) is not None]
    held = [one for module in model.modules() for group in fsdp2_groups(module) for one in group.fsdp_params]
    made = {id(one.sharded_param) for one in held}
    if not parallelised and any(getattr(one, "is_dtensor", True) for one in held):
        return (
            "its parameters are DTensors for tensor parallelism, which no hook of `parallelize_module` joins"
        )
    if not parallelised and any(is_dtensor(one) and id(one) not in made for one in model.parameters()):
        return "parameters of it are DTensors, and neither FSDP2 nor `parallelize_module` made them"
    if any(getattr(one, "offload_to_cpu", False) for one in held):
        return "its parameters are offloaded to the host"
    if any(not hasattr(state, name) for state in states for name in (*CASTS, *HANDLES)):
        return "FSDP2 in this torch version is not supported"
    return ""


@torch.no_grad()
def gather(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter whole, by name, in the type that the forward computes in. All ranks must call it together."""
    kinds = _types(model)
    whole: dict[int, Tensor] = {}
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) not in whole:
            full = _whole(param)
            whole[id(param)] = nn.Parameter(full.to(kinds.get(id(param)) or full.dtype), param.requires_grad)
        found[name] = whole[id(param)]
    return found


@torch.no_grad()
def gather_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every gradient whole, by the name of its parameter. All ranks must call it together."""
    return {name: _whole(param.grad) for name, param in model.named_parameters() if param.grad is not None}


def _whole(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor.detach()
    return full


@contextlib.contextmanager
def without_fsdp(model: nn.Module) -> Iterator[None]:
    """FSDP2's forward hooks only cast, as they do, and neither gather nor reshard."""
    restores: list[Callable[[], None]] = []
    try:
        for state in {id(s): s for m in model.modules() if (s := _state(m)) is not None}.values():
            restores += _alias_hooks(model, state)
        yield
    finally:
        for restore in restores:
            restore()


CASTS = ("_cast_forward_inputs", "_cast_output_dtype")
HANDLES = ("_pre_forward_hook_handle", "_post_forward_hook_handle")


def _alias_hooks(model: nn.Module, state: Any) -> list[Callable[[], None]]:
    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return state._cast_forward_inputs(args, kwargs)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return state._cast_output_dtype(output)

    ids = {one.id for name in HANDLES for one in _handles(getattr(state, name))}
    restores = []
    for module in model.modules():
        for hooks, cast in ((module._forward_pre_hooks, before), (module._forward_hooks, after)):
            for number in ids & hooks.keys():
                restores.append(replaced(hooks, number, cast))
    return restores


def replaced(hooks: dict[int, Hook], number: int, other: Hook) -> Callable[[], None]:
    """Put another hook in the place of one; the returned call puts that back."""
    original = hooks[number]
    hooks[number] = other  # in its place: the order of hooks is that of the dict

    def restore() -> None:
        hooks[number] = original

    return restore


def _handles(handle: Any) -> Sequence[Any]:
    """Handles of FSDP2, which keeps one, or one of several."""
    return getattr(handle, "handles", (handle,))


def _types(model: nn.Module) -> dict[int, torch.dtype | None]:
    """The type FSDP2 computes in, by the id of its shard; None = the parameter's own."""
    groups = (group for module in model.modules() for group in fsdp2_groups(module))
    held = (one for group in groups for one in group.fsdp_params)
    return {id(one.sharded_param): one.param_dtype for one in held}


def _state(module: Any) -> Any:
    return getattr(module, "_get_fsdp_state", lambda: None)()


def is_dtensor(param: Tensor) -> bool:
    """True for a parameter, or a gradient, that is spread over ranks."""
    return hasattr(param, "full_tensor")
