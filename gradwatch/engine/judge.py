"""One step through all rules: read, learn, compare, count. The hot path of the engine.

On a healthy step most rules end at a bound: the smallest and largest value of a column, or the largest score of a bank,
compared once. Masks, FiringStates and Events are made only for rules that trip or are not idle.

Axes: R rules, B banks, K series of one rule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from gradwatch.detectors import Sample, State, breaches, may_breach
from gradwatch.engine.actions.escalation import climbed, remembered
from gradwatch.engine.baseline_bounds import BASELINE_SIGMAS, part_of
from gradwatch.engine.conditions.bound_condition import BoundCondition
from gradwatch.engine.conditions.evaluation import with_unsettled
from gradwatch.engine.engine_state import EngineState, NewBaselines, rules_anew
from gradwatch.engine.firing import NEVER, FiringState, Moved, move, unchanged_by
from gradwatch.engine.judged_steps.stages import stage_at
from gradwatch.engine.reporting.events import of_new_baselines
from gradwatch.engine.reporting.transitions import report_move
from gradwatch.engine.rule_plan import NO_BANK, Plan, RulePlan, Yardstick
from gradwatch.engine.scores import Scored, cleared, scored_by, worst_first
from gradwatch.engine.snapshot_reader import Reader
from gradwatch.records.columns import RUNNING_STATISTICS, is_observed
from gradwatch.records.event import SEVERITIES, Event
from gradwatch.records.snapshot import BoolArray, FloatArray
from gradwatch.records.verdict import Due, Verdict


class BankResult(NamedTuple):
    """Result of a bank on this step: its samples, their scores (None = none can breach), its state before."""

    sample: Sample
    score: FloatArray | None
    before: State


NOTHING = np.zeros(0)
MISSING = Scored(NOTHING, NOTHING, np.zeros(0, np.bool_))
"""The rule's column was not measured this step."""
IDLE = Scored(NOTHING, NOTHING, np.zeros(0, np.bool_))
"""The rule is idle and nothing breaches."""


