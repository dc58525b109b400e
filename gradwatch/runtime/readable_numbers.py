"""Times and values as people read them, in pages and terminals."""

from __future__ import annotations

import math

_UNITS = (("d", 86_400), ("h", 3600), ("min", 60))


def duration(seconds: float) -> str:
    """`3 h 12 min`, `4 min 10 s`, `45.0 s`."""
    if not math.isfinite(seconds):
        return "an unknown time"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def ago(seconds: float) -> str:
    """`just now`, `45 s ago`, and from two of a unit on in that unit: `3 min ago`, `2 d ago`."""
    for unit, size in _UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago" if seconds >= 2 else "just now"


def number(value: float, digits: int = 4) -> str:
    """So many significant digits; `NaN`, `Inf` and `-Inf` are named."""
    if math.isfinite(value):
        return f"{value:.{digits}g}"
    return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
