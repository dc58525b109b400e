"""What other tools check, by their published formulas, as judges of the same Snapshots.

A check holds or not at each step; it gives an alarm when it holds after 20 steps on which it did not, as a rule of
gradwatch does with its default `cooldown`. Those that act on loss or norms are judged by when they would have acted.

Axes: S sites.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.records.snapshot import BoolArray, Snapshot
from tests.benchmarks.detection.judging import Alarm

COOLDOWN = 20
Found = bool | BoolArray
"""Whether the check holds: of the whole model, or bool[S] by parameter."""


class Check:
    """One check of one optimizer; it remembers what its formula needs."""

    def __call__(self, snapshot: Snapshot) -> Found:
        """Judge a step, and learn it."""
        raise NotImplementedError


class NotFinite(Check):
    """`torch.isfinite` on gradients and loss, as in `clip_grad_norm_(error_if_nonfinite=True)` and most loops."""

    def __call__(self, snapshot: Snapshot) -> Found:
        loss = snapshot.scalars.get("loss", 0.0)
        found = snapshot.nonfinite()
        return found if found.any() else not math.isfinite(loss)


class TotalAbove(Check):
    """A constant for the total norm: a dashboard's alert `grad_norm > 100`."""

    def __call__(self, snapshot: Snapshot) -> Found:
        return snapshot.total_norm > 100


@dataclass
class RunningMean:
    """Exponential mean of finite values with a share `rest` for the newest, the plain mean of the first samples."""

    rest: float = 0.01
    count: int = 0
    mean: float = 0.0

    def learn(self, value: float) -> None:
        """Take one value."""
        if math.isfinite(value):
            self.count += 1
            self.mean += max(self.rest, 1 / self.count) * (value - self.mean)


class TotalAboveMean(Check):
    """Total norm > 10 x its running mean, after 20 steps: the one-line rule of many in-house loops."""

    def __init__(self) -> None:
        self._mean = RunningMean()

    def __call__(self, snapshot: Snapshot) -> Found:
        found = self._mean.count >= 20 and snapshot.total_norm > 10 * self._mean.mean
        self._mean.learn(snapshot.total_norm)
        return found


class ParameterAboveMean(Check):
    """The norm of a parameter > 10 x its running mean, after 20 samples."""

    factor = 10.0

    def __init__(self) -> None:
        self._count: NDArray[np.int64] | None = None
        self._mean: NDArray[np.float64] = np.zeros(0)

    def __call__(self, snapshot: Snapshot) -> Found:
        if self._count is None or len(self._count) != len(snapshot.norm):
            self._count = np.zeros(len(snapshot.norm), np.int64)
            self._mean = np.zeros(len(snapshot.norm))
        norm = snapshot.norm.astype(np.float64)
        known = (snapshot.calls > 0) & np.isfinite(norm)
        found: BoolArray = known & (self._count >= 20) & (norm > self.factor * self._mean)
        self._count = self._count + known
        share = np.maximum(0.01, 1 / np.maximum(self._count, 1))
        self._mean = np.where(known, self._mean + share * (np.where(known, norm, 0) - self._mean), self._mean)
        return found


class Turbulence(ParameterAboveMean):
    """msProbe's monitor, `AnomalyTurbulence` with its example threshold of 0.5: value > 1.5 x the mean so far."""

    factor = 1.5


class ZClipCheck(Check):
    """ZClip (Kumar et al. 2025): z of the total norm > 2.5 by an exponential mean and variance, alpha 0.97.

    Its warm-up is 25 steps; it learns the norm to which it would have clipped.
    """

    def __init__(self) -> None:
        self._first: list[float] = []
        self._mean = self._variance = 0.0

    def __call__(self, snapshot: Snapshot) -> Found:
        norm = snapshot.total_norm
        if not math.isfinite(norm):
            return False
        if len(self._first) < 25:
            self._first.append(norm)
            self._mean, self._variance = float(np.mean(self._first)), float(np.var(self._first))
            return False
        deviation = math.sqrt(self._variance)
        z = (norm - self._mean) / (deviation + 1e-6)
        found = z > 2.5
        kept = self._mean + 2.5 * deviation / (z / 2.5) if found else norm
        self._mean = 0.97 * self._mean + 0.03 * kept
        self._variance = 0.97 * self._variance + 0.03 * (kept - self._mean) ** 2
        return found


class MegatronLoss(Check):
    """Megatron-LM's `is_unexpectedly_large` with its factor of 10: loss >= 10 x the largest of the first 100."""

    def __init__(self) -> None:
        self._seen, self._largest = 0, 0.0

    def __call__(self, snapshot: Snapshot) -> Found:
        loss = abs(snapshot.scalars.get("loss", math.nan))
        if self._seen < 100:
            if math.isfinite(loss):
                self._seen, self._largest = self._seen + 1, max(self._largest, loss)
            return False
        return loss >= 10 * self._largest


