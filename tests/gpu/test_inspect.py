"""`gradwatch.inspect` on a GPU: statistics as on the host, a table and a profile that see the device."""

from __future__ import annotations

import pytest
import torch

from gradwatch.inspect import ActivationStats, module_summary, profile_step
from tests.gpu.training import Training, mlp


def test_activation_statistics_are_those_of_the_host() -> None:
    """Mean and deviation of each module's output at each step."""
    found = []
    batches = [torch.randn(32, 16, generator=torch.Generator().manual_seed(n)) for n in range(5)]
    for where in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = mlp().to(where)
        with ActivationStats(model, every=1, with_hist=True) as stats:
            for batch in batches:
                model(batch.to(where)).sum().backward()
        found.append([(one.mean, one.std) for each in stats.of.values() for one in each])
    host, there = found
    assert len(host) == len(there) > 0
    for one, other in zip(host, there, strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-5)


def test_summary_and_profile_see_the_device() -> None:
    """The table names the device; the profile holds kernels of the model and phases of ours."""
    assert "cuda" in str(module_summary(mlp().cuda(), torch.randn(4, 16, device="cuda")))
    training = Training("mlp")
    profile = profile_step(training.model, training.step)
    assert "cuda" in profile.table().lower()
