"""How far numbers made in float32 may be from those of float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

RELATIVE = 1e-5
ROUNDINGS = 4
"""Measured: `c.bias` of tests/ranks/situations.Net is a mean of outputs of both signs, each of them off by about 1e-7
of its own summands. Over 120 seeds, 1 to 3 micro-batches and 7 choices of instruction set (ATen's default, AVX2 and
AVX-512, MKL_CBWR from COMPATIBLE on), bare torch was off by more than RELATIVE in 38 of 25,200 norms, and in these by
3.9 float32 eps of the total norm at most; in the trainings of the tests themselves by 2.1.
"""
EPS = float(np.finfo(np.float32).eps)


def near_norms(expected: Mapping[str, float]) -> Any:
    """Equal to these norms of one step's gradients: within RELATIVE, or within ROUNDINGS eps of their total norm.

    A gradient that is small because large summands cancel has the error of those, and how much depends on the CPU.
    """
    return pytest.approx(dict(expected), rel=RELATIVE, abs=ROUNDINGS * EPS * math.hypot(*expected.values()))
