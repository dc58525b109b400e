"""A rule or a group that matches nothing is off by itself, said everywhere; all other rules protect."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.engine.unmatched_rules import CLIPS_NOTHING
from gradwatch.errors import UnmatchedRulesError
from gradwatch.rules.files import parse_rules
from gradwatch.sinks.log import LogSink
from gradwatch.sinks.prometheus.sink import PrometheusSink
from gradwatch.taps import step_hooks
from tests.engine.test_unsupported_rules import under_run
from tests.support.kept import Kept

RULES = """version: 1
extends: [default]
groups: {layer4: {params: ["layer4.*"]}}
rules:
  mine: {detect: {kind: above, of: norm, threshold: 10}, groups: [layer4]}
  ranks: {detect: {kind: rank_mismatch}}
  silenced: {detect: {kind: above, of: norm, threshold: 10}, exclude: ["*"], optional: true}
"""
REASON = "matches no parameter of groups: layer4"


def job() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(torch.ones(2, 4)).pow(2).mean() * factor).backward()
    optimizer.step()


def test_the_rest_protects_and_what_is_off_is_said(tmp_path: Path) -> None:
    """A group of another model: NaN is still skipped; log, status and metric name it and its rule."""
    model, optimizer = job()
    said, endpoint, sink = io.StringIO(), PrometheusSink(listen=None), Kept()
    rules = parse_rules(RULES, path="mine.yaml")
    with gradwatch.watch(
        model, optimizer, rules=rules, run_dir=tmp_path, sinks=[sink, endpoint, LogSink(stream=said)]
    ) as gw:
        assert gw.health.inactive() == {"group:layer4": "matches no parameter", "mine": REASON}
        step(model, optimizer)
        step(model, optimizer, float("nan"))
        inactive = gw.health.inactive()
        assert gw.status()["inactive"] == inactive
        assert gw.health.errors() == {}
        scrape = endpoint.render().decode()
    assert bool(model.weight.isfinite().all())
    assert sink.records[1].decision.skip
    assert inactive.keys() == {"group:layer4", "mine", "ranks"}
    assert "needs several ranks" in inactive["ranks"]
    assert f'gradwatch_rule_inactive{{rule="mine",reason="{REASON}"}} 1' in scrape
    told = [line for line in scrape.splitlines() if line.startswith("gradwatch_rule_inactive{")]
    never = ("no loss was observed", "no GradScaler was seen", "no clip ")
    without_data = [line for line in told if any(reason in line for reason in never)]
    assert len(told) - len(without_data) == 3
    lines = [line for line in said.getvalue().splitlines() if "switched off, because" in line]
    assert len(lines) == 2  # at the attach, and when the number of ranks is known
    assert "rule 'mine' matches no parameter of groups: layer4 (mine.yaml:5)" in lines[0]
    assert "group 'layer4' matches no parameter (mine.yaml:3)" in lines[0]
    assert "rule 'ranks'" in lines[1]
    assert "silenced" not in said.getvalue()


def test_a_clip_of_a_group_that_has_nothing_left_is_said(tmp_path: Path) -> None:
    """Groups before it that `clip:` names have all its parameters: it is off, and its name and the reason are told."""
    model, optimizer = job()
    text = """version: 1
groups: {all: {params: ["*"]}, head: {params: ["weight"]}}
clip: {groups: {head: {method: norm, max_norm: 1}, all: {method: norm, max_norm: 2}}}
"""
    with gradwatch.watch(model, optimizer, rules=parse_rules(text), run_dir=tmp_path, sinks=[Kept()]) as gw:
        step(model, optimizer)
        (said,) = gw.health.inactive().items()
    assert said == ("group:head", CLIPS_NOTHING)


def test_a_parameter_that_comes_later_ends_it(tmp_path: Path) -> None:
    """`add` brings the layer the rule is about: it judges from there on, and is not listed any more."""
    model, optimizer = job()
    rules = parse_rules(
        "version: 1\nrules: {r: {detect: {kind: above, of: norm, threshold: 0}, exclude: [weight, bias]}}"
    )
    with gradwatch.watch(model, optimizer, rules=rules, run_dir=tmp_path, sinks=[Kept()]) as gw:
        step(model, optimizer)
        assert gw.health.inactive() == {"r": "matches no parameter"}
        late = nn.ModuleDict({"late": nn.Linear(4, 1)})
        gw.add([late])
        step(late["late"], torch.optim.SGD(late.parameters(), 0.1))
        assert gw.health.inactive() == {}


def test_strict_rules_refuse_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `strict_rules`, or its variable, the same file is refused with every place, and no hook stays behind."""
    model, optimizer = job()
    rules = parse_rules(RULES, path="mine.yaml")
    with pytest.raises(UnmatchedRulesError) as refused:
        gradwatch.watch(model, optimizer, rules=rules, sinks=[Kept()], strict_rules=True)
    assert "rule 'mine' matches no parameter of groups: layer4 (mine.yaml:5)" in str(refused.value)
    assert "group 'layer4'" in str(refused.value)
    assert step_hooks.installed() == 0
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    monkeypatch.setenv("GRADWATCH_STRICT_RULES", "1")
    with pytest.raises(UnmatchedRulesError):
        gradwatch.watch(model, optimizer, rules=rules, sinks=[Kept()])


def test_under_run_too(tmp_path: Path) -> None:
    """NaN is skipped and stderr names the rule; with --strict-rules exit 2, no step taken."""
    for said in under_run(RULES, tmp_path):
        assert "rule 'mine' matches no parameter of groups: layer4" in said
