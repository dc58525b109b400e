"""P1 on a GPU: weights, states, losses and generators of a watched training are those of a bare one, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gradwatch
from tests.gpu.training import Training
from tests.promises.test_bit_identity import digest, tensors

STEPS = 24
pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # torch's: what has no deterministic form, and what it compiles


def left_behind(training: Training) -> str:
    """A hash of everything a training leaves behind."""
    states = training.model.state_dict(), training.optimizer.state_dict()["state"], training.losses
    generators = torch.cuda.get_rng_state(), torch.get_rng_state()
    return digest(tensors(states), tensors(generators), training.scaler.state_dict())


def bare(**options: object) -> str:
    """What a training leaves behind unwatched; the test is skipped where two such trainings differ."""
    found = set()
    for _ in range(2):
        torch._dynamo.reset()
        training = Training(**options)  # type: ignore[arg-type]
        for _ in range(STEPS):
            training.step()
        found.add(left_behind(training))
    if len(found) == 2:
        pytest.skip("two bare runs differ here")
    return found.pop()


@pytest.mark.parametrize("pack", ["observe-only", "default"])
@pytest.mark.parametrize(
    ("model", "optimizer", "precision", "micro", "compiled"),
    [
        ("mlp", "sgd", "fp32", 1, False),
        ("mlp", "adamw-capturable", "fp16", 2, False),
        ("cnn", "sgd-fused", "fp32", 1, False),
        ("cnn", "adam", "bf16", 4, False),
        ("cnn", "adamw-fused", "fp16", 1, False),
        ("lstm", "adam", "fp32", 1, False),
        ("lstm", "sgd", "fp16", 1, False),
        ("gpt", "adamw-fused", "bf16", 1, False),
        ("gpt", "adam", "fp16", 2, False),
        ("mlp", "adamw-fused", "fp32", 1, True),
        ("gpt", "adamw-fused", "bf16", 1, True),
    ],
)
def test_watching_changes_no_bit(
    model: str, optimizer: str, precision: str, micro: int, compiled: bool, pack: str, tmp_path: Path
) -> None:
    """Shipped packs on healthy runs of four models, with and without loss scaling, autocast and torch.compile."""
    options = {
        "model_name": model,
        "optimizer_name": optimizer,
        "precision": precision,
        "micro": micro,
        "compiled": compiled,
        "max_norm": 1.0,
    }
    want = bare(**options)
    torch._dynamo.reset()
    training = Training(**options)  # type: ignore[arg-type]
    with gradwatch.watch(
        training.model, training.optimizer, rules=pack, run_dir=tmp_path, listen="127.0.0.1:0", strict=True
    ) as gw:
        for _ in range(STEPS):
            training.step()
        got = left_behind(training)
        assert gw.health.errors() == {}
        assert gw.coverage == 1.0
    assert got == want
