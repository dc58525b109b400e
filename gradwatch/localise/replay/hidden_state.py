"""State that a forward reads and that no replay restores: variables of Python's that it changes, clocks, the system.

Looked for while a call is run again: what changes then has changed in training too, so that the second run began from
another state than the first. Nothing of the user's is called for it. What a forward only
reads is looked for in the source of what may have written it.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import itertools
import operator
import os
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from gradwatch.localise.diagnosis.python_frames import NOT_OF_USER
from gradwatch.localise.held_calls.module_attributes import IMMUTABLE, REGISTRIES
from gradwatch.localise.held_calls.random_generators import OWN
from gradwatch.records.finding import LIBRARIES

DEPTH = 5
LONGEST = 1000  # items of a container that are looked at
MOST = 100_000  # objects
MOST_BYTES = 16 << 20  # of arrays
OUTSIDE = frozenset(
    {"posix", "nt", "time", "datetime", "io", "_io", "_socket", "select", "mmap", "_posixsubprocess"}
)
"""Modules of Python's whose functions give what the system does, or the clock."""

ENVIRONMENT = frozenset(
    one.__code__
    for one in (os.getenv, type(os.environ).__getitem__, Mapping.get)
    if isinstance(one, FunctionType)
)


def state_of(models: Iterable[nn.Module]) -> dict[str, Any]:
    """Variables that the code of the models can reach and change, by name, as values that can be compared."""
    found: dict[str, Any] = {}
    compared = _Comparable()
    modules = [(name, module) for model in models for name, module in model.named_modules()]
    for path, module in modules:
        for name, value in list(module.__dict__.items()):
            if name not in REGISTRIES:
                found[f"{path}.{name}".lstrip(".")] = compared.of(value)
    for names in _files(type(module) for _, module in modules):
        file = names.get("__name__", "")
        for name, value in list(names.items()):
            if not name.startswith("__"):
                found[f"{file}.{name}"] = compared.of(value)
    return found


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first name whose value is another; "" where there is none."""
    names = itertools.chain(before, (name for name in now if name not in before))
    return next((name for name in names if before.get(name) != now.get(name)), "")


def _files(kinds: Iterable[type]) -> list[Mapping[str, Any]]:
    """The globals of the files of the user's that classes, and what those files use, are written in."""
    found: dict[int, Mapping[str, Any]] = {}
    waiting = [base for kind in set(kinds) for base in kind.__mro__]
    waiting_for: deque[Any] = deque(waiting)
    while waiting_for:
        for function in _functions(waiting_for.popleft()):
            names = function.__globals__
            if id(names) not in found and _is_of_user(function.__code__):
                found[id(names)] = names
                waiting_for.extend(
                    one for one in list(names.values()) if isinstance(one, (type, FunctionType, ModuleType))
                )
    return list(found.values())


def _functions(of: Any) -> Iterator[FunctionType]:
    if isinstance(of, FunctionType):
        yield of
    else:
        for one in list(vars(of).values()):
            function = getattr(one, "__func__", one) if isinstance(one, (staticmethod, classmethod)) else one
            if isinstance(function, FunctionType):
                yield function


def _is_of_user(code: CodeType) -> bool:
    file = code.co_filename
    return not file.startswith((*NOT_OF_USER, "<frozen")) and not any(part in file for part in LIBRARIES)


class _Comparable:
    """Values as what can be compared with what they are later; beyond so many, and so many bytes, by identity only."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._bytes = 0

    def of(self, value: Any, depth: int = DEPTH) -> Any:
        """Equal for as long as nothing in it changes."""
        kind = type(value)
        if kind in IMMUTABLE:
            return kind, repr(value)
        if not depth or id(value) in self._seen or isinstance(value, OWN) or len(self._seen) > MOST:
            return id(value)
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            return id(value), value._version
        if isinstance(value, np.ndarray):
            self._bytes += value.nbytes
            return id(value), value.tobytes() if self._bytes <= MOST_BYTES else None
        if kind in (list, tuple, set, frozenset, dict, deque):
            return kind, len(value), self._items(value, depth - 1)
        return id(value), self._object(value, depth - 1)

    def _items(self, value: Any, depth: int) -> Any:
        if len(value) > LONGEST:
            return None
        pairs = list(value.items()) if type(value) is dict else [(None, one) for one in list(value)]
        return [(self.of(key, depth), self.of(one, depth)) for key, one in pairs]

    def _object(self, value: Any, depth: int) -> Any:
        if isinstance(value, itertools.count):
            return repr(value)
        if isinstance(value, GeneratorType):
            frame = value.gi_frame
            return None if frame is None else (frame.f_lasti, frame.f_lineno)
        if type(value).__module__ == "builtins" and type(value).__name__.endswith("iterator"):
            return operator.length_hint(value)
        if isinstance(value, FunctionType):
            return self._function(value, depth)
        if isinstance(value, (nn.Module, ModuleType, BuiltinFunctionType)):
            return None  # modules are looked at for themselves
        if isinstance(value, type) and value.__module__ in ("builtins", "typing"):
            return None
        return self._attributes(value, depth)

    def _function(self, value: FunctionType, depth: int) -> Any:
        return [self.of(one, depth) for one in (*_closed_over(value), value.__defaults__, value.__dict__)]

    def _attributes(self, value: Any, depth: int) -> Any:
        """Attributes of an object or class of the user's that are not code."""
        try:
            held = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return None
        plain = {name: one for name, one in list(held.items()) if isinstance(name, str)}
        kept = {name: one for name, one in plain.items() if not name.startswith("__")}
        return [
            (name, self.of(one, depth)) for name, one in kept.items() if not isinstance(one, FunctionType)
        ]


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty one
            yield cell.cell_contents


