"""What torch calls here is run by Python and not compiled by `torch.compile`.

While a compiled function runs what dynamo could not capture (a backward, a step), dynamo listens to every Python frame
of the thread and compiles it, hooks included. It would compile whatever they call too, warn about what it cannot
trace, and fail in some of it. To be told of a code object costs no import of dynamo. What dynamo captures symbolically
is not run at all; a hook that may be captured asks `torch.compiler.is_dynamo_compiling`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Entry = TypeVar("Entry", bound=Callable[..., Any])


def untraced(entry: Entry) -> Entry:
    """Have neither this Python function nor what it calls compiled; returns it. For functions that torch calls.

    In torch < 2.7 only the function itself is spared.
    """
    _told(entry, deep=True)
    return entry


def untraced_itself(entry: Entry) -> Entry:
    """Have only this Python function not compiled; returns it. For wrappers of functions of torch."""
    _told(entry, deep=False)
    return entry


def _told(entry: Callable[..., Any], deep: bool) -> None:
    code = entry.__code__
    dynamo: Any = torch._C._dynamo.eval_frame
    if hasattr(dynamo, "skip_code"):  # torch < 2.7
        dynamo.skip_code(code)
    elif hasattr(dynamo, "set_code_exec_strategy"):
        action = dynamo._FrameAction
        calls = action.SKIP if deep else action.DEFAULT
        dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(action.SKIP, calls))
