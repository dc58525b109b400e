"""Thresholds are loosened until healthy runs stay within a budget, and refused where the data cannot bear it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gradwatch.backtest.firings import firings
from gradwatch.backtest.outcome import RunBacktest
from gradwatch.backtest.run_backtest import backtest_run
from gradwatch.backtest.tuned_file import text
from gradwatch.backtest.tuning import LEAST_MOVE, Judge, key_of, most_alarms, rounded, takes, tune
from gradwatch.errors import GradwatchError
from gradwatch.records.snapshot import Column
from gradwatch.rules.files import load_rules, parse_rules
from gradwatch.rules.rule_set import RuleSet
from tests.backtest.noisy_runs import SITES, STEPS, folders, noisy
from tests.report.runs import broken, recorded
from tests.support.sink_records import make_record

RULES = parse_rules(
    """
version: 1
rules:
  large: {detect: {kind: above, of: norm, threshold: 2.0}}
  small: {detect: {kind: below, of: norm, threshold: 0.6}, scope: total}
  quiet: {detect: {kind: above, of: total_norm, threshold: 1e6}}
  told: {detect: {kind: above, of: norm, threshold: 0.1}, severity: info}
"""
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two healthy runs."""
    return folders(tmp_path_factory.mktemp("runs"))


def judge_of(runs: Sequence[Path]) -> Judge:
    """Judges these runs."""

    def judge(ruleset: RuleSet, numbers: Sequence[int]) -> list[RunBacktest]:
        return [backtest_run(runs[number], ruleset) for number in numbers]

    return judge


def test_as_few_alarms_as_the_budget_says(runs: list[Path]) -> None:
    """By the thresholds of those rules alone that alarm too often; each says what it is to hold back."""
    tuned = tune(RULES, 2, 3.0, judge_of(runs))
    assert tuned.steps == 2 * STEPS
    assert sum(tuned.before.values()) > tuned.allowed >= sum(tuned.after.values())
    (one,) = tuned.thresholds
    assert (one.rule, one.key, one.was) == ("large", "threshold", 2.0)
    assert 2.0 < one.now <= rounded(one.worst.event.score * 1.05, down=False)
    assert tuned.ruleset.rule("large").detect.threshold == one.now
    assert all(tuned.ruleset.rule(rule) == RULES.rule(rule) for rule in ("small", "quiet", "told"))
    assert tuned.held_out is not None


def test_rules_on_modules_that_were_not_tapped_are_named(runs: list[Path]) -> None:
    """That they give no alarm says nothing of their thresholds."""
    rules = parse_rules(
        "version: 1\nmodules: {tap: output}\n"
        "rules: {dead: {detect: {kind: above, of: activation_near_zero, threshold: 0.9}, optional: true}}"
    )
    assert tune(rules, 2, 3.0, judge_of(runs)).not_judged.keys() == {"dead"}


def test_a_rule_within_its_share_of_the_budget_stays(runs: list[Path]) -> None:
    """Of ten alarms allowed, three of one rule are left to it, and the other has to give."""
    rules = parse_rules(
        "version: 1\nrules:\n  large: {detect: {kind: above, of: norm, threshold: 2.0}}\n"
        "  largest: {detect: {kind: above, of: norm, threshold: 10.0}}\n"
    )
    tuned = tune(rules, 2, 6.0, judge_of(runs))
    assert (tuned.before, tuned.allowed) == ({"large": 15, "largest": 3}, 10)
    assert [one.rule for one in tuned.thresholds] == ["large"]
    assert tuned.after["largest"] == 3


def test_a_lower_bound_goes_down(tmp_path: Path) -> None:
    """A rule that fires below its threshold."""
    run = recorded(tmp_path, noisy(7))
    rules = parse_rules("version: 1\nrules: {small: {detect: {kind: below, of: total_norm, threshold: 2.2}}}")
    tuned = tune(rules, 1, 3.0, judge_of([run]))
    (one,) = tuned.thresholds
    assert one.now < one.was == 2.2
    assert one.worst.event.score == min(
        each.event.score for each in firings(backtest_run(run, rules).outcome)
    )
    assert sum(tuned.before.values()) > tuned.allowed >= sum(tuned.after.values())
    assert tuned.held_out is None


def test_the_file_says_which_score_lies_furthest_out(tmp_path: Path) -> None:
    """The lowest of a rule that fires below its threshold; a value of the whole step is named, and is no total."""
    made = [
        make_record(SITES, step=step, scalars={"loss": 0.1 if step % 100 == 50 else 2.0})
        for step in range(1_000)
    ]
    rules = parse_rules("version: 1\nrules: {low: {detect: {kind: below, of: loss, threshold: 0.5}}}")
    tuned = tune(rules, 1, 3.0, judge_of([recorded(tmp_path, made)]))
    assert "threshold was 0.5; the lowest score was 0.1, at step 50 of run-1 (loss)" in text(tuned, "x", 3.0)


