"""Clip policies: bit-equal to torch where torch is right, harmless where it is not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradwatch.errors import GradwatchError
from gradwatch.policies import POLICIES, ClipByNorm, clip_coefficient, find_policy, register_policy

torch = pytest.importorskip("torch")

finite_norms = st.one_of(st.floats(0, 2.0**127, width=32), st.floats(0, 16, width=32))


def torch_coefficient(total_norm: float, max_norm: float) -> float:
    """The very expressions of `torch.nn.utils.clip_grads_with_norm_`."""
    clip_coef = max_norm / (torch.tensor(total_norm, dtype=torch.float32) + 1e-6)
    return float(torch.clamp(clip_coef, max=1.0))


@given(finite_norms, st.floats(1e-6, 1e6))
@example(0.0, 1.0)
@example(1.0, 1.0)
def test_the_coefficient_is_torchs_to_the_bit(total_norm: float, max_norm: float) -> None:
    """Given the same norm, for any norm float32 can hold."""
    found = clip_coefficient(total_norm, max_norm)
    assert found.dtype == np.float32
    assert float(found) == torch_coefficient(total_norm, max_norm)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 37.0, 1e6])
def test_gradients_are_clipped_as_clip_grad_norm_clips_them(scale: float) -> None:
    """End to end: multiplying by the coefficient of torch's own norm gives torch's own gradients."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(5, 3)), torch.nn.Parameter(torch.zeros(7))]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator) * scale
    ours = [param.grad.clone() for param in params]
    total = float(torch.nn.utils.clip_grad_norm_(params, 1.0))
    factor = torch.tensor(clip_coefficient(total, 1.0))
    assert all(torch.equal(grad * factor, param.grad) for grad, param in zip(ours, params, strict=True))


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf, 1e300])
def test_a_norm_that_is_not_finite_clips_nothing(norm: float) -> None:
    """torch would multiply every gradient by NaN or 0."""
    assert clip_coefficient(norm, 1.0) == np.float32(1)


@given(st.floats(0, 2.0**90, width=32), st.floats(1e-6, 1e6))
def test_clipping_never_enlarges_and_meets_its_bound(total_norm: float, max_norm: float) -> None:
    """0 <= coefficient <= 1, and the clipped norm exceeds max_norm by rounding at most."""
    coefficient = float(ClipByNorm(max_norm).coefficient(total_norm))
    assert 0 <= coefficient <= 1
    assert total_norm * coefficient <= max_norm * (1 + 1e-5)


def test_methods_are_registered_once() -> None:
    """As detectors are."""
    assert POLICIES["norm"] is ClipByNorm
    assert find_policy("norm") is ClipByNorm
    assert find_policy("no-such-method") is None
    with pytest.raises(GradwatchError, match="'norm' is registered already"):
        register_policy(type("Other", (), {"method": "norm"}))
