"""Causes of incidents whose rules order no search, in trainings that are watched by the default pack and by others."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.cli.entry_point import main
from gradwatch.incidents.explanation import sentence
from gradwatch.records.finding import Finding
from gradwatch.records.record import Record
from gradwatch.rules.files import parse_rules
from gradwatch.rules.rule_set import RuleSet
from gradwatch.sinks.journal import JournalSink
from tests.support.kept import Kept

STEPS, BAD = 100, 80
LOCALISED = """
version: 1
rules:
  usual: {detect: {kind: spike, above: 1e6}, warmup: 5}
  off: {detect: {kind: above, of: total_norm, threshold: 1e3}, for: 1, do: [localise]}
  also: {detect: {kind: above, of: total_norm, threshold: 1e3}, for: 1}
"""
WITHOUT_LEVELS = """
version: 1
rules:
  off: {detect: {kind: above, of: total_norm, threshold: 1e3}, for: 1}
"""


LOSS_TOO = parse_rules(
    "version: 1\nextends: [default]\nrules: {loss-spike: {inhibited_by: [loss-non-finite]}}\n"
)
"""The default pack, of which a spike of the loss is part of no incident of the gradients."""


def test_one_zero_gradient_is_not_the_loss(tmp_path: Path) -> None:
    """All layers are at a third of their level, as training goes on, and one gradient is 0: that one is named."""
    rules = parse_rules(
        "version: 1\nextends: [default]\nrules: {low: {detect: {kind: below, of: norm, threshold: 1e-7}, for: 5}}\n"
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer, kept = torch.optim.SGD(model.parameters(), 1e-6), Kept()
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[kept]):
        for step in range(STEPS):
            optimizer.zero_grad()
            if step == BAD:
                model[2].weight.register_hook(torch.zeros_like)
            (model(torch.randn(32, 8)).square().mean() * (0.3 if step >= BAD else 1.0)).backward()
            optimizer.step()
    (finding,) = (one for record in kept.records for one in record.findings if one.rule == "low")
    assert (finding.phase, finding.module, finding.at_outputs) == ("vanishing", "2", False)
    assert "the gradient of 2.weight is ×0 of its usual level" in finding.note
    assert "the loss" not in sentence(finding)


def trained(rules: str | RuleSet, bad: Callable[[int], float], directory: Path | None = None) -> list[Record]:
    """The Records of a training whose loss is multiplied by what `bad` gives of each step."""
    torch.manual_seed(0)
    model, kept = (
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)),
        Kept(),
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    journal, where = ([], {}) if directory is None else ([JournalSink()], {"run_dir": directory / "run"})
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[kept, *journal], **where) as gw:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss: Tensor = model(torch.randn(32, 8)).square().mean() * bad(step)
            loss.backward()
            optimizer.step()
        assert gw.health.errors() == {}
    return kept.records


def once(step: int) -> float:
    """Too large at one step."""
    return 1e5 if step == BAD else 1.0


def test_every_incident_that_is_told_has_its_cause() -> None:
    """One of each incident about gradients or the loss; what belongs to another has none."""
    records = trained(LOSS_TOO, once)
    events = [event for record in records for event in record.verdict.events if event.kind == "firing"]
    told = {event.rule for event in events if event.notify and not event.inhibited}
    findings = {finding.rule: finding for record in records for finding in record.findings}
    assert sorted(findings) == sorted(told) == ["jump", "loss-spike"]
    assert any(event.inhibited for event in events)
    found, of_loss = findings["jump"], findings["loss-spike"]
    assert not of_loss.found
    assert re.fullmatch(
        r"its gradients are at ×[\d.e+]+ \(.*\) to ×[\d.e+]+ \(.*\) of their usual levels", of_loss.note
    )
    assert (found.by, found.step, found.at_outputs, found.module) == ("norms", BAD, True, "")
    assert found.incident == f"jump-0-{BAD}"
    assert [layer.module for layer in found.profile] == ["0", "2", "4"]
    assert all(1e4 < layer.moved < 1e6 for layer in found.profile)


def test_a_healthy_training_is_told_no_cause() -> None:
    """Nothing fires."""
    assert not [one for record in trained("default", lambda step: 1.0) for one in record.findings]


def test_an_incident_is_told_once_while_it_fires() -> None:
    """Whatever the steps it lasts, and where it comes again within its cooldown."""
    rules = parse_rules(LOCALISED.replace(", do: [localise]", ""))
    records = trained(rules, lambda step: 1e5 if step in (BAD, BAD + 1, BAD + 4) else 1.0)
    events = [event for record in records for event in record.verdict.events if event.kind == "firing"]
    assert [event.step for event in events if event.rule == "off"] == [BAD, BAD + 4]
    assert [one.step for record in records for one in record.findings] == [BAD, BAD]


def test_what_a_search_has_found_is_the_cause_of_the_other_incidents() -> None:
    """The rule without `localise` has the cause that the replay for another one found, under its own incident."""
    records = trained(parse_rules(LOCALISED), once)
    found = {finding.rule: finding for record in records for finding in record.findings}
    assert {rule: finding.by for rule, finding in found.items()} == {"off": "replay", "also": "replay"}
    assert all(finding.at_outputs for finding in found.values())
    assert [found[rule].incident.startswith(f"{rule}-") for rule in ("off", "also")] == [True, True]


def test_without_usual_levels_nothing_is_claimed() -> None:
    """No rule learns what is usual of each parameter."""
    records = trained(parse_rules(WITHOUT_LEVELS), once)
    assert [
        event.rule for record in records for event in record.verdict.events if event.kind == "firing"
    ] == ["off"]
    assert not [finding for record in records for finding in record.findings]


class Branched(nn.Module):
    """A residual block whose branch fades at a step."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.branch, self.out = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.alpha = 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        return self.out(hidden + self.alpha * torch.tanh(self.branch(hidden)))


