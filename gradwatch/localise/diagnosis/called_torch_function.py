"""The function of torch that the user called: `einsum`, where the operation that overflowed is the `bmm` inside it."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from torch.overrides import TorchFunctionMode

from gradwatch.localise.diagnosis.module_attribution import LEAF
from gradwatch.taps.graph.node_numbers import next_number


class Calls(TorchFunctionMode):
    """Follows the outermost torch function under way while it is entered; "" between them.

    `at` gives it for the node of a sequence number, as `ModuleAttribution` gives the module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = ""
        self._numbers: list[int] = []
        self._names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function; what it calls in turn belongs to it."""
        outermost = not self.now
        if outermost:
            self._note(spelled(func))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            if outermost:
                self._note("")

    def at(self, number: int) -> str:
        """The function under way when the node of that sequence number was made."""
        position = bisect_right(self._numbers, number) - 1
        return self._names[position] if position >= 0 and number < LEAF else ""

    def _note(self, name: str) -> None:
        self.now = name
        number = next_number()
        if not self._numbers or number >= self._numbers[-1]:
            self._numbers.append(number)
            self._names.append(name)


def spelled(func: Any) -> str:
    """Public name of a function: `normalize`, `div` for `__truediv__`, `matmul` for `@`."""
    name = str(getattr(func, "__name__", ""))
    return OPERATORS.get(name, name.strip("_"))


OPERATORS = {
    "__truediv__": "div",
    "__rtruediv__": "div",
    "__itruediv__": "div",
    "__rdiv__": "div",
    "__matmul__": "matmul",
    "__rmatmul__": "matmul",
    "__pow__": "pow",
    "__rpow__": "pow",
    "__get__": "",
    "__set__": "",
}
