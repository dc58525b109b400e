"""The gradient noise scale from norms, against the gradients that they are of."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.distributed.noise_scale import noise_scale


@given(st.integers(2, 8), st.integers(1, 30), st.floats(0.01, 3.0), st.integers(0, 10**6))
def test_it_is_the_ratio_of_two_unbiased_estimates(world: int, size: int, noise: float, seed: int) -> None:
    """tr(Σ) is the variance of the ranks' gradients (by W - 1), |G|² the square of their mean less a share of it."""
    rng = np.random.default_rng(seed)
    own = rng.normal(1.0, noise, (world, size))
    mean = own.mean(axis=0)
    trace = float(np.square(own - mean).sum() / (world - 1))
    gradient = float(mean @ mean) - trace / world
    found = noise_scale(np.linalg.norm(own, axis=1), float(np.linalg.norm(mean)))
    if gradient <= 1e-6 * trace:
        assert found is None or found > 1e5
    else:
        assert found == pytest.approx(trace / gradient, rel=1e-4)


@pytest.mark.parametrize(
    ("norms", "mean"), [([3.0], 3.0), ([1.0, math.nan], 1.0), ([1.0, math.inf], 1.0), ([1.0, 1.0], 0.0)]
)
def test_it_is_unknown_where_norms_do_not_tell(norms: list[float], mean: float) -> None:
    """One rank, a norm that is not finite, a mean that vanishes."""
    assert noise_scale(np.array(norms), mean) is None
