"""Detectors: pure, vectorised judgements of gradient series, and the registry that `detect: {kind: …}` names.

One file per family; `baseline` is what `spike` and `drift` learn of the past of a series.
"""

from __future__ import annotations

from gradwatch.detectors.baseline import leading
from gradwatch.detectors.converged import Converged
from gradwatch.detectors.detector import (
    DETECTORS,
    ENTRY_POINT_GROUP,
    KNOWN_NOT_BUILT,
    Detector,
    Sample,
    Scope,
    State,
    breaches,
    clears,
    find_detector,
    first_crossed,
    may_breach,
    register_detector,
    rule_keys,
)
from gradwatch.detectors.drift import Drift
from gradwatch.detectors.explosions import Diverged, Exploded, Jump
from gradwatch.detectors.fade import Fade
from gradwatch.detectors.learning_rate import LrJump
from gradwatch.detectors.loss_scale import ScaleCollapse
from gradwatch.detectors.missing_gradients import AllZero, Never, Stale, Stuck
from gradwatch.detectors.nonfinite import LossNonFinite, NonFinite, NormOverflow
from gradwatch.detectors.plateau import Plateau
from gradwatch.detectors.rank_outlier import RankMismatch, RankOutlier
from gradwatch.detectors.recent_extremes import AboveRecentMax, BelowRecentMin
from gradwatch.detectors.same_batch import SameBatch
from gradwatch.detectors.scaled import Grown, Scaled
from gradwatch.detectors.share_and_depth import DepthRatio, Drop, Rise
from gradwatch.detectors.spike import LossSpike, Spike
from gradwatch.detectors.thresholds import Above, Below, Dead, UpdateRatio
from gradwatch.detectors.usual_level import AboveUsual, BelowUsual

__all__ = [
    "DETECTORS",
    "ENTRY_POINT_GROUP",
    "KNOWN_NOT_BUILT",
    "Above",
    "AboveRecentMax",
    "AboveUsual",
    "AllZero",
    "Below",
    "BelowRecentMin",
    "BelowUsual",
    "Converged",
    "Dead",
    "DepthRatio",
    "Detector",
    "Diverged",
    "Drift",
    "Drop",
    "Exploded",
    "Fade",
    "Grown",
    "Jump",
    "LossNonFinite",
    "LossSpike",
    "LrJump",
    "Never",
    "NonFinite",
    "NormOverflow",
    "Plateau",
    "RankMismatch",
    "RankOutlier",
    "Rise",
    "SameBatch",
    "Sample",
    "ScaleCollapse",
    "Scaled",
    "Scope",
    "Spike",
    "Stale",
    "State",
    "Stuck",
    "UpdateRatio",
    "breaches",
    "clears",
    "find_detector",
    "first_crossed",
    "leading",
    "may_breach",
    "register_detector",
    "rule_keys",
]
