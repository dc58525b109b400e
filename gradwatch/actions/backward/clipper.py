"""Acting inside the backward: a tensor hook on each parameter that returns its gradient clipped or rescaled.

On the host a hook reads the norm, and returns nothing unless the norm is out of bounds: an unconditional multiply
costs a third of a small model's step. On a device it multiplies by a 0-dim factor made of the norm, without
waiting; there the bounds are those of the latest step whose numbers have arrived.

A hook sees one backward of this process, before any reduction, times the loss scale. So where gradients are
accumulated, reduced over ranks or scaled, a bound would mean something else than in the rule file: the clipper then
switches itself off and says so, unless `local` forces it to act. Whoever made it sees that it is
`disabled_reason`, and has the same clip carried out at the step.

One writer (`publish`, between a step and the next backward), one reader (the hooks). The hooks hold no parameter and
no clipper: parameter -> hook -> object -> parameter would never be collected.

Axes: K parameters of a capture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from gradwatch.actions.backward.clip_state import BackwardClipState
from gradwatch.actions.backward.pre_clip_norms import before_acting
from gradwatch.actions.elementwise_clip import Elementwise
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.window.window_norms import WindowNorms
from gradwatch.policies.norm_bound import Bound
from gradwatch.reading.read_plan import SMALL
from gradwatch.reading.row_sums import ROW
from gradwatch.reading.single_norm import exact_norm
from gradwatch.runtime.interruption import not_ours
from gradwatch.taps import backward_end, dispatch_modes, grad_ready
from gradwatch.taps.dynamo import untraced
from gradwatch.taps.hook_ids import own_ids
from gradwatch.taps.swap_tensors import contents, revive

Hook = Callable[[Tensor], Tensor | None]
NOT_PLAIN = np.zeros(0, np.float64)


class BackwardClipper:
    """Tensor hooks on the parameters of one capture; `covered[K]` says which of them may ever be multiplied.

    `taps[K]` are the tensors that autograd accumulates into (None: no hook sees that gradient). `local`: act
    whatever the gradients go through afterwards. `refused(reason)` is called once, when the clipper switches itself
    off; `failed` counts an internal error, at which the gradient passes unchanged.
    """

    def __init__(
        self,
        captured: OptimizerCapture,
        taps: Sequence[Tensor | None],
        covered: Sequence[bool],
        elementwise: Elementwise | None,
        local: bool,
        failed: Callable[[str, BaseException], None],
        refused: Callable[[str], None],
        before: BackwardClipper | None = None,
    ) -> None:
        """`before` is one that acted on some of these parameters until now; it hands over what it has done."""
        self._state = BackwardClipState(captured, elementwise, local, refused)
        if before is not None:
            self._state.take_over(before._state, captured.param_ids)
            before.close()
        self._hooks: list[tuple[Tensor, int, int, RemovableHandle]] = []
        shapes = () if elementwise is None else elementwise.at
        for k, tap in enumerate(taps):
            if tap is not None and (covered[k] or k in shapes):
                with own_ids:
                    handle = tap.register_hook(_hook(k, tap, self._state, failed))
                self._hooks.append((tap, k, contents(tap), handle))

    @property
    def disabled_reason(self) -> str:
        """The reason why it does nothing any more; "" while it acts."""
        return self._state.disabled_reason

    def publish(self, bounds: tuple[Bound, ...], elements: bool = True) -> None:
        """Set the bounds of the next backward, over K parameters; `elements`: policies on elements act in it."""
        self._state.publish(bounds, elements)

    def scaled(self, scale: Tensor) -> None:
        """Note the 0-dim `scale` that a GradScaler has multiplied a loss by, and goes on changing in place."""
        self._state.scaled(scale)

    def backward_ended(self) -> None:
        """Count what was done in the backward that ends now."""
        self._state.ended()

    def collect_into(self, window: WindowNorms) -> None:
        """Give a window the norms found before the hooks multiplied; its batched read is what they left."""
        acted = self._state.collect()
        if acted:
            window.measured_as(before_acting(window, acted))
        if self._state.disabled_reason:
            self.close()

    def reusable_norms(self, grads: Sequence[Tensor | None]) -> dict[int, float]:
        """Norms that need not be read again: the hook saw them, returned nothing, and `grads[K]` are what it saw.

        Loss scale included. Only of the first backward since a step, and of parameters on which no other code has a
        tensor hook or a post-accumulate hook, which may put another gradient in its place.
        """
        found = self._state.reusable_norms()
        for tap, k in self._alone() if found else ():
            grad = grads[k]
            if k in found and (grad is None or grad._version not in (0, self._state.versions[k])):
                del found[k]
            elif len(tap._backward_hooks or ()) != 1 or not _ours(tap._post_accumulate_grad_hooks):
                found.pop(k, None)
        return found

    def _alone(self) -> list[tuple[Tensor, int]]:
        return [(tap, k) for tap, k, _, _ in self._hooks]

    def discard(self) -> None:
        """Discard the actions since the last step: they belong to none."""
        self._state.collect()

    def close(self) -> None:
        """Remove the hooks."""
        for tap, _, stood_for, handle in self._hooks:
            handle.remove()
            if contents(tap) != stood_for:
                revive(tap, "_backward_hooks", handle.id)
        self._hooks.clear()


def _hook(
    k: int, tap: Tensor, clip_state: BackwardClipState, failed: Callable[[str, BaseException], None]
) -> Hook:
    """The hook of one parameter."""
    # A square shows whether a closer look is due, where float32 adds it up well enough. What float32 cannot hold of it
    # is out of every bound, or is 0.
    quick = clip_state.on_cpu and tap.dtype is torch.float32 and tap.numel() <= ROW
    clip_state.squared[k] = quick
    # Sending a parameter with a tensor hook to another process would otherwise warn.
    hook: Hook = unserializable_hook((_quickly if quick else _closely)(k, tap, clip_state, failed))
    return hook


def _quickly(
    k: int, tap: Tensor, clip_state: BackwardClipState, failed: Callable[[str, BaseException], None]
) -> Hook:
    """The hook of a small float32 parameter on the CPU; numpy's dot is a third cheaper than torch's dispatch."""
    tracing, current = torch.compiler.is_dynamo_compiling, backward_end.current
    dispatching, functions = dispatch_modes.dispatching, dispatch_modes.functions
    task, low, high = clip_state.task, clip_state.low, clip_state.high
    seen, versions = clip_state.seen, clip_state.versions
    large, vdot, float32 = tap.numel() > SMALL, np.vdot, np.dtype(np.float32)

    @untraced
    def limit(grad: Tensor | None, shown: bool = True) -> Tensor | None:
        try:
            # A custom Function may return None for it; compiled autograd: what this does would break its graph.
            if grad is None or tracing():
                return None
            if shown and (dispatching() or functions()):  # modes of the script's
                return dispatch_modes.unseen(limit, grad, False)
            if task[0] != current():
                clip_state.begin(k)
            try:
                values: Any = grad.numpy()  # sync: CPU tensor
            except (TypeError, RuntimeError) as error:
                # sparse, on another device, or it wants a gradient itself
                if not_ours(error):
                    raise
                if not grad.is_cpu:
                    return checked(grad, clip_state.on_device(k, grad))
                values = NOT_PLAIN
            plain = values.dtype is float32
            square = float(vdot(values, values)) if plain else _square(exact_norm(grad)[0])
            if low[k] <= square <= high[k]:
                if large:
                    seen[k], versions[k] = math.sqrt(square), grad._version
                return None
            return checked(grad, clip_state.on_host(k, grad))
        except Exception as error:
            failed("action", error)
            return None

    return limit


def _closely(
    k: int, tap: Tensor, clip_state: BackwardClipState, failed: Callable[[str, BaseException], None]
) -> Hook:
    """The hook of any other parameter."""
    tracing, current = torch.compiler.is_dynamo_compiling, backward_end.current
    dispatching, functions = dispatch_modes.dispatching, dispatch_modes.functions
    task, low, high, on_cpu = clip_state.task, clip_state.low, clip_state.high, clip_state.on_cpu
    seen, versions, large = clip_state.seen, clip_state.versions, tap.numel() > SMALL

    @untraced
    def limit(grad: Tensor | None, shown: bool = True) -> Tensor | None:
        try:
            if grad is None or tracing():
                return None
            if shown and (dispatching() or functions()):
                return dispatch_modes.unseen(limit, grad, False)
            if task[0] != current():
                clip_state.begin(k)
            if not on_cpu or not grad.is_cpu:
                return checked(grad, clip_state.on_device(k, grad))
            norm = exact_norm(grad)[0]
            if low[k] <= norm <= high[k]:
                if large:
                    seen[k], versions[k] = norm, grad._version
                return None
            return checked(grad, clip_state.on_host(k, grad))
        except Exception as error:
            failed("action", error)
            return None

    return limit


def _ours(hooks: Mapping[int, Callable[..., object]] | None) -> bool:
    """True if all hooks on a parameter are gradwatch's, which leave its gradient as it is."""
    return all(getattr(hook, "__module__", "") == grad_ready.__name__ for hook in (hooks or {}).values())


def checked(grad: Tensor, made: Tensor | None) -> Tensor | None:
    """Check the return value of a hook: None, or a gradient of the same kind. Raises `TypeError` for anything else."""
    if made is None or (made.shape, made.dtype, made.layout) == (grad.shape, grad.dtype, grad.layout):
        return made
    raise TypeError(f"a gradient {grad.shape} {grad.dtype} would have become {made.shape} {made.dtype}")


def _square(norm: float) -> float:
    return norm * norm  # `**` raises where it overflows
