"""The calls that loss code may make when it is run again: of functions known to change nothing, whoever calls them.

Everything else is refused (`Refused`) before it is called: so whatever the answer, nothing of the user's runs twice but
what is interpreted line by line.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionMeta

from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.taps.graph.pure_functions import is_of_torch

PLAIN = (
    *(bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, range, slice, type(None)),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, type(...)),
)
"""Types whose operators and methods are Python's or torch's own."""
BOUND = (MethodType, BuiltinFunctionType, MethodWrapperType)
CONTAINERS = (tuple, list, dict, set, frozenset)
MODULE_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
ARITHMETIC: frozenset[Any] = frozenset({abs, complex, divmod, float, int, max, min, pow, round, sum})
OF_ELEMENTS: frozenset[Any] = frozenset({all, any, frozenset, hasattr, repr, set, sorted, str})
STRUCTURAL: frozenset[Any] = frozenset(
    {bool, dict, enumerate, isinstance, len, list, range, reversed, slice, tuple, type, zip}
)
"""Those of Python's functions that touch no element of the containers they are given."""
BUILTINS = ARITHMETIC | OF_ELEMENTS | STRUCTURAL
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
SHARING = ("as_tensor", "asarray", "from_numpy", "frombuffer", "from_dlpack")
"""Functions whose result may share the memory of what they were given, which is no tensor."""
MOST_ELEMENTS = 10_000  # of containers whose elements are looked at, one by one
FORBIDDEN_METHODS = frozenset({"backward", "register_hook", "retain_grad", "numpy", "apply_", "map_"})


def is_context(func: Any) -> bool:
    """True for torch's switches that are entered and left."""
    return any(func is one for one in CONTEXTS)


def writes(name: str) -> bool:
    """True for the name of an operation in place: `clamp_`, not `__add__`."""
    return name.endswith("_") and not name.endswith("__")


def checked_arguments(args: Any, kwargs: Any, deep: bool = True) -> None:
    """Raise `Refused` where an argument would run code of the user's: a function, a subclass of Tensor, `out=`.

    With `deep`, also where an element of one would.
    """
    if "out" in kwargs:
        raise Refused("loss code writes into `out=`")
    values = (*args, *kwargs.values())
    for value in values:
        if isinstance(value, type):
            if not is_of_library(value):
                raise Refused(f"loss code computes with the class {value.__name__}")
        elif isinstance(value, nn.Module):
            raise Refused("loss code passes functions on")
        elif isinstance(value, torch.Generator):
            raise Refused("loss code draws from a generator of the script's")
        else:
            _check_kind(value)
    if deep:
        check_elements(values)


def _check_kind(value: Any) -> None:
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter):
            raise Refused(f"loss code computes with {type(value).__name__}")
    elif isinstance(value, (FunctionType, MethodType, BuiltinFunctionType, partial)):
        if not (is_one_of(value, BUILTINS) or is_of_torch(value)):
            raise Refused("loss code passes functions on")
    else:
        check_plain(value, "computes with")


def check_elements(values: Iterable[Any]) -> None:
    """Raise `Refused` where operators on an element of nested containers would run code of the user's."""
    left = MOST_ELEMENTS
    under_way = [one for one in values if isinstance(one, CONTAINERS)]
    while under_way:
        container = under_way.pop()
        left -= len(container)
        if left < 0:
            raise Refused("loss code computes with a container of many elements")
        elements = (*container, *container.values()) if isinstance(container, dict) else tuple(container)
        for one in elements:
            if isinstance(one, type):
                raise Refused("loss code computes with a class in a container")
            _check_kind(one)
            if isinstance(one, CONTAINERS):
                under_way.append(one)


def check_keys(keys: Iterable[Any]) -> None:
    """Raise `Refused` where the hash of a key would run code of the user's."""
    check_elements((tuple(keys),))


def check_instance_of(args: Any) -> None:
    """Raise `Refused` for an `isinstance` that a class of the user's answers itself."""
    kinds = args[1] if isinstance(args[1], tuple) else (args[1],)
    for kind in kinds:
        if not isinstance(kind, type) or not (type(kind) is type or is_of_library(type(kind))):
            raise Refused("loss code asks a class of the user's what is an instance of it")


