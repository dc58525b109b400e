"""The loss scale: the one place where a GradScaler is noticed, so that norms are free of its factor.

A GradScaler multiplies the loss before backward and divides the gradients again later: in `unscale_` (called by
the loop, or by `scaler.step`), which bumps no version, or, for a fused optimizer, inside the optimizer itself.
So what was read before carries the scale, and loses it at the very moment the gradients do. That moment is
told here, per optimizer; a loop may scale one loss and not the other, or use several scalers.

A step whose gradients overflowed is rejected by the scaler, most often without calling the optimizer: that is
told here too, since no hook of the optimizer ever runs for it.

`GradScaler._unscale_grads_`, `.step` and `.update` are wrapped once, on the class and on every subclass that has
its own (FSDP's ShardedGradScaler).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from gradwatch.reading.async_copy import Number, start_copy
from gradwatch.runtime import guard
from gradwatch.taps import dispatch_modes, step_hooks
from gradwatch.taps.dynamo import untraced, untraced_itself
from gradwatch.taps.patch import Layer, Patch
from gradwatch.taps.process_totals import step_rejected


class ScalerListener(Protocol):
    """Listener for what a GradScaler does to the gradients of an optimizer."""

    def unscaled(self, optimizer: Optimizer, scale: Tensor) -> None:
        """Called when the gradients are about to be divided by the 0-dim `scale`, in place."""

    def rejected(self, optimizer: Optimizer) -> None:
        """`scaler.step` found an overflow and did not call `optimizer.step`. What it raises reaches the user."""

    def abandoned(self, found: Mapping[int, Tensor | None]) -> None:
        """`scaler.update` with gradients unscaled but no `scaler.step`: found_inf by `id(optimizer)`."""


_listeners: list[ScalerListener] = []
_patched: dict[tuple[type[GradScaler], str], Callable[[], None]] = {}  # what restores each method
_scale_listeners: list[Callable[[Tensor], None]] = []
_inside: set[tuple[str, int]] = set()
"""Calls under way, by method and `id(optimizer)`: a subclass's method may call the one it replaces."""
_carried: dict[int, tuple[Tensor, Tensor | None]] = {}
"""Inside `scaler.step` of a fused optimizer whose gradients still carry the scale: that, and the user's own divisor."""


def listen(listener: ScalerListener) -> Callable[[], None]:
    """Add a listener; the returned call removes it. The last one out puts every scaler class back as found."""
    _listeners.append(listener)
    _wrap_with_subclasses(GradScaler)

    def remove() -> None:
        if listener in _listeners:
            _listeners.remove(listener)
        if not _listeners:
            while _patched:
                _patched.popitem()[1]()

    return remove


def listen_scale(called: Callable[[Tensor], None]) -> Callable[[], None]:
    """Call `called` with the 0-dim scale whenever a GradScaler has scaled a loss; the returned call ends that.

    Needs a listener too, whose coming and going wraps the scaler classes. `called` must not raise.
    """
    _scale_listeners.append(called)
    _wrap_with_subclasses(GradScaler)

    def remove() -> None:
        if called in _scale_listeners:
            _scale_listeners.remove(called)

    return remove


def _wrap_with_subclasses(kind: type[GradScaler]) -> None:
    for name in (*_BEFORE, "scale") if _scale_listeners else _BEFORE:  # `scale` only where it is asked for
        if name in kind.__dict__ and (kind, name) not in _patched:
            _patched[kind, name] = Patch(kind, name, functools.partial(_make, name)).listen(None)
    for subclass in kind.__subclasses__():
        _wrap_with_subclasses(subclass)


