"""Classes by the name that a rule file gives them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TypeVar

from gradwatch.errors import GradwatchError

C = TypeVar("C")


def _place(entry: object) -> tuple[str, str] | object:
    """Module and name of a class that stands at the top of its module; any other entry is itself."""
    name = getattr(entry, "__qualname__", "")
    return (getattr(entry, "__module__", ""), name) if name.isidentifier() else entry


class Registry(dict[str, C]):
    """Registered classes, by name; an installed package's entry points of `group` are loaded when asked for.

    `noun` is what a message calls an entry.
    """

    def __init__(self, noun: str, group: str) -> None:
        super().__init__()
        self.noun, self.group = noun, group

    def register(self, name: str, entry: C) -> C:
        """Add `entry`; the same one again is harmless. Raises `GradwatchError` where another one has that name.

        A class of the same module and name takes the place: an import that was interrupted is run anew.
        """
        known = self.setdefault(name, entry)
        if known is not entry:
            if _place(known) != _place(entry):
                raise GradwatchError(f"{self.noun} {name!r} is registered already, by {known!r}")
            self[name] = entry
        return entry

    def find(self, name: str, register: Callable[[C], object]) -> C | None:
        """The entry of that name; entry points are given to `register`. None where there is none."""
        if name not in self:
            for entry in entry_points(group=self.group, name=name):
                register(entry.load())
        return self.get(name)
