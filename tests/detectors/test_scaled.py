"""`scaled`: gradients multiplied by one and the same factor, step after step."""

from __future__ import annotations

import numpy as np
import pytest

from gradwatch.detectors import Sample, Scaled, breaches


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ([0.1] * 4, [1, 2, 3]),
        ([0.1, 0.1, 1.0, 1.0, 0.1, 0.1], [1, 5]),
        ([0.5, 0.4, 0.3], []),
        ([0.5, 0.5003, 0.52, 0.52], [1, 3]),
        ([1.0, 1.0, 1.0], []),
        ([0.1, None, 0.1], [2]),
        ([0.1, np.nan, 0.1, np.inf], [2]),
    ],
)
def test_the_same_factor_as_before(factors: list[float | None], expected: list[int]) -> None:
    """The steps that breach, where these are the factors; None = no step with one."""
    detector, found = Scaled(), []
    state = detector.init(1)
    for step, factor in enumerate(factors):
        sample = Sample(np.array([factor or 0.0], np.float32), np.array([factor is not None]))
        if breaches(detector, detector.score(state, sample))[0]:
            found.append(step)
        state = detector.learn(state, sample)
    assert found == expected
