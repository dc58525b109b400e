"""Attributes and items that loss code reads, where looking them up runs no code of the user's."""

from __future__ import annotations

import inspect
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.loss.interpreter.purity import MODULE_LISTS, check_keys, check_plain, is_of_library

DESCRIPTORS = frozenset({"member_descriptor", "getset_descriptor", "_tuplegetter", "method_descriptor"})
"""Python's own."""


def attribute(value: Any, name: str) -> Any:
    """`value.name`, where looking it up runs no code of the user's; a property is given as the property itself."""
    if isinstance(value, ModuleType):
        if name in vars(value):
            return vars(value)[name]
        if value.__name__.split(".")[0] == "torch":
            return getattr(value, name)
        raise Refused(f"loss code reads `{name}` of a module")
    if isinstance(value, nn.Module):
        for held in (value.__dict__, value._parameters, value._buffers, value._modules):
            if name in held:
                return held[name]
    elif type(value) in (Tensor, nn.Parameter) or is_of_library(type(value)):
        if isinstance(value, type) and not is_of_library(value):
            return _static(value, name)
        return getattr(value, name)
    return _static(value, name)


def _static(value: Any, name: str) -> Any:
    if isinstance(inspect.getattr_static(type(value), "__getattribute__"), FunctionType):
        raise Refused(f"loss code reads `{name}` of {type(value).__name__}")
    try:
        found = inspect.getattr_static(value, name)
    except AttributeError:
        raise Refused(f"loss code reads `{name}` of {type(value).__name__}") from None
    if isinstance(found, property):
        return found
    if isinstance(found, (FunctionType, staticmethod, classmethod, BuiltinFunctionType)):
        return getattr(value, name)
    if hasattr(type(found), "__get__") and not isinstance(found, type):
        return _slot(value, name, found)
    return found


def _slot(value: Any, name: str, found: Any) -> Any:
    """Value that a descriptor gives, if it is one of Python's own."""
    if type(found).__name__ in DESCRIPTORS:
        return getattr(value, name)
    raise Refused(f"loss code reads `{name}` of {type(value).__name__}")


def item(owner: Any, place: Any) -> Any:
    """`owner[place]`, where looking it up runs no code of the user's."""
    check_keys((place,))
    kind = type(owner)
    if isinstance(owner, MODULE_LISTS):
        if kind not in MODULE_LISTS:
            raise Refused(f"loss code indexes {kind.__name__}")
    elif isinstance(owner, (dict, list, tuple)):
        looked_up = inspect.getattr_static(kind, "__getitem__")
        if isinstance(looked_up, FunctionType) or (isinstance(owner, dict) and place not in owner):
            raise Refused(f"loss code indexes {kind.__name__}")
    else:
        check_plain(owner, "indexes")
    return owner[place]
