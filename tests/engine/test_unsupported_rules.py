"""Under a launcher, actions that cannot be carried out are off by themselves, which is said; all else protects."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.engine.unsupported_rules import Refusal, disarmed
from gradwatch.errors import AttachError, UnfitRulesError
from gradwatch.rules.files import parse_rules
from gradwatch.session.watch import session_of
from gradwatch.sinks.log import LogSink
from gradwatch.sinks.prometheus.sink import PrometheusSink
from gradwatch.taps import step_hooks
from tests.launch.test_training import execute_warm
from tests.support.kept import Kept
from tests.support.launch_cases import GRADWATCH

RULES = """version: 1
groups: {head: {params: ["2.*"]}}
modules: {tap: full_backward}
clip: {total: {method: norm, max_norm: 0.01}, groups: {head: {method: agc}}}
rules:
  non-finite: {detect: {kind: nonfinite}, do: [skip_step]}
  passed-on:
    detect: {kind: above, of: grad_input_norm, threshold: 9}
    scope: module
    do: [clip: {to: 1, at: backward}]
"""
AGC = "agc leaves the last layer alone, and nothing else is there"


def job() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose full-backward hooks would break it, and whose only agc is on its last layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), 0.1)


def test_what_cannot_be_carried_out_is_off_and_said(tmp_path: Path) -> None:
    """Refused to a user; a launcher's watch clips the total and skips NaN all the same, and names what is off."""
    model, optimizer = job()
    rules = parse_rules(RULES, path="mine.yaml")
    with pytest.raises(AttachError, match="inplace"):
        gradwatch.watch(model, optimizer, rules=rules, sinks=[Kept()])
    said, endpoint, kept = io.StringIO(), PrometheusSink(listen=None), Kept()
    sinks = [kept, endpoint, LogSink(stream=said)]
    with gradwatch.watch(
        model, optimizer, rules=rules, run_dir=tmp_path, sinks=sinks, origin="launcher", strict=True
    ) as gw:
        for step in range(3):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)).pow(2).mean() * (float("nan") if step == 2 else 1)).backward()
            optimizer.step()
        off = gw.health.inactive()
        assert gw.status()["inactive"] == off
        assert gw.health.errors() == {}
        scrape = endpoint.render().decode()
        account = session_of(gw).account()
    assert off.keys() == {"clip:groups.head", "modules:full_backward", "passed-on"}
    assert off["clip:groups.head"] == f"not armed: {AGC}"
    assert f'gradwatch_rule_inactive{{rule="clip:groups.head",reason="not armed: {AGC}"}} 1' in scrape
    assert [record.decision.skip for record in kept.records] == [False, False, True]
    assert kept.records[0].snapshot.total_norm_applied == pytest.approx(0.01, rel=1e-3)
    (line,) = [
        line for line in said.getvalue().splitlines() if "switched off, everything else stays active" in line
    ]
    assert f"clip.groups.head: {AGC}; set `last_layer: true`" in line
    assert "inplace" in line
    assert any(
        "not armed: clip:groups.head, modules:full_backward (" in one
        for one in gradwatch.account.lines(account)
    )


def test_strict_rules_refuse_it_of_a_launcher_too() -> None:
    """The error lists the place and the reason, and no hook stays behind."""
    model, optimizer = job()
    rules = parse_rules(RULES.replace("full_backward", "output").split("  passed-on")[0])
    with pytest.raises(UnfitRulesError, match=f"clip.groups.head: {AGC}"):
        gradwatch.watch(model, optimizer, rules=rules, sinks=[Kept()], origin="launcher", strict_rules=True)
    assert step_hooks.installed() == 0
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_only_what_is_refused_is_taken_out() -> None:
    """A bundle that cannot be written leaves the skip beside it; one place of `clip:` leaves the others."""
    rules = parse_rules(RULES.replace("do: [skip_step]", "do: [skip_step, snapshot]"))
    bundle = Refusal("no library", rule="non-finite", actions=frozenset({"snapshot"}))
    left = disarmed([bundle, Refusal("torn", clip="groups.head")], rules)
    assert [action.name for action in left.rule("non-finite").do] == ["skip_step"]
    assert left.rule("passed-on") == rules.rule("passed-on")
    assert left.clip is not None
    assert rules.clip is not None
    assert (left.clip.total, dict(left.clip.groups)) == (rules.clip.total, {})
    whole = disarmed(
        [Refusal("a", clip="total"), Refusal("b", clip="groups.head"), Refusal("c", rule="passed-on")], rules
    )
    assert whole.clip is None
    assert not whole.rule("passed-on").acts
    assert disarmed([], rules) == rules


SCRIPT = """import torch
m = torch.nn.Linear(4, 1); o = torch.optim.SGD(m.parameters(), 0.1)
for t in range(8):
    o.zero_grad()
    (m(torch.ones(8, 4)).pow(2).mean() * (float("nan") if t == 5 else 1)).backward()
    o.step()
    print("step", t, bool(m.weight.isfinite().all()), flush=True)
"""


def under_run(rules: str, folder: Path) -> tuple[str, str]:
    """What stderr says where a NaN is skipped under these rules, and where `--strict-rules` refuses them."""
    (folder / "mine.gradwatch.yaml").write_text(rules)
    (folder / "train.py").write_text(SCRIPT)
    command = [*GRADWATCH, "run", "--rules", "mine.gradwatch.yaml", "--listen", "127.0.0.1:0"]
    script = ["--", sys.executable, "train.py"]
    done = execute_warm([*command, *script], folder)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "step 7 True"), done.stderr
    refused = execute_warm([*command, "--strict-rules", *script], folder)
    assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
    assert "Traceback" not in refused.stderr
    return done.stderr, refused.stderr


def test_under_run_the_rest_protects(tmp_path: Path) -> None:
    """NaN is skipped, stderr names what is off at the start and in the account; --strict-rules exits 2."""
    text = RULES.replace("2.*", "*").replace("modules: {tap: full_backward}\n", "").split("  passed-on")[0]
    done, refused = under_run(text, tmp_path)
    assert f"clip.groups.head: {AGC}" in done
    assert "8 of 8 steps watched" in done
    assert f"not armed: clip:groups.head ({AGC})" in done
    assert f"clip.groups.head: {AGC}" in refused
