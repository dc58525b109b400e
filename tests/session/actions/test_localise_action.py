"""Searches for causes: as many as a rule allows, each incident until its cause is known; what is left out is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.localise.localiser import Localiser
from gradwatch.records.finding import Finding
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept

KEPT = "not searched: the cause of 3 incidents of this rule was sought before (keep: 3)"


def run(action: str, bad: range) -> tuple[Kept, gradwatch.Watch]:
    """Twelve steps, of which those in `bad` have gradients of NaN; the weights stay as they are."""
    model, sink = nn.Linear(3, 1), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rules = parse_rules(
        f"version: 1\nrules: {{nan: {{detect: {{kind: nonfinite}}, cooldown: 0, do: [skip_step, {action}]}}}}"
    )
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[sink]) as gw:
        for step in range(12):
            optimizer.zero_grad()
            out = model(torch.ones(4, 3)).sum()
            (out.mul(0).sqrt() if step in bad else out).backward()
            optimizer.step()
        gw.flush()
    return sink, gw


def searched(sink: Kept) -> list[int]:
    """The steps on which a search was ordered and made."""
    return [
        one.snapshot.step
        for one in sink.records
        if any(order.action == "localise" for order in one.decision.orders)
    ]


def findings(sink: Kept) -> list[Finding]:
    return [finding for one in sink.records for finding in one.findings]


def test_an_incident_whose_cause_is_known_is_not_searched_again_and_not_counted() -> None:
    """It goes on for ten steps: one search, one Finding, and one `localise` in the totals."""
    sink, _ = run("localise", range(2, 12))
    assert searched(sink) == [2]
    assert [(one.step, one.phase) for one in findings(sink)] == [(2, "backward")]


def test_without_a_limit_each_incident_has_its_cause() -> None:
    """A new incident may have a new cause."""
    sink, _ = run("localise", range(1, 12, 2))
    assert searched(sink) == [1, 3, 5, 7, 9, 11]
    assert all(one.found for one in findings(sink))


def test_the_first_incidents_are_searched_and_of_the_others_it_is_said() -> None:
    """With the step and the incident, once of each."""
    sink, _ = run("localise: {keep: 3}", range(1, 12, 2))
    assert searched(sink) == [1, 3, 5]
    assert [one.step for one in findings(sink)] == [1, 3, 5, 7, 9, 11]
    assert [one.note for one in findings(sink) if not one.found] == [KEPT] * 3
    assert len({one.incident for one in findings(sink)}) == 6


def test_each_rule_has_its_own_limit() -> None:
    """What one of two has used up the other one has left."""
    model, sink = nn.Linear(3, 1), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    rules = parse_rules("""version: 1
rules:
  one: {detect: {kind: nonfinite}, cooldown: 0, do: [localise: {keep: 1}]}
  two: {detect: {kind: nonfinite, of: norm, values: [nan]}, cooldown: 0, do: [skip_step, localise: {keep: 2}]}
""")
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[sink]) as gw:
        for step in range(6):
            optimizer.zero_grad()
            out = model(torch.ones(4, 3)).sum()
            (out.mul(0).sqrt() if step % 2 else out).backward()
            optimizer.step()
        gw.flush()
    found = [(one.rule, one.found) for one in findings(sink)]
    assert found == [
        ("one", True),
        ("two", True),
        ("one", False),
        ("two", True),
        ("one", False),
        ("two", False),
    ]


def test_searches_in_vain_end_after_three_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one incident; it takes one of `keep`, however often it was searched."""
    monkeypatch.setattr(Localiser, "_localised", lambda *_: Finding("unknown", "replay", note="no idea"))
    sink, _ = run("localise: {keep: 3}", range(2, 12))
    assert searched(sink) == [2, 3, 4]
    again = "not searched again in this incident: 3 searches have found nothing"
    assert [again in one.note for one in findings(sink)] == [False, False, True]
    assert not [one for one in findings(sink) if KEPT in one.note]


def test_shadow_orders_are_told_and_never_carried_out() -> None:
    """As before: what would have been searched stands in the Record of every step."""
    model, sink = nn.Linear(3, 1), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    rules = parse_rules(
        "version: 1\nrules: {a: {detect: {kind: nonfinite}, mode: shadow, do: [localise: {keep: 1}]},"
        " b: {detect: {kind: nonfinite}, do: [localise]}}"
    )
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[sink]) as gw:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().mul(0).sqrt().backward()
            optimizer.step()
        gw.flush()
    shadow = [[order.rule for order in one.decision.orders if order.shadow] for one in sink.records]
    assert shadow == [["a"]] * 4
    assert searched(sink)[0] == 0
    assert {one.rule for one in findings(sink)} == {"b"}
