"""`grown`: gradients multiplied between backward and step, not what is added to each of them."""

from __future__ import annotations

import numpy as np
import pytest

from gradwatch.detectors import Grown, Sample, breaches


def grown(coef: list[float | None]) -> list[int]:
    """The parameters with a breach, where these are the factors; None = no gradient."""
    present = np.array([one is not None for one in coef])
    values = np.array([0.0 if one is None else one for one in coef], np.float32)
    detector = Grown()
    found: list[int] = np.flatnonzero(
        breaches(detector, detector.score((), Sample(values, present)))
    ).tolist()
    return found


@pytest.mark.parametrize(
    ("coef", "expected"),
    [
        ([10.0, 10.0, 10.0, 10.0], [0, 1, 2, 3]),
        ([10.0, 10.0000005, 10.0, 4.0], [0, 1, 2, 3]),
        ([1.0, 1.0, 1.0, 50.0], [3]),
        ([0.25, 0.25, 0.25, 50.0], [3]),  # clipped by others, too
        ([1.0, 10.0], [1]),
        ([10.0], [0]),
        ([3.0, 3.0, 3.0], []),
        ([10.0, None, 10.0, None], [0, 2]),
        ([1.3, 7.0, 1.1, 4.5], []),  # noise
        ([1.01, 1.002, 40.0, 1.03], []),  # weight decay by hand
        ([7.0, 8.0], []),
        ([None, None], []),
        ([np.nan, 10.0, 10.0], [1, 2]),
        ([np.inf, 1.0, 1.0], []),
        ([0.0, 0.0, 10.0], [2]),
    ],
)
def test_one_factor_or_a_few_parameters(coef: list[float | None], expected: list[int]) -> None:
    """A factor that half of them share, and what stands apart from it; nothing where each has its own."""
    assert grown(coef) == expected
