"""Thresholds that no value of their column can cross: a rule with one would never fire, and nothing would say so."""

from __future__ import annotations

from typing import Any

from gradwatch.detectors.thresholds import Above, Below
from gradwatch.records.columns import range_of

FRACTION = (0.0, 1.0)
MEASURED_ONLY = 1e6
"""A threshold as far from 0 as this is no mistake: its rule has the column measured, and is not meant to fire."""


def out_of_reach(detector: Any) -> tuple[str, str] | None:
    """(reason, advice) where a detector compares a column with a constant that none of its values is beyond."""
    if not isinstance(detector, Above | Below):
        return None
    least, most = range_of(detector.of)
    threshold, of = detector.threshold, detector.of
    if abs(threshold) >= MEASURED_ONLY:
        return None
    if isinstance(detector, Above) and threshold >= most:
        reason = (
            f"'threshold' {threshold:g}: '{of}' is never more than {most:g}, so the rule could never fire"
        )
        return reason, _advice(threshold, (least, most))
    if isinstance(detector, Below) and threshold <= least:
        reason = (
            f"'threshold' {threshold:g}: '{of}' is never less than {least:g}, so the rule could never fire"
        )
        return reason, f"write more than {least:g}; -1e9 to have it measured only"
    return None


def _advice(threshold: float, limits: tuple[float, float]) -> str:
    if limits == FRACTION and 1 < threshold < 100:
        return f"a fraction: {threshold / 100:g} is {threshold:g} %"
    return f"write less than {limits[1]:g}; 1e9 to have it measured only"
