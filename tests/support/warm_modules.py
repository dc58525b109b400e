"""gradwatch's modules made beforehand: a warm script that imports one is given it as its body left it, in no time.

A module is still found on the script's own path, in the order in which it is imported, and stands in `sys.modules` no
earlier than in a fresh process; only its body is not run again. Each is given once: what a process has used it does not
get again when it starts over.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

WATCHED = (
    "gradwatch.cli.run",
    "gradwatch.launch.auto_watch",
    "gradwatch.launch.os_exit",
    "gradwatch.session.watch_function",
    "gradwatch.session.session",
    "gradwatch.sinks.journal",
    "gradwatch.sinks.log",
    "gradwatch.sinks.prometheus.sink",
    "gradwatch.endpoint.http_server",
    "gradwatch.journal.process_account",
    "gradwatch.rules.files.load",
)
"""With all that they import: what a script that is watched comes to."""


class MadeModules(MetaPathFinder):
    """Finds the modules of one start of a script among those that were made for it."""

    def __init__(self) -> None:
        with _noted() as imports:
            for name in WATCHED:
                importlib.import_module(name)
        sys.modules["gradwatch.rules.files.load"].load_rules(
            "default"
        )  # read once: it takes as long as the rest
        self._made = {name: sys.modules.pop(name) for name in [*sys.modules] if _ours(name)}
        self._imports: Mapping[str, Sequence[str]] = imports
        for (
            name,
            module,
        ) in self._made.items():  # else `from package import module` finds it without an import
            package, _, attribute = name.rpartition(".")
            if vars(self._made.get(package, module)).get(attribute) is module:
                delattr(self._made[package], attribute)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module as it is found on `path`, to be loaded from what was made; None of any other."""
        module = self._made.get(name)
        spec = None if module is None else PathFinder.find_spec(name, path, target)
        if spec is None or module is None or module.__spec__ is None or spec.origin != module.__spec__.origin:
            return None
        spec.loader = _Made(self._made.pop(name), self._imports.get(name, ()), spec.loader)
        return spec


class _Made(Loader):
    def __init__(self, module: ModuleType, imports: Sequence[str], reader: Any) -> None:
        self._module, self._imports, self._reader = module, imports, reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)  # files of the package, its source for a traceback

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        for name in self._imports:
            importlib.import_module(name)


def _ours(name: str) -> bool:
    return name.partition(".")[0] == "gradwatch"


@contextmanager
def _noted() -> Iterator[dict[str, list[str]]]:
    """What each module of gradwatch imports of gradwatch while its body runs, in order."""
    found: dict[str, list[str]] = {}
    plain = builtins.__import__

    def noting(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        module = plain(name, globals, locals, fromlist, level)
        if globals is not None and _ours(name) and _ours(str(globals.get("__name__"))):
            names = [name, *(f"{name}.{each}" for each in fromlist or ())]
            found.setdefault(globals["__name__"], []).extend(one for one in names if one in sys.modules)
        return module

    builtins.__import__ = noting
    try:
        yield found
    finally:
        builtins.__import__ = plain
