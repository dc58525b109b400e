"""Norms of one accumulation window, some of which are known only a few steps later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.capture.window.hook_pruning import PrunedCount
from gradwatch.reading.async_copy import CopiedNumber, Number, is_ready
from gradwatch.reading.batched_norms import Detail
from gradwatch.reading.cpu_norms import CpuNorms
from gradwatch.reading.gradient_writes import Reading
from gradwatch.reading.loss_scale_removal import unscaled
from gradwatch.records.snapshot import Sites

Norms = NDArray[np.float64]


@dataclass(slots=True, eq=False)  # not frozen: a pruned count is checked again in `wait`
class WindowNorms:
    """Norms of one accumulation window of one optimizer, K parameters; on a device still on their way to the host.

    sites, step: the K parameters, and the index of the step that ends the window.
    raw, after: norms before any clipping, and as the optimizer gets them; both may be the same object.
    calls: int32[K], times that each gradient arrived; 0 = absent.
    micro: backwards.
    provisional: some number may not be what was measured everywhere else, for instance after hooks were missed.
    left: loss scale still in the gradients at the boundary (fused optimizers unscale inside their step).
    deferrable: nothing unusual so far, so that `wait` may be put off for a few steps.
    pruned: arrivals counted by a few hooks only; `wait` checks that they counted right.
    loss_scale: of the GradScaler of these gradients; None without one.
    skipped: 1 if that scaler rejects the step, 0 if not; None without one.
    empty: every micro-batch was dropped, so that there is nothing to step by.
    loss: sum of the roots of its backwards, loss scale included; None where unknown.
    applied_known: False where it is unknown what became of the gradients; `after` then stands for nothing.
    altered: the factor of the script's clips at a step where other code has changed the gradients too; None elsewhere.
    facts: columns of the step that say what the loop did with its gradients.
    """

    sites: Sites
    step: int
    raw: Reading
    after: Reading
    calls: NDArray[np.int32]
    micro: int
    provisional: bool
    left: Number = 1.0
    deferrable: bool = False
    pruned: PrunedCount | None = None
    loss_scale: Number | None = None
    skipped: Number | None = None
    empty: bool = False
    loss: float | Tensor | CopiedNumber | None = None
    applied_known: bool = True
    altered: float | None = None
    facts: Mapping[str, Number] | None = None

    @property
    def details(self) -> Mapping[int, Detail]:
        """Exact reads, by position, of gradients whose norm is not finite or so small that squares underflow."""
        return self.raw.details

    def ready(self) -> bool:
        """True if `wait()` would return without waiting."""
        for number in (self.left, self.loss_scale, self.skipped):
            if number is not None and type(number) is not float and not is_ready(number):
                return False
        return self.raw.ready() and (self.after is self.raw or self.after.ready())

    def measured_as(self, raw: Reading) -> None:
        """Put norms found before gradwatch itself changed the gradients in the place of those of the batched read."""
        self.raw, self.deferrable = raw, False

    def without_micro_batches(self, kept: int) -> None:
        """Note that micro-batches were dropped and `kept` are left, whose share of the loss is not known."""
        self.empty, self.loss = kept == 0, None

    def scaled_by(self, left: Number, skipped: Number | None) -> None:
        """Note the GradScaler of this step: it has removed its scale or `left` it in, and rejects the step or not."""
        if self.loss_scale is None:
            self.loss_scale = left
        self.skipped = 0.0 if skipped is None else skipped

    def divide_applied(self, divisor: Number) -> Reading:
        """Divide the norms as the optimizer itself will divide its gradients; returns them. They cannot wait then."""
        self.deferrable, self.after = False, unscaled(self.after, divisor)
        return self.after

    def altered_beside(self, factor: float) -> None:
        """Note that other code has changed the gradients, beside clips by this factor."""
        self.altered = factor

    def add_facts(self, facts: Mapping[str, Number]) -> None:
        """Add columns of the step that say what the loop did with its gradients."""
        self.facts = {**(self.facts or {}), **facts}

    def total_applied(self) -> float:
        """L2 norm over all parameters of what the optimizer gets, gradients of earlier windows included."""
        return root_of_squares(self.after.norms())

    def total(self) -> float:
        """L2 norm over all parameters before clipping, gradients of earlier windows included."""
        return root_of_squares(self.raw.norms())

    def zero(self) -> NDArray[np.bool_] | None:
        """bool[K]: the gradients of zeros; None while that is not on the host."""
        return self.raw.norms() == 0 if self.raw.ready() else None

    def wait(self) -> tuple[Norms, Norms]:
        """(float64[K] norms before any clipping, float64[K] as the optimizer gets them), loss scale removed.

        Blocks until a device has sent them. `provisional` is final only afterwards.
        """
        raw = self.raw.norms()
        if self.pruned is not None:
            self.pruned.recheck(self.raw)
            self.provisional = self.provisional or not self.pruned.right
        return raw, raw if self.after is self.raw else self.after.norms()


def root_of_squares(norms: Norms) -> float:
    """L2 norm of these norms; infinite where their squares are too large for float64."""
    with np.errstate(over="ignore"):
        return float(np.sqrt(np.dot(norms, norms)))


def is_finite(after: Reading) -> bool:
    """True if the quick total of what other code has made of gradients shows that they are finite."""
    return isinstance(after, CpuNorms) and after.finite() and not after.details
