"""torch.jit.script of a model that has hooks of ours: it compiles every hook it finds, and ours are not for compiling.

While any exist, the function that collects a module's hooks for TorchScript is given a module without them. TorchScript
keeps the hooks of modules it has compiled for as long as the process lives, as part of their type.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import nn

try:
    import torch.jit._recursive as recursive
except ImportError:  # a torch without TorchScript has nothing to hide from
    recursive = None  # type: ignore[assignment]

COLLECTS = "get_hook_stubs"
HOOKS = ("_forward_hooks", "_forward_pre_hooks")

_hidden: weakref.WeakSet[Any] = weakref.WeakSet()
_wrapped: list[tuple[Any, Any]] = []  # (original, wrapper) while there is anything to hide


def hide(hook: Any) -> None:
    """TorchScript is not to see this module hook for as long as it lives. No effect where torch collects otherwise."""
    _hidden.add(hook)
    weakref.finalize(hook, _put_back).atexit = False
    original = getattr(recursive, COLLECTS, None)
    if _wrapped or original is None:
        return

    @functools.wraps(original)
    def collected(module: nn.Module) -> Any:
        return original(_without(module))

    _wrapped.append((original, collected))
    setattr(recursive, COLLECTS, collected)


def _without(module: nn.Module) -> nn.Module:
    """The module, or where it has hooks that are hidden one that has the others only."""
    found = {name: list(vars(module).get(name, {}).values()) for name in HOOKS}
    if not any(hook in _hidden for hooks in found.values() for hook in hooks):
        return module
    bare = nn.Module()
    for name, hooks in found.items():
        vars(bare)[name].update(enumerate(hook for hook in hooks if hook not in _hidden))
    return bare


def _put_back() -> None:
    if any(True for _ in _hidden):  # its length may still count the one that has just gone
        return
    while _wrapped:
        original, collected = _wrapped.pop()
        if getattr(recursive, COLLECTS) is collected:  # else somebody wrapped it again since
            setattr(recursive, COLLECTS, original)
