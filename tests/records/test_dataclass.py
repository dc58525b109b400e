"""The decorator of all dataclasses makes what the standard library's makes, and compiles nothing before it is used."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, field
from itertools import product
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

import pytest

import gradwatch
from gradwatch.records.dataclass import dataclass

PACKAGE = Path(gradwatch.__file__).parent
OPTIONS = [
    dict(zip(("frozen", "eq", "repr", "slots"), given, strict=True))
    for given in product((False, True), repeat=4)
]
OF_THE_LIBRARY = {  # `order`, and `init=False`
    *("records/dataclass.py", "journal/reader.py"),
    *("localise/replay/closure_replay.py", "localise/replay/reproduction.py"),
}
BY_USE: dict[str, Callable[[Any], Any]] = {
    "make": lambda cls: dataclasses.astuple(cls(1.0)),
    "make with all": lambda cls: dataclasses.astuple(cls(1.0, 3.0, ("a",), name="q", weight=2)),
    "make with too few": lambda cls: cls(y=2.0),
    "make with too many": lambda cls: cls(1.0, z=2.0),
    "show": lambda cls: repr(cls(1.0)) if "__repr__" in vars(cls) else None,
    "equal": lambda cls: (cls(1.0) == cls(1.0), cls(1.0, name="q") == cls(1.0), cls(2.0) == cls(1.0)),
    "not comparable": lambda cls: cls(1.0).__eq__(1.0),
    "same NaN": lambda cls: cls(float("nan")) == cls(float("nan")),
    "hash": lambda cls: {cls(1.0, tags=()): 1}.get(cls(1.0, tags=(), name="q")),
    "hash of less": lambda cls: (
        cls.__eq__ is object.__eq__ or hash(cls(1.0, 2.0, ())) == hash(cls(1.0, 2.0, (), "q", 2))
    ),
    "hash a list": lambda cls: hash(cls(1.0, tags=[])) and None,
    "assign": lambda cls: setattr(cls(1.0), "x", 2.0),
    "delete": lambda cls: delattr(cls(1.0), "x"),
    "replace": lambda cls: dataclasses.astuple(dataclasses.replace(cls(1.0), y=3.0)),
    "copy": lambda cls: dataclasses.astuple(copy.deepcopy(copy.copy(cls(1.0)))),
    "a list for each": lambda cls: cls(1.0).tags is cls(1.0).tags,
    "a dictionary": lambda cls: hasattr(cls(1.0), "__dict__"),
    "describe": lambda cls: (cls.__match_args__, cls.__doc__, cls.kind, cls.__qualname__),
    "parameters": lambda cls: str(inspect.signature(cls)),
    "annotations": lambda cls: cls.__init__.__annotations__,
    "inherit": lambda cls: dataclasses.dataclass(frozen=True)(type("Child", (cls,), {})),
    "subclass": lambda cls: setattr(type("Child", (cls,), {})(1.0), "x", 1),
}


def point(decorator: Callable[..., Any], options: dict[str, bool]) -> Any:
    """A class with every kind of field that ours have."""

    @decorator(**options)
    class Point:
        """A place."""

        kind: ClassVar[str] = "point"
        x: float
        y: float = 2.0
        tags: Any = field(default_factory=list)
        name: str = field(default="p", compare=False, repr=False)
        weight: int = field(default=1, hash=False)
        was_made: Any = None

        def __post_init__(self) -> None:
            object.__setattr__(self, "was_made", self.x)

    return Point


def outcome(use: Callable[[Any], Any], cls: Any) -> Any:
    """What a use of the class returns, or its error."""
    try:
        found = use(cls)
    except Exception as error:
        return type(error), str(error)
    return "a class" if isinstance(found, type) else found


@dataclass(frozen=True, slots=True)
class Sent:
    """Sent to another process."""

    value: float
    tags: tuple[str, ...] = ()


@pytest.mark.parametrize("use", BY_USE)
def test_uses_are_those_of_the_standard_library(use: str) -> None:
    """With every combination of the options each use of a class gives the same, errors included."""
    for options in OPTIONS:
        ours, stock = point(dataclass, options), point(dataclasses.dataclass, options)
        assert outcome(BY_USE[use], ours) == outcome(BY_USE[use], stock), options


def test_what_is_frozen_can_be_pickled() -> None:
    """Processes of a DataLoader and of ranks are sent records."""
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(Sent(1.0, ("a",)), protocol)) == Sent(1.0, ("a",))


def test_methods_are_compiled_when_they_are_needed() -> None:
    """A class that was never used has no `__init__` yet; looking at its signature makes one."""
    unused = point(dataclass, {"frozen": True, "slots": True})
    assert not isinstance(vars(unused)["__init__"], FunctionType)
    unused(1.0)
    assert isinstance(vars(unused)["__init__"], FunctionType)


def test_fields_that_are_no_parameters_are_refused() -> None:
    """`init=False` and keywords only are for the standard library's decorator: an error says so at import."""

    class Later:
        """It gets its field later."""

        x: int = field(init=False)

    with pytest.raises(TypeError, match=r"take dataclasses\.dataclass"):
        dataclass(slots=True)(Later)


def test_a_subclass_may_have_attributes_of_its_own() -> None:
    """One that is no dataclass, of a frozen class with slots: there the standard library's fails with a TypeError."""
    child = type("Child", (point(dataclass, {"frozen": True, "slots": True}),), {})(1.0)
    child.more = 1
    assert child.more == 1


def test_all_of_ours_are_made_by_it() -> None:
    """The standard library's decorator is imported by those only that need more than ours can do."""
    importers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"^from dataclasses import .*\bdataclass\b", path.read_text(encoding="utf-8"), re.M)
    }
    assert importers | {"records/dataclass.py"} == OF_THE_LIBRARY


def test_parameters_are_the_fields() -> None:
    """Of every dataclass of a watch: in their order, with their defaults."""
    importlib.import_module("gradwatch.session.attach")
    ours = [
        cls
        for name, module in list(sys.modules.items())
        if name.startswith("gradwatch.")
        for cls in vars(module).values()
        if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == name
    ]
    assert len(ours) > 100
    for cls in ours:
        defaults = {one.name: one.default for one in dataclasses.fields(cls) if one.init}
        found = inspect.signature(cls).parameters
        assert [*found] == [*defaults], cls
        assert all(
            found[name].default is given for name, given in defaults.items() if given is not MISSING
        ), cls
