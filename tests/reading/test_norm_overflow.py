"""Gradients so large that float32 cannot hold their norm: clipped and skipped as any other, for the norm is known."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.policies.norm import clip_coefficient, clip_coefficients
from gradwatch.policies.norm_bound import SiteBound, factor_of
from gradwatch.reading.foreach_norms import clip_factor
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept

BIG = 3e38
FILES = {
    "total": "clip: {total: {method: norm, max_norm: 1}}",
    "param": "clip: {total: {method: norm, max_norm: 1, scope: param}}",
    "baseline": "clip: {total: {method: baseline}}",
    "zclip": "clip: {total: {method: zclip}}",
    "block_rms": "clip: {total: {method: block_rms}}",
    "above": "rules: {a: {detect: {kind: above, of: norm, threshold: 5}, do: [clip: {to: 5}]}}",
    "spike": "rules: {a: {detect: {kind: spike, of: norm, above: 6}, scope: total, do: [skip_step: {}]}}",
}


@pytest.mark.parametrize("norm", [3.5e38, 1e39, 2.4e39, 1e200])
def test_every_factor_of_a_norm_beyond_float32_meets_the_bound(norm: float) -> None:
    """One norm, many, on a device and in a hook: max_norm / norm in float64, rounded once."""
    want = np.float32(2.0 / norm)
    assert clip_coefficient(norm, 2.0) == want
    assert clip_coefficients(np.array([norm, 1.0]), 2.0, np.ones(2, np.bool_)).tolist() == [want, 1.0]
    assert float(clip_factor(torch.tensor(norm, dtype=torch.float64), 2.0)) == want
    assert factor_of((SiteBound(0.0, 2.0, 2.0, 1e-6, False),), norm) == want


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_still_gets_1(norm: float) -> None:
    """A bad element is never spread."""
    assert float(clip_factor(torch.tensor(norm, dtype=torch.float64), 2.0)) == 1
    assert factor_of((SiteBound(0.0, 2.0, 2.0, 1e-6, False),), norm) == 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("pack", ["", "extends: [default]\n"])
@pytest.mark.parametrize("name", FILES)
def test_the_largest_finite_gradients_are_clipped_or_skipped(
    name: str, pack: str, late: bool, tmp_path: Path
) -> None:
    """In the backward or after it (`late`), in a calm loop or not: no weight moves by more than the bound allows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer, kept, blown = torch.optim.SGD(model.parameters(), lr=1e-3), Kept(), False
    for param in model.parameters():
        param.register_hook(lambda grad: torch.full_like(grad, BIG) if blown and not late else None)
    rules = parse_rules(f"version: 1\n{pack}{FILES[name]}\n")
    watch = gradwatch.watch(model, optimizer, rules=rules, sinks=[kept], run_dir=tmp_path / "run")
    for step in range(61):
        blown = step == 60
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        if blown and late:
            for param in model.parameters():
                assert param.grad is not None
                param.grad.fill_(BIG)
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.step()
    moved = max(float((a - b).detach().abs().max()) for a, b in zip(before, model.parameters(), strict=True))
    assert moved <= 0.01, moved
    watch.flush()
    record = kept.records[-1]
    assert record.snapshot.step == 60
    assert record.decision.skip == (name == "spike")
    assert not record.snapshot.nonfinite().any()
    if name != "spike":
        assert record.snapshot.total_norm_applied < 100
        assert record.snapshot.total_norm == pytest.approx(BIG * math.sqrt(65), rel=1e-4)
    watch.close()
