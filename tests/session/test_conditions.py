"""Rules with a condition on others, in trainings: they act in their step, and are told as any rule is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.errors import TrainingStopped
from gradwatch.monitoring.alerts import rule_alerts
from gradwatch.monitoring.scrape_interval import Pace
from gradwatch.rules.files import load_rules
from gradwatch.session.watch import session_of
from tests.support.kept import Kept

RULES = """version: 1
rules:
  large: {detect: {kind: above, of: total_norm, threshold: 1e3}}
  lossy: {detect: {kind: above, of: loss, threshold: 1e3}}
  both:
    when: {all: [large, lossy], within: 5}
    severity: critical
    annotations: {summary: "{where} ({value})"}
    do: [%s]
"""
CAUSED = 40


def rules(tmp_path: Path, do: str = "") -> str:
    """The file, with these actions."""
    path = tmp_path / "joined.gradwatch.yaml"
    path.write_text(RULES % do)
    return str(path)


def train(steps: range, optimizer: Any, model: nn.Module, lossy: int = CAUSED) -> None:
    """A model whose gradients are large at one step, and whose loss at another."""
    x = torch.ones(4, 3)
    for step in steps:
        optimizer.zero_grad()
        output = model(x).pow(2).mean()
        loss = output + (1e4 if step == lossy else 0)
        if step == CAUSED:
            loss = loss + 1e6 * (output - output.detach())
        loss.backward()
        optimizer.step()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of two parameters."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), 1e-9)


def test_a_condition_stops_the_training_in_its_step(tmp_path: Path) -> None:
    """Three steps after the gradients, when the loss is large too; that step is not taken."""
    model, optimizer = build()
    sink = Kept()
    with gradwatch.watch(
        model, optimizer, rules=rules(tmp_path, "stop"), sinks=[sink], run_dir=tmp_path
    ) as gw:
        with pytest.raises(TrainingStopped):
            train(range(60), optimizer, model, lossy=CAUSED + 3)
        assert not gw.healthy
    events = [(event.step, event.rule) for record in sink.records for event in record.verdict.events]
    assert (CAUSED + 3, "both") in events
    assert sink.records[-1].snapshot.step == CAUSED + 3


def test_a_condition_that_observes_is_told_as_any_rule(tmp_path: Path) -> None:
    """Though its steps were judged later, many at a time; in the account too."""
    model, optimizer = build()
    sink = Kept()
    with gradwatch.watch(model, optimizer, rules=rules(tmp_path), sinks=[sink], run_dir=tmp_path) as gw:
        train(range(60), optimizer, model)
    events = [event for record in sink.records for event in record.verdict.events if event.rule == "both"]
    assert [(event.step, event.kind) for event in events] == [(CAUSED, "firing"), (CAUSED + 5, "resolved")]
    assert events[0].summary == "large, lossy (2)"
    assert session_of(gw).account().fired["both"] == 1


def test_a_condition_goes_on_after_a_restart(tmp_path: Path) -> None:
    """In a new session, from its checkpoint, within the window."""
    model, optimizer = build()
    options: dict[str, Any] = {"rules": rules(tmp_path), "run_dir": tmp_path, "strict": True}
    with gradwatch.watch(model, optimizer, sinks=[Kept()], **options) as gw:
        train(range(CAUSED + 2), optimizer, model, lossy=-1)
        saved = json.loads(json.dumps(gw.state_dict()))
    sink = Kept()
    with gradwatch.watch(model, optimizer, sinks=[sink], **options) as gw:
        gw.load_state_dict(saved)
        train(range(CAUSED + 2, CAUSED + 9), optimizer, model, lossy=CAUSED + 3)
    events = [event for record in sink.records for event in record.verdict.events if event.rule == "both"]
    assert [(event.step, event.kind) for event in events] == [
        (CAUSED + 3, "firing"),
        (CAUSED + 5, "resolved"),
    ]


def test_a_condition_has_an_alert_of_its_own(tmp_path: Path) -> None:
    """By its id, severity and kind."""
    alerts = {alert.labels["rule"]: alert for alert in rule_alerts(load_rules(rules(tmp_path)), Pace())}
    assert (alerts["both"].severity, alerts["both"].labels["kind"]) == ("critical", "when")