def is_of_library(kind: type) -> bool:
    """True for a class of torch's or of Python's own, but for those through which a data set of the user's is read."""
    module = str(kind.__module__)
    if module.startswith("torch.utils.data"):
        return False
    return module in ("builtins", "collections", "math") or module.split(".")[0] in ("torch", "numpy")


def is_plain(value: Any) -> bool:
    """True where operators and subscripts of a value run no code of the user's."""
    return type(value) in (*PLAIN, Tensor, nn.Parameter) or is_of_library(type(value))


def check_plain(value: Any, does: str) -> None:
    """Raise `Refused` for any other value, saying what loss code does to it."""
    if not is_plain(value):
        raise Refused(f"loss code {does} {type(value).__name__}")


def is_one_of(func: Any, functions: Iterable[Any]) -> bool:
    """True if it is the very one: a set would ask the hash of an object of the user's."""
    return any(func is one for one in functions)


def bound_to(func: Any) -> Any:
    """The object that a method was looked up on; None for all else, which is not asked."""
    return func.__self__ if isinstance(func, BOUND) else None


def is_custom_function(func: Any) -> bool:
    """True for `apply` of an `autograd.Function` of the user's."""
    return isinstance(bound_to(func), FunctionMeta) and func.__name__ == "apply"


def only_computes(func: Any) -> bool:
    """True for functions of Python's, of torch's and of other libraries that are known to do nothing else."""
    return is_one_of(func, BUILTINS) or is_of_torch(func) or is_of_known_library(func)


def function_of_user(func: Any) -> tuple[FunctionType, tuple[Any, ...]] | None:
    """The function that a call runs, and what it is given first; None where that is not the user's."""
    if isinstance(func, FunctionType):
        return func, ()
    if isinstance(func, MethodType):
        if not isinstance(func.__func__, FunctionType) or is_of_library(type(func.__self__)):
            return None
        return func.__func__, (func.__self__,)
    called = None if isinstance(func, type) or is_of_library(type(func)) else vars(type(func)).get("__call__")
    return (called, (func,)) if isinstance(called, FunctionType) else None


def name_of(func: Any) -> str:
    """Name of what is called, which is not asked if it is an object of the user's."""
    named = isinstance(func, (FunctionType, *BOUND, type))
    return str(func.__qualname__) if named else type(func).__name__


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


def check_writes(func: Any, args: Any, kwargs: Any) -> None:
    """Raise `Refused` for functions that write into an argument without saying so by their name."""
    name = getattr(func, "__name__", "")
    if not isinstance(func, FunctionType):
        if "batch_norm" in name or "instance_norm" in name:
            raise Refused(f"loss code calls `{name}`")
        return
    try:
        given = inspect.signature(func).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return  # torch raises what it raises
    if given.get("running_mean") is not None or given.get("max_norm") is not None:
        raise Refused(f"loss code calls `{name}`, which writes into its arguments")


def check_module(module: nn.Module, stands_in: bool) -> None:
    """Raise `Refused` where a call of a module that was not recorded would do more than compute.

    `stands_in`: copies of its buffers stand in for them.
    """
    for part in module.modules():
        kind = type(part).__name__
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            raise Refused(f"loss code calls a {kind} with a hook")
        if getattr(part, "inplace", False) or getattr(part, "max_norm", None) is not None:
            raise Refused(f"loss code calls a {kind} that writes into its arguments")
        if not stands_in and not type(part).__module__.startswith("torch.nn.modules"):
            raise Refused(f"loss code calls a {kind} within another module")
        if not stands_in and part.training and getattr(part, "running_mean", None) is not None:
            raise Refused(f"loss code calls a {kind}, whose running statistics would move")


def is_in_place(func: Any, args: Any, kwargs: Any) -> bool:
    """True where a function writes into its first argument: `clamp_(x)`, `relu(x, True)`."""
    if writes(getattr(func, "__name__", "")) or kwargs.get("inplace"):
        return True
    if not isinstance(func, FunctionType):
        return False
    names = func.__code__.co_varnames[: func.__code__.co_argcount]
    return "inplace" in names[: len(args)] and bool(args[names.index("inplace")])
