"""Thresholds by which healthy runs give no more false alarms than a budget says: loosened where rules alarm too often.

No threshold is made stricter: what one would find more cannot be known from runs in which nothing went wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gradwatch.backtest.firings import firings
from gradwatch.backtest.outcome import PlacedEvent, RunBacktest
from gradwatch.backtest.rule_coverage import with_dependents
from gradwatch.detectors.detector import Detector
from gradwatch.errors import GradwatchError
from gradwatch.rules.rule_set import Rule, RuleSet

CONFIDENCE = 0.95
MARGIN, LEAST_MOVE = 1.02, 1.05
"""A threshold is put so much beyond the score it is to hold back, and moved by this factor at least; by its square the
second time, and so on: the score is that at which an alarm began, and a value that grows slowly goes far beyond it."""
MOST_ROUNDS = 24
NO_LEVEL = "it states a fact, or has no threshold above 0 to move"
NOT_FINITE = "no finite threshold would hold it back: its score was {}"
NOT_TAKEN = "no threshold would hold it back that a rule file may have: `{}: {:g}` it may not"
HALF = "no thresholds could be made of one half of the runs alone"
Judge = Callable[[RuleSet, Sequence[int]], list[RunBacktest]]
"""Judges some of the runs, by their numbers."""


@dataclass(slots=True)
class Threshold:
    """A threshold that was moved, `moves` times: the key of `detect:`, and the false alarm with the largest score."""

    rule: str
    key: str
    was: float
    now: float
    worst: PlacedEvent
    run: str
    moves: int = 1


@dataclass(frozen=True, slots=True)
class Tuned:
    """Rules with moved thresholds, and the evidence: false alarms before, after, and where none was chosen by.

    `before` and `after` are counts by rule. `held_out` counts the alarms on each half of the runs by thresholds that
    were chosen on the other half; None where there is one run only, or none could be chosen on a half.
    """

    ruleset: RuleSet
    thresholds: tuple[Threshold, ...]
    steps: int
    runs: int
    allowed: int
    before: Mapping[str, int]
    after: Mapping[str, int]
    held_out: int | None = None
    not_judged: Mapping[str, str] = field(default_factory=dict)


def tune(ruleset: RuleSet, count: int, budget: float, judge: Judge) -> Tuned:
    """Move thresholds until healthy runs, `count` of them, give at most `budget` false alarms per 1,000 steps.

    Raises `GradwatchError` where the runs are too short to tell, or alarms come of rules without a threshold.
    """
    everything = list(range(count))
    first = judge(ruleset, everything)
    steps = sum(one.steps for one in first)
    allowed = most_alarms(steps, budget)
    if allowed < 0:
        raise GradwatchError(too_few(steps, budget))
    tuned, thresholds = loosened(ruleset, everything, allowed, judge, first)
    after = by_rule(judge(tuned, everything))
    held_out = _held_out(ruleset, everything, steps, allowed, judge) if count > 1 else None
    return Tuned(
        tuned,
        tuple(thresholds.values()),
        steps,
        count,
        allowed,
        by_rule(first),
        after,
        held_out,
        {
            one.rule: one.why
            for run in first
            for one in run.outcome.coverage
            if one.extent in ("part", "not recorded")
        },
    )


def _held_out(ruleset: RuleSet, runs: Sequence[int], steps: int, allowed: int, judge: Judge) -> int | None:
    """The alarms on each half of the runs by thresholds that are made of the other half; None where none can be made.

    An alarm that no threshold holds back may be within what is allowed of all runs, and not of the half that has it.
    """
    count = 0
    for part, rest in ((runs[::2], runs[1::2]), (runs[1::2], runs[::2])):
        found = judge(ruleset, part)
        share = allowed * sum(one.steps for one in found) // steps
        try:
            other, _ = loosened(ruleset, part, share, judge, found)
        except GradwatchError:
            return None
        count += sum(by_rule(judge(other, rest)).values())
    return count


def loosened(
    ruleset: RuleSet, runs: Sequence[int], allowed: int, judge: Judge, found: Sequence[RunBacktest]
) -> tuple[RuleSet, dict[str, Threshold]]:
    """The rules with thresholds by which these runs give at most `allowed` alarms; `found` is what they give now."""
    moved: dict[str, Threshold] = {}
    for _ in range(MOST_ROUNDS):
        alarms = alarms_of(found)
        if sum(map(len, alarms.values())) <= allowed:
            return ruleset, moved
        share = allowed // len(alarms)
        stuck: dict[str, str] = {}
        loose: set[str] = set()
        for rule, events in alarms.items():
            if len(events) > share:
                try:
                    threshold = _moved(ruleset.rule(rule), events, share, moved)
                except ValueError as error:
                    stuck[rule] = str(error)
                    continue
                moved[f"{rule}.{threshold.key}"] = threshold
                ruleset = with_threshold(ruleset, threshold)
                loose.add(rule)
        for rule in with_dependents(ruleset, loose):
            stuck.pop(
                rule, None
            )  # what depends on a rule that was moved right now may give no alarms any more
        if sum(len(alarms[rule]) for rule in stuck) > allowed:
            raise GradwatchError(_not_healthy(stuck, alarms))
        found = judge(ruleset, runs)
    raise GradwatchError(
        f"no thresholds were found in {MOST_ROUNDS} rounds by which these runs give at most {allowed} false alarms; "
        "see what fires: gradwatch backtest RUN --rules FILE --healthy"
    )


def _moved(
    rule: Rule,
    events: Sequence[tuple[RunBacktest, PlacedEvent]],
    share: int,
    moved: Mapping[str, Threshold],
) -> Threshold:
    """The threshold of a rule that leaves `share` of these alarms; ValueError where it has none to move."""
    below = rule.detect.comparison == "below"
    ordered = sorted(events, key=lambda one: one[1].event.score, reverse=not below)
    run, worst = ordered[0]
    detector = rule.detect
    if detector.second is not None and worst.event.yardstick == detector.second.kind:
        key = key_of(detector, lambda one: one.second and one.second.fires_at)
    else:
        key = key_of(detector, lambda one: one.fires_at)
    if key is None:
        raise ValueError(NO_LEVEL)
    now = float(getattr(detector, key))
    score = ordered[share][1].event.score
    if not (math.isfinite(score) and score > 0 and now > 0):
        raise ValueError(NO_LEVEL if now == 0 else NOT_FINITE.format(score))
    known = moved.get(f"{rule.id}.{key}")
    moves = 1 if known is None else known.moves + 1
    least = LEAST_MOVE**moves
    target = min(score / MARGIN, now / least) if below else max(score * MARGIN, now * least)
    value = rounded(target, down=below)
    if not takes(detector, key, value):
        raise ValueError(NOT_TAKEN.format(key, value))
    if known is None:
        return Threshold(rule.id, key, now, value, worst, run.run)
    beyond = known.worst.event.score > worst.event.score
    if beyond is not below:  # of all rounds, the score that lies furthest out
        run_id, worst = known.run, known.worst
    else:
        run_id = run.run
    return Threshold(rule.id, key, known.was, value, worst, run_id, moves)


def takes(detector: Detector, key: str, value: float) -> bool:
    """True if a rule file may give this value to this key of a detector."""
    from pydantic import TypeAdapter, ValidationError

    kind: type[Any] = type(detector)
    values = {one.name: getattr(detector, one.name) for one in fields(kind) if one.init}
    try:
        TypeAdapter(kind).validate_python({**values, key: value})
    except ValidationError:
        return False
    return True


def key_of(detector: Any, threshold: Callable[[Any], Any]) -> str | None:
    """The field of a detector that is its threshold: what moves `threshold(detector)`, and nothing else does."""
    for one in fields(detector):
        value = getattr(detector, one.name)
        if type(value) in (int, float) and value > 0:
            try:
                other = replace(detector, **{one.name: type(value)(value * 2)})
            except ValueError:  # a value that this kind does not take
                continue
            if threshold(other) != threshold(detector):
                return one.name
    return None


def with_threshold(ruleset: RuleSet, threshold: Threshold) -> RuleSet:
    """The rules with this threshold."""
    rules = tuple(
        replace(rule, detect=replace(rule.detect, **{threshold.key: threshold.now}))
        if rule.id == threshold.rule
        else rule
        for rule in ruleset.rules
    )
    return replace(ruleset, rules=rules)


def alarms_of(found: Sequence[RunBacktest]) -> dict[str, list[tuple[RunBacktest, PlacedEvent]]]:
    """The alarms of some runs by rule, each with its run."""
    alarms: dict[str, list[tuple[RunBacktest, PlacedEvent]]] = {}
    for run in found:
        for one in firings(run.outcome):
            if one.event.severity != "info":
                alarms.setdefault(one.event.rule, []).append((run, one))
    return alarms


def by_rule(found: Sequence[RunBacktest]) -> dict[str, int]:
    """The number of alarms by rule."""
    return {rule: len(events) for rule, events in alarms_of(found).items()}


def most_alarms(steps: int, budget: float) -> int:
    """The most alarms in so many steps that bear out a rate below `budget` per 1,000, at 95 %; -1: not even none does.

    By Poisson's distribution: of a rate of `budget`, at most so many would be seen in one of twenty cases.
    """
    expected = budget * steps / 1000
    if expected > 500:
        return int(expected - 1.645 * math.sqrt(expected))
    count, term = -1, math.exp(-expected)
    total = term
    while total <= 1 - CONFIDENCE:
        count += 1
        term *= expected / (count + 1)
        total += term
    return count


def too_few(steps: int, budget: float) -> str:
    """The error of runs that are too short for a budget, with what would do."""
    needed = -math.log(1 - CONFIDENCE)
    return (
        f"{steps:,} steps are too few to tell whether false alarms are below {budget:g} per 1,000: even if there is "
        f"none, that takes {math.ceil(1000 * needed / budget):,} healthy steps (95 %); name more healthy runs, or say "
        f"--budget {rounded(1000 * needed / steps, down=False):g}"
    )


def _not_healthy(
    stuck: Mapping[str, str], alarms: Mapping[str, Sequence[tuple[RunBacktest, PlacedEvent]]]
) -> str:
    said = []
    for rule, why in stuck.items():
        run, one = alarms[rule][0]
        said.append(f"{rule} fires at step {one.event.step:,} of {run.run} ({why})")
    return (
        f"too many alarms that no threshold holds back: {'; '.join(said)}; are these runs healthy? Leave out those "
        "that are not, or switch the rule off in a rule file: `enabled: false`"
    )


def rounded(value: float, down: bool) -> float:
    """Three digits, away from what is to be held back."""
    scale = 10.0 ** (math.floor(math.log10(value)) - 2)
    found = math.floor(value / scale) if down else math.ceil(value / scale)
    return float(f"{found * scale:.3g}")
