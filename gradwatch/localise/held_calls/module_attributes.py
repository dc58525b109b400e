"""Plain attributes of modules that a forward may write in place: tensors, generators, containers.

An EMA beside the buffers, a cache, a `torch.Generator` of the module's own. Found directly and in lists, dicts, tuples,
sets and deques within each other; not in objects of the user's own classes.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.reading.generator_state import get_state, set_state
from gradwatch.taps import module_tree
from gradwatch.taps.graph.node_numbers import set_version

DEPTH = 6  # containers within containers
CONTAINERS = (list, dict, set)  # whose contents are restored
IMMUTABLE = frozenset({bool, int, float, str, bytes, type(None)})
OPENED = (list, tuple, dict, set, frozenset, deque)
REGISTRIES = frozenset(nn.Module().__dict__)
"""torch's own (`_parameters`, `_forward_hooks`, …) are restored by those who change them."""

Restore = Callable[[], None]


class Refused(Exception):  # noqa: N818 (an answer, not an error)
    """A replay would not be the step that was, or not without a trace; the message says why."""


def written_in_place(model: nn.Module) -> tuple[list[Tensor], list[Any]]:
    """The tensors that are neither parameters nor buffers, and the containers and generators, of all its modules."""
    found: dict[int, Any] = {}
    for module in module_tree.modules(model):
        held = module.__dict__
        for name in held.keys() - REGISTRIES:
            value = held[name]
            if type(value) not in IMMUTABLE:  # almost all: sizes, flags, paddings
                _collect(value, DEPTH, found)
    if not found:
        return [], []
    registered = {id(tensor) for tensor in (*module_tree.parameters(model), *model.buffers())}
    tensors = [one for one in found.values() if isinstance(one, Tensor) and id(one) not in registered]
    return tensors, [one for one in found.values() if not isinstance(one, Tensor)]


def _collect(value: Any, depth: int, found: dict[int, Any]) -> None:
    if id(value) in found or not depth:
        return
    if isinstance(value, OPENED):
        found[id(value)] = value
        for item in _items(value):
            _collect(item, depth - 1, found)
    elif isinstance(
        value, (Tensor, torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    ):
        found[id(value)] = value


def _items(value: Any) -> Iterator[Any]:
    yield from list(value.values() if isinstance(value, dict) else value)


def attributes(model: nn.Module, max_bytes: int) -> list[Restore]:
    """Copies of all that, as what puts it back. Raises `Refused` where its tensors take more than `max_bytes`."""
    tensors, others = written_in_place(model)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if size > max_bytes:
        raise Refused(
            f"tensors in plain attributes of its modules take {size} bytes, more than max_bytes = {max_bytes} "
            "allows to be copied and restored (register those that are not scratch space as buffers)"
        )
    held = [_names(module) for module in model.modules()]
    return [*held, *(restore for one in others for restore in _state(one)), *map(_numbers, tensors)]


def _names(module: nn.Module) -> Restore:
    """Backup of the attributes of a module."""
    held = dict(module.__dict__)

    def restore() -> None:
        now = module.__dict__
        for name in [name for name in now if name not in held]:
            del now[name]
        now.update(held)

    return restore


def _numbers(tensor: Tensor) -> Restore:
    """Backup of a tensor; restored only where it was written, and without bumping its version."""
    if tensor.is_inference():  # it cannot be written here
        return _nothing
    kept, version = tensor.detach().clone(), tensor._version

    def restore() -> None:
        if tensor._version != version:
            tensor.data.copy_(kept)
            set_version(tensor, version)

    return restore


def _nothing() -> None:
    """No-op: it cannot have changed."""


def _state(one: Any) -> Iterator[Restore]:
    """Functions that restore a container or a generator."""
    if isinstance(one, torch.Generator):
        yield partial(set_state, one, get_state(one))
    elif isinstance(one, np.random.Generator):
        state = copy.deepcopy(one.bit_generator.state)
        yield lambda: setattr(one.bit_generator, "state", state)
    elif isinstance(one, np.random.RandomState):
        legacy = one.get_state()
        yield lambda: one.set_state(legacy)
    elif isinstance(one, random.Random):
        python = one.getstate()
        yield lambda: one.setstate(python)
    elif type(one) in CONTAINERS:
        content = one.copy()
        yield lambda: _refill(one, content)


def _refill(container: Any, content: Any) -> None:
    if len(container) == len(content) and _same(container, content):
        return
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def _same(one: Any, other: Any) -> bool:
    """True if two hold the same items, by identity: comparing tensors would compare their numbers."""
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return all(a is c and b is d for (a, b), (c, d) in pairs)
    if isinstance(one, set):
        return bool(one == other)
    return all(a is b for a, b in zip(one, other, strict=True))
