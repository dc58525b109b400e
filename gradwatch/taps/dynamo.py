"""Hooks run by Python, not compiled by `torch.compile`.

While a compiled function runs what dynamo could not capture (a backward, a step), dynamo listens to every Python frame
of the thread and compiles it, hooks included. It would compile whatever they call too, warn about what it cannot
trace, and fail in some of it. To be told of a code object costs no import of dynamo. What dynamo captures symbolically
is not run at all; a hook that may be captured asks `torch.compiler.is_dynamo_compiling`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

Entry = TypeVar("Entry", bound=Callable[..., Any])


def untraced(entry: Entry) -> Entry:
    """Have neither this Python function nor what it calls compiled; returns it. For functions that torch calls.

    In torch < 2.7 only the function itself is spared.
    """
    _skip_code(entry, deep=True)
    return entry


def untraced_itself(entry: Entry) -> Entry:
    """Have only this Python function not compiled; returns it. For wrappers of functions of torch."""
    _skip_code(entry, deep=False)
    return entry


def _skip_code(entry: Callable[..., Any], deep: bool) -> None:
    code = entry.__code__
    dynamo: Any = torch._C._dynamo.eval_frame
    if hasattr(dynamo, "skip_code"):  # torch < 2.7
        dynamo.skip_code(code)
    elif hasattr(dynamo, "set_code_exec_strategy"):
        action = dynamo._FrameAction
        calls = action.SKIP if deep else action.DEFAULT
        dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(action.SKIP, calls))


def imported() -> bool:
    """True where something of this process may be compiled: dynamo is imported by the first use."""
    return "torch._dynamo" in sys.modules


def anything_compiled() -> bool:
    """True if torch.compile has compiled anything in this process."""
    # Without `counters` another thread is just importing dynamo, as every first optimizer does.
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    # With `fullgraph=True` dynamo counts graphs and no frames.
    return counters is not None and bool(counters.get("frames") or counters.get("stats"))


def compiles(module: nn.Module) -> bool:
    """True if this module, as it is called, runs compiled: the calls of its parts are not seen."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
