"""Firings of two rule files compared: on which side, how often, how many are alarms."""

from __future__ import annotations

from pathlib import Path

from gradwatch.backtest.firings import alarms, by_rule, differences, per_thousand, quiet
from gradwatch.backtest.run_backtest import backtest_run
from gradwatch.rules.files import parse_rules
from tests.report.runs import SITES, broken, recorded, steps
from tests.support.sink_records import make_record

LOUD = "version: 1\nrules:\n  total: {detect: {kind: above, of: total_norm, threshold: %s}, severity: %s%s}\n"


def test_each_side_has_what_the_other_has_not(tmp_path: Path) -> None:
    """By rule and step; a rule that fires at the same steps by both is on no side, though its numbers differ."""
    folder = recorded(tmp_path, steps(40))
    always, never = parse_rules(LOUD % (0.1, "warning", "")), parse_rules(LOUD % (1e9, "warning", ""))
    found = differences(backtest_run(folder, always, never))
    assert ([one.event.step for one in found.only_new], found.only_old, found.same) == ([0], (), False)
    found = differences(backtest_run(folder, never, always))
    assert (found.only_new, [one.event.step for one in found.only_old], found.same) == ((), [0], False)
    found = differences(backtest_run(folder, always, parse_rules(LOUD % (0.2, "warning", ""))))
    assert (found.only_new, found.only_old, found.same) == ((), (), False)
    assert differences(backtest_run(folder, always, always)).same


def test_against_nothing_it_is_what_fired_in_the_run(tmp_path: Path) -> None:
    """The recorded events, counted by rule beside those of the new rules."""
    found = backtest_run(recorded(tmp_path, broken()), parse_rules(LOUD % (0.1, "critical", "")))
    assert [(one.rule, one.new, one.old) for one in by_rule([found, found])] == [
        ("total", 2, 0),
        ("non-finite", 0, 2),
    ]


def test_firings_within_the_incident_of_another_rule_are_counted_apart(tmp_path: Path) -> None:
    """They alarm nobody, and so stand in no list of alarms."""
    rules = LOUD % (0.1, "warning", "") + (
        "  part: {detect: {kind: above, of: total_norm, threshold: 0.1}, inhibited_by: [total]}\n"
    )
    found = backtest_run(recorded(tmp_path, steps(40)), parse_rules(rules))
    assert (alarms(found.outcome), [one.rule for one in by_rule([found])]) == (1, ["total"])
    assert (quiet(found.outcome), quiet(found.live)) == ({"part": 1}, {})


def test_information_is_no_alarm(tmp_path: Path) -> None:
    """It fires all the same."""
    folder = recorded(tmp_path, steps(40))
    for severity, expected in (("info", 0), ("warning", 1), ("critical", 1)):
        outcome = backtest_run(folder, parse_rules(LOUD % (0.1, severity, ""))).outcome
        assert (len(outcome.events), alarms(outcome)) == (1, expected)
    assert (per_thousand(1, 40), per_thousand(0, 0)) == (25.0, 0.0)


def test_actions_are_those_of_the_steps_as_recorded(tmp_path: Path) -> None:
    """Clips have their factor, a stop its step; at steps that gradwatch clipped in the run nothing is claimed."""
    clip = parse_rules(LOUD % (0.1, "warning", ", do: [{clip: {to: 1.0}}]"))
    found = backtest_run(recorded(tmp_path / "clipped", broken()), clip).outcome
    (line,) = found.actions
    assert (line.rule, line.action, line.times, found.unknown) == ("total", "clip", 49, 10)
    assert all(0 < factor < 1 for factor in line.coefficients)
    assert not set(range(10, 20)) & {line.first_step, line.last_step}
    skip = parse_rules(LOUD % (0.1, "warning", ", do: [skip_step]"))
    found = backtest_run(tmp_path / "clipped" / "run-1", skip).outcome
    assert (found.skipped, found.unknown) == (60, 0)  # whatever was clipped
    stop = parse_rules(LOUD % (0.1, "warning", ", do: [stop]"))
    found = backtest_run(recorded(tmp_path / "healthy", steps(20)), stop).outcome
    assert found.stop == (0, 0)


def test_a_clip_in_the_backward_is_what_its_hook_would_have_done(tmp_path: Path) -> None:
    """By the bound that was known before the step, on the one parameter beyond it."""
    made = steps(60)
    norm = made[50].snapshot.norm.copy()
    norm[2] *= 100
    made[50] = make_record(SITES, norm, step=50, wall_time=1e9 + 50)
    rules = parse_rules(
        "version: 1\nrules:\n"
        "  spike: {detect: {kind: spike, above: 6}, warmup: 20, do: [{clip: {to: baseline, at: backward}}]}\n"
    )
    (line,) = backtest_run(recorded(tmp_path, made), rules).outcome.actions
    assert (line.action, line.times, line.first_step, list(line.sites)) == ("clip", 1, 50, [SITES.names[2]])
    assert 0.005 < line.coefficients[0] < 0.05
