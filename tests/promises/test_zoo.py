"""P5: any legal model works. Nothing fails that does not also fail without us, no bit changes, nothing is missed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gradwatch
from gradwatch.rules.files import parse_rules
from tests.odd_models import ODD, Odd
from tests.promises.test_bit_identity import digest, tensors
from tests.support.kept import Kept
from tests.support.recorder import norms_of
from tests.support.zoo import EVERY_TAP, MODELS

STEPS = 9
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning",
    "ignore:Using backward\\(\\) with create_graph=True:UserWarning",
    "ignore:Anomaly Detection has been enabled:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # compiled autograd's own
    "ignore:Lazy modules are a new feature:UserWarning",
)


def make(name: str) -> Odd:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    if name in ODD:
        return ODD[name]()
    model, batch = MODELS[name]()
    odd = Odd([model], [torch.optim.AdamW(model.parameters(), 1e-3)])

    def step(number: int) -> None:
        odd.optimizers[0].zero_grad()
        model(batch()).pow(2).mean().backward()
        odd.optimizers[0].step()

    odd.step = step
    return odd


def left_behind(odd: Odd) -> str:
    """A hash of everything a training leaves behind: weights, buffers, optimizer states, generators."""
    states = [tensors(model.state_dict()) for model in odd.watched]
    states += [tensors(optimizer.state_dict()["state"]) for optimizer in odd.optimizers]
    return digest(states, torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state())


class Applied:
    """What every optimizer step was given: float64 norms by id of the parameter, in the order of the steps."""

    def __init__(self) -> None:
        self.steps: list[dict[int, float]] = []

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        params = [(str(id(p)), p) for group in optimizer.param_groups for p in group["params"] if p.numel()]
        self.steps.append({int(key): norm for key, norm in norms_of(params).items()})


@contextmanager
def noted() -> Iterator[Applied]:
    applied = Applied()
    handle = register_optimizer_step_pre_hook(applied)
    try:
        yield applied
    finally:
        handle.remove()


@pytest.mark.parametrize("name", [*MODELS, *ODD])
def test_any_model_trains_as_without_us(name: str, tmp_path: Path) -> None:
    """Watched with every tap, strictly: the same bits, no fault of ours, and every parameter covered in the end."""
    bare = make(name)
    for number in range(STEPS):
        bare.step(number)
    want = left_behind(bare)
    torch._dynamo.reset()
    odd, sink = make(name), Kept()
    with gradwatch.watch(odd.watched, rules=parse_rules(EVERY_TAP), sinks=[sink], strict=True) as gw:
        for number in range(STEPS):
            odd.step(number)
        assert gw.health.errors() == {}
        assert gw.coverage == 1.0
    assert left_behind(odd) == want
    assert len(sink.records) >= STEPS
    assert not any(record.decision.skip for record in sink.records)


# In these several steps of one optimizer (or many optimizers) make one Snapshot, or one step several.
COALESCED = {"optimizer_in_backward", "sharpness_aware", "lbfgs", "adam_with_closure", "double_firing_step"}


@pytest.mark.parametrize("name", sorted((MODELS.keys() | ODD.keys()) - COALESCED))
def test_every_step_reports_what_the_optimizer_was_given(name: str) -> None:
    """One Snapshot per step; its norms after clipping are those found independently just before the step."""
    with noted() as applied:
        odd, sink = make(name), Kept()
        with gradwatch.watch(odd.watched, rules="observe-only", sinks=[sink], strict=True):
            for number in range(STEPS):
                odd.step(number)
        assert len(sink.records) == len(applied.steps)
        for record, want in zip(sink.records, applied.steps, strict=True):
            column = record.snapshot.column("norm_applied")
            assert column is not None
            got = sorted(column.values[column.present].tolist())
            assert got == pytest.approx(sorted(want.values()), rel=1e-5)


def test_the_zoo_is_large_enough() -> None:
    """P5 asks for thirty."""
    assert len(MODELS) + len(ODD) >= 60
