"""Small trainings of several kinds, each recorded under rules of its own, for the laws of a backtest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import gradwatch
from gradwatch.rules.files import parse_rules
from gradwatch.rules.rule_set import RuleSet
from gradwatch.sinks.journal import JournalSink
from tests.support.kept import Kept

STEPS = 120
SKIPS = """
version: 1
rules:
  non-finite: {detect: {kind: nonfinite}, severity: critical, do: [skip_step]}
  spike: {detect: {kind: spike, above: 4}, warmup: 20}
  loss-spike: {detect: {kind: loss_spike, above: 4}, warmup: 20}
  total-spike: {detect: {kind: spike, above: 4}, warmup: 20, scope: total}
"""
SPIKES = """
version: 1
rules:
  of-parameters: {detect: {kind: spike, above: 4}, warmup: 20}
  of-total: {detect: {kind: spike, of: total_norm, above: 6}, half_life: 50, warmup: 20}
"""
CLIPS = """
version: 1
clip: {total: {method: norm, max_norm: 5.0}}
rules:
  spike: {detect: {kind: spike, above: 4}, warmup: 20, do: [{clip: {to: baseline}}]}
  total: {detect: {kind: above, of: total_norm, threshold: 8.0}, do: [skip_step]}
"""
BITES = """
version: 1
clip: {total: {method: norm, max_norm: 0.3}}
rules:
  applied: {detect: {kind: above, of: norm_applied, threshold: 0.8}}
  spike: {detect: {kind: spike, above: 4}, warmup: 20}
"""
COLUMNS = """
version: 1
extends: [default]
modules: {tap: output}
rules:
  ratio: {detect: {kind: above, of: update_ratio, threshold: 0.002}, every: 7}
  total-ratio: {detect: {kind: above, of: update_ratio, threshold: 0.002}, scope: total, every: 5}
  zeros: {detect: {kind: above, of: zero_fraction, threshold: 0.3}}
  outputs: {detect: {kind: above, of: activation_near_zero, threshold: 0.4}}
"""
CONDITIONS = """
version: 1
rules:
  reward: {detect: {kind: below, of: observed.reward, threshold: 0}, for: 2}
  loud: {detect: {kind: above, of: total_norm, threshold: 4.0}, unless: [reward]}
  large: {detect: {kind: above, of: norm, threshold: 2.0}, inhibited_by: [loud]}
  both: {when: {all: [loud, {not: reward}], within: 5}, severity: critical}
"""


class Recorded(NamedTuple):
    """A training that has been recorded: its folder, its rules, and the Records that sinks were given."""

    folder: Path
    rules: RuleSet
    kept: Kept


class Loop:
    """A model, its loss on random batches, and what happens to it at some steps."""

    def __init__(self, rules: str | RuleSet, params: str = "full", max_bytes: int = 0) -> None:
        torch.manual_seed(0)
        self.rules = gradwatch.load_rules(rules) if isinstance(rules, str) else rules
        self.kept = Kept()
        self.journal = JournalSink(params=params, max_bytes=max_bytes)  # type: ignore[arg-type]
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = Adam(self.model.parameters(), 1e-2)

    def watch(self, folder: Path) -> gradwatch.Watch:
        """Watch the model."""
        sinks = [self.kept, self.journal]
        return gradwatch.watch(
            self.model,
            self.optimizer,
            rules=self.rules,
            sinks=sinks,
            run_dir=folder,
            run_id="run",
            strict=True,
        )

    def loss(self, scale: float = 1.0) -> Tensor:
        """Of one batch."""
        x = torch.randn(32, 8)
        found: Tensor = scale * (self.model(x) - x[:, :4]).square().mean()
        return found

    def step(self, loss: Tensor) -> None:
        """Backward and step."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def recorded(self, folder: Path) -> Recorded:
        """What is left of it."""
        return Recorded(folder / "run", self.rules, self.kept)


def not_finite(folder: Path) -> Recorded:
    """NaN at one step, which is skipped; a spike of all, and a learning rate that jumps, at others."""
    loop = Loop(parse_rules(SKIPS))
    with loop.watch(folder):
        for step in range(STEPS):
            if step == 90:
                loop.optimizer.param_groups[0]["lr"] = 1e-1
            loop.step(loop.loss(float("nan") if step == 50 else 300.0 if step == 70 else 1.0))
    return loop.recorded(folder)


