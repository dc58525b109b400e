"""State shared by the hooks of a `BackwardClipper`: bounds, and actions in the running backward and this window.

One writer (`publish`, between a step and the next backward), one reader (the hooks). It holds no parameter.

Axes: K parameters of a capture.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gradwatch.actions.backward.pre_clip_norms import Acted
from gradwatch.actions.elementwise_clip import Elementwise, shaped
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.policies.norm_bound import LARGEST, Bound, SiteBound, at_site, factor_of
from gradwatch.reading.async_copy import capturing
from gradwatch.reading.foreach_norms import widest
from gradwatch.reading.layouts import dense
from gradwatch.reading.read_plan import SMALL
from gradwatch.reading.row_sums import UNDERFLOW
from gradwatch.reading.single_norm import exact_norm
from gradwatch.taps import backward_end

WHY = (
    "clipping inside the backward is switched off: {reason}, so a hook sees other gradients than those that the "
    "rule file bounds; {instead}use `at: step`, or force it with `local: true`"
)
INSTEAD = "from this step on gradients are clipped at the step instead; to make that explicit "
ACCUMULATED = "this loop accumulates the gradients of several backwards"
SCALED = "a GradScaler multiplies the gradients"
SEVERAL_RANKS = "gradients are reduced over {count} ranks after the hooks have run"


class BackwardClipState:
    """State shared by the hooks: the bounds in force, and what was done in the running backward and in this window."""

    def __init__(
        self,
        captured: OptimizerCapture,
        elementwise: Elementwise | None,
        local: bool,
        refused: Callable[[str], None],
    ) -> None:
        # Lists, so that a hook can look without an attribute walk.
        self.task = [backward_end.IDLE]
        # What hooks look at first, loss scale included: a norm within needs no second thought. Its square where that is
        # cheaper to have.
        self.squared = np.zeros(len(captured), np.bool_)
        self.low = [-math.inf] * len(captured)
        self.high = [math.inf] * len(captured)
        self.seen = [math.nan] * len(captured)  # norms that were within, of the running window
        self.versions = [0] * len(captured)
        self.scale = 1.0  # of the loss, on the host
        self.on_cpu = captured.on_cpu
        self.disabled_reason = ""
        self._captured = weakref.ref(captured)
        self._param_ids = captured.param_ids
        # Small gradients are read together for less than it takes to hand over what the hooks saw of each.
        floor = np.where(captured.sites.numels > SMALL, np.sqrt(captured.sites.numels * UNDERFLOW), np.inf)
        self._floor = floor.tolist()  # sync: numpy
        self._elementwise = self._policies = elementwise
        self._local = local
        self._refused = refused
        self._bounds: tuple[Bound, ...] = ()
        self._scale: Tensor | None = None
        self._running: dict[int, Acted] = {}
        self._acted: dict[int, Acted] = {}
        self._ended = 0  # backwards since the last step
        self._within = False  # a nested backward has begun in this one
        self._tighten()

    # -- the one writer ----------------------------------------------------------------------------------

    def publish(self, bounds: tuple[Bound, ...], elements: bool = True) -> None:
        if not self.disabled_reason:
            self._bounds = bounds
            if (policies := self._policies if elements else None) is not self._elementwise:
                self._elementwise = policies
                self._unbounded()
            self._tighten()

    def _tighten(self) -> None:
        """Compute the narrowest interval at each parameter, which the hooks compare with."""
        if self._bounds:
            with np.errstate(invalid="ignore", over="ignore"):
                low = np.maximum.reduce([one.low * self.scale for one in self._bounds])
                high = np.minimum.reduce([one.high * self.scale for one in self._bounds])
                low = np.where(self.squared & (low > 0), low * low, low)
                high = np.where(self.squared & (high > 0), high * high, high)
            self.low[:], self.high[:] = low.tolist(), high.tolist()  # sync: numpy
        # Elementwise policies want to see every gradient.
        for k in () if self._elementwise is None else self._elementwise.at:
            self.low[k], self.high[k] = math.inf, -math.inf

    def _unbounded(self) -> None:
        self.low[:], self.high[:] = [-math.inf] * len(self.low), [math.inf] * len(self.high)

    def scaled(self, scale: Tensor) -> None:
        if self._local:
            self._scale = scale
        else:
            self.stop(SCALED)

    def stop(self, reason: str) -> None:
        """Do nothing any more, and say why."""
        if self.disabled_reason:
            return
        self.disabled_reason = WHY.format(reason=reason, instead=INSTEAD)
        self._bounds, self._elementwise = (), None
        self._unbounded()
        self._refused(self.disabled_reason)

    def take_over(self, before: BackwardClipState, param_ids: list[int]) -> None:
        """Go on with a window that another has begun."""
        place = {identity: k for k, identity in enumerate(param_ids)}
        former = before._param_ids
        self._acted = {place[former[k]]: norm for k, norm in before._acted.items() if former[k] in place}
        self._ended, self._scale = before._ended, before._scale

    # -- one backward ------------------------------------------------------------------------------------

    def begin(self, k: int) -> None:
        """Begin a graph task, whose first hook to run is that of parameter k."""
        self.task[0] = backward_end.current()
        if backward_end.nested():  # reentrant checkpointing: a part of the backward around it
            self._within = True
            return
        if self._within:  # back in the backward around it
            self._within = False
        else:
            self._running.clear()  # of a backward that raised, or of `autograd.grad`
        if not self._local:
            self._look_around(k)
        if self._scale is not None and self._scale.device.type == "cpu":
            scale = float(self._scale)  # sync: CPU tensor
            if scale != self.scale:
                self.scale = scale
                self._tighten()

    def _look_around(self, k: int) -> None:
        """Switch off where a bound would mean something else."""
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        captured = self._captured()
        if ranks > 1:
            self.stop(SEVERAL_RANKS.format(count=ranks))
        elif (
            self._ended and captured is not None and any(param.grad is not None for param in captured.params)
        ):
            self._stop_if_accumulating(k)

    def _stop_if_accumulating(self, k: int) -> None:
        if self._accumulates(k):  # not `autograd.grad`
            self.stop(ACCUMULATED)

    def ended(self) -> None:
        """Note that a backward has ended, all of it or a nested part."""
        if backward_end.nested():
            return
        self._ended += 1
        self._within = False
        self.task[0] = backward_end.IDLE
        for k, norm in self._running.items():
            self._acted[k] = _larger(self._acted.get(k), norm)
        self._running.clear()

    def reusable_norms(self) -> dict[int, float]:
        """Norms of this window's only backward so far, of gradients that were left alone; safe from underflow."""
        if self._ended != 1:
            return {}
        floor, acted = self._floor, self._acted
        return {k: norm for k, norm in enumerate(self.seen) if norm > floor[k] and k not in acted}

    def collect(self) -> dict[int, Acted]:
        """Actions since the last step, by position; starts the next window."""
        if backward_end.current() == backward_end.NONE and self._running:
            self.ended()  # its end was missed
        acted, self._acted, self._ended = self._acted, {}, 0
        self.seen[:] = [math.nan] * len(self.seen)
        if self._scale is not None:
            acted = {
                k: norm / self._scale.to(norm.device, non_blocking=True) if isinstance(norm, Tensor) else norm
                for k, norm in acted.items()
            }
        return acted

    def on_host(self, k: int, grad: Tensor) -> Tensor | None:
        """Clip a gradient whose quick norm is out of bounds; None = leave it alone."""
        norm = exact_norm(grad)[0]
        if not math.isfinite(norm):
            return None  # one bad element must not spread; the verdict at the boundary deals with it
        unscaled = norm / (self.scale or math.nan)
        factor = factor_of(at_site(self._bounds, k), unscaled)
        made = self._shaped(k, grad, factor, self.scale) if self._speaks(k, unscaled, factor) else None
        if made is None and factor == 1.0:
            return None
        if made is not None and torch.equal(made, grad):
            return None  # nothing was done: two ways of adding up one norm must not be taken for a clip
        if not self._accumulates(k):
            return None
        self._running[k] = unscaled
        return grad * factor if made is None else made

    def on_device(self, k: int, grad: Tensor) -> Tensor | None:
        """Clip as `on_host`, by a factor that never leaves the device; always multiplied where there is a bound."""
        bounds = at_site(self._bounds, k)
        shapes = self._elementwise is not None and k in self._elementwise.at
        if (not bounds and not shapes) or capturing() or not self._accumulates(k):
            return None
        norm = torch.linalg.vector_norm(dense(grad).detach(), dtype=widest(grad.device))
        scale = None if self._scale is None else self._scale.to(norm.device, non_blocking=True)
        factor = factor_on_device(bounds, norm if scale is None else norm / scale)
        made = self._shaped(k, grad, factor, 1.0 if scale is None else scale)
        self._running[k] = norm
        made = grad * factor if made is None else made
        return made.to(grad.dtype)  # two 0-dim tensors multiply in the wider type

    def _speaks(self, k: int, norm: float, factor: float) -> bool:
        """True if elementwise policies may change a gradient of this norm, known without its loss scale."""
        policies = () if self._elementwise is None else self._elementwise.at.get(k, ())
        return factor != 1.0 or not all(policy.idle(norm) for policy in policies)

    def _shaped(self, k: int, grad: Tensor, factor: float | Tensor, scale: float | Tensor) -> Tensor | None:
        """Apply the elementwise policies, and the factor with them, to a dense gradient; None without any."""
        captured = self._captured()
        if self._elementwise is None or k not in self._elementwise.at or captured is None or not grad.numel():
            return None
        if grad.layout is not torch.strided or grad.is_complex():  # they compare elements
            return None
        made = shaped(grad, captured.params[k].detach(), self._elementwise.at[k], factor, scale)
        return made.to(grad.dtype)

    def _accumulates(self, k: int) -> bool:
        """True if the running backward leaves this gradient in `.grad`, and does not hand it to `autograd.grad`."""
        captured = self._captured()
        if captured is None:
            return False
        param = captured.params[k]
        if hasattr(param, "to_local"):  # its hook is on another tensor, which only backward reaches
            return True
        return backward_end.reaches(param)


def factor_on_device(bounds: tuple[SiteBound, ...], norm: Tensor) -> Tensor:
    """0-dim float32: `gradwatch.policies.norm_bound.factor_of` without the host knowing the norm."""
    known = torch.nan_to_num(norm.to(torch.float32), nan=0.0, posinf=0.0)
    found = torch.full_like(known, math.inf)
    for one in bounds:
        factor = torch.reciprocal(known + one.eps) * one.target
        factor = factor.clamp(max=LARGEST if one.enlarges else 1.0)
        speaks = (known > one.high) | (known < one.low) if one.low > 0 else known > one.high
        found = torch.where(speaks & (known > 0), torch.minimum(found, factor), found)
    return torch.where(torch.isinf(found), torch.ones_like(found), found)


def _larger(before: Acted | None, norm: Acted) -> Acted:
    """The larger of two finite norms."""
    if before is None:
        return norm
    if isinstance(norm, Tensor) or isinstance(before, Tensor):
        norm = torch.as_tensor(norm)
        return torch.maximum(norm, torch.as_tensor(before, device=norm.device))
    return max(before, norm)
