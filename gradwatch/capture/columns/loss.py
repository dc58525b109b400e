"""The loss of a step, without `observe`: the value of the root that `backward` was called on.

A gradient is that of the sum of what the backwards of its window started from, so that sum is the loss; a loss scale is
in both and is taken out of both. The value is read before the engine runs, on the host as a number, on a device as a
0-dim copy that is sent when the step is judged, so no graph is kept and later in-place writes change nothing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwatch.reading.async_copy import (
    AsyncCopy,
    CopiedNumber,
    Number,
    capturing,
    host_value,
    on_host,
    one_number,
)
from gradwatch.reading.foreach_norms import widest
from gradwatch.reading.layouts import local
from gradwatch.reading.training_threads import TrainingThreads
from gradwatch.taps import backward_end, backward_entry
from gradwatch.taps.backward_entry import begun_here, entry_frame

Value = float | Tensor
_THREADS = 32
_PLAIN: Any = Tensor.__torch_dispatch__
_EXACT = frozenset({torch.float32, torch.float64})


class Root:
    """The root of one backward; `value` is None where it is not a loss. Compared by identity."""

    __slots__ = ("value",)
    value: Value | None  # set by whoever makes one: a Python call less at the entry of every backward


class Losses:
    """The root of each backward of this process as it begins; a nested one, or `autograd.grad`, has none of its own.

    `failed` counts an internal error. `unheard` says why the last backward had no loss ("" = it had one), and
    `refused` is called with each such reason; a backward from several roots has their sum.
    """

    def __init__(self, failed: Callable[[str, BaseException], None]) -> None:
        self.threads = TrainingThreads()
        self.unheard = "no backward was called"
        self.refused: Callable[[str], None] = _nothing
        self.not_finite: Callable[[], None] | None = None
        self._failed = failed
        self._latest: dict[int, Root] = {}  # by thread
        self.close = backward_entry.listen(self._begins)

    def report_to(self, refused: Callable[[str], None], not_finite: Callable[[], None] | None) -> None:
        """Call `refused` with each reason for which a backward has no loss, and `not_finite` before one of NaN or Inf.

        With `not_finite` the loss is looked at as its backward begins, if it is on the host; None: it is not.
        """
        self.refused, self.not_finite = refused, not_finite

    def latest(self) -> Root | None:
        """The root of the backward that is running, or of the last one; None where that is not certain."""
        found = self._latest.get(threading.get_ident())
        if found is None and len(self._latest) == 1:  # on a device, backwards end on autograd's own threads
            (found,) = self._latest.values()
        return found

    def thread(self) -> int:
        """This thread where Python code has begun a backward on it, else 0: one of autograd's own, of a device."""
        thread = threading.get_ident()
        return thread if thread in self._latest else 0

    def reached(self) -> int:
        """Note that the running backward has reached a parameter: its root is known only where Python started it.

        Returns `thread()`.
        """
        thread = threading.get_ident()
        if thread not in self._latest:
            return 0
        if not begun_here() and backward_end.current() != backward_end.NONE and entry_frame() is None:
            root = Root()
            root.value, self.unheard = None, "backward was started from C++"
            self._latest[thread] = root
            self.refused(self.unheard)
        return thread

    def _begins(self, call: backward_entry.BackwardCall) -> None:
        if not call.accumulates or call.nested:
            return
        root = Root()
        root.value, self.unheard = None, ""
        try:
            roots, weights = call.roots, call.grad_roots
            only, weight = (roots[0], weights[0]) if len(roots) == 1 else (None, None)
            if (  # almost every backward: both are one number on the host
                type(only) is Tensor
                and type(weight) is Tensor
                and only.is_cpu
                and weight.is_cpu
                and only.numel() == weight.numel() == 1
                and only.is_floating_point()
                and weight.is_floating_point()
            ):
                root.value = only.item() * weight.item()  # sync: CPU tensors
                if not math.isfinite(root.value) and self.not_finite is not None:
                    self.not_finite()
            else:
                root.value, self.unheard = _value_of(roots, weights)
                if self.unheard:
                    self.refused(self.unheard)
        except Exception as error:
            self._failed("loss", error)
        thread = threading.get_ident()
        if thread != self.threads.first:
            self.threads.began(thread)
        if len(self._latest) >= _THREADS:
            self._latest.clear()
        self._latest[thread] = root


