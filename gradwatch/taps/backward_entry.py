"""Every call of autograd's engine from Python, noticed just before it runs: `Tensor.backward`, `torch.autograd.grad`.

torch has hooks inside a backward and none at its entry. Both entry points look `run_backward` up on one engine
object (`Variable._execution_engine`) and call what they get. The object is replaced by one of a subclass on which that
lookup is a property: listeners run during the lookup, and the call itself goes to torch's own method, so that no frame
of gradwatch stands in the traceback of a backward that raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence, Sized
from functools import partial
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch._C import _ImperativeEngine as ImperativeEngine
from torch.autograd import Variable

from gradwatch.runtime import guard
from gradwatch.taps import dispatch_modes
from gradwatch.taps.dispatch_modes import dispatching, functions
from gradwatch.taps.dynamo import untraced
from gradwatch.taps.patch import Layer, Patch
from gradwatch.taps.process_totals import TOTALS

_ENTRY: CodeType = torch.autograd.graph._engine_run_backward.__code__
"""Of torch's function in which every backward from Python runs; its first argument is what it begins at."""
_OUTSIDE = -1  # torch's number of "no graph task"
_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_tracing = torch.compiler.is_dynamo_compiling
_frame = sys._getframe
# Bound, as a lookup gives it.
_run_backward: Callable[[ImperativeEngine], Any] = ImperativeEngine.run_backward.__get__


class BackwardCall(NamedTuple):
    """One call of the autograd engine.

    `roots` are the tensors (or gradient edges) it starts from and `grad_roots` the gradients handed in for them, None
    where torch takes ones. `accumulates` is True for `backward`, which adds to `.grad`, and False for
    `torch.autograd.grad`. `nested` is True inside another backward, as reentrant checkpointing does. `inputs` are the
    tensors that `backward(inputs=…)` was limited to, empty for all leaves.
    """

    roots: Sequence[Any]
    grad_roots: Sequence[Any]
    inputs: Sequence[Any]
    accumulates: bool
    nested: bool


# Without the Python function that makes a named tuple: caches are cold here.
_called: Callable[[tuple[Any, ...]], BackwardCall] = partial(tuple.__new__, BackwardCall)
Listener = tuple[Callable[[BackwardCall], None], tuple[Sized, ...]]
"""What is called, and the containers of which one must not be empty for that."""
_ALWAYS = ((None,),)
_NEVER = ()


class _Engine(ImperativeEngine):
    """torch's engine with a `run_backward` that is noticed when it is looked up."""

    __slots__ = ("layer",)

    def __init__(self, layer: Layer[Listener]) -> None:
        self.layer = layer

    @property
    @untraced
    def run_backward(self) -> Any:
        """torch's own method, after the listeners were called."""
        try:
            layer = self.layer
            listeners = layer.listeners
            if not listeners or _tracing():
                return _run_backward(self)
            # Of torch's `_engine_run_backward`: what the method is about to be given.
            found = _frame(1).f_locals
            args = found.get("args", ())
            accumulates = bool(found.get("kwargs", {}).get("accumulate_grad", False))
            nested = _graph_task() != _OUTSIDE
            weights, inputs = args[0] if args else (), args[3] if len(args) > 3 else ()
            call = _called((found.get("t_outputs", ()), weights, inputs, accumulates, nested))
            aside = dispatch_modes.Aside() if dispatching() or functions() else None
            try:
                for listener, only_if in listeners:
                    if any(only_if):
                        listener(call)
                if layer.listeners is not listeners:
                    _call_new(layer.listeners, listeners, call)
            finally:
                if aside is not None:
                    aside.put_back()
                # After the listeners: it counts for those that begin to watch with it, not for those that end.
                if not nested:
                    TOTALS.backwards += accumulates
                    TOTALS.grad_calls += not accumulates
            return _run_backward(self)
        except Exception as error:
            guard.fault("capture", error)
        return _run_backward(self)


_engine = Patch(Variable, "_execution_engine", _Engine)


def listen(about_to_run: Callable[[BackwardCall], None], *only_if: Sized) -> Callable[[], None]:
    """Call `about_to_run` before every call of the engine; the returned call ends that. It must not raise.

    With `only_if` only where one of these containers is not empty, which is looked at without a Python call. Not
    noticed: engines started from C++ (TorchScript's, an extension's), and what dynamo traces.
    """
    return _engine.listen((about_to_run, only_if or _ALWAYS))


def count_backwards() -> Callable[[], None]:
    """Count every call of the engine that is not inside another one, in `TOTALS`; the returned call ends that.

    Each is counted once, however many listen.
    """
    return _engine.listen((_nothing, _NEVER))


def _nothing(_: BackwardCall) -> None:
    """No-op: never called."""


def _call_new(now: Sequence[Listener], before: Sequence[Listener], call: BackwardCall) -> None:
    """One of the listeners has begun to watch: this is the first backward of those that it has added."""
    for listener, only_if in now:
        if (listener, only_if) not in before and any(only_if):
            listener(call)


def _not_known() -> bool:
    return False


begun_here: Callable[[], bool] = (
    partial(torch._C._is_key_in_tls, "context") if hasattr(torch._C, "_remove_obj_from_tls") else _not_known
)
"""True where torch's Python function has certainly started the backward running on this thread.

That function keeps something under this name for as long as it runs, and a nested one takes it away: only `entry_frame`
can say that it has not. Earlier versions of torch (< 2.13) never took it away.
"""


def entry_frame() -> FrameType | None:
    """The frame of torch's Python function that started the backward running on this thread; None where none did.

    That is so on the threads of a device, and where C++ called the engine.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _ENTRY:
        frame = frame.f_back
    return frame
