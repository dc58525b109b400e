"""`dataclass` as the standard library has it, in a fifth of the time that it takes there.

That compiles five methods for each class when it is imported: 0.6 ms, and 130 classes were half of what the start of
`gradwatch run` takes. Here `__init__` is compiled when it is first looked up, and no other method is compiled at all.
Nothing else differs (`tests/records/test_dataclass.py`). A class that inherits from a dataclass, or has one of these
methods itself, is left to the standard library; for `order`, `init=False` and `kw_only` import its decorator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING
from operator import attrgetter
from reprlib import recursive_repr
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

T = TypeVar("T")
Fields = tuple[dataclasses.Field[Any], ...]

_METHODS = ("init", "repr", "eq", "hash", "setattr", "delattr", "getstate", "setstate")
_GENERATED = "<string>"
"""The file of generated code, as the standard library names it."""


class _Factory:
    """The default of a parameter whose field has a `default_factory`."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen: bool = False, eq: bool = True, repr: bool = True, slots: bool = False) -> Any:
        """`dataclasses.dataclass` with these options."""

        def made(cls: type[T]) -> type[T]:
            own = any(f"__{name}__" in vars(cls) for name in _METHODS)
            if own or any(map(dataclasses.is_dataclass, cls.__mro__[1:])):
                return dataclasses.dataclass(frozen=frozen, eq=eq, repr=repr, slots=slots)(cls)
            bare = dataclasses.dataclass(init=False, eq=False, repr=False, slots=slots)(cls)
            return _completed(bare, frozen, eq, repr, slots)

        return made


def _completed(cls: Any, frozen: bool, eq: bool, repr: bool, slots: bool) -> Any:
    """The class with the methods that its options ask for."""
    fields = dataclasses.fields(cls)
    if any(field.kw_only or not field.init for field in fields):
        raise TypeError(f"{cls.__qualname__} has init=False or kw_only: take dataclasses.dataclass")
    cls.__init__ = _Initializer(cls, fields, frozen)
    if repr:
        cls.__repr__ = _repr
    if eq:
        _compare(cls, fields, frozen)
    if frozen:
        _freeze(cls, frozenset(field.name for field in fields))
        if slots:
            cls.__getstate__, cls.__setstate__ = _getstate, _setstate
    params = cls.__dataclass_params__  # what inherits from the class asks whether it is frozen
    params.init, params.repr, params.eq, params.frozen = True, repr, eq, frozen
    return cls


class _Initializer:
    """The `__init__` of a class until it is looked up: then a function takes its place."""

    def __init__(self, cls: Any, fields: Fields, frozen: bool) -> None:
        self._of = cls, fields, frozen

    def __get__(self, instance: object, owner: type) -> Any:
        function = _init(*self._of)
        self._of[0].__init__ = function
        return function.__get__(instance, owner)


def _init(cls: Any, fields: Fields, frozen: bool) -> FunctionType:
    """The function that sets all fields; compiled, but no source text is run.

    Python dies of the Ctrl-C that has ended a script only if it has run no source text since.
    """
    names: dict[str, Any] = {"_set": object.__setattr__, "_FACTORY": _FACTORY}
    lines: list[str] = []
    defaults: list[Any] = []
    for field in fields:
        value = field.name
        if field.default_factory is not MISSING:
            names[f"_make_{field.name}"] = field.default_factory
            value = f"_make_{field.name}() if {field.name} is _FACTORY else {field.name}"
            defaults.append(_FACTORY)
        elif field.default is not MISSING:
            defaults.append(field.default)
        lines.append(f"_set(self, {field.name!r}, {value})" if frozen else f"self.{field.name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    parameters = ", ".join(["self", *(field.name for field in fields)])
    text = f"def __init__({parameters}):\n  " + "\n  ".join(lines or ["pass"])
    constants = compile(text, _GENERATED, "exec").co_consts
    code = next(one for one in constants if isinstance(one, CodeType))
    function = FunctionType(code, names, "__init__", tuple(defaults))
    function.__qualname__ = f"{cls.__qualname__}.__init__"
    function.__annotations__ = {**{field.name: field.type for field in fields}, "return": None}
    return function


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (field.name for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


def _compare(cls: Any, fields: Fields, frozen: bool) -> None:
    compared = _values([field.name for field in fields if field.compare])
    hashed = _values(
        [field.name for field in fields if (field.compare if field.hash is None else field.hash)]
    )

    def equal(self: object, other: object) -> bool:
        return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

    def hash_value(self: object) -> int:
        return hash(hashed(self))

    cls.__eq__, cls.__hash__ = equal, hash_value if frozen else None


def _values(names: list[str]) -> Callable[[object], tuple[Any, ...]]:
    """The tuple of an object's attributes: of tuples, what is the same object is equal (a NaN is)."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda given: tuple(getattr(given, name) for name in names)


def _freeze(cls: Any, names: frozenset[str]) -> None:
    def assign(self: object, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            _refuse("assign to", name)
        super(cls, self).__setattr__(name, value)

    def delete(self: object, name: str) -> None:
        if type(self) is cls or name in names:
            _refuse("delete", name)
        super(cls, self).__delattr__(name)

    cls.__setattr__, cls.__delattr__ = assign, delete


def _refuse(what: str, name: str) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot {what} field {name!r}")


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _setstate(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=False):
        object.__setattr__(self, field.name, value)
