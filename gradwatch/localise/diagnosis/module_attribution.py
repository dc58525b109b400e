"""Attribution of a line of the forward to a module: now, or when an autograd node was made.

Every node carries a number that grows in the order of the forward (`Node._sequence_nr`), so it is enough to
write down at which number which module began and ended. Global module hooks, in place only while something is
replayed or recorded.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gradwatch.capture.parameter_names import named_modules
from gradwatch.runtime import guard
from gradwatch.taps.graph.node_numbers import next_number
from gradwatch.taps.hook_ids import own_ids

LEAF = 2**63  # AccumulateGrad is numbered beyond every operation


def _kind(module: nn.Module) -> str:
    """Class of a module, as the user wrote it: `fully_shard` makes an `FSDPNet` of a `Net`, and FSDP1 wraps it."""
    module = getattr(module, "_fsdp_wrapped_module", module)
    bases = type(module).__bases__
    return (
        bases[1].__name__ if bases[0].__name__ == "FSDPModule" and len(bases) > 1 else type(module).__name__
    )


class ModuleAttribution:
    """A context manager that follows the calls of modules in this thread; FQNs as `named_modules`.

    In others those of the named ones only: a device's thread runs a checkpoint of theirs again.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._names: dict[int, tuple[str, str]] = {}
        for name, module in named_modules(list(models)):
            kind = _kind(module)
            self._names.setdefault(id(module), (kind if name == type(module).__name__ else name, kind))
        self._stack: list[tuple[str, str]] = []
        self._numbers: list[int] = []
        self._modules: list[tuple[str, str]] = []
        self._handles: list[Any] = []
        self._last: dict[int, Any] = {}
        self._thread = 0

    def __enter__(self) -> ModuleAttribution:
        self._thread = threading.get_ident()
        # One by one: an exception between the two must leave the first to be removed.
        with own_ids:
            self._handles.append(register_module_forward_pre_hook(self._enters))
            self._handles.append(register_module_forward_hook(self._ran, always_call=True))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in (*self._handles, *self._last.values()):
            handle.remove()
        self._handles.clear()
        self._last.clear()

    @property
    def now(self) -> tuple[str, str]:
        """(FQN, class) of the innermost module under way; ("", "") outside all of them."""
        return self._stack[-1] if self._stack else ("", "")

    def at(self, number: int) -> tuple[str, str]:
        """The same for when the node of that sequence number was made."""
        position = bisect_right(self._numbers, number) - 1
        return self._modules[position] if position >= 0 and number < LEAF else ("", "")

    def _enters(self, module: nn.Module, args: Any) -> None:
        try:
            if self._is_foreign(module):
                return
            # A module that is not registered belongs to the one that called it.
            self._stack.append(self._names.get(id(module), self.now))
            self._note()
            if module._forward_hooks:
                # What the user's forward hooks compute belongs to the module too, and the global hook runs before them.
                with own_ids:
                    self._last[id(module)] = module.register_forward_hook(self._leaves, always_call=True)
        except Exception as error:
            guard.fault("localise", error)

    def _ran(self, module: nn.Module, args: Any, output: Any) -> None:
        try:
            if id(module) not in self._last and not self._is_foreign(module):
                self._leaves(module, args, output)
        except Exception as error:
            guard.fault("localise", error)

    def _leaves(self, module: nn.Module, args: Any, output: Any) -> None:
        try:
            last = self._last.pop(id(module), None)
            if last is not None:
                last.remove()
            if self._stack:
                self._stack.pop()
            self._note()
        except Exception as error:
            guard.fault("localise", error)

    def _is_foreign(self, module: nn.Module) -> bool:
        """True for what another thread of the script computes: torch calls a global hook in all of them."""
        return threading.get_ident() != self._thread and id(module) not in self._names

    def _note(self) -> None:
        number = next_number()
        if self._numbers and number < self._numbers[-1]:
            return  # another thread's count: a checkpoint run again inside a device's backward
        self._numbers.append(number)
        self._modules.append(self.now)
