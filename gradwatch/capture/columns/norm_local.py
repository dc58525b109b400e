"""`norm_local`: what a tensor hook sees, one backward of this rank before any reduction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from gradwatch.capture.columns.pending_columns import PendingColumns
from gradwatch.engine.columns_needed import EVERY_STEP
from gradwatch.reading.async_copy import AsyncCopy, Number, capturing
from gradwatch.reading.foreach_norms import widest
from gradwatch.reading.layouts import alias, dense
from gradwatch.reading.row_sums import ROW, UNDERFLOW
from gradwatch.reading.single_norm import exact_norm
from gradwatch.runtime.interruption import not_ours
from gradwatch.taps import backward_end, dispatch_modes
from gradwatch.taps.dynamo import untraced
from gradwatch.taps.hook_ids import own_ids
from gradwatch.taps.swap_tensors import contents, revive

PROBES = 4
"""Small parameters, at most, that are looked at for NaN and Inf in every backward."""


class LocalNorms:
    """`Tensor.register_hook` on K parameters; the largest local norm over the backwards of a step.

    A hook sees the gradient of one backward: not accumulated, not reduced over ranks, and still multiplied by
    the loss scale, which `collect` divides out. NaN beats every number. A tensor hook also fires for
    `torch.autograd.grad`, which leaves nothing in `.grad`: what it saw counts once the gradient has been
    accumulated, and a second hook says so. What a backward that raised has left behind does not count either.
    A parameter that no hook can see is None.

    A hook costs by being there, and the read as much as that of the norms. So where all rules are judged at some steps
    only (`cadences`), there are hooks in the backwards of those steps only. In between, few small parameters are looked
    at for NaN and Inf (`Probes`), which a backward hands on to all that lies before: one is kept until the next read.
    """

    def __init__(
        self,
        params: Sequence[Tensor | None],
        failed: Callable[[str, BaseException], None],
        before: LocalNorms | None = None,
        cadences: frozenset[int] = EVERY_STEP,
        probing: bool = False,
    ) -> None:
        """`before` is one that listened to some of these parameters until now; it hands them over."""
        self._count = len(params)
        self._params = params
        self._failed = failed
        self._cadences = cadences
        self._norms: dict[int, float | Tensor] = {}  # a tensor where the gradient is on a device
        self._running = Running()
        self._taps: dict[int, tuple[int, Tensor, int, tuple[RemovableHandle, ...]]] = {}
        self._listen(before)
        former = None if before is None else before._probes
        self._probes: Probes | None = (
            Probes(params, failed, former) if probing and not self._reads(1) else None
        )

    def _reads(self, step: int) -> bool:
        return any(step % every == 0 for every in self._cadences)

    def _listen(self, before: LocalNorms | None = None) -> None:
        for k, param in enumerate(self._params):
            if param is None or not param.requires_grad:
                continue
            norms = None if before is None else before._release(param)
            if norms is not None:
                self._norms[k] = norms
            observe, accumulated = _hooks(k, param, self._running, self._failed)
            with own_ids:
                handles = param.register_hook(observe), param.register_post_accumulate_grad_hook(accumulated)
            self._taps[id(param)] = k, param, contents(param), handles

    def take(self, step: int, scale: Number, broken: Callable[[], bool]) -> PendingColumns | None:
        """The local norms of this step, None where it is none of those at which they are read.

        `broken()`: whether what the optimizer is about to get is not finite, as it is if one rank's part is not.
        """
        probes = self._probes
        if probes is not None and probes.suspects:
            probes.keep(broken)
        pending = None
        if self._reads(step):
            if probes is not None and probes.kept:
                self.backward_ended()
                _add(self._norms, probes.kept)
                probes.kept.clear()
            pending = self.collect(scale)
        else:
            self.discard()
        if self._reads(step + 1):
            if not self._taps:
                self._listen()
        elif self._taps:
            self._remove()
        return pending

    def collect(self, scale: Number) -> PendingColumns:
        """The local norms of this step; starts the next one."""
        if backward_end.current() == backward_end.NONE:
            self.backward_ended()
        pending = PendingColumns(self._count)
        present = np.zeros(self._count, bool)
        present[list(self._norms)] = True
        on_host = {k: norm for k, norm in self._norms.items() if not isinstance(norm, Tensor)}
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for k, norm in self._norms.items():
            if isinstance(norm, Tensor):
                by_device.setdefault(norm.device, []).append((k, norm))
        stacks = [torch.stack([norm for _, norm in group]) for group in by_device.values()]
        order = [k for group in by_device.values() for k, _ in group]
        if on_host:
            # In float64 to the end, and never rounded to 0 or past float32 without need: as `norm` is.
            stacks.append(torch.tensor(list(on_host.values()), dtype=torch.float64, device="cpu"))
            order += on_host
        pending.parts["norm_local"] = AsyncCopy(stacks, np.array(order, np.intp), self._count, scale=scale)
        pending.present["norm_local"] = present
        self.discard()
        return pending

    def backward_ended(self) -> None:
        """Count what was measured in the backward that ends now."""
        _add(self._norms, self._running.norms)
        self._running.norms.clear()
        self._running.pending.clear()
        self._running.task = backward_end.IDLE

    def cleared(self) -> None:
        """The gradients of the backwards that have ended are gone; the running one counts."""
        self._norms.clear()

    def discard(self) -> None:
        """Discard what was measured, as when a GradScaler rejects the step."""
        self._norms.clear()
        self._running.norms.clear()
        self._running.pending.clear()
        if self._probes is not None:
            self._probes.suspects.clear()

    def close(self) -> None:
        """Remove the hooks."""
        self._remove()
        if self._probes is not None:
            self._probes.close()

    def _remove(self) -> None:
        for _, param, _, _ in list(self._taps.values()):
            self._release(param)

    def _release(self, param: Tensor) -> float | Tensor | None:
        """Stop listening to one parameter; what was measured of it in this step."""
        if id(param) not in self._taps:
            return None
        k, _, stood_for, (seen, accumulated) = self._taps.pop(id(param))
        seen.remove()
        accumulated.remove()
        if contents(param) != stood_for:  # a swap silenced them: leave it able to take new ones
            revive(param, "_backward_hooks", seen.id)
            revive(param, "_post_accumulate_grad_hooks", accumulated.id)
        return self._norms.pop(k, None)


class Probes:
    """A hook on each of few small parameters, spread over all of them, for NaN and Inf in any backward.

    `suspects` by position: norms seen since the last step. `kept` those of gradients that a step was about to take.
    """

    def __init__(
        self,
        params: Sequence[Tensor | None],
        failed: Callable[[str, BaseException], None],
        before: Probes | None = None,
    ) -> None:
        """`before` are those of some of these parameters until now; they hand over what they saw."""
        small = [
            (k, one) for k, one in enumerate(params) if one is not None and one.requires_grad and _small(one)
        ]
        count = min(PROBES, len(small))
        chosen = [small[i * (len(small) - 1) // max(1, count - 1)] for i in range(count)]
        self._params = params
        self.suspects: dict[int, float] = {}
        self.kept: dict[int, float] = {}
        if before is not None:
            place = {id(param): k for k, param in enumerate(params) if param is not None}
            self.suspects.update(before._seen_of(place, before.suspects))
            self.kept.update(before._seen_of(place, before.kept))
        with own_ids:
            self._taps = [
                (param, contents(param), param.register_hook(_probe(k, self.suspects, failed)))
                for k, param in chosen
            ]

    def keep(self, broken: Callable[[], bool]) -> None:
        """Keep, at a step, what was seen if it arrived; `torch.autograd.grad` may have looked at it only."""
        if broken():
            _add(self.kept, self.suspects)
        self.suspects.clear()

    def _seen_of(self, place: Mapping[int, int], norms: Mapping[int, float]) -> dict[int, float]:
        """Norms of parameters that have a new place, by that place."""
        ids = {k: id(self._params[k]) for k in norms}
        return {place[ids[k]]: norm for k, norm in norms.items() if ids[k] in place}

    def close(self) -> None:
        """Remove the hooks."""
        while self._taps:
            param, stood_for, handle = self._taps.pop()
            handle.remove()
            if contents(param) != stood_for:
                revive(param, "_backward_hooks", handle.id)


class Running:
    """One backward: what arrived between the two hooks (a gradient, or its norm), and norms, by position."""

    def __init__(self) -> None:
        self.task = backward_end.IDLE
        self.pending: dict[int, float | Tensor] = {}
        self._pending_in = backward_end.IDLE
        self.norms: dict[int, float | Tensor] = {}

    def arrives(self, k: int, found: float | Tensor) -> None:
        """Note a gradient on its way to k, and release those of another backward that never got there."""
        task = backward_end.current()
        if task != self._pending_in:
            if not backward_end.nested():
                self.pending.clear()
            self._pending_in = task
        self.pending[k] = found

    def accumulated(self, k: int) -> None:
        """The gradient that arrived at k is in `.grad` now."""
        found = self.pending.pop(k, None)
        if found is None:
            return
        task = backward_end.current()
        if task != self.task:
            if self.norms and not backward_end.nested():
                self.norms.clear()  # the backward before this one raised
            self.task = task
        norm = found if isinstance(found, float) else _norm(found)
        self.norms[k] = norm if k not in self.norms else _larger_of(self.norms[k], norm)


Hook = Callable[[Tensor], None]


def _hooks(
    k: int, param: Tensor, running: Running, failed: Callable[[str, BaseException], None]
) -> tuple[Hook, Hook]:
    """The two hooks of one parameter. They must not reach the LocalNorms: parameter -> hook -> object leaks."""
    tracing = torch.compiler.is_dynamo_compiling  # compiled autograd: what they do would break its graph
    dispatching, functions = dispatch_modes.dispatching, dispatch_modes.functions
    found = _norm_of_small if _small(param) else alias

    @untraced
    def observe(grad: Tensor | None) -> None:
        try:
            # A custom Function may return None for it.
            if tracing() or grad is None or (not grad.is_cpu and capturing()):
                return
            kept = dispatch_modes.unseen(found, grad) if dispatching() or functions() else found(grad)
            if kept is not None:
                running.arrives(k, kept)
        except Exception as error:
            failed("norm_local", error)

    @untraced
    def accumulated(_: Tensor) -> None:
        try:
            if not tracing():
                if dispatching() or functions():  # modes of the script's
                    dispatch_modes.unseen(running.accumulated, k)
                else:
                    running.accumulated(k)
        except Exception as error:
            failed("norm_local", error)

    # Sending a parameter with a tensor hook to another process would otherwise warn.
    return unserializable_hook(observe), accumulated


def _small(param: Tensor) -> bool:
    return param.is_cpu and param.dtype is torch.float32 and param.numel() <= ROW


def _probe(k: int, suspects: dict[int, float], failed: Callable[[str, BaseException], None]) -> Hook:
    """The hook of one parameter. It must not reach the Probes: parameter -> hook -> object leaks."""
    tracing = torch.compiler.is_dynamo_compiling
    dispatching, functions = dispatch_modes.dispatching, dispatch_modes.functions

    @untraced
    def observe(grad: Tensor | None) -> None:
        try:
            if tracing() or grad is None:
                return
            set_aside = dispatching() or functions()  # modes of the script's see nothing of this
            norm = dispatch_modes.unseen(_nonfinite, grad) if set_aside else _nonfinite(grad)
            if norm is not None:
                _add(suspects, {k: norm})
        except Exception as error:
            failed("norm_local", error)

    unserializable_hook(observe)  # marks it, and gives it back
    return observe


def _norm_of_small(grad: Tensor) -> float | Tensor | None:
    """The norm of no more than a row of float32 elements, or the gradient if it has to be looked at more closely.

    Reading it now costs less than keeping it for the second hook, and no more than a wasted read if none comes.
    """
    try:
        values = grad.numpy()  # sync: CPU tensor
    except (TypeError, RuntimeError) as error:  # sparse, or it wants a gradient itself
        if not_ours(error):
            raise
        return alias(grad)
    if values.dtype != np.float32:
        return alias(grad)
    square = float(np.vdot(values, values))
    return math.sqrt(square) if UNDERFLOW * values.size <= square < math.inf else alias(grad)


def _nonfinite(grad: Tensor) -> float | None:
    """The norm of no more than a row of float32 elements, None where it is finite.

    In the middle of a backward every call costs microseconds: two tell of almost all gradients.
    """
    try:
        values = grad.numpy()  # sync: CPU tensor
        if values.dtype == np.float32 and np.vdot(values, values) < math.inf:
            return None
    except (TypeError, RuntimeError) as error:  # sparse, or it wants a gradient itself
        if not_ours(error):
            raise
    found = alias(grad)
    norm = None if found is None else _norm(found)
    return norm if isinstance(norm, float) and not math.isfinite(norm) else None


def _norm(grad: Tensor) -> float | Tensor:
    with torch.no_grad():
        if grad.device.type == "cpu":
            return exact_norm(grad)[0]
        norm: Tensor = torch.linalg.vector_norm(dense(grad).detach(), dtype=widest(grad.device))
        return norm


def _add(norms: dict[int, Any], others: Mapping[int, Any]) -> None:
    """Add norms of other backwards; of two at one position the larger stays."""
    for k, norm in others.items():
        norms[k] = _larger_of(norms.get(k), norm)


def _larger_of(before: float | Tensor | None, norm: float | Tensor) -> float | Tensor:
    """The larger one; NaN beats every number."""
    if before is None:
        return norm
    if isinstance(norm, Tensor):
        return torch.maximum(norm, torch.as_tensor(before, device=norm.device))
    before = float(before)
    return norm if norm > before or norm != norm else before
