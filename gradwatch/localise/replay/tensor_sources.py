"""Names of the tensors that a forward may read: parameters, buffers, arguments, attributes of modules, globals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from gradwatch.localise.held_calls.module_attributes import REGISTRIES
from gradwatch.localise.replay.first_nonfinite_in_forward import key_of
from gradwatch.taps import nested_containers


def sources(
    models: Iterable[nn.Module], given: Mapping[str, Tensor], args: Any = (), kwargs: Any = None
) -> dict[int, tuple[str, str]]:
    """("parameter" | "buffer" | "input" | "tensor", name) by the key of the tensor's memory.

    `given` are parameters and buffers by name; a "tensor" is another attribute of one of the models' modules, or a
    global of the file in which its class is written.
    """
    found = {key_of(tensor): ("tensor", name) for name, tensor in _beside(models)}
    for name, tensor in given.items():
        found[key_of(tensor)] = "parameter" if isinstance(tensor, nn.Parameter) else "buffer", name
    for name, leaf in nested_containers.named_leaves(args, kwargs or {}):
        if isinstance(leaf, Tensor):
            found[key_of(leaf)] = ("input", name)
    return found


def _beside(models: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Globals first: an attribute that is one of them is called by its own name."""
    named = {id(module): (name, module) for model in models for name, module in model.named_modules()}
    kinds = {base for _, module in named.values() for base in type(module).__mro__}
    files = {id(names): names for kind in kinds for names in _globals_of(kind)}
    for names in files.values():
        yield from _tensors_in(dict(names), "")
    for path, module in named.values():
        held = {name: value for name, value in module.__dict__.items() if name not in REGISTRIES}
        yield from _tensors_in(held, f"{path}." if path else "")


def _globals_of(kind: type) -> Iterator[dict[str, Any]]:
    if not kind.__module__.startswith("torch."):
        yield from (one.__globals__ for one in vars(kind).values() if isinstance(one, FunctionType))


def _tensors_in(held: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors by the name under which they are held, directly or in a list, tuple or dict."""
    for name, value in held.items():
        if isinstance(value, (Tensor, list, tuple, dict)):
            for leaf in nested_containers.leaves(value):
                if isinstance(leaf, Tensor):
                    yield f"{prefix}{name}", leaf