class SkipStep(Check):
    """OLMo-core's `SkipStepOptimizer`: loss or total norm > mean + 6 deviations of the last 128, once there are 64."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=128)
        self._norms: deque[float] = deque(maxlen=128)

    def __call__(self, snapshot: Snapshot) -> Found:
        loss, norm = snapshot.scalars.get("loss", math.nan), snapshot.total_norm
        found = self._large(self._losses, loss) or self._large(self._norms, norm)
        self._losses.append(loss)
        self._norms.append(norm)
        return found

    @staticmethod
    def _large(before: deque[float], value: float) -> bool:
        finite = [one for one in before if math.isfinite(one)]
        if len(before) < 64 or len(finite) < 2 or math.isnan(value):
            return False
        return value - float(np.mean(finite)) > 6 * float(np.std(finite, ddof=1))


class VanishingGradient(Check):
    """SageMaker Debugger's rule: the mean magnitude of a gradient < 1e-7; by its norm, as of normal elements."""

    def __call__(self, snapshot: Snapshot) -> Found:
        sizes = np.sqrt(np.maximum(snapshot.sites.numels, 1))
        found: BoolArray = (snapshot.calls > 0) & (0.8 * snapshot.norm / sizes < 1e-7)
        return found


class ExplodingTensor(Check):
    """SageMaker Debugger's rule: a gradient holds NaN or Inf."""

    def __call__(self, snapshot: Snapshot) -> Found:
        return snapshot.nonfinite()


class WeightUpdateRatio(Check):
    """SageMaker Debugger's rule: the update of a weight by the weight > 10 or < 1e-8."""

    def __call__(self, snapshot: Snapshot) -> Found:
        ratio = snapshot.column("update_ratio")
        if ratio is None:
            return False
        found: BoolArray = ratio.present & ((ratio.values > 10) | (ratio.values < 1e-8))
        return found


class LossNotDecreasing(Check):
    """SageMaker Debugger's rule: the loss is not 0.1 % below that of 10 steps ago, asked every 10 steps."""

    def __init__(self) -> None:
        self._before: float | None = None

    def __call__(self, snapshot: Snapshot) -> Found:
        loss = snapshot.scalars.get("loss")
        if loss is None or snapshot.step % 10:
            return False
        before, self._before = self._before, loss
        return before is not None and not loss < before * (1 - 0.001)


RIVALS: Mapping[str, tuple[Callable[[], Check], ...]] = {
    "NaN check": (NotFinite,),
    "total norm > 100": (TotalAbove,),
    "parameter > 10 × mean": (ParameterAboveMean,),
    "total > 10 × mean": (TotalAboveMean,),
    "ZClip z > 2.5": (ZClipCheck,),
    "Megatron loss × 10": (MegatronLoss, NotFinite),
    "OLMo 6 σ": (SkipStep,),
    "SageMaker Debugger": (ExplodingTensor, VanishingGradient, WeightUpdateRatio, LossNotDecreasing),
    "msProbe": (NotFinite, Turbulence),
}
"""The checks of each rival; Megatron-LM and msProbe look for NaN too."""


@dataclass
class Rival:
    """The checks of one rival on every optimizer of a training."""

    checks: tuple[Callable[[], Check], ...]
    _running: dict[tuple[int, int], Check] = field(default_factory=dict)
    _held: dict[tuple[int, int], int] = field(default_factory=dict)

    def judge(self, place: int, snapshot: Snapshot) -> Iterator[Alarm]:
        """The checks that begin to hold."""
        for number, make in enumerate(self.checks):
            key = (snapshot.optimizer, number)
            check = self._running.setdefault(key, make())
            with np.errstate(all="ignore"):
                found: Any = check(snapshot)
            if np.any(found):
                last = self._held.get(key, -COOLDOWN - 1)
                self._held[key] = snapshot.step
                if snapshot.step - last > COOLDOWN:
                    yield Alarm(
                        place, snapshot.step, type(check).__name__, "warning", _named(snapshot, found)
                    )

    def copy(self) -> Rival:
        """A deep copy: checks remember."""
        return copy.deepcopy(self)


def _named(snapshot: Snapshot, found: Found) -> tuple[str, ...]:
    """The parameters that a check by parameter holds for, the largest norms first."""
    if isinstance(found, (bool, np.bool_)):
        return ()
    here = np.flatnonzero(found)
    order = here[np.argsort(-snapshot.norm[here], kind="stable")]
    return tuple(snapshot.sites.names[k] for k in order)
