"""What a forward writes in place into plain attributes of its modules is put back after a replay, or told."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.records.finding import Finding
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept

SKIP = "version: 1\nrules:\n  nf:\n    detect: {kind: nonfinite, of: norm}\n    do: [skip_step: {}%s]\n"
LOOSE = torch.zeros(8)  # of no module


class Stateful(nn.Module):
    """A forward that keeps its state anywhere but in buffers; `kind` says where."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 1)
        self.ema = torch.zeros(8)
        self.boxes: dict[str, Any] = {
            "deep": [(torch.zeros(8),)],
            "seen": [[]],
            "queue": deque([torch.zeros(8)]),
        }
        self.torch_generator = torch.Generator().manual_seed(0)
        self.numpy_generator = np.random.default_rng(0)
        self.legacy = [np.random.RandomState(0)]
        self.python = {"random": random.Random(0)}

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        with torch.no_grad():
            kept = {
                "attribute": self.ema,
                "containers": self.boxes["deep"][0][0],
                "queue": self.boxes["queue"][0],
                "loose": LOOSE,
            }.get(self.kind)
            if kept is not None:
                kept.mul_(0.9).add_(h.mean(0), alpha=0.1)
            torch.zeros(3).add_(1.0)  # made here: nobody's affair
            torch.tensor(1.0).mul_(2.0)
        self.boxes["seen"][0].append(float(h.detach().mean()))
        noise = {
            "generator": lambda: torch.randn(h.shape, generator=self.torch_generator),
            "numpy": lambda: float(self.numpy_generator.random()),
            "legacy": lambda: float(self.legacy[0].rand()),
            "python": lambda: self.python["random"].random(),
        }.get(self.kind, lambda: 0.0)
        return self.leave(h + noise())

    def state(self) -> list[Any]:
        """Everything that goes on from step to step, as plain numbers."""
        tensors = [*self.parameters(), self.ema, self.boxes["deep"][0][0], self.boxes["queue"][0]]
        return [
            *(tensor.tolist() for tensor in tensors),
            self.boxes["seen"],
            self.torch_generator.get_state().tolist(),
            self.numpy_generator.bit_generator.state,
            self.legacy[0].rand(),
            self.python["random"].getstate(),
        ]


def trained(kind: str, do: str) -> tuple[Stateful, list[Finding]]:
    """A model after eight steps, the fifth of which is NaN from the loss on, and what was found of it."""
    torch.manual_seed(0)
    LOOSE.zero_()
    model, kept = Stateful(kind), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, rules=parse_rules(SKIP % do), sinks=[kept]) as gw:
        for step in range(8):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 6)).square().mean()
            (loss * (float("nan") if step == 4 else 1.0)).backward()
            optimizer.step()
        gw.flush()
        assert gw.health.errors() == {}
    return model, [finding for record in kept.records for finding in record.findings]


@pytest.mark.parametrize(
    "kind", ["none", "attribute", "containers", "queue", "generator", "numpy", "legacy", "python"]
)
def test_training_goes_on_as_if_nothing_had_been_run_again(kind: str) -> None:
    """Weights, attributes and generators after a localised NaN are those of a run without localise."""
    bare, nothing = trained(kind, "")
    watched, findings = trained(kind, ", localise: {}")
    assert nothing == []
    assert findings[0].phase == "loss"
    assert "disturbed" not in findings[0].note
    assert watched.state() == bare.state()


def test_a_write_that_nobody_puts_back_is_told() -> None:
    """A global tensor is out of reach: the finding names the operation, its line, and the way out."""
    _, findings = trained("loose", ", localise: {}")
    assert "mul_ (" in findings[0].note
    assert "test_module_attributes.py:" in findings[0].note
    assert "may have changed the training" in findings[0].note


def test_attributes_beyond_max_bytes_are_not_run_again() -> None:
    """What cannot be copied is not put at risk: the replay is refused, and says why."""
    bare, _ = trained("attribute", "")
    watched, findings = trained("attribute", ", localise: {max_bytes: 64}")
    assert "plain attributes" in findings[0].note
    assert "max_bytes = 64" in findings[0].note
    assert watched.state() == bare.state()


def test_a_tensor_that_was_put_back_can_still_be_differentiated() -> None:
    """The version of an attribute that a graph of the user's has saved is as before."""
    from gradwatch.localise.held_calls.module_attributes import attributes

    model = Stateful("attribute")
    weight = torch.ones(8, requires_grad=True)
    product = (weight * model.ema).sum()
    restores: list[Callable[[], None]] = attributes(model, 1 << 20)
    model(torch.randn(4, 6))
    for restore in restores:
        restore()
    product.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(8))
