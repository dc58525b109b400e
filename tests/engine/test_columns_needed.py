"""Every rule gets the data it asks for, at its own steps and exact, whatever other rules ask for beside it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradwatch
from gradwatch.errors import RuleFileError
from gradwatch.rules.files import parse_rules
from tests.support.examples import examples
from tests.support.kept import Kept

HEAD = "version: 1\nrules:\n"
MX = "{kind: above, of: max_abs, threshold: 5.0}"
SOME = {
    "largest": f"{{detect: {MX}, for: 1}}",
    "largest-3": "{detect: {kind: above, of: max_abs, threshold: 0.02}, for: 2, every: 3}",
    "ratio-5": "{detect: {kind: above, of: update_ratio, threshold: 1e-3}, for: 1, every: 5}",
    "ratio": "{detect: {kind: update_ratio, above: 1e-3}, for: 2}",
    "ratio-1": "{detect: {kind: update_ratio, above: 1e-3}, for: 2, every: 1}",
    "zeros": "{detect: {kind: above, of: zero_fraction, threshold: 0.4}, for: 2}",
    "zeros-2": "{detect: {kind: above, of: zero_fraction, threshold: 0.4}, for: 3, every: 2, keep_firing_for: 4}",
    "weights": "{detect: {kind: spike, of: weight_norm, above: 1}, warmup: 3, every: 4}",
    "weights-b": "{detect: {kind: spike, of: weight_norm, above: 1}, warmup: 3}",
    "active": "{detect: {kind: above, of: activation_std, threshold: 0.3}, every: 2, for: 1}",
    "active-b": "{detect: {kind: above, of: activation_std, threshold: 0.3}, for: 1}",
    "guard": f"{{detect: {MX}, for: 1, mode: shadow, do: [skip_step]}}",
    "norms": "{detect: {kind: spike, of: norm, above: 2}, warmup: 5}",
}


def trained(rules: Mapping[str, str], steps: int = 24, size: int = 100) -> list[tuple[object, ...]]:
    """What became of every rule at every step of one small training, elements beyond a sample's 4,096."""
    text = HEAD + "".join(f"  {name}: {rule}\n" for name, rule in rules.items())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    sink = Kept()
    parsed = parse_rules(text + "modules: {tap: output}\n")
    with gradwatch.watch(model, optimizer, rules=parsed, sinks=[sink], strict=True):
        for step in range(steps):
            optimizer.zero_grad()
            (model(torch.randn(2, size)).pow(2).mean() * (1 + step % 7)).backward()
            optimizer.step()
    return [
        (name, record.snapshot.step, [record.snapshot.sites.names[k] for k in np.flatnonzero(mask)])
        for record in sink.records
        for name, mask in sorted(record.verdict.breaching.items())
    ] + [
        (event.rule, event.step, event.kind, event.sites, event.value, event.score)
        for record in sink.records
        for event in record.verdict.events
    ]


@settings(max_examples=examples(5), deadline=None)
@given(st.sets(st.sampled_from(sorted(SOME)), min_size=1, max_size=4), st.data())
def test_no_rule_changes_what_another_sees(names: set[str], data: st.DataObject) -> None:
    """Breaches, events, values and scores of a rule beside others are those of the rule alone."""
    one = data.draw(st.sampled_from(sorted(names)))
    alone = trained({one: SOME[one]})
    beside = [told for told in trained({name: SOME[name] for name in sorted(names)}) if told[0] == one]
    assert beside == alone


def test_a_rule_that_acts_is_asked_on_every_step() -> None:
    """`max_abs` beyond its bound on every tenth step: each is skipped, where 3 steps in 100 used to be read."""
    rules = parse_rules(f"{HEAD}  guard: {{detect: {MX}, for: 1, do: [skip_step]}}\n")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    sink = Kept()
    beyond = []
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[sink], strict=True):
        for step in range(120):
            optimizer.zero_grad()
            (model(torch.randn(16, 8)).sub(1).pow(2).mean() * (1000 if step % 10 == 5 else 1)).backward()
            beyond.append(
                max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None) > 5
            )
            optimizer.step()
    assert [record.decision.skip for record in sink.records] == beyond
    assert sum(beyond) == 12


@pytest.mark.parametrize("every", ["", ", every: 2"])
def test_the_largest_element_is_the_largest(every: str) -> None:
    """One element of a million is 1e4: told as that within ten steps, or within two where the rule says so."""
    rules = parse_rules(
        f"{HEAD}  mx: {{detect: {{kind: above, of: max_abs, threshold: 100}}, for: 1{every}}}\n"
    )
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    sink = Kept()
    steps = 2 if every else 10
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[sink], strict=True):
        for _ in range(steps):
            optimizer.zero_grad()
            (model(torch.zeros(1, 1000)).sum() + 1e4 * model.weight[500, 501]).backward()
            optimizer.step()
    fired = [event for record in sink.records for event in record.verdict.events if event.kind == "firing"]
    assert [event.value for event in fired] == [1e4]


