"""fp16 and bf16 training as it really goes: a healthy run is quiet, a collapsing one is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gradwatch.reading.batched_norms import FLOAT32_MAX
from tests.precision.loops import events, norms_in, watched

STEPS = 220


class Blobs:
    """A learnable classification task; `run` trains under fp16 autocast and a GradScaler that starts at 65,536.

    The loss is a sum over the batch, so its scaled gradients overflow float16 until the scale has come down.
    """

    def __init__(self, seed: int, kind: str = "mlp", lr: float = 1e-3) -> None:
        torch.manual_seed(seed)
        self.model = _mlp() if kind == "mlp" else _conv()
        self.image = kind == "conv"
        self.truth = torch.randn(64, 10)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr)
        self.scaler = torch.amp.GradScaler("cpu")
        self.halvings = 0

    def run(self, steps: int, bad: frozenset[int] = frozenset()) -> None:
        for step in range(steps):
            x = torch.randn(32, 64)
            y = (x @ self.truth).argmax(1)
            self.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = self.model(x.view(32, 1, 8, 8) if self.image else x)
                loss = cross_entropy(out, y, reduction="sum")
            self.scaler.scale(loss * (float("nan") if step in bad else 1.0)).backward()
            self.scaler.step(self.optimizer)
            scale = self.scaler.get_scale()
            self.scaler.update()
            self.halvings += self.scaler.get_scale() < scale


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 10)
    )


def _conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 10)
    )


@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        pytest.param(seed, kind, marks=() if seed == (kind == "conv") else pytest.mark.soak)
        for seed in range(4)
        for kind in ("mlp", "conv")
    ],
)
def test_a_healthy_fp16_run_raises_no_warning(seed: int, kind: str) -> None:
    """It settles from a scale of 65,536 by several rejected steps: each a Record and an info, nothing more."""
    task = Blobs(seed, kind)
    gw, sink = watched(task.model, task.optimizer)
    with gw:
        task.run(STEPS)
    assert task.halvings >= 3, "this run had nothing to settle, so it proves nothing"
    assert [record.snapshot.step for record in sink.records] == list(range(STEPS))
    assert sum(record.snapshot.scalars["scaler_skip"] for record in sink.records) == task.halvings
    assert events(sink, "warning", "critical") == []
    assert {event.rule for event in events(sink, "info")} == {"scaler-skip"}


def test_a_run_that_is_broken_from_the_start_collapses_loudly() -> None:
    """Every loss is NaN: critical at once, and again when the scale reaches 1 after 16 halvings."""
    task = Blobs(0)
    gw, sink = watched(task.model, task.optimizer)
    with gw:
        task.run(20, bad=frozenset(range(20)))
    loss, event = events(sink, "critical")
    assert (loss.rule, loss.kind, loss.step) == ("loss-non-finite", "firing", 0)
    assert (event.rule, event.kind, event.step, event.value) == ("scale-collapse", "firing", 16, 1.0)
    assert "scale of 1 at step 16" in event.description
    assert not any(record.decision.skip for record in sink.records)


def test_a_run_that_breaks_later_collapses_within_the_window() -> None:
    """Four halvings within a hundred steps, long after settling; three are not enough."""
    for faults, fires in ((3, False), (4, True)):
        task = Blobs(1)
        task.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)  # fits: no halvings but those asked for
        bad = frozenset(160 + 20 * k for k in range(faults))
        gw, sink = watched(task.model, task.optimizer)
        with gw:
            task.run(240, bad)
        assert task.halvings == faults
        told = [event for event in events(sink, "critical") if event.rule == "scale-collapse"]
        assert bool(told) == fires
        if fires:
            assert [event.kind for event in told] == ["firing"]
            assert told[0].step == 221  # the scale is halved after the step that overflowed


def test_a_hook_that_hides_overflow_leaves_the_scale_where_it_is() -> None:
    """`nan_to_num` in a tensor hook: the scaler never learns of the overflow, and so nobody counts a skip."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: torch.nan_to_num(grad, nan=0.0, posinf=0.0, neginf=0.0))
    gw, sink = watched(model, optimizer)
    with gw:
        for step in range(5):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).pow(2).mean() * (float("inf") if step in (1, 2, 3) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 65536.0
    assert [record.snapshot.scalars["scaler_skip"] for record in sink.records] == [0.0] * 5
    assert [record.snapshot.total_norm == 0 for record in sink.records] == [False, True, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_half_parameters_under_a_fused_optimizer_and_a_scaler(dtype: torch.dtype, kind: Any) -> None:
    """Only fused optimizers take half gradients under a GradScaler: norms to 1e-5 of float64, scale removed."""
    torch.manual_seed(0)
    model = nn.Linear(40, 30).to(dtype)
    optimizer = kind(model.parameters(), 1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    gw, sink = watched(model, optimizer)
    with gw:
        for step in range(5):
            optimizer.zero_grad()
            poison = float("inf") if step == 2 else 1.0
            scaler.scale(model(torch.randn(3, 40).to(dtype)).float().pow(2).mean() * poison).backward()
            want = {
                n: float(p.grad.double().norm()) / scaler.get_scale() for n, p in model.named_parameters()
            }
            scaler.step(optimizer)
            scaler.update()
            if step != 2:
                assert norms_in(sink.records[-1]) == pytest.approx(want, rel=1e-5)
    assert [record.snapshot.scalars["scaler_skip"] for record in sink.records] == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_parameters_of_every_dtype_without_a_scaler(dtype: torch.dtype) -> None:
    """Whole models in one dtype: norms to 1e-5 of float64, over steps that the optimizer really takes."""
    torch.manual_seed(0)
    model = nn.Linear(70, 50, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    gw, sink = watched(model, optimizer)
    with gw:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(3, 70).to(dtype)).abs().float().pow(2).sum().backward()
            wide = torch.complex128 if dtype.is_complex else torch.float64
            want = {n: float(torch.linalg.vector_norm(p.grad.to(wide))) for n, p in model.named_parameters()}
            optimizer.step()
            assert norms_in(sink.records[-1]) == pytest.approx(want, rel=1e-5)
    assert events(sink) == []


def test_bf16_autocast_keeps_float32_gradients() -> None:
    """Weights stay float32 under bf16 autocast; what is reported is the float32 gradient, no loss scale."""
    torch.manual_seed(0)
    model = nn.Linear(20, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    gw, sink = watched(model, optimizer)
    with gw:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.randn(4, 20)).pow(2).sum()
            loss.backward()
            want = {n: float(p.grad.double().norm()) for n, p in model.named_parameters()}
            optimizer.step()
            assert norms_in(sink.records[-1]) == pytest.approx(want, rel=1e-5)
            assert sink.records[-1].snapshot.loss_scale is None


def test_scaled_gradients_may_overflow_where_unscaled_ones_do_not() -> None:
    """A norm beyond float32 only because of the loss scale is no overflow once the scale is out of it."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(400))})
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    gw, sink = watched(model, optimizer)
    with gw:
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale((model["w"] * 1e33).sum()).backward()
            assert float(model["w"].grad.double().norm()) > FLOAT32_MAX
            scaler.step(optimizer)
            scaler.update()
    snapshot = sink.records[-1].snapshot
    assert snapshot.norm[0] == pytest.approx(1e33 * 20, rel=1e-5)
    assert not snapshot.columns
    assert snapshot.scalars["scaler_skip"] == 0