def default_pack(folder: Path) -> Recorded:
    """Under the default pack: a spike, then gradients that vanish."""
    loop = Loop("default")
    with loop.watch(folder):
        for step in range(STEPS):
            loop.step(loop.loss(1e3 if step == 80 else 1e-9 if step > 100 else 1.0))
    return loop.recorded(folder)


def clipped(folder: Path) -> Recorded:
    """Gradients are clipped by a rule and by `clip:`, and a step is skipped."""
    loop = Loop(parse_rules(CLIPS))
    with loop.watch(folder):
        for step in range(STEPS):
            loop.step(loop.loss(3.0 if step in (40, 60) else 400.0 if step == 80 else 1.0))
    return loop.recorded(folder)


def columns(folder: Path) -> Recorded:
    """Columns of weights, elements and activations, at cadences and in turns."""
    loop = Loop(parse_rules(COLUMNS))
    with loop.watch(folder):
        for step in range(STEPS):
            loop.step(loop.loss(100.0 if step == 80 else 1.0))
    return loop.recorded(folder)


def conditions(folder: Path) -> Recorded:
    """Observed values, and rules that depend on rules."""
    loop = Loop(parse_rules(CONDITIONS))
    with loop.watch(folder) as gw:
        for step in range(STEPS):
            gw.observe(reward=-1.0 if 30 < step < 50 else 1.0)
            loop.step(loop.loss(40.0 if step in (20, 40, 60) else 1.0))
    return loop.recorded(folder)


def other_parameters(folder: Path) -> Recorded:
    """Parameters join the optimizer, baselines begin anew by request, and the shape of what is measured changes."""
    loop = Loop(parse_rules(SKIPS))
    loop.optimizer = SGD(loop.model[2].parameters(), 1e-2)
    with loop.watch(folder) as gw:
        for step in range(STEPS):
            if step == 40:
                loop.optimizer.add_param_group({"params": list(loop.model[0].parameters())})
            if step == 75:
                gw.rebaseline("another data set")
            loop.step(loop.loss(1e3 if step in (70, 110) else 1.0))
    return loop.recorded(folder)


def baselines_of_one_rule(folder: Path) -> Recorded:
    """Of two rules on spikes the script has the baselines of one begin anew, right before a spike."""
    loop = Loop(parse_rules(SPIKES))
    with loop.watch(folder) as gw:
        for step in range(STEPS):
            if step == 70:
                gw.rebaseline("another data set", rules=["of-parameters"])
            loop.step(loop.loss(300.0 if step in (40, 73, 110) else 1.0))
    return loop.recorded(folder)


def two_optimizers(folder: Path) -> Recorded:
    """Two optimizers in turn, one of which steps twice as often, under a GradScaler that rejects a step."""
    loop = Loop("default")
    other = nn.Linear(4, 1)
    second = SGD(other.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with gradwatch.watch(
        [loop.model, other],
        [loop.optimizer, second],
        rules=loop.rules,
        sinks=[loop.kept, loop.journal],
        run_dir=folder,
        run_id="run",
        strict=True,
    ):
        for step in range(STEPS):
            x = torch.randn(32, 8)
            for optimizer in (loop.optimizer, second, second):
                loss = other(loop.model(x)).square().mean() * (float("inf") if step == 60 else 1.0)
                optimizer.zero_grad()
                scaler.scale(loss * (1e4 if step == 90 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
    return loop.recorded(folder)


def clipped_throughout(folder: Path) -> Recorded:
    """`clip:` bites at most steps, and a rule is about the norms that the optimizer gets."""
    loop = Loop(parse_rules(BITES))
    with loop.watch(folder):
        for step in range(STEPS):
            loop.step(loop.loss(300.0 if step == 70 else 1.0))
    return loop.recorded(folder)


KINDS: tuple[Callable[[Path], Recorded], ...] = (
    *(
        not_finite,
        default_pack,
        clipped,
        clipped_throughout,
        columns,
        conditions,
        other_parameters,
        baselines_of_one_rule,
        two_optimizers,
    ),
)
