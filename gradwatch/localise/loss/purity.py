"""The calls that loss code may make when it is run again: of functions known to change nothing, whoever calls them.

Everything else is refused (`Refused`) before it is called: so whatever the answer, nothing of the user's runs twice but
what is interpreted line by line.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionMeta

from gradwatch.localise.hold.module_attributes import Refused

PLAIN = (
    *(bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, range, slice, type(None)),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, type(...)),
)
"""Types whose operators and methods are Python's or torch's own."""
BUILTINS: frozenset[Any] = frozenset(
    {
        *(
            abs,
            all,
            any,
            bool,
            complex,
            dict,
            divmod,
            enumerate,
            float,
            frozenset,
            int,
            isinstance,
            len,
            list,
        ),
        *(
            max,
            min,
            pow,
            range,
            reversed,
            round,
            set,
            slice,
            sorted,
            str,
            sum,
            tuple,
            type,
            zip,
            repr,
            hasattr,
        ),
    }
)
LISTS_OF_MODULES: frozenset[Any] = frozenset(
    {
        *(nn.Module.parameters, nn.Module.named_parameters, nn.Module.buffers, nn.Module.named_buffers),
        *(nn.Module.modules, nn.Module.named_modules, nn.Module.children, nn.Module.named_children),
    }
)
CONTEXTS: tuple[Any, ...] = (
    torch.autocast,
    torch.amp.autocast_mode.autocast,
    torch.no_grad,
    torch.enable_grad,
    torch.inference_mode,
    contextlib.nullcontext,
)
FORBIDDEN_METHODS = frozenset({"backward", "register_hook", "retain_grad", "numpy", "apply_", "map_"})


def is_context(func: Any) -> bool:
    """True for torch's switches that are entered and left."""
    return any(func is one for one in CONTEXTS)


def writes(name: str) -> bool:
    """True for the name of an operation in place: `clamp_`, not `__add__`."""
    return name.endswith("_") and not name.endswith("__")


def checked_arguments(args: Any, kwargs: Any) -> None:
    """Raise `Refused` where an argument would run code of the user's: a function, a subclass of Tensor, `out=`."""
    if "out" in kwargs:
        raise Refused("loss code writes into `out=`")
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, nn.Parameter):
                raise Refused(f"loss code computes with {type(value).__name__}")
        elif isinstance(value, (FunctionType, MethodType, partial, nn.Module)):
            raise Refused("loss code passes functions on")
        elif not isinstance(value, (*PLAIN, type)) and not is_of_library(type(value)):
            raise Refused(f"loss code computes with {type(value).__name__}")


def is_of_library(kind: type) -> bool:
    """True for a class of torch's or of Python's own."""
    module = str(kind.__module__)
    return module in ("builtins", "collections", "math") or module.split(".")[0] in ("torch", "numpy")


def is_plain(value: Any) -> bool:
    """True where operators and subscripts of a value run no code of the user's."""
    return type(value) in (*PLAIN, Tensor, nn.Parameter) or is_of_library(type(value))


def is_custom_function(func: Any) -> bool:
    """True for `apply` of an `autograd.Function` of the user's."""
    return isinstance(getattr(func, "__self__", None), FunctionMeta) and func.__name__ == "apply"


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
    if type(found).__name__ in (
        "member_descriptor",
        "getset_descriptor",
        "_tuplegetter",
        "method_descriptor",
    ):
        return getattr(value, name)
    raise Refused(f"loss code reads `{name}` of {type(value).__name__}")


def is_of_known_library(func: Any) -> bool:
    """True for functions of libraries that are known to compute and nothing else; numpy's of numbers."""
    if type(func).__name__ == "ufunc" and str(type(func).__module__).startswith("numpy"):
        return True
    return isinstance(func, FunctionType) and func.__module__.startswith(("einops.", "torchvision.ops."))


def switched_by(func: Any) -> Any:
    """Maker of the context of a function under `@torch.no_grad()` and the like; None for any other function."""
    if not isinstance(func, FunctionType) or not hasattr(func, "__wrapped__"):
        return None
    cells = dict(zip(func.__code__.co_freevars, func.__closure__ or (), strict=True))
    made = cells["ctx_factory"].cell_contents if "ctx_factory" in cells else None
    return made if is_context(type(getattr(made, "__self__", None))) else None


def has_source(func: FunctionType) -> bool:
    """True for a function of the user's whose file can be read."""
    return os.path.isfile(func.__code__.co_filename)