def written_beside(
    models: Iterable[nn.Module], codes: Collection[CodeType], caller: tuple[CodeType, int] | None
) -> str:
    """An attribute or a global that a forward reads, and that other code of the user's writes; "" where there is none.

    `codes` are the functions that ran in the forward, and `caller` the line that called it. What the loop's function
    writes counts from that line on to where it is now; so do weights that it reaches by `.data`.
    """
    modules = [module for model in models for module in model.modules()]
    read = {name for code in codes if _is_of_user(code) for name in _names(code, LOADS)}
    own = {name for one in modules for name in (*one._modules, *one._parameters, *one._buffers)}
    frames = list(_frames_of_user())
    files = [*_files(map(type, modules)), *(frame.f_globals for frame in frames)]
    since = {
        frame.f_code: (caller[1], frame.f_lineno) for frame in frames if caller and frame.f_code is caller[0]
    }
    others = {code for names in files for code in _codes_of(names)} - {*codes, *since}
    for code in others:
        if code.co_name != "__init__":
            for name in _names(code, STORES):
                if name in read and name not in own:
                    return f"{code.co_name} writes `{name}`, which the forward reads"
    for code, lines in since.items():
        for name in _names(code, STORES | {"STORE_NAME"}, lines):
            if name in read and name not in own:
                return f"{code.co_name} writes `{name}`, which the forward reads"
        if "data" in _names(code, LOADS | STORES, lines):
            return f"{code.co_name} uses `.data`, by which weights are changed unseen"
    return ""


LOADS = frozenset({"LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD"})
STORES = frozenset({"STORE_GLOBAL", "STORE_ATTR"})


def _frames_of_user() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_of_user(frame.f_code):
            yield frame
        frame = frame.f_back


def _codes_of(names: Mapping[str, Any]) -> Iterator[CodeType]:
    """Functions and methods of a file, and those in them."""
    for value in list(names.values()):
        if isinstance(value, (type, FunctionType)):
            for function in _functions(value):
                if _is_of_user(function.__code__):
                    yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _names(
    code: CodeType, operations: Collection[str], lines: tuple[int, int] = (0, sys.maxsize)
) -> set[str]:
    """Names that these operations of a function load or store, on lines from the first to the last."""
    meant = [range(begin, end) for begin, end, line in code.co_lines() if lines[0] <= (line or 0) <= lines[1]]
    return {
        str(one.argval)
        for one in dis.get_instructions(code)
        if one.opname in operations and any(one.offset in offsets for offsets in meant)
    }


class SystemCalls:
    """Call that this thread first makes of the system, or of a clock, while this is entered, and its line.

    `codes` are the functions of Python's that ran. `known` False: another profiler was there, and nothing was looked
    at. No garbage is collected meanwhile: what that calls (finalizers, `gc.callbacks`) is no part of the forward.
    """

    def __init__(self) -> None:
        self.first = ""
        self.known = False
        self.codes: set[CodeType] = set()
        self._collects = False

    def __enter__(self) -> SystemCalls:
        self.known = sys.getprofile() is None
        if self.known:
            self._collects = gc.isenabled()
            gc.disable()
            sys.setprofile(self._called)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.known:
            sys.setprofile(None)
            if self._collects:
                gc.enable()

    def _called(self, frame: FrameType, event: str, of: Any) -> None:
        if self.first or frame.f_code.co_filename.startswith(NOT_OF_USER):
            return
        if event == "call":
            self.codes.add(frame.f_code)
            if frame.f_code in ENVIRONMENT:
                self.first = "reads the environment"
        if event != "c_call":
            return
        owner = getattr(of, "__self__", None)
        kind = owner if isinstance(owner, type) else type(owner)
        module = of.__module__ or kind.__module__
        if module in OUTSIDE or of.__name__ == "seed":
            self.first = f"calls {of.__name__} at {frame.f_code.co_filename}:{frame.f_lineno}"
