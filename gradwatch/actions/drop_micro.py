"""Dropping one poisoned micro-batch of a step, and keeping the others: `drop_micro`.

The gradients accumulated so far are moved aside at the first tensor hook of a backward, so that what this backward
leaves can be looked at by itself when it has ended, and added to them or not: the addition that autograd would have
done. A step of k micro-batches of which d were dropped is multiplied by k / (k - d), once: with micro-batches of
equal weight it is then the mean over those that are left. Nothing of the kind exists once gradients have been
reduced over ranks or sharded, and under a GradScaler it would hide overflow from the scaler; there it is refused.

On a device the host waits once per micro-batch, to know whether it is finite.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.window.window_norms import WindowNorms
from gradwatch.reading.batched_norms import CpuReader, Detail, inspect
from gradwatch.reading.cpu_norms import CpuNorms
from gradwatch.reading.foreach_functions import multiply
from gradwatch.reading.layouts import dense
from gradwatch.runtime import guard
from gradwatch.taps import backward_end, clip_functions, dispatch_modes
from gradwatch.taps.dynamo import untraced
from gradwatch.taps.hook_ids import own_ids

SCALED = (
    "dropping micro-batches is switched off: the GradScaler would not see the overflow and would never lower its "
    "scale; use `skip_step`"
)


class MicroDrop:
    """Tensor hooks on all parameters of one capture that tell its micro-batches apart.

    `failed` counts an internal error; `refused(reason)` is called once, when it switches itself off;
    `cleared(captured)` where the gradients of earlier backwards are found to be gone. Before the step `from_step` it
    does nothing.
    """

    def __init__(
        self,
        captured: OptimizerCapture,
        failed: Callable[[str, BaseException], None],
        refused: Callable[[str], None],
        cleared: Callable[[OptimizerCapture], None],
        from_step: int = 0,
    ) -> None:
        self._cleared = cleared
        self._from_step = from_step
        self._captured = weakref.ref(captured)
        self._failed = failed
        self._refused = refused
        self._reader = CpuReader()
        self._ends = backward_end.Ends(self._guard(self._ended), self._guard(self._recover))
        self._aside: list[Tensor | None] | None = None
        self._open = False  # a backward is running whose gradients stand apart
        self._kept = self._dropped = 0
        self._factor = 1.0  # what the gradients have been multiplied by for those that were dropped
        self._poison: dict[int, Detail] = {}
        self.disabled_reason = ""
        self._handles = [_listen(k, param, self) for k, param in enumerate(captured.params)]
        self._unlisten = clip_functions.listen(self._guard(self._before_clip))

    def close(self) -> None:
        """Remove the hooks, with every gradient where it belongs."""
        self._guard(self._recover)()
        self._unlisten()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def scaled(self) -> None:
        """Switch off: a GradScaler has multiplied a loss."""
        if not self.disabled_reason:
            self.disabled_reason = SCALED
            self._refused(SCALED)

    def is_of(self, captured: OptimizerCapture) -> bool:
        """True if this is that capture's."""
        return self._captured() is captured

    def _guard(self, call: Callable[..., None]) -> Callable[..., None]:
        owner = weakref.ref(self), call.__func__  # type: ignore[attr-defined]  # a bound method would be a cycle

        def guarded(*given: Any) -> None:
            try:
                drop = owner[0]()
                if drop is not None:
                    with torch.no_grad():
                        owner[1](drop, *given)
            except Exception as error:
                guard.fault("action", error)

        return guarded

    def _discard(self) -> None:
        """Discard what was counted of micro-batches that were kept or dropped."""
        self._kept, self._dropped, self._factor, self._poison = 0, 0, 1.0, {}

    # -- one backward ------------------------------------------------------------------------------------

    def begins(self, k: int, task: int) -> None:
        """Begin a graph task, whose first hook to run is that of parameter k."""
        captured = self._captured()
        if (
            captured is None
            or captured.step < self._from_step
            or self.disabled_reason
            or backward_end.nested()
            or not backward_end.reaches(captured.params[k])
        ):
            return
        self._ends.arm()  # a backward before this one that raised is settled first
        if self._open:  # back from a nested one
            return
        if captured.begins():
            self._discard()
            self._cleared(captured)
        captured.stash()
        if self._factor != 1.0:  # corrected too early: another micro-batch comes
            _multiply(captured.grads(), 1.0 / self._factor)
            self._factor = 1.0
        self._open, self._aside = True, [param.grad for param in captured.params]
        for param in captured.params:
            param.grad = None

    def _ended(self, _: list[int]) -> None:
        """Add what the backward left to what stood aside, or drop it."""
        captured = self._captured()
        if captured is None or not self._open or backward_end.nested():
            return
        fresh = [param.grad for param in captured.params]
        poison = {} if self._finite(fresh, captured) else poisoned(fresh)
        if poison:
            self._poison |= poison
            self._dropped += 1
            _put(captured, self._aside or fresh)
        else:
            self._kept += 1
            _put(captured, _added(self._aside or [None] * len(fresh), fresh))
        self._open, self._aside = False, None

    def _finite(self, grads: Sequence[Tensor | None], captured: OptimizerCapture) -> bool:
        """True if the total norm alone shows that all of them are finite."""
        if captured.on_cpu:
            return math.isfinite(self._reader.read(grads).total())
        norms = [
            torch.linalg.vector_norm(dense(grad), dtype=torch.float64) for grad in grads if grad is not None
        ]
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
        return math.isfinite(float(total))  # sync: kept or dropped before the next micro-batch arrives

    def _recover(self) -> None:
        """A backward raised: its callbacks never ran. Leave what autograd would have left.

        Where nothing of it is there the loop has cleared its gradients since, and with them those that stood aside.
        """
        captured = self._captured()
        aside, self._aside = self._aside, None
        was_open, self._open = self._open, False
        if captured is None or not was_open or aside is None:
            return
        fresh = [param.grad for param in captured.params]
        # Sync: after an exception.
        if any(grad is not None and bool((dense(grad) != 0).any()) for grad in fresh):
            _put(captured, _added(aside, fresh))

    # -- the step ----------------------------------------------------------------------------------------

    def _before_clip(self, clip: clip_functions.Clip) -> None:
        captured = self._captured()
        if captured is not None and captured.is_of(clip):
            self.correct()

    def correct(self) -> None:
        """Weigh the micro-batches that are left, before other code clips or the optimizer steps."""
        captured = self._captured()
        self._recover()
        if captured is None or not self._dropped or not self._kept or self._factor != 1.0:
            return
        self._factor = (self._kept + self._dropped) / self._kept
        _multiply(captured.grads(), self._factor)
        captured.read()

    def at_boundary(self) -> None:
        """Note that the step is about to be judged."""
        self._guard(self.correct)()

    def collect_into(self, window: WindowNorms) -> None:
        """Tell of what was dropped, and whether anything is left.

        `norm` is not finite where that of a micro-batch was not; `norm_applied` is of what is left.
        """
        poison = self._poison
        if self._dropped:
            window.without_micro_batches(self._kept)
        self._discard()
        if poison and isinstance(window.raw, CpuNorms):
            norms = {k: detail.norm for k, detail in poison.items()}
            window.measured_as(window.raw.with_norms(norms, {**window.raw.details, **poison}))


