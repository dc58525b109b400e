"""Steps judged together are as if each were judged alone, and a copy of a judge learns nothing of the other."""

from __future__ import annotations

from dataclasses import replace

from gradwatch.backtest.rule_judge import RuleJudge
from gradwatch.records.snapshot import Snapshot
from gradwatch.rules.files import load_rules
from tests.report.runs import steps


def snapshots() -> list[Snapshot]:
    """Two hundred steps: one is provisional, one a spike, one without a gradient of one parameter."""
    found = [one.snapshot for one in steps(200)]
    found[120] = replace(found[120], provisional=True)
    found[150] = replace(found[150], norm=found[150].norm * 300, total_norm=found[150].total_norm * 300)
    calls = found[170].calls.copy()
    calls[2] = 0
    found[170] = replace(found[170], calls=calls)
    return found


def test_many_together_are_as_each_alone() -> None:
    """Verdicts, decisions, series in turn, and what is learned in the end."""
    rules = load_rules("default")
    alone, together = RuleJudge(rules), RuleJudge(rules)
    one_by_one = [alone.judge(one) for one in snapshots()]
    at_once = list(together.judge_all(snapshots()))
    assert any(one.verdict.events for one in one_by_one)
    for one, other in zip(one_by_one, at_once, strict=True):
        assert one.verdict.events == other.verdict.events
        assert one.decision == other.decision
        assert one.in_turn.keys() == other.in_turn.keys()
    last = snapshots()[-1]
    assert alone.bind(last).state.to_dict() == together.bind(last).state.to_dict()


def test_a_copy_learns_by_itself() -> None:
    """What is judged with one is news to the other."""
    judge = RuleJudge(load_rules("default"))
    found = snapshots()
    for one in found[:100]:
        judge.judge(one)
    copy = judge.copy()
    for one in found[100:151]:
        copy.judge(one)
    before = judge.bind(found[0]).state
    assert before.to_dict() != copy.bind(found[0]).state.to_dict()
    assert judge.bind(found[0]).state is before
