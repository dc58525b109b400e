"""Detectors: pure, vectorised judgements of gradient series, and the registry that `detect: {kind: …}` names.

One file per family: `finiteness` (NaN, Inf), `constant` (a value against a bound), `presence` (gradients
that do not come or move nothing), `level` and `trend` (a series against its past), `jump` (against
the largest so far), `share` (a site against
the others), `rank` (a rank against the others), `scale` (a GradScaler's loss scale).
"""

from __future__ import annotations

from gradwatch.detectors.baseline import LossSpike, Spike
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
from gradwatch.detectors.finiteness import LossNonFinite, NonFinite, NormOverflow
from gradwatch.detectors.jump import Jump
from gradwatch.detectors.loss_scale import ScaleCollapse
from gradwatch.detectors.presence import AllZero, Never, Stale, Stuck
from gradwatch.detectors.rank import RankMismatch, RankOutlier
from gradwatch.detectors.share import DepthRatio, Drop
from gradwatch.detectors.thresholds import Above, Below, Dead, UpdateRatio
from gradwatch.detectors.trend import Drift

__all__ = [
    "DETECTORS",
    "ENTRY_POINT_GROUP",
    "KNOWN_NOT_BUILT",
    "Above",
    "AllZero",
    "Below",
    "Dead",
    "DepthRatio",
    "Detector",
    "Drift",
    "Drop",
    "Jump",
    "LossNonFinite",
    "LossSpike",
    "Never",
    "NonFinite",
    "NormOverflow",
    "RankMismatch",
    "RankOutlier",
    "Sample",
    "ScaleCollapse",
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
    "may_breach",
    "register_detector",
    "rule_keys",
]
