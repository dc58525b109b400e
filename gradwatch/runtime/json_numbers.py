"""Plain data as JSON can hold it: JSON has no NaN and no infinities, and UTF-8 no lone surrogates."""

from __future__ import annotations

import math
from typing import Any


def json_number(value: float) -> float | str:
    """The number, or "NaN", "Infinity" or "-Infinity"; `float()` of the result gives the value back."""
    value = float(value)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def json_ready(value: Any) -> Any:
    """Plain data with every float as `json_number` and every text as `utf8` gives it; tuples become lists."""
    if isinstance(value, dict):
        return {json_ready(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if isinstance(value, str):
        return utf8(value)
    return json_number(value) if isinstance(value, float) else value


def utf8(text: str) -> str:
    """The text with lone surrogates as question marks."""
    return text.encode("utf-8", "replace").decode()