class WindowLoss:
    """The losses of one optimizer's backwards since its gradients were last cleared."""

    __slots__ = ("_last", "_values", "clear")

    def __init__(self) -> None:
        self._values: list[Value | None] = []
        self._last: Root | None = None
        self.clear: Callable[[], None] = self._values.clear  # a new window, or gradients that were cleared

    def add(self, root: Root | None) -> None:
        """A backward from `root` reached the optimizer; once for each backward, however many parts it ends in."""
        if root is not self._last:
            self._last = root
            self._values.append(None if root is None else root.value)

    def follow(self, before: WindowLoss) -> None:
        """Go on with the losses of another one, whose window this one is to close."""
        self._values += before._values
        self._last = before._last

    def total(self) -> Value | None:
        """Their sum; None without any, or where one of the backwards had none."""
        values = self._values
        if len(values) == 1:
            return values[0]
        total: Value | None = None
        for value in values:
            if value is None:
                return None
            total = value if total is None else _sum(total, value)
        return total


def without_scale(loss: Value | CopiedNumber, scale: Number | None) -> Number:
    """The loss as a number that may still be on its way, the factor `scale` of a GradScaler taken out."""
    if isinstance(loss, CopiedNumber):
        return loss if scale is None else loss.divided(scale)
    if isinstance(loss, Tensor):
        return one_number(loss, 1.0 if scale is None else scale)
    if scale is None:
        return loss
    if isinstance(scale, AsyncCopy):
        return one_number(torch.tensor(loss, dtype=torch.float64, device="cpu"), scale)
    left = host_value(scale)
    return loss / left if left else float("nan")


def _value_of(roots: Sequence[Any], weights: Sequence[Any]) -> tuple[Value | None, str]:
    """(what the gradient of these roots is the gradient of, why it is not known)."""
    total: Value | None = None
    for root, weight in zip(roots, weights, strict=True):
        if not isinstance(root, Tensor):
            return None, "backward starts from a gradient edge"
        if root.numel() != 1:
            return None, f"backward starts from a tensor of {root.numel()} elements"
        if weight is None:  # torch is about to refuse this backward
            return None, "backward starts from a tensor that requires no gradient"
        found, factor = _readable(root), _readable(weight)
        if found is None or factor is None:
            return None, f"backward starts from a {type(root).__name__} that cannot be read alone"
        value = _times(found, factor)
        total = value if total is None else _sum(total, value)
    return total, ""


def _readable(tensor: Tensor) -> Tensor | None:
    """The plain tensor behind a scalar; None where reading it would need other ranks, or it holds no number."""
    found = tensor
    if hasattr(tensor, "placements"):
        if not all(placement.is_replicate() for placement in tensor.placements):
            return None
        with torch.no_grad():
            found = local(tensor)
    if type(found).__torch_dispatch__ is not _PLAIN or found.device.type == "meta":
        return None
    if not on_host(found) and capturing():
        return None
    return found if found.is_floating_point() else None


def _times(root: Tensor, weight: Tensor) -> Value:
    if on_host(root):
        return root.item() * weight.item()  # sync: CPU tensors
    value = root.detach()
    if value.dtype not in _EXACT:
        value = value.to(torch.float32)
    # Made by one launch, of the type in which it is sent with the norms. Whether the weight is 1, the device knows.
    product = torch.empty((), dtype=widest(value.device), device=value.device)
    return torch.mul(value.reshape(()), weight.detach().reshape(()), out=product)


def _sum(total: Value, value: Value) -> Value:
    if isinstance(total, Tensor) and isinstance(value, Tensor):
        return total + value.to(total.device, non_blocking=True)
    return total + value


def _nothing(_: str) -> None:
    """Default receiver of reasons: ignores them."""
