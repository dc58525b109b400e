"""How far numbers made in float32 may be from those of float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

RELATIVE = 1e-5
ROUNDINGS = 8
EPS = float(np.finfo(np.float32).eps)


def near_norms(expected: Mapping[str, float]) -> Any:
    """Equal to these norms of one step's gradients: within RELATIVE, or some roundings of what they are sums of.

    A gradient that is small because large summands cancel has the error of those, and how much depends on the CPU.
    """
    return pytest.approx(dict(expected), rel=RELATIVE, abs=ROUNDINGS * EPS * math.hypot(*expected.values()))
