"""A Record as a line of JSON that another checkout can be compared with: all of it but time and cost.

The keys are those of the first checkout that wrote such lines; a field that is renamed since keeps its key here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradwatch.records.record import Record

ROOT = Path(__file__).resolve().parents[2]
BY_THE_CLOCK = frozenset({"overhead_seconds", "step_seconds", "wall_time", "weights_step"})
SECONDS = re.compile(r"\b\d+(\.\d+)?(e-?\d+)? s\b")
FOLDERS = re.compile(r"/tmp/[\w./-]*|0x[0-9a-f]+")


def line(record: Record) -> str:
    """The Record, byte for byte the same wherever the same thing happened."""
    return json.dumps(_plain(record), sort_keys=True, allow_nan=False)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in fields(value) if each.name not in BY_THE_CLOCK]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, Set):
        return sorted((_plain(one) for one in value), key=lambda one: json.dumps(one, sort_keys=True))
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return _without_place(value)
    return value if value is None or isinstance(value, bool | int | float) else _without_place(str(value))


def _without_place(text: str) -> str:
    """Without what differs from run to run: folders, addresses, durations."""
    return SECONDS.sub("… s", FOLDERS.sub("…", text.replace(f"{ROOT}/", "")))
