"""A model run once more without a trace: what the run changes is put back, also when it raises.

The run works on stand-ins: parameters that share the memory of the real ones but have no hooks and no `.grad`
of their own, and copies of the buffers. So DDP's reducer, the user's tensor hooks and our own marks hear
nothing, and `.grad` and the buffers need no putting back. What does: the generators, the anomaly flags, and
what the forward sets on its modules (`self.calls += 1`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.hooks.silence import silent
from gradwatch.localise.randomness import Generators

CONTAINERS = (list, dict, set)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run what is inside, then put back generators, anomaly flags, grad mode and module attributes."""
    restores: list[Callable[[], None]] = [
        Generators.now().restore,
        _anomaly(),
        _grad_mode(),
        *map(_attributes, model.modules()),
    ]
    with contextlib.ExitStack() as stack:
        for restore in restores:  # every one of them runs, whatever another raises
            stack.callback(restore)
        stack.enter_context(silent())
        yield


def stand_ins(model: nn.Module, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters and buffers by name, for `torch.func.functional_call`; tied parameters stay tied."""
    made: dict[int, Tensor] = {}
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) not in made:
            made[id(param)] = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
        found[name] = made[id(param)]
    copies: dict[int, Tensor] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if id(buffer) not in copies:
            copies[id(buffer)] = buffers.get(name, buffer).detach().clone()
        found[name] = copies[id(buffer)]
    return found


def _anomaly() -> Callable[[], None]:
    enabled, checks = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    return lambda: torch.set_anomaly_enabled(enabled, checks)


def _grad_mode() -> Callable[[], None]:
    graded = torch.is_grad_enabled()

    def restore() -> None:
        torch.set_grad_enabled(graded)

    return restore


def _attributes(module: nn.Module) -> Callable[[], None]:
    """What a forward may set on a module: attributes, and the contents of plain containers among them."""
    held = dict(module.__dict__)
    # torch's own registries (`_parameters`, `_forward_hooks`, …) are put back by those who change them.
    contents = {
        name: value.copy()
        for name, value in held.items()
        if type(value) in CONTAINERS and name not in _REGISTRIES
    }

    def restore() -> None:
        now = module.__dict__
        for name in [name for name in now if name not in held]:
            del now[name]
        now.update(held)
        for name, content in contents.items():
            _refill(held[name], content)

    return restore


def _refill(container: Any, content: Any) -> None:
    if len(container) == len(content) and _same(container, content):
        return
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def _same(one: Any, other: Any) -> bool:
    """By identity of the items: comparing tensors would compare their numbers."""
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return all(a is c and b is d for (a, b), (c, d) in pairs)
    if isinstance(one, set):
        return bool(one == other)
    return all(a is b for a, b in zip(one, other, strict=True))


_REGISTRIES = frozenset(nn.Module().__dict__)
