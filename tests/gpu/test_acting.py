"""Rules that act on a GPU: a NaN step is skipped, clips are torch's, and what the record says is what was done."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gradwatch.rules.files import parse_rules
from tests.gpu.training import OPTIMIZERS, Training
from tests.precision.loops import events, watched

BAD = 9


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", ["mlp", "cnn", "gpt"])
def test_a_nan_step_is_skipped_and_told(model: str, optimizer: str, precision: str) -> None:
    """The default pack: weights stay at the bad step and move at every other, and its event has the step's number."""
    training = Training(model, optimizer, precision)
    gw, sink = watched(training.model, training.optimizer, "default")
    moved = []
    with gw:
        for step in range(14):
            before = training.weights()
            training.step(float("nan") if step == BAD else 1.0)
            pairs = zip(before, training.model.parameters(), strict=True)
            moved.append(not all(torch.equal(a, b) for a, b in pairs))
        healthy = gw.healthy
    assert moved == [step != BAD for step in range(14)]
    assert healthy
    if precision != "fp16":  # the GradScaler has rejected that step itself
        told = [(one.step, one.rule) for one in events(sink, "critical") if one.kind == "firing"]
        assert (BAD, "non-finite") in told, told
        assert {step for step, _ in told} == {BAD}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["mlp", "cnn", "gpt"])
def test_a_clip_of_the_total_is_torchs(model: str, precision: str, optimizer: str) -> None:
    """`clip: total` in a rule file beside `clip_grad_norm_` in the loop: the same weights up to float32's rounding."""
    ours, theirs = Training(model, optimizer, precision), Training(model, optimizer, precision, max_norm=0.1)
    said = parse_rules("version: 1\nclip: {total: {method: norm, max_norm: 0.1}}\nrules: {}")
    gw, sink = watched(ours.model, ours.optimizer, said)
    before = ours.weights()
    torch.manual_seed(1)
    with gw:
        for _ in range(6):
            ours.step()
    torch.manual_seed(1)
    for _ in range(6):
        theirs.step()
    # Adam's first steps move by the sign of a gradient, whatever its size: so all weights together.
    apart, moved = (
        math.hypot(*(float((a - b).norm()) for a, b in zip(ours.weights(), others, strict=True)))
        for others in (theirs.weights(), before)
    )
    assert apart < (0.05 if precision == "bf16" else 0.01) * moved
    for record in sink.records:
        snapshot = record.snapshot
        want = min(0.1, snapshot.total_norm)
        assert snapshot.total_norm_applied == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize(
    "clip",
    [
        "{total: {method: norm, max_norm: 0.05, scope: param}}",
        "{total: {method: value, clip_value: 0.001}}",
        "{total: {method: agc}}",
        "{total: {method: autoclip}}",
        "{total: {method: zclip}}",
    ],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw-fused"])
def test_policies_do_on_a_gpu_what_they_do_on_the_host(clip: str, optimizer: str) -> None:
    """The gradients that the optimizer got, of one device and of the other, over eight steps of the same data."""
    seen: list[list[list[torch.Tensor]]] = []
    batches = [torch.randn(32, 16, generator=torch.Generator().manual_seed(step)) for step in range(8)]
    for where in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(where)
        chosen = OPTIMIZERS[optimizer](model.parameters())
        gw, _ = watched(model, chosen, parse_rules(f"version: 1\nclip: {clip}\nrules: {{}}"))
        seen.append([])
        with gw:
            for step, batch in enumerate(batches):
                chosen.zero_grad()
                (model(batch.to(where)).square().mean() * (100.0 if step == 6 else 1.0)).backward()
                chosen.step()
                seen[-1].append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
            assert gw.health.errors() == {}
    for host, there in zip(*seen, strict=True):
        for one, other in zip(host, there, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_spike_is_clipped_in_its_own_step(optimizer: str) -> None:
    """A rule with `do: clip` bounds the very step that is out of line."""
    training = Training("mlp", optimizer)
    said = parse_rules(
        "version: 1\nrules: {big: {detect: {kind: above, of: total_norm, threshold: 50}, do: [clip: {to: 1.0}]}}"
    )
    gw, sink = watched(training.model, training.optimizer, said)
    norms = []
    with gw:
        for step in range(10):
            training.step(1e4 if step == 5 else 1.0)
            norms.append(float(nn.utils.get_total_norm(training.gradients().values())))
    assert norms[5] == pytest.approx(1.0, rel=1e-3)
    assert [event.step for event in events(sink) if event.kind == "firing"] == [5]


def test_a_checkpoint_is_called_healthy_only_with_finite_weights() -> None:
    """`healthy` looks at the weights on the device: ruined ones are told, also where no gradient shows them."""
    training = Training("mlp", "adamw-fused")
    gw, _ = watched(training.model, training.optimizer, "observe-only")
    with gw:
        for _ in range(6):
            training.step()
        assert gw.healthy
        with torch.no_grad():
            next(training.model.parameters()).fill_(float("inf"))
        assert not gw.healthy
