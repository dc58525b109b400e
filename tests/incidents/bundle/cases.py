"""A training that breaks on demand and keeps bundles of it, and the model as somebody else would build it again."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.incidents.bundle.bundle_reader import read_document, read_tensors
from gradwatch.incidents.bundle.incident_json import Document
from gradwatch.records.finding import Finding
from gradwatch.rules.files import parse_rules
from gradwatch.rules.rule_set import RuleSet
from gradwatch.session.watch import session_of

BAD = 77.0
RULES = """
version: 1
rules:
  non-finite:
    detect: {kind: nonfinite}
    severity: critical
    cooldown: 0
    annotations: {summary: "Non-finite gradients.", description: "{param} at step {step}"}
    do: [skip_step, localise, snapshot: {SNAPSHOT}]
"""
EVERYTHING = "batch: true, parameters: true"


def rules(snapshot: str = EVERYTHING, text: str = RULES) -> RuleSet:
    """Skip, localise, and keep a bundle with these options."""
    return parse_rules(text.replace("SNAPSHOT", snapshot))


class Fragile(nn.Module):
    """Dropout, batch normalisation, a buffer that moves, all three generators; a square root of 0 on a bad batch.

    What the root is taken of, and so the evidence of the fault, depends on all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.leave = nn.Linear(8, 3)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: Tensor, scales: Any = None) -> Tensor:
        """Three numbers for each row."""
        h = self.enter(x) * (1 + 0.01 * random.random()) + float(np.random.rand())
        h = self.dropout(torch.relu(self.norm(h)))
        with torch.no_grad():
            self.centre.lerp_(h.detach().float().mean(0), 0.1)
        h = h - self.centre
        if scales is not None:
            h = h * scales["h"][0]
        if bool(x.reshape(-1)[0] == BAD):
            h = h + torch.sqrt((h - h.detach()).square() + torch.relu(h))  # fault
        out: Tensor = self.leave(h)
        return out


def build() -> nn.Module:
    """The model, as a script builds it: with weights of its own."""
    return Fragile()


def build_with_loss() -> Any:
    """Model and loss function."""
    return Fragile(), lambda output: output.float().square().mean()


def seeded() -> None:
    """Every generator at its beginning."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def batch(step: int, bad: bool) -> Tensor:
    """The batch of a step, from a generator of its own."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
    if bad:
        x[0, 0] = BAD
    return x


class Run:
    """A watched training in `folder`; `bad` are the steps at which it fails."""

    def __init__(
        self,
        folder: Path,
        ruleset: RuleSet,
        bad: tuple[int, ...] = (4,),
        steps: int = 6,
        *,
        model: nn.Module | None = None,
        call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
        micro: int = 1,
        autocast: bool = False,
        before: Callable[[Any, int], None] = lambda gw, step: None,
        after: Callable[[Any, int], None] = lambda gw, step: None,
        **options: Any,
    ) -> None:
        seeded()
        self.model = Fragile() if model is None else model
        optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        options = {"sinks": [], "strict": True, **options}
        with gradwatch.watch(self.model, optimizer, rules=ruleset, run_dir=folder, **options) as gw:
            self.gw = gw
            for step in range(steps):
                for each in range(micro):
                    before(gw, step)
                    x = batch(step * micro + each, step in bad and each == micro - 1)
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        loss = call(self.model, x).float().square().mean()
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                after(gw, step)
            assert gw.flush(30) or not session_of(gw)._activity._strict
        self.errors = gw.health.errors()
        self.directory = Path(gw.run.directory)

    @property
    def bundles(self) -> list[Path]:
        """The folders kept, by name."""
        place = self.directory / "bundles"
        return sorted(place.iterdir()) if place.exists() else []

    @property
    def only(self) -> Path:
        """The one bundle there is."""
        (found,) = self.bundles
        return found

    @property
    def document(self) -> Document:
        """That of the one bundle."""
        return read_document(self.only)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those of the one bundle."""
        return read_tensors(self.only)


def compared(finding: Finding | None) -> Finding:
    """What two runs of one step must agree on: everything but who called, and what was noted."""
    assert finding is not None
    return finding.amended(frames=finding.frames[:1], note="", by="replay", deterministic=False)