def test_of_two_optimizers_a_layer_that_alone_is_off_is_named() -> None:
    """As of one: where its neighbours are as usual, no layer of the other optimizer explains it."""
    torch.manual_seed(0)
    model, critic, kept = Branched(), nn.Linear(2, 1), Kept()
    optimizers = [torch.optim.SGD(one.parameters(), 1e-6) for one in (model, critic)]
    rules = parse_rules(
        "version: 1\nrules:\n  usual: {detect: {kind: spike, above: 1e6}, warmup: 5}\n"
        "  gone: {detect: {kind: below, threshold: 1e-6}, for: 1}\n"
    )
    with gradwatch.watch([model, critic], optimizers, rules=rules, sinks=[kept], strict=True):
        for step in range(STEPS):
            model.alpha = 1e-9 if step >= BAD else 1.0
            for optimizer in optimizers:
                optimizer.zero_grad()
            critic(model(torch.randn(32, 8))).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    (found,) = (finding for record in kept.records for finding in record.findings)
    assert (found.rule, found.step, found.phase, found.module) == (
        "gone",
        BAD,
        "vanishing",
        "Branched.branch",
    )
    assert sentence(found) == "gradients that vanish in Branched.branch"


def test_what_moved_before_the_gradients_is_told_with_them() -> None:
    """A learning rate that jumped, some steps before the gradients of a training that diverges by it."""
    torch.manual_seed(0)
    model, kept = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with gradwatch.watch(model, optimizer, rules="default", sinks=[kept]) as gw:
        for step in range(STEPS):
            if step == BAD:
                optimizer.param_groups[0]["lr"] = 3.0
            optimizer.zero_grad()
            x = torch.randn(32, 8)
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
        assert gw.health.errors() == {}
    (first, *_) = [finding for record in kept.records for finding in record.findings]
    assert first.step > BAD
    assert f"before it: lr-jump at step {BAD}" in first.note
    assert first.lr_jumped_at == BAD
    assert sentence(first).endswith(f", after the learning rate had jumped at step {BAD}")
    assert sentence(Finding.from_dict(first.to_dict())) == sentence(first)


