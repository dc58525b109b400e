"""Classes by the name that a rule file gives them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TypeVar

from gradwatch.errors import GradwatchError

C = TypeVar("C")


class Registry(dict[str, C]):
    """Registered classes, by name; an installed package's entry points of `group` are loaded when asked for.

    `noun` is what a message calls an entry.
    """

    def __init__(self, noun: str, group: str) -> None:
        super().__init__()
        self.noun, self.group = noun, group

    def register(self, name: str, entry: C) -> C:
        """Add `entry`; the same one again is harmless. Raises `GradwatchError` where another one has that name."""
        if self.setdefault(name, entry) is not entry:
            raise GradwatchError(f"{self.noun} {name!r} is registered already, by {self[name]!r}")
        return entry

    def find(self, name: str, register: Callable[[C], object]) -> C | None:
        """The entry of that name; entry points are given to `register`. None where there is none."""
        if name not in self:
            for entry in entry_points(group=self.group, name=name):
                register(entry.load())
        return self.get(name)