class Step:
    """The judgement of one Snapshot while it is made; `finish` gives the Verdict and the next state."""

    __slots__ = (
        "_before",
        "_clips",
        "_stage_before",
        "_tracks_before",
        "acting",
        "banks",
        "baselines",
        "breaching",
        "consecutive",
        "due",
        "events",
        "nonfinite_breached",
        "nonfinite_reported",
        "plan",
        "rank",
        "reader",
        "snapshot",
        "stage",
        "tracks",
        "unjudged",
    )

    def __init__(self, state: EngineState, reader: Reader, rank: int) -> None:
        self.plan: Plan = state.plan
        self.snapshot = reader.snapshot
        self.rank = rank
        self.reader = reader
        self.tracks = list(state.tracks)
        self._tracks_before = state.tracks
        self._before = state.consecutive
        self.baselines = state.baselines
        self._clips = state.clips
        self.consecutive = list(state.consecutive)
        self.banks: list[BankResult | None] = [None] * len(state.plan.banks)
        self.breaching: dict[str, BoolArray] = {}
        self.nonfinite_breached = False  # a rule on finiteness breaches on this step
        self.nonfinite_reported = -1  # the highest severity of those on gradients that breach on it, and fire
        self.acting: set[str] = set()
        self.due: dict[str, Due] = {}
        self.events: list[Event] = []
        self.unjudged = state.unjudged
        self._stage_before = self.stage = state.stage
        if not self.stage.first <= self.snapshot.step < self.stage.end:
            self.stage = stage_at(self.plan.stages, self.snapshot.step)

    def begin_anew(self, begun: Iterable[NewBaselines]) -> None:
        """Report the baselines that begin anew at this step; series that were firing by them are resolved."""
        for one in begun:
            found = rules_anew(self.plan, one)
            for number, mask in found.items():
                self._discard(number, mask)
            rules = [self.plan.rules[number].rule.id for number in found]
            self.events.append(of_new_baselines(one.reason, rules, self._names(one), self.snapshot))

    def resolve_unreached(self) -> None:
        """End what rules say that are not to be judged yet: others, loaded or read anew, may have let them fire."""
        for number in sorted(self.stage.unreached):
            self._discard(number, np.ones(len(self.tracks[number].firing), np.bool_))
        self.unjudged |= self.stage.unreached & self.plan.joined

    def _names(self, begun: NewBaselines) -> list[str]:
        """The names of all series that learn anew, each once."""
        names: dict[str, None] = {}
        for bank, mask in zip(self.plan.banks, begun.masks, strict=True):
            for segment, part in zip(bank.segments, bank.parts, strict=True):
                found = np.flatnonzero(mask[part]).tolist()  # sync: numpy
                names |= dict.fromkeys(segment.names[k] for k in found if segment.names[k])
        return list(names)

    def _discard(self, number: int, mask: BoolArray) -> None:
        """Nothing of these series is pending or firing any more."""
        was, unknown = self.tracks[number], np.full(len(mask), np.nan)
        self.consecutive[number] = 0
        if was.idle:
            return
        track = was._replace(
            streak=np.where(mask, np.int32(0), was.streak),
            firing=was.firing & ~mask,
            quiet_since=np.where(mask, NEVER, was.quiet_since),
        )
        none = np.zeros(len(mask), np.bool_)
        moved = Moved(track, none, was.firing & mask)
        self.tracks[number] = report_move(self, number, was, moved, Scored(unknown, unknown, none), 0)

    def learn(
        self, baselines: tuple[State, ...], learning: bool, only: frozenset[str] = frozenset()
    ) -> tuple[State, ...]:
        """Score every bank that is due, and learn from its samples unless `learning` is False.

        `only` restricts it to banks over these columns; empty = all banks.
        """
        after = list(baselines)
        for number, bank in enumerate(self.plan.banks):
            if self.snapshot.step % bank.judged_every or (only and not only.issuperset(bank.columns)):
                continue
            sample = bank.sample(self.reader)
            if sample is None:
                continue
            before = baselines[number]
            if learning:
                score, after[number] = bank.detector.advance(before, sample)
            else:
                score = bank.detector.score(before, sample)
            self.banks[number] = BankResult(sample, score, before)
        return tuple(after)

    def judge(self, number: int) -> None:
        """Judge one rule, by its number; a rule whose column was not measured stays as it is."""
        one, track = self.plan.rules[number], self.tracks[number]
        if self.snapshot.step % one.judged_every or number in self.stage.unreached:
            return
        if self._is_suspended(number):
            return
        idle = track.idle
        scored = self.scored(one, idle)
        if scored is MISSING:
            return
        if number in self.unjudged and self._judges(one):
            self.unjudged -= {number}
        scored = self._without_reported(one, scored)
        self.consecutive[number] = 0
        if scored is not IDLE and not (idle and not scored.breach.any()):
            self._transit(number, scored)
            of_gradients = one.detector.finiteness and one.series.column != "loss" and _is_of_gradients(one)
            if of_gradients and scored.breach.any() and self.tracks[number].firing.any():
                self.nonfinite_reported = max(self.nonfinite_reported, SEVERITIES.index(one.rule.severity))

    def _is_suspended(self, number: int) -> bool:
        """True if a rule fires while which this one judges nothing."""
        others = (self.tracks[other] for other in self.plan.suspended_by[number])
        return any(not track.idle and bool(track.firing.any()) for track in others)

    def judge_conditions(self, judged: Collection[int] | None = None) -> None:
        """Judge the rules with a condition, after all rules that they name.

        A condition on a rule that is not in `judged` (None = every rule is) stays as it is.
        """
        values: dict[int, bool | None] = {}
        for one in self.plan.conditions:
            reached = one.number not in self.stage.unreached
            value = one.value(self.tracks, self.unjudged, values, self.snapshot.step) if reached else None
            values[one.number] = value
            if value is not None and (judged is None or one.of.issubset(judged)):
                self._judge_condition(one, value)

    def _judge_condition(self, one: BoundCondition, value: bool) -> None:
        self.consecutive[one.number] = 0
        if value or not self.tracks[one.number].idle:
            held = float(len(one.rules_that_hold(self.tracks, self.snapshot.step)))
            self._transit(one.number, Scored(np.array([held]), np.array([float(value)]), np.array([value])))

    def _judges(self, one: RulePlan) -> bool:
        """True if a rule that is evaluated has something to say of any of its series."""
        result = None if one.bank == NO_BANK else self.banks[one.bank]
        sample = result.sample if result is not None else None
        return judges(one, self.plan, self.reader, () if result is None else result.before, sample)

    def scored(self, one: RulePlan, idle: bool) -> Scored:
        """The scores of one rule; IDLE if the rule is idle and a bound proves that no series breaches."""
        detector = one.detector
        if one.bank == NO_BANK:
            bounds = self.reader.bounds(one.series)
            if bounds is None:
                return MISSING
            if idle and (detector.cannot_breach(*bounds) or self._cannot_breach(one)):
                return IDLE
            sample = self.reader.sample(one.series, detector.columns)
            assert sample is not None  # what has bounds was measured
            values: FloatArray = sample.values
            score: FloatArray = detector.score((), sample)
            return Scored(values, score, breaches(detector, score))
        result = self.banks[one.bank]
        if result is None:
            return MISSING
        if idle and not any(map(self._may_breach, one.yardsticks)):
            return IDLE
        first, *others = (self._score(yardstick) for yardstick in one.yardsticks)
        return scored_by(detector, detector.shown(result.before, result.sample)[one.part], first, *others)

    def _may_breach(self, yardstick: Yardstick) -> bool:
        result = self.banks[yardstick.bank]
        score = None if result is None else result.score
        return score is not None and may_breach(yardstick.detector, score[yardstick.part])

    def _score(self, yardstick: Yardstick) -> FloatArray:
        result = self.banks[yardstick.bank]
        assert result is not None  # both yardsticks read one series
        if result.score is None:
            return yardstick.detector.score(result.before, result.sample)[yardstick.part]
        return result.score[yardstick.part]

    def _without_reported(self, one: RulePlan, scored: Scored) -> Scored:
        """The scores without those of NaN and Inf that a rule on finiteness has reported already on this step.

        One NaN is one incident: the gradients' own rules report it, before the loss and before any bound. That of the
        loss is silent only where one of them fires, of its severity at least. A rule that acts is asked all the same,
        for it may be the one that keeps a NaN out. A NaN in an observed value, or one that a layer keeps in its running
        statistics, is another fact than one in the gradients.
        """
        if not _is_of_gradients(one):
            return scored
        of_loss = one.series.column == "loss"
        if one.detector.finiteness and not (
            of_loss and self.nonfinite_reported >= SEVERITIES.index(one.rule.severity)
        ):
            self.nonfinite_breached = self.nonfinite_breached or bool(scored.breach.any())
            return scored
        # Kinds that compare series (depths, ranks) say which one it was: another fact than that there is a NaN.
        if not self.nonfinite_breached or scored is IDLE or one.rule.do or not one.detector.elementwise:
            return scored
        finite = np.isfinite(scored.values)
        scores = [
            np.where(finite, score, np.nan) for score in (scored.score, scored.second) if score is not None
        ]
        return scored_by(one.detector, scored.values, *scores)

    def _cannot_breach(self, one: RulePlan) -> bool:
        """True if the rule's own series cannot breach, though others of the same column are not."""
        bounds = self.reader.own_bounds(one.series)
        return bounds is not None and one.detector.cannot_breach(*bounds)

    def _transit(self, number: int, scored: Scored) -> None:
        """Count, and report what changed."""
        one, track = self.plan.rules[number], self.tracks[number]
        rule, step = one.rule, self.snapshot.step
        judged = scored.judged
        if unchanged_by(track, scored.breach, judged, rule.for_):
            moved = Moved(track, *[np.zeros(len(scored.breach), np.bool_)] * 2)
        else:
            clear = cleared(one.detector, scored)
            moved = move(track, scored.breach, clear, judged, step, rule.for_, rule.keep_firing_for)
        if scored.breach.any():
            self.breaching[rule.id] = one.shown.spread(scored.breach, len(self.plan.sites))
        if rule.do and (upon := acted_on(one, scored, moved.track)).any():
            moved = moved._replace(track=remembered(one, moved.track, step))
            self.acting.add(rule.id)
            self.consecutive[number] = self._before[number] + 1
            self.due[rule.id] = self._due(one, scored, upon, moved.track)
        self.tracks[number] = report_move(self, number, track, moved, scored, self.consecutive[number])

    def _due(self, one: RulePlan, scored: Scored, upon: BoolArray, track: FiringState) -> Due:
        """Series that the actions of a rule are about at this step."""
        worst = int(worst_first(one.detector, scored, one.shown.depths, upon)[0])
        result, usual = None if one.bank == NO_BANK else self.banks[one.bank], None
        if result is not None:
            usual = one.detector.usual(part_of(one.detector, result.before, one.part), BASELINE_SIGMAS)
        return Due(upon, worst, usual, climbed(one, track, self.snapshot.step))

    def finish(
        self, baselines: tuple[State, ...], lr: float | None, by_all: bool = True
    ) -> tuple[Verdict, EngineState]:
        """The verdict of the rules on this step, and the state after it; `lr` is the learning rate of the step.

        `by_all`: all rules were asked. Else those whose first step it is are still to be asked, at the next one.
        """
        tracks, consecutive = tuple(self.tracks), tuple(self.consecutive)
        active = self._active()
        firing = firing_of(self.plan, tracks, sorted(active))
        verdict = Verdict(
            firing,
            self.breaching,
            tuple(self.events),
            frozenset(self.acting),
            self.due,
            under_factor(self.plan, self._tracks_before),
        )
        ordinary: Verdict | None = None
        # A healthy step would change no rule: those of rare columns are not asked on it.
        if all(self.plan.rules[number].rare for number in active):
            ordinary = Verdict(firing, standing=under_factor(self.plan, tracks))
        done = self.plan.done(baselines)
        return verdict, EngineState(
            self.plan,
            baselines,
            tracks,
            consecutive,
            lr=lr,
            ordinary=ordinary,
            done=done,
            active=active,
            clips=self._clips,
            unjudged=self.unjudged,
            stage=self.stage if by_all else self._stage_before,
        )

    def _active(self) -> frozenset[int]:
        """The rules that are pending or firing, or have acted on this step, and conditions that may change by that."""
        rules = enumerate(zip(self.tracks, self.consecutive, strict=True))
        active = frozenset(number for number, (track, acted) in rules if acted or not track.idle)
        if not self.plan.conditions:
            return active
        conditions = self.plan.conditions
        if self.stage.unreached:
            conditions = tuple(one for one in conditions if one.number not in self.stage.unreached)
        return with_unsettled(conditions, self.tracks, active, self.snapshot.step)