def test_a_half_that_cannot_be_made_leaves_the_other_numbers(tmp_path: Path) -> None:
    """One alarm of a fact is within the budget of all runs, and beyond that of the half that has it."""
    quiet = [make_record(SITES, step=step) for step in range(1_660)]
    broken_once = [make_record(SITES, np.nan if step == 50 else 1.0, step=step) for step in range(1_660)]
    runs = [
        recorded(tmp_path / name, made, run_id=name)
        for name, made in (("quiet", quiet), ("once", broken_once))
    ]
    rules = parse_rules("version: 1\nrules: {nan: {detect: {kind: nonfinite}}}")
    tuned = tune(rules, 2, 1.5, judge_of(runs))
    assert (tuned.allowed, tuned.before, tuned.held_out) == (1, {"nan": 1}, None)
    assert "no thresholds could be made of one half of the runs alone" in text(tuned, "x", 1.5)


def test_a_condition_follows_the_rules_that_it_is_about(runs: list[Path]) -> None:
    """It has no threshold of its own, and gives fewer alarms where theirs is loosened."""
    rules = parse_rules(
        "version: 1\nrules:\n  large: {detect: {kind: above, of: norm, threshold: 2.0}}\n"
        "  again: {when: {all: [large]}, severity: critical}\n"
    )
    tuned = tune(rules, 2, 3.0, judge_of(runs))
    assert tuned.before["again"] > tuned.allowed >= sum(tuned.after.values())
    assert [one.rule for one in tuned.thresholds] == ["large"]


def test_too_few_steps_are_refused_with_what_would_do(runs: list[Path]) -> None:
    """Even where no rule alarms at all."""
    quiet = replace(RULES, rules=(RULES.rule("quiet"),))
    with pytest.raises(GradwatchError, match=r"takes 29,958 healthy steps .* or say --budget 0\.999$"):
        tune(quiet, 2, 0.1, judge_of(runs))
    assert tune(quiet, 2, 1.0, judge_of(runs)).thresholds == ()


def test_what_no_threshold_holds_back_is_refused(tmp_path: Path) -> None:
    """A NaN is no matter of degree: that run is not healthy."""
    run = recorded(tmp_path, broken(), run_id="broken")
    rules = parse_rules("version: 1\nrules: {nan: {detect: {kind: nonfinite}}}")
    with pytest.raises(
        GradwatchError,
        match=r"nan fires at step 40 of broken \(it states a fact, or has no threshold above 0 to move.*healthy\?",
    ):
        tune(rules, 1, 60.0, judge_of([run]))


def test_a_value_that_grows_slowly_is_held_back(tmp_path: Path) -> None:
    """Its alarm begins right beyond the threshold, which is moved further each time than the time before."""
    made = [make_record(SITES, 1.01 ** max(0, step - 300), step=step) for step in range(1_000)]
    rules = parse_rules("version: 1\nrules: {grows: {detect: {kind: above, of: total_norm, threshold: 3}}}")
    tuned = tune(rules, 1, 3.0, judge_of([recorded(tmp_path, made)]))
    largest = made[-1].snapshot.total_norm
    (one,) = tuned.thresholds
    assert largest < one.now < rounded(largest * LEAST_MOVE**one.moves, down=False)
    assert sum(tuned.after.values()) == 0


def test_a_threshold_that_a_rule_file_may_not_have_is_not_taken(tmp_path: Path) -> None:
    """All elements of a gradient are zero: no share of them is larger, and so the run is not healthy."""
    every = np.ones(len(SITES), np.bool_)
    made = []
    for step in range(1_000):
        zeros = Column(np.full(len(SITES), float(step % 100 > 90), np.float32), every)
        made.append(make_record(SITES, step=step, columns={"zero_fraction": zeros}))
    rules = parse_rules(
        "version: 1\nrules: {dead: {detect: {kind: dead, at_least: 0.3, min_ndim: 0}, every: 1}}"
    )
    with pytest.raises(GradwatchError, match=r"dead fires at step .*`at_least: 1\.02` it may not.*healthy\?"):
        tune(rules, 1, 3.0, judge_of([recorded(tmp_path, made)]))
    assert takes(rules.rule("dead").detect, "at_least", 1.0)


@pytest.mark.parametrize(
    ("steps", "budget", "most"),
    [(29_957, 0.1, -1), (29_958, 0.1, 0), (100_000, 0.1, 4), (1_000, 10.0, 4), (1_000_000, 1.0, 947)],
)
def test_how_many_alarms_bear_out_a_budget(steps: int, budget: float, most: int) -> None:
    """Poisson's distribution, at 95 %: 10 expected, P(X ≤ 4) = .029 and P(X ≤ 5) = .067."""
    assert most_alarms(steps, budget) == most


def test_the_threshold_of_every_kind_is_found() -> None:
    """What a rule of the default pack fires by is one of its keys, unless it states a fact."""
    found = {
        rule.kind: key_of(rule.detect, lambda one: one.fires_at)
        for rule in load_rules("default").rules
        if rule.detect.fires_at > 0
    }
    assert found["spike"] == found["drift"] == found["loss_spike"] == "above"
    assert (found["below"], found["depth_ratio"], found["dead"]) == ("threshold", "below", "at_least")
    assert {kind for kind, key in found.items() if key is None} == {"scale_collapse", "scaled", "same_batch"}