def _listen(k: int, param: Tensor, drop: MicroDrop) -> RemovableHandle:
    owner, failed, seen = weakref.ref(drop), drop._failed, drop._ends.task
    current, tracing = backward_end.current, torch.compiler.is_dynamo_compiling

    @untraced
    def first(grad: Tensor | None) -> None:
        try:
            found = None if tracing() or seen[0] == current() else owner()
            if found is not None:
                with torch.no_grad():
                    dispatch_modes.unseen(found.begins, k, current())
        except Exception as error:
            failed("action", error)

    with own_ids:
        handle: RemovableHandle = param.register_hook(unserializable_hook(first))
    return handle


def poisoned(grads: Sequence[Tensor | None]) -> dict[int, Detail]:
    """The second look at each gradient with a NaN or Inf element, by position."""
    looked = {k: inspect(grad) for k, grad in enumerate(grads) if grad is not None}
    return {k: detail for k, detail in looked.items() if detail.nonfinite}


def _put(captured: OptimizerCapture, grads: Sequence[Tensor | None]) -> None:
    for param, grad in zip(captured.params, grads, strict=True):
        param.grad = grad


def _added(aside: Sequence[Tensor | None], fresh: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Add a new gradient to an accumulated one as autograd does: in place where it would be."""
    return [
        old if new is None else new if old is None else _sum(old, new)
        for old, new in zip(aside, fresh, strict=True)
    ]


def _sum(old: Tensor, new: Tensor) -> Tensor:
    if old.requires_grad or new.requires_grad or (old.is_sparse and not new.is_sparse):
        with torch.enable_grad():
            return new + old
    return old.add_(new)


def _multiply(grads: Sequence[Tensor | None], factor: float) -> None:
    present = [grad for grad in grads if grad is not None]
    if present:
        multiply(present, factor)
