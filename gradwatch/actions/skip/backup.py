"""Everything that a step of an optimizer may change, as it was, to be restored in place.

The optimizer's attributes are followed through containers, modules, optimizers and plain objects, and every tensor,
list, dict and generator found there is noted. It is restored into the very same objects: whatever else refers to
them (a flat buffer, a scheduler, a dict keyed by `id(param)`) finds them unchanged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.reading.generator_state import get_state, set_state
from gradwatch.taps.optimizers.param_groups import params_of

OBJECTS = 3
"""Plain objects within objects that are followed: an optimizer's own, not those of a trainer that it knows."""
OPAQUE = (type, FunctionType, MethodType, ModuleType)
COUNTED_BY_TORCH = frozenset({"_step_count"})  # LR schedulers look at it: a skipped step was called
Restore = Callable[[], object]


class OptimizerBackup:
    """Backup of an optimizer with its tensors, `further` ones and torch's generators; `restore` is exact."""

    def __init__(self, optimizer: Optimizer, further: Iterable[Tensor] = ()) -> None:
        self._restores: list[Restore] = [*_random_numbers(optimizer)]
        known: dict[int, object] = {}  # by id; held so that no other object gets one
        waiting = deque[tuple[object, int]]([(optimizer, OBJECTS), *((each, 0) for each in further)])
        while waiting:
            value, objects = waiting.popleft()
            if id(value) not in known:
                known[id(value)] = value
                restore, parts = _noted(value, objects)
                self._restores += [] if restore is None else [restore]
                left = objects - _is_plain(value)
                waiting.extend((part, left) for part in parts)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, to the bit."""
        for restore in self._restores:
            restore()


def _noted(value: Any, objects: int) -> tuple[Restore | None, Collection[Any]]:
    """Function that restores a value (None: nothing can change it), and the values it leads to."""
    if isinstance(value, Tensor):
        return partial(value.copy_, _copy(value)), ()
    if isinstance(value, nn.Module):
        return None, (*value.parameters(), *value.buffers())
    if isinstance(value, dict):
        return partial(_restore_dict, value, dict(value)), (*value.keys(), *value.values())
    if isinstance(value, (list, deque)):
        return partial(_restore_sequence, value, list(value)), list(value)
    if isinstance(value, set):
        return partial(_restore_set, value, set(value)), list(value)
    if isinstance(value, (tuple, frozenset)):
        return None, value
    if isinstance(value, np.ndarray):
        return partial(np.copyto, value, value.copy()), ()
    if isinstance(value, torch.Generator):
        return partial(set_state, value, get_state(value)), ()
    if isinstance(value, Optimizer) or (objects and _is_plain(value)):
        before = _attributes(value)
        return partial(_restore_attributes, value, before), before.values()
    return None, ()


def _is_plain(value: Any) -> bool:
    """True if a value is a third-party object with attributes, and neither a container nor an optimizer."""
    return (
        (hasattr(value, "__dict__") or hasattr(value, "__slots__"))
        and not isinstance(value, (*OPAQUE, Tensor, nn.Module, Optimizer, dict, list, deque, set, tuple))
        and not type(value).__module__.startswith("gradwatch.")
    )


def _copy(tensor: Tensor) -> Tensor:
    """A copy of a tensor, on the host where its device has no room for one."""
    try:
        return tensor.detach().clone()
    except torch.OutOfMemoryError:
        return tensor.detach().to("cpu", copy=True)


def _random_numbers(optimizer: Optimizer) -> Iterable[Restore]:
    """Functions that restore the generators of an optimizer's devices: a skipped step draws nothing."""
    devices = {param.device.index for param in params_of(optimizer) if param.is_cuda}
    for one in (torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)):
        yield partial(set_state, one, get_state(one))


def _attributes(owner: object) -> dict[str, Any]:
    """Attributes of an object that its own step may change: not torch's hooks and counts."""
    slots = [name for cls in type(owner).__mro__ for name in vars(cls).get("__slots__", ())]
    slotted = {name: getattr(owner, name) for name in slots if name != "__dict__" and hasattr(owner, name)}
    return slotted | {
        name: value
        for name, value in getattr(owner, "__dict__", {}).items()
        if name not in COUNTED_BY_TORCH and not name.startswith("_optimizer_")
    }


def _restore_attributes(owner: object, before: dict[str, Any]) -> None:
    now = _attributes(owner)
    for name in now.keys() - before.keys():
        object.__delattr__(owner, name)
    for name, value in before.items():
        if name not in now or now[name] is not value:
            object.__setattr__(owner, name, value)  # also where its class is frozen


def _restore_dict(one: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key in one.keys() - before.keys():
        del one[key]
    one.update(before)


def _restore_sequence(one: list[Any] | deque[Any], before: list[Any]) -> None:
    if list(map(id, one)) != list(map(id, before)):
        one.clear()
        one.extend(before)


def _restore_set(one: set[Any], before: set[Any]) -> None:
    one &= before
    one |= before
