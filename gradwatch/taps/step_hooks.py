"""torch's global optimizer-step hooks, registered once and shared by everything here that listens.

torch iterates over its hook dict while the hooks run, so a hook that registers or removes another one (a
launcher that attaches at the first step, a rule that closes the watch) would break the user's step. Listeners
may come and go at any time; torch's own dict is touched only outside a step: where the last one has left inside a
step, before the next backward outside one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sized
from functools import partial
from threading import get_ident
from types import CodeType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradwatch.runtime import guard
from gradwatch.taps import backward_entry, closure_calls, dispatch_modes
from gradwatch.taps.dispatch_modes import dispatching, functions
from gradwatch.taps.hook_ids import own_ids
from gradwatch.taps.optimizers.wrapped_optimizers import with_inner
from gradwatch.taps.process_totals import TOTALS, open_steps, step_begins, step_ends

Before = Callable[[Optimizer, Any, Any], Any]
"""Called with (optimizer, args, kwargs) before every `optimizer.step()` of the process.

It returns None, or (args, kwargs) that replace those of the call. What it raises reaches the user's step.
"""
After = Callable[[Optimizer], None]
"""Called when a step has returned normally."""

# Each with what it waits for: it is called only where that is not empty.
_befores: list[tuple[Before, Sized]] = []
_afters: list[tuple[After, Sized]] = []
_ALWAYS = (None,)
_handles: list[RemovableHandle] = []
_later: list[Callable[[], None]] = []  # ends what waits for the next backward
_tracing = torch.compiler.is_dynamo_compiling
_listening: Callable[[], object]
try:
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    _listening = get_eval_frame_callback
except ImportError:  # then it cannot be known, and the shield is always up
    _listening = object


def listen(
    before: Before | None = None, after: After | None = None, only_if: Sized = _ALWAYS
) -> Callable[[], None]:
    """Call these around every step; the returned call ends that (and the last one out removes torch's hooks).

    They are called only where `only_if` is not empty, which is looked at without a Python call.
    """
    befores = [] if before is None else [(before, only_if)]
    afters = [] if after is None else [(after, only_if)]
    _befores.extend(befores)
    _afters.extend(afters)
    if not _handles:
        with own_ids:
            _handles.append(register_optimizer_step_pre_hook(_before))
            _handles.append(register_optimizer_step_post_hook(_after))

    def remove() -> None:
        while befores:
            _befores.remove(befores.pop())
        while afters:
            _afters.remove(afters.pop())
        _tidy()

    return remove


def installed() -> int:
    """Number of torch's global step hooks that gradwatch has registered now."""
    return len(_handles)


def begun() -> int:
    """Number of steps of any optimizer that have begun, those inside another one included."""
    return TOTALS.steps + TOTALS.nested


def _tidy() -> None:
    """Take torch's hooks away where no listener is left, now or later."""
    if _befores or _afters or not _handles:
        return
    if not _stepping():
        for handle in _handles:
            handle.remove()
        _handles.clear()
    elif not _later:
        _later.append(backward_entry.listen(_about_to_run))


def _about_to_run(call: backward_entry.BackwardCall) -> None:
    if not _stepping():
        _later.pop()()
        _tidy()


# torch wraps every optimizer's `step` in what this function defines; that wrapper runs the hooks.
_WRAPPER = next(code for code in Optimizer.profile_hook_step.__code__.co_consts if isinstance(code, CodeType))


def _stepping() -> bool:
    """True if this thread is inside some `optimizer.step()`, and so perhaps inside torch's hook dicts."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # By name: a compiled step runs copies and continuations of that wrapper.
        if code.co_filename == _WRAPPER.co_filename and _WRAPPER.co_name in code.co_name:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def steps_under_way(optimizer: Optimizer) -> int:
    """Number of calls of this optimizer's `step` on this thread's stack; 0 where a compiled one hides them."""
    found, frame = 0, sys._getframe(1)
    while frame is not None:
        # torch's wrapper keeps the optimizer in its local `self`.
        if frame.f_code is _WRAPPER and frame.f_locals.get("self") is optimizer:
            found += 1
        frame = frame.f_back  # type: ignore[assignment]
    return found


def under_way() -> int:
    """The calls of `step` on this thread's stack; compiled steps hide theirs."""
    found, frame = 0, sys._getframe(1)
    while frame is not None:
        found += frame.f_code is _WRAPPER and isinstance(frame.f_locals.get("self"), Optimizer)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _part_of(optimizer: Optimizer) -> list[bool]:
    """True, for each step on this thread's stack around this optimizer's, the innermost first, if this is part of it.

    Empty where compiled steps hide them.
    """
    # Each with whether a closure that it was given has called what is inside it.
    found: list[tuple[Optimizer, bool]] = []
    frame, codes = sys._getframe(1), set[CodeType]()
    while frame is not None:
        if frame.f_code is _WRAPPER:  # torch's wrapper keeps the optimizer in its local `self`
            outer = frame.f_locals.get("self")
            if isinstance(outer, Optimizer):
                found.append((outer, _closure_code(frame.f_locals) in codes))
            codes = set()
        codes.add(frame.f_code)
        frame = frame.f_back  # type: ignore[assignment]
    own = [by_closure for _, by_closure in found[1:]]
    # What a closure steps is a step of its own, whatever is stepped around it.
    return [
        not any(own[: place + 1]) and _belongs(optimizer, outer) for place, (outer, _) in enumerate(found[1:])
    ]


def _closure_code(called: Mapping[str, Any]) -> CodeType | None:
    """The code of the closure in a call of torch's wrapper, by the locals of that; None where there is none."""
    args, kwargs = called.get("args", ()), called.get("kwargs", {})
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure_calls.code_of(closure)


def _belongs(optimizer: Optimizer, outer: Optimizer) -> bool:
    """True if a step of `outer` is made of this optimizer's."""
    if optimizer is outer:
        return True
    groups, outers = getattr(optimizer, "param_groups", ()), getattr(outer, "param_groups", ())
    mine = {id(param) for group in groups for param in group["params"]}
    shared = any(id(param) in mine for group in outers for param in group["params"])
    return shared or any(inner is optimizer for inner in with_inner(outer))


def _before(optimizer: Optimizer, args: Any, kwargs: Any, shielded: bool = False) -> Any:
    try:
        changed = None
        if not shielded and (_tracing() or _listening() is not None):
            return _shielded_before(optimizer, args, kwargs, True)
        step_begins(optimizer, partial(_part_of, optimizer))
        aside = dispatch_modes.Aside() if dispatching() or functions() else None
        try:
            # Not over a copy: a launcher's listener may add the watch that must see this very step.
            for listener, only_if in _befores:
                if only_if:
                    result = listener(optimizer, args, kwargs)
                    if result is not None:
                        args, kwargs = changed = result
        finally:
            if aside is not None:
                aside.put_back()
        return changed
    except Exception as error:
        guard.fault("boundary", error)
        return None


def _after(optimizer: Optimizer, args: Any, kwargs: Any, shielded: bool = False) -> None:
    try:
        if not shielded and (_tracing() or _listening() is not None):
            _shielded_after(optimizer, args, kwargs, True)
            return
        calls = open_steps.get(get_ident())
        if calls and calls[-1][1] == id(optimizer):  # almost always
            calls.pop()
        else:
            step_ends(optimizer)
        aside = dispatch_modes.Aside() if dispatching() or functions() else None
        try:
            for listener, only_if in tuple(_afters):
                if only_if:
                    listener(optimizer)
        finally:
            if aside is not None:
                aside.put_back()
    except Exception as error:
        guard.fault("boundary", error)


# Under a compiled `optimizer.step` the hooks are run and not traced. torch's own wrapper costs more than a cold hook
# can afford, and so would one of gradwatch's: it is used only while dynamo traces, or listens.
_shield: Callable[..., Any] = torch._disable_dynamo  # type: ignore[attr-defined]
_shielded_before, _shielded_after = _shield(_before), _shield(_after)
