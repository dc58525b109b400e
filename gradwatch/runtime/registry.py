"""Classes by the name that a rule file gives them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from gradwatch.errors import GradwatchError

C = TypeVar("C")


def _place(entry: object) -> tuple[str, str] | object:
    """Module and name of a class that stands at the top of its module; any other entry is itself."""
    name = getattr(entry, "__qualname__", "")
    return (getattr(entry, "__module__", ""), name) if name.isidentifier() else entry


@functools.lru_cache(maxsize=8)
def _plugins(group: str, installed: tuple[tuple[str, int], ...]) -> dict[str, list[EntryPoint]]:
    """The entry points of a group by name: to read them of all packages takes milliseconds."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, []).append(entry)
    return found


def _installed() -> tuple[tuple[str, int], ...]:
    """Folders that Python looks in, and when each was written to: changed where a package comes or goes."""
    places = []
    for folder in sys.path:
        try:
            places.append((folder, os.stat(folder or ".").st_mtime_ns))
        except OSError:  # a folder that is not there
            continue
    return tuple(places)


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
            for entry in _plugins(self.group, _installed()).get(name, ()):
                register(entry.load())
        return self.get(name)
