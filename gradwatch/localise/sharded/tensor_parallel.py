"""Tensor parallelism (`parallelize_module`): the hooks that divide inputs and join outputs, set aside for one replay.

On whole parameters and whole inputs a module computes what all ranks compute together, but for rounding. Code that
counts on its rank's part of a layer (its heads of an attention) does not: it raises, or gives outputs of other shapes,
or others by far, and the replay is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from gradwatch.localise.sharded.fsdp2 import Hook, replaced

MADE_IN = ("torch.distributed.tensor.",)
"""Packages whose hooks on modules divide and join tensors."""


def parallelised(model: nn.Module) -> bool:
    """True if some module has such hooks."""
    return any(_is_of_parallelism(hook) for module in model.modules() for hook in _hooks(module))


@contextlib.contextmanager
def without_parallelism(model: nn.Module) -> Iterator[None]:
    """Have the hooks of tensor parallelism do nothing."""
    restores: list[Callable[[], None]] = []
    try:
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for number in [number for number, hook in hooks.items() if _is_of_parallelism(hook)]:
                    restores.append(replaced(hooks, number, _nothing))
        yield
    finally:
        for restore in restores:
            restore()


def _hooks(module: nn.Module) -> Iterator[Hook]:
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()


def _is_of_parallelism(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(MADE_IN)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
