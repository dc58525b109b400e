"""Calls in loss code: made where they only compute, interpreted where the function is the user's, else refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradwatch.localise.diagnosis.tensor_values import tensors
from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.loss.interpreter import purity
from gradwatch.localise.loss.interpreter.custom_functions import check_custom_function
from gradwatch.localise.loss.interpreter.own_graph import check_graph, newest_node
from gradwatch.localise.loss.interpreter.own_memory import OwnMemory

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
ModuleCall: TypeAlias = Callable[[nn.Module, Callable[[], Arguments]], Any]
Interpret: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
READS = frozenset({"get", "items", "keys", "values", "index", "count", "copy"})
"""Methods of containers that change nothing."""
COMPARES = frozenset({"sort", "index", "count", "remove"})
"""Methods of containers that ask their elements."""


class Calls:
    """Makes calls; `interpret` is given the functions of the user's, `module_call` the modules (see `Interpreter`)."""

    def __init__(self, memory: OwnMemory, module_call: ModuleCall, interpret: Interpret) -> None:
        self.begun = newest_node()
        self._memory = memory
        self._module_call = module_call
        self._interpret = interpret

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call. Raises `Refused`, before it is made, where it may do more than compute."""
        if isinstance(func, partial):
            return self.call(func.func, (*func.args, *args), {**func.keywords, **kwargs})
        if isinstance(func, nn.Module):
            return self.module(func, lambda: (args, kwargs))
        if purity.is_context(func):
            return func(*args, **kwargs)
        owner = purity.bound_to(func)
        if isinstance(owner, Tensor):
            return self._method_of_tensor(func, owner, args, kwargs)
        if purity.is_custom_function(func):
            return self._custom_function(func, owner, args, kwargs)
        if purity.only_computes(func):
            return self._computed(func, args, kwargs)
        if isinstance(func, MethodType) and purity.is_one_of(func.__func__, purity.LISTS_OF_MODULES):
            return self._memory.add_container(list(func(*args, **kwargs)))
        users = purity.function_of_user(func)
        if users is not None:
            function, first = users
            return self._interpret(function, (*first, *args), kwargs)
        return self._of_library(func, owner, args, kwargs)

    def module(self, module: nn.Module, arguments: Callable[[], Arguments]) -> Any:
        """The result of the call of a module, whose arguments are evaluated where they are needed."""
        given = functools.lru_cache(maxsize=1)(arguments)
        result = self._module_call(module, given)
        if result is NotImplemented:
            args, kwargs = given()
            return self._interpret(type(module).forward, (module, *args), kwargs)
        if given.cache_info().currsize:
            return self._memory.add_result(result, given())
        # Made with the arguments that were recorded, of which no gradient is asked: without one it may be one of them.
        self._memory.add_result([one for one in tensors(result) if one.grad_fn is not None], ())
        return result

    def _method_of_tensor(self, func: Any, owner: Tensor, args: Any, kwargs: Any) -> Any:
        name = func.__name__
        if name in purity.FORBIDDEN_METHODS or type(owner) not in (Tensor, nn.Parameter):
            raise Refused(f"loss code calls `{name}` of a tensor")
        purity.checked_arguments(args, kwargs)
        if name == "requires_grad_" and owner.requires_grad is _flag(*args, **kwargs):
            return owner  # it is so since the loop itself said it
        if (purity.writes(name) or name == "__setitem__") and not self._memory.writable(owner):
            return owner
        return self._noted(func(*args, **kwargs), (owner, args, kwargs))

    def _custom_function(self, func: Any, owner: Any, args: Any, kwargs: Any) -> Any:
        check_custom_function(owner)
        purity.checked_arguments(args, kwargs)
        return self._memory.add_result(func(*args, **kwargs), (args, kwargs))

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function of Python's, torch's or of another library that is known to compute and nothing else."""
        if func is isinstance:
            purity.check_instance_of(args)
            return isinstance(*args)
        purity.checked_arguments(args, kwargs, deep=not purity.is_one_of(func, purity.STRUCTURAL))
        purity.check_writes(func, args, kwargs)
        self._memory.check_iterators((*args, *kwargs.values()))
        if func is torch.autograd.grad:
            self._memory.check_hooks(tensors((args, kwargs)))
            check_graph(tensors((args[:1], kwargs.get("outputs"))), self.begun)
        self._memory.check_in_place(func, args, kwargs)
        result = func(*args, **kwargs)
        if func in (max, min) or getattr(func, "__name__", "") in purity.SHARING:
            return result
        return self._noted(result, (args, kwargs))

    def _of_library(self, func: Any, owner: Any, args: Any, kwargs: Any) -> Any:
        """A method of a string or a container, of one of torch's distributions, of a scaler."""
        name = getattr(func, "__name__", "") if purity.is_plain(func) else ""
        kind = type(owner)
        purity.checked_arguments(args, kwargs)
        if name in COMPARES:
            purity.check_elements((owner,))
        if kind in (str, bytes, tuple, int, float, complex) or (kind in (dict, list, set) and name in READS):
            return func(*args, **kwargs)
        if kind in (dict, list, set):
            if self._memory.has(owner):
                return func(*args, **kwargs)
            self._memory.leave_out(owner)
            return None
        if str(kind.__module__).startswith("torch.distributions") or (
            kind.__name__ == "GradScaler" and name == "scale"
        ):
            return self._memory.add_result(func(*args, **kwargs), (args, kwargs))
        raise Refused(f"loss code calls {purity.name_of(func)}")

    def _noted(self, result: Any, given: Any) -> Any:
        return self._memory.add_container(self._memory.add_result(result, given))


def _flag(requires_grad: object = True) -> object:
    """The argument of `requires_grad_`."""
    return requires_grad