def _is_of_gradients(one: RulePlan) -> bool:
    """True of a rule on gradients, the loss or what else a NaN in these shows in."""
    return not (is_observed(one.series.column) or one.series.column in RUNNING_STATISTICS)


def judges(one: RulePlan, plan: Plan, reader: Reader, before: State, sample: Sample | None = None) -> bool:
    """True if a rule has a score for any of its series, with its bank in the state `before`.

    `sample` is the bank's sample of this step, if it was read already.
    """
    if one.bank == NO_BANK:
        part, sample = slice(None), reader.sample(one.series, one.detector.columns)
    else:
        part, sample = one.part, plan.banks[one.bank].sample(reader) if sample is None else sample
    return sample is not None and not np.isnan(one.detector.score(before, sample)[part]).all()


def acted_on(one: RulePlan, scored: Scored, track: FiringState) -> BoolArray:
    """bool[K]: the series for which a rule's actions are due on this step.

    Those are the series that breach and have done so `for` times in a row; for a non-finite gradient the first breach
    counts, since at the next step it would be too late.
    """
    if one.detector.finiteness:
        return scored.breach
    if one.detector.in_depth_order:  # one series made of all sites
        return scored.breach & track.firing
    return scored.breach & (track.firing | ~np.isfinite(scored.values))


def under_factor(plan: Plan, tracks: Iterable[FiringState]) -> dict[str, BoolArray]:
    """By rule id, bool[K] for each rule that rescales and was firing: its factor holds until the rule resolves."""
    return {
        one.rule.id: track.firing
        for one, track in zip(plan.rules, tracks, strict=True)
        if not track.idle and one.action("rescale") is not None and track.firing.any()
    }


def firing_now(state: EngineState) -> dict[str, BoolArray]:
    """By rule id, bool[S] for each rule that is firing, even if it was not evaluated on this step."""
    return firing_of(state.plan, state.tracks, range(len(state.tracks)))


def firing_of(plan: Plan, tracks: Sequence[FiringState], numbers: Iterable[int]) -> dict[str, BoolArray]:
    """By rule id, bool[S] for each of the rules of these `numbers` that is firing."""
    firing = {}
    for number in numbers:
        one, track = plan.rules[number], tracks[number]
        if not track.idle and track.firing.any():
            firing[one.rule.id] = one.shown.spread(track.firing, len(plan.sites))
    return firing
