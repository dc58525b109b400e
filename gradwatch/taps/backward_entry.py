"""Every call of autograd's engine from Python, noticed just before it runs: `Tensor.backward`, `torch.autograd.grad`.

torch has hooks inside a backward and none at its entry. Both entry points look `run_backward` up on one engine
object (`Variable._execution_engine`) and call what they get. The object is replaced by one of a subclass on which that
lookup is a property: listeners run during the lookup, and the call itself goes to torch's own method, so that no frame
of gradwatch stands in the traceback of a backward that raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch._C import _ImperativeEngine as ImperativeEngine
from torch.autograd import Variable

from gradwatch.runtime import guard
from gradwatch.taps import dispatch_modes
from gradwatch.taps.dynamo import untraced
from gradwatch.taps.patch import Layer, Patch

_ENTRY: CodeType = torch.autograd.graph._engine_run_backward.__code__
"""Of torch's function in which every backward from Python runs; its first argument is what it begins at."""
_OUTSIDE = -1  # torch's number of "no graph task"
_graph_task: Callable[[], int] = torch._C._current_graph_task_id
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


Listener = Callable[[BackwardCall], None]


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
            if not listeners:
                return _run_backward(self)
            call = _call_of(sys._getframe(1))
            aside = (
                dispatch_modes.Aside() if dispatch_modes.dispatching() or dispatch_modes.functions() else None
            )
            try:
                for listener in listeners:
                    listener(call)
                # One may have begun to watch: this is its first backward.
                if layer.listeners is not listeners:
                    for listener in layer.listeners:
                        if listener not in listeners:
                            listener(call)
            finally:
                if aside is not None:
                    aside.put_back()
            return _run_backward(self)
        except Exception as error:
            guard.fault("capture", error)
        return _run_backward(self)


_engine = Patch(Variable, "_execution_engine", _Engine)


def listen(about_to_run: Listener) -> Callable[[], None]:
    """Call `about_to_run` before every call of the engine; the returned call ends that. It must not raise.

    Not noticed: engines started from C++ (TorchScript's, an extension's).
    """
    return _engine.listen(about_to_run)


def entry_frame() -> FrameType | None:
    """The frame of torch's Python function that started the backward running on this thread; None where none did.

    That is so on the threads of a device, and where C++ called the engine.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _ENTRY:
        frame = frame.f_back
    return frame


def _call_of(frame: Any) -> BackwardCall:
    """The call that torch's `_engine_run_backward` is about to make, by its arguments."""
    found = frame.f_locals
    args, named = found.get("args", ()), found.get("kwargs", {})
    return BackwardCall(
        found.get("t_outputs", ()),
        args[0] if args else (),
        args[3] if len(args) > 3 else (),
        bool(named.get("accumulate_grad", False)),
        _graph_task() != _OUTSIDE,
    )