def _make(name: str, layer: Layer[None]) -> Callable[..., Any]:
    original = layer.original
    before, after = _BEFORE.get(name), _AFTER.get(name)

    @functools.wraps(original)
    @untraced_itself
    def wrapped(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        try:
            call = _entered(name, scaler, args, kwargs) if layer.listeners else None
        except Exception as error:
            call = None
            guard.fault("precision", error)
        try:
            _notify(before, scaler, call)
            result = original(scaler, *args, **kwargs)
        finally:
            _left(call)
        _notify(after, scaler, call)
        return result

    return wrapped


class _Call:
    """A call of one of the wrapped methods; `argument` is its first: an optimizer, but for `scale` and `update`."""

    __slots__ = ("argument", "begun", "key")

    def __init__(self, name: str, argument: Any) -> None:
        self.argument = argument
        self.key = name, id(argument)
        self.begun = step_hooks.begun()


@untraced
def _entered(name: str, scaler: GradScaler, args: Any, kwargs: Any) -> _Call | None:
    """The call that begins; None where the scaler is off, or where it is the method that a wrapped one replaces."""
    call = _Call(name, args[0] if args else next(iter(kwargs.values()), None))
    if call.key in _inside or not scaler.is_enabled():
        return None
    _inside.add(call.key)
    return call


@untraced
def _notify(
    about: Callable[[GradScaler, _Call], None] | None, scaler: GradScaler, call: _Call | None
) -> None:
    try:
        if about is not None and call is not None:
            dispatch_modes.unseen(about, scaler, call)
    except Exception as error:
        guard.fault("precision", error)


@untraced
def _left(call: _Call | None) -> None:
    if call is not None:
        _inside.discard(call.key)
        if call.key[0] == "step":
            _carried.pop(call.key[1], None)


def _before_unscale(scaler: GradScaler, call: _Call) -> None:
    optimizer, scale = call.argument, scaler._scale
    # Inside `scaler.step` a fused optimizer is only checked for Inf, with a factor of 1.
    only_checked = ("step", id(optimizer)) in _inside and supports_scaling(optimizer)
    if scale is not None and not only_checked:
        for listener in tuple(_listeners):
            listener.unscaled(optimizer, scale)


def _before_step(scaler: GradScaler, call: _Call) -> None:
    _wrap_with_subclasses(GradScaler)  # one that was imported after the watch began
    optimizer = call.argument
    if supports_scaling(optimizer) and scaler._scale is not None and not _is_unscaled(scaler, optimizer):
        _carried[id(optimizer)] = scaler._scale, getattr(optimizer, "grad_scale", None)


def _after_step(scaler: GradScaler, call: _Call) -> None:
    # One that never ran torch's own constructor fires no hooks: then nothing follows from silence.
    if step_hooks.begun() == call.begun and announces_steps(call.argument):
        step_rejected(call.argument)
        for listener in tuple(_listeners):
            listener.rejected(call.argument)


def _before_update(scaler: GradScaler, call: _Call) -> None:
    for listener in tuple(_listeners):
        listener.abandoned(_unscaled_only(scaler))


def _after_scale(scaler: GradScaler, call: _Call) -> None:
    if scaler._scale is not None:
        for called in tuple(_scale_listeners):
            called(scaler._scale)


_BEFORE: dict[str, Callable[[GradScaler, _Call], None]] = {
    "_unscale_grads_": _before_unscale,
    "step": _before_step,
    "update": _before_update,
}
_AFTER: dict[str, Callable[[GradScaler, _Call], None]] = {"step": _after_step, "scale": _after_scale}


def _unscaled_only(scaler: GradScaler) -> dict[int, Tensor | None]:
    """found_inf of the optimizers whose gradients were unscaled since the last update, and then not stepped."""
    found: dict[int, Tensor | None] = {}
    for identity, state in scaler._per_optimizer_states.items():
        if state["stage"] is OptState.UNSCALED:
            found[identity] = next(iter(state["found_inf_per_device"].values()), None)
    return found


def _is_unscaled(scaler: GradScaler, optimizer: Optimizer) -> bool:
    state = scaler._per_optimizer_states.get(id(optimizer))
    return state is not None and state["stage"] is not OptState.READY


def announces_steps(optimizer: Optimizer) -> bool:
    """True if torch calls its global hooks at the steps of this optimizer, whose class its constructor has wrapped."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def supports_scaling(optimizer: Optimizer) -> bool:
    """True if the optimizer divides by the scale and heeds `found_inf` itself (torch's fused ones do)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


class AtStep(NamedTuple):
    """AMP attributes set on a fused optimizer for its gradients; other optimizers have none.

    It will divide them by the loss scale still in them, `left` (1 = none), and by `divisor`, a loop's own clipping
    through `optimizer.grad_scale` (None = none). `found_inf` is 1 where a scaler has found an overflow that it
    will skip by itself, 0 where not; None without a scaler.
    """

    left: Number = 1.0
    divisor: Number | None = None
    found_inf: Number | None = None


_NO_DIVISORS = AtStep()


def at_step(optimizer: Optimizer) -> AtStep:
    """AMP attributes of this optimizer, which is about to step."""
    found = getattr(optimizer, "found_inf", None)
    if found is None:
        return _NO_DIVISORS if getattr(optimizer, "grad_scale", None) is None else divisors(optimizer)
    # `sum` over devices: 2 where two of them overflowed.
    overflow = start_copy((found > 0).to(torch.float32)) if isinstance(found, Tensor) else None
    return divisors(optimizer)._replace(found_inf=overflow)


def divisors(optimizer: Optimizer) -> AtStep:
    """Divisor that the optimizer will apply to its gradients; `found_inf` is left out, which may be on a device."""
    divisor = getattr(optimizer, "grad_scale", None)
    if not isinstance(divisor, Tensor):
        return _NO_DIVISORS
    scale, rest = _carried.get(id(optimizer), (None, divisor))
    return AtStep(
        left=1.0 if scale is None else start_copy(scale),
        divisor=start_copy(rest) if isinstance(rest, Tensor) else None,
    )
