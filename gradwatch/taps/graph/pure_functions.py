"""Functions of torch, and of `math`, that only compute: recognised by where they are defined."""

from __future__ import annotations

import math
import os
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

FOLDER = os.path.dirname(torch.__file__) + os.sep
NAMESPACES = (
    *("torch", "torch.nn.functional", "torch.functional", "torch.linalg", "torch.special", "torch.fft"),
    *("torch._tensor", "torch._jit_internal", "torch.nn.utils.rnn", "torch.nn._reduction"),
)
"""Modules of torch's functions in Python that only compute."""
NEVER = (
    "set_",
    "manual_seed",
    "use_deterministic",
    "seed",
    "save",
    "load",
    "compile",
    "from_file",
    "share_memory",
    "initial_seed",
)
_OWNERS = tuple(
    owner
    for owner in (
        getattr(torch._C, "_VariableFunctionsClass", None),
        *(
            getattr(torch._C, name, None)
            for name in ("_nn", "_linalg", "_special", "_fft", "_VariableFunctions")
        ),
    )
    if owner is not None
)


def is_of_torch(func: Any) -> bool:
    """True for a function or class that torch's own files define, among those which only compute.

    Names that end in `_` write into their argument; that is left to the caller.
    """
    if isinstance(func, BuiltinFunctionType):
        owner = getattr(func, "__self__", None)
        if owner is math or getattr(func, "__module__", "") == "math":
            return True
        name = func.__name__
        if name.startswith(NEVER):
            return False
        return any(owner is one for one in _OWNERS) or getattr(torch, name, None) is func
    if isinstance(func, FunctionType):
        if not func.__code__.co_filename.startswith(FOLDER) or func.__name__.startswith(NEVER):
            return False
        return func.__module__ in NAMESPACES or func is torch.autograd.grad or _of_distributions(func)
    return isinstance(func, type) and _of_distributions(func)


def _of_distributions(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("torch.distributions")