@pytest.mark.parametrize("extends", ["", "extends: [default]\n"])
def test_a_rhythm_beside_the_default_pack(extends: str) -> None:
    """`every: 10` on a column that the default pack reads: each parameter at each tenth step, alone or beside it."""
    rules = parse_rules(
        f"version: 1\n{extends}rules:\n"
        "  mine: {detect: {kind: above, of: update_ratio, threshold: 1e-30}, for: 1, every: 10}\n"
    )
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    sink = Kept()
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[sink], strict=True):
        for _ in range(120):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).sub(1).pow(2).mean().backward()
            optimizer.step()
    breaching = {r.snapshot.step: r.verdict.breaching.get("mine", np.zeros(1)) for r in sink.records}
    assert [step for step, mask in breaching.items() if mask.any()] == list(range(1, 120, 10))
    assert all(mask.all() for step, mask in breaching.items() if step % 10 == 1)


@pytest.mark.parametrize(
    "do", ["skip_step", "zero_nonfinite", "drop_micro", "escalate: {after: 1 in 1, to: skip_step}"]
)
def test_acting_between_the_steps_a_rule_is_asked_on_is_refused(do: str) -> None:
    """An action on the gradients of a step needs a verdict on every step: `every: 2` is refused."""
    with pytest.raises(RuleFileError, match="GW211"):
        parse_rules(f"{HEAD}  r: {{detect: {{kind: nonfinite}}, every: 2, do: [{do}]}}\n")


@pytest.mark.parametrize(
    "do", ["skip_step", "stop", "localise", "snapshot", "escalate: {after: 2 in 10, to: stop}"]
)
def test_acting_on_ranks_between_the_steps_of_a_rule_is_refused(do: str) -> None:
    """Any action on ranks needs what they exchange at every step, also where the pack's `every: 10` is inherited."""
    rules = f"version: 1\nextends: [default]\nrules:\n  rank-mismatch: {{do: [{do}]}}\n"
    with pytest.raises(RuleFileError, match="GW211"):
        parse_rules(rules)
    assert parse_rules(rules.replace("{do", "{every: 1, do"))


@pytest.mark.parametrize("every", [1, 2, 3, 10])
@pytest.mark.parametrize("beside", [False, True])
def test_every_parameter_is_judged_once_in_a_cadence(every: int, beside: bool) -> None:
    """Evaluations are counted per parameter, whose phases differ; those of other rules beside it change none."""
    others = (
        "  total: {detect: {kind: above, of: max_abs, threshold: -1}, scope: total, for: 1, every: 4}\n"
        "  often: {detect: {kind: above, of: max_abs, threshold: -1}, for: 1, every: 7}\n"
    )
    rules = parse_rules(
        f"{HEAD}  mine: {{detect: {{kind: above, of: max_abs, threshold: -1}}, for: 1, every: {every}}}\n"
        + (others if beside else "")
    )
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    sink = Kept()
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[sink], strict=True):
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.ones(2, 300)).sum().backward()
            optimizer.step()
    judged = np.array([record.verdict.breaching.get("mine", np.zeros(8, bool)) for record in sink.records])
    assert (judged.sum(0) == 60 // every).all()
    assert all((np.diff(np.flatnonzero(judged[:, k])) == every).all() for k in range(8))
    if every > 1:  # the weights are spread, so no step reads them all
        assert not judged[:, ::2].all(1).any()


LATE: dict[str, tuple[str, int]] = {"stuck": ("lr", 0), "update-too-big": ("rate", 50), "dead": ("relu", 60)}


@pytest.mark.parametrize("rule", LATE)
@pytest.mark.parametrize("size", [16, 400])
def test_the_default_pack_tells_within_twenty_steps(rule: str, size: int) -> None:
    """A learning rate of 0, one that is a thousand times too high for 15 steps, a layer that has died."""
    what, onset = LATE[rule]
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.0 if what == "lr" else 1e-3)
    sink = Kept()
    with gradwatch.watch(model, optimizer, sinks=[sink], strict=True):
        for step in range(onset + 22):
            if what == "rate":
                optimizer.param_groups[0]["lr"] = 1.0 if onset <= step < onset + 15 else 1e-3
            if what == "relu" and step == onset:
                with torch.no_grad():
                    model[2].bias.fill_(-1e3)
            optimizer.zero_grad()
            out = model(torch.randn(32, size))
            # A gradient of a size that a step of 1 turns into half of the weights.
            (out - 1).pow(2).mean().backward()
            if what == "rate":
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad.mul_(0.5 * param.detach().norm() / param.grad.norm().clamp(min=1e-30))
            optimizer.step()
    events = [event for record in sink.records for event in record.verdict.events if event.rule == rule]
    firing = [event.step for event in events if event.kind == "firing"]
    assert firing
    assert onset <= firing[0] <= onset + 20