def of_a_loss(
    change: Callable[[torch.optim.Optimizer], None], x: float = 1.0, y: float = 1.0, term: float = 0.0
) -> list[Finding]:
    """Causes of the incidents of the loss, of a training whose inputs, labels, loss or optimizer change at `BAD`."""
    torch.manual_seed(0)
    model, kept = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gradwatch.watch(model, optimizer, rules=LOSS_TOO, sinks=[kept]) as gw:
        for step in range(STEPS):
            bad = step == BAD
            if bad:
                change(optimizer)
            optimizer.zero_grad()
            data = torch.randn(32, 8)
            error = model(data * (x if bad else 1)) - data.sum(1, keepdim=True) * (y if bad else 1)
            (error.square().mean() + (term if bad else 0)).backward()
            optimizer.step()
        assert gw.health.errors() == {}
    found = [finding for record in kept.records for finding in record.findings]
    return [finding for finding in found if finding.rule.startswith("loss-")]


def test_a_loss_that_alone_moved_has_no_cause_and_its_gradients_are_told() -> None:
    """A term without a gradient: they are at their usual levels."""
    (found,) = of_a_loss(lambda _: None, term=1e4)
    assert (found.by, found.found, found.step) == ("norms", False, BAD)
    assert "at their usual levels" in found.note, found.note


def test_activations_that_are_off_are_the_cause_of_the_loss_too() -> None:
    """A batch that is too large by a thousand enters the first layer."""
    found, overflow = of_a_loss(lambda _: None, x=1e3)
    assert (found.rule, found.phase, found.module) == ("loss-spike", "activations", "0"), found
    assert (overflow.rule, overflow.by) == ("loss-non-finite", "replay")  # gradients are finite yet


def test_what_moved_before_the_loss_is_told() -> None:
    """A learning rate that jumped: the steps by which the loss rose were taken with it."""

    def jump(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 3.0

    first = of_a_loss(jump)[0]
    assert first.step > BAD
    assert f"lr-jump at step {BAD}" in first.note, first.note


def test_a_fault_of_ours_costs_the_cause_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has its Record and its events all the same, and the error is counted."""

    def fails(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("gradwatch.session.actions.causes_by_norms.of_norms", fails)
    torch.manual_seed(0)
    model, kept = nn.Linear(8, 1), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    with gradwatch.watch(model, optimizer, rules="default", sinks=[kept]) as gw:
        for step in range(STEPS):
            optimizer.zero_grad()
            (model(torch.randn(32, 8)).square().mean() * once(step)).backward()
            optimizer.step()
        assert gw.health.errors() == {"localise": 1}
    assert [record.snapshot.step for record in kept.records] == list(range(STEPS))
    assert any(event.rule == "jump" for event in kept.records[BAD].verdict.events)


def test_explain_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The journal has the cause, with the factors by depth."""
    trained("default", once, tmp_path)
    assert main(["explain", "--dir", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert f"jump-0-{BAD}: the loss, or what follows the last layer (the loss is at ×" in said
    assert "| module | its bias ÷ usual | its weights ÷ usual |" in said


def test_of_an_optimizer_that_has_a_part_of_the_model_no_place_is_told() -> None:
    """The fault lies between its layers and the last one, which another optimizer has."""
    torch.manual_seed(0)
    first, last, kept = (
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16)),
        nn.Linear(16, 1),
        Kept(),
    )
    model = nn.Sequential(first, last)
    optimizers = [torch.optim.SGD(part.parameters(), 1e-6) for part in (first, last)]
    with gradwatch.watch(model, optimizers, rules="default", sinks=[kept]):
        for step in range(BAD + 1):
            for optimizer in optimizers:
                optimizer.zero_grad()
            hidden = first(torch.randn(32, 8))
            by = once(step)
            hidden.register_hook(lambda gradient, by=by: gradient * by)
            last(hidden).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    found = [finding for record in kept.records for finding in record.findings]
    assert [finding.rule for finding in found] == ["jump"]
    assert not any(finding.at_outputs or finding.module for finding in found)
