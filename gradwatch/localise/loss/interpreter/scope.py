"""The names that a function under way can see, and those of a call of one."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.records.finding import Frame


class Scope:
    """The names of one function under way, and those of its module; `outer` are the lines that called it."""

    def __init__(
        self,
        file: str,
        function: str,
        values: dict[str, Any],
        around: Mapping[str, Any],
        outer: tuple[Frame, ...] = (),
    ) -> None:
        self.file, self.function, self.values, self.around, self.outer = file, function, values, around, outer

    def get(self, name: str) -> Any:
        """The value of a name. Raises Refused where it has none."""
        for names in (self.values, self.around, vars(builtins)):
            if name in names:
                return names[name]
        raise Refused(f"`{name}` has no value any more")

    def inner(self) -> Scope:
        """Make the scope of a comprehension: what it assigns is seen in it only."""
        return Scope(self.file, self.function, dict(self.values), self.around, self.outer)


def scope_of_call(
    func: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], outer: tuple[Frame, ...]
) -> Scope:
    """The names of a function that is called with these arguments. Raises Refused where it does not take them."""
    try:
        bound = inspect.signature(func, follow_wrapped=False).bind(*args, **kwargs)
    except TypeError as error:
        raise Refused(f"{func.__qualname__} takes other arguments: {error}") from None
    bound.apply_defaults()
    enclosed = _enclosed(func)
    around = {**func.__globals__, **enclosed} if enclosed else func.__globals__
    return Scope(func.__code__.co_filename, func.__code__.co_name, dict(bound.arguments), around, outer)


def _enclosed(func: FunctionType) -> dict[str, Any]:
    """Names of the function that it was defined in, as far as they have a value."""
    found = {}
    for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # an empty cell
            continue
    return found
