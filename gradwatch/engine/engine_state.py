"""State of an engine between steps; saved as JSON by site name, and restored to sites that may be others.

Axes: K series of a bank or a rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gradwatch.detectors import State
from gradwatch.engine.firing import IDLE, NEVER, FiringState, awake
from gradwatch.engine.judged_steps.stages import Stage
from gradwatch.engine.judged_steps.staggered_judging import InTurn, OverdueSeries
from gradwatch.engine.rule_plan import Plan
from gradwatch.engine.series import Series
from gradwatch.errors import GradwatchError
from gradwatch.records.snapshot import BoolArray
from gradwatch.records.verdict import Verdict

FORMAT = 1


class NewBaselines(NamedTuple):
    """Series that learn anew, for `reason`: `masks` has bool[K] of each bank. The next step reports it."""

    reason: str
    masks: tuple[BoolArray, ...]


NONE_ACTIVE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EngineState:
    """Immutable by convention: `evaluate` returns a new one and never writes to the old.

    `plan` the rules and series it belongs to; `baselines` one detector state per bank; `tracks` one per rule;
    `consecutive` steps in a row on which each rule asked for an action; `lr` the last learning rate seen.
    `clips` one state per policy of `clip:`. `in_turn` the staggered series whose turn it was at the last step, and
    `overdue` those of them that it could not judge; neither is saved. `unjudged` the numbers of the rules that
    conditions are about (`Plan.joined`) and that have judged nothing so far. `begun_anew` what is still to be told; it
    is not saved. `stage` is that of the last step that all rules could judge; before one, the first.
    What follows is only known of a state that `evaluate` made, and follows from the rest: `ordinary` the verdict
    on a healthy step, None while a rule on columns of every step is pending or firing; `done` by bank (see
    `Detector.done`); `active` the numbers of the rules that are pending, firing or acting, None where not known.
    """

    plan: Plan
    baselines: tuple[State, ...]
    tracks: tuple[FiringState, ...]
    consecutive: tuple[int, ...]
    lr: float | None = None
    ordinary: Verdict | None = None
    done: tuple[bool, ...] = ()
    active: frozenset[int] | None = None
    clips: tuple[State, ...] = ()
    in_turn: InTurn = field(default_factory=dict)
    overdue: OverdueSeries = field(default_factory=dict)
    unjudged: frozenset[int] = NONE_ACTIVE
    begun_anew: tuple[NewBaselines, ...] = ()
    stage: Stage = field(kw_only=True)

    def __repr__(self) -> str:
        firing = [
            one.rule.id for one, track in zip(self.plan.rules, self.tracks, strict=True) if not track.idle
        ]
        return f"EngineState({len(self.plan.rules)} rules, {len(self.plan.sites)} sites, not idle: {firing})"

    @property
    def may_act(self) -> bool:
        """True if a rule with a `do` is pending or firing, or if it is not known whether one is."""
        if not self.active:
            return self.active is None
        return any(self.plan.rules[number].rule.do for number in self.active)

    def with_learned(self, baselines: tuple[State, ...], lr: float | None) -> EngineState:
        """The state after a step that changed no rule; `in_turn` is empty in it until `with_turns` sets it."""
        done = self.done if self.done == self.plan.may_be_done else self.plan.done(baselines)
        return EngineState(
            self.plan,
            baselines,
            self.tracks,
            self.consecutive,
            lr=lr,
            ordinary=self.ordinary,
            done=done,
            active=self.active,
            clips=self.clips,
            unjudged=self.unjudged,
            stage=self.stage,
        )

    def with_turns(self, in_turn: InTurn, overdue: OverdueSeries) -> EngineState:
        """The state with the staggered series whose turn it was, and those of them that could not be judged."""
        return EngineState(
            self.plan,
            self.baselines,
            self.tracks,
            self.consecutive,
            lr=self.lr,
            ordinary=self.ordinary,
            done=self.done,
            active=self.active,
            clips=self.clips,
            in_turn=in_turn,
            overdue=overdue,
            unjudged=self.unjudged,
            begun_anew=self.begun_anew,
            stage=self.stage,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers (no NaN), by site name: for JSON and for checkpoints."""
        plan = self.plan
        baselines = {}
        for bank, state in zip(plan.banks, self.baselines, strict=True):
            for segment, part in zip(bank.segments, bank.parts, strict=True):
                baselines[f"{bank.key}|{segment.key}"] = _rows(segment, state, part)
        rules = zip(plan.rules, self.tracks, self.consecutive, strict=True)
        judged = sorted(plan.rules[number].rule.id for number in plan.joined - self.unjudged)
        return {
            "format": FORMAT,
            "lr": self.lr,
            "baselines": baselines,
            "rules": {one.rule.id: _track_rows(one.shown, track, count) for one, track, count in rules},
            "clips": plan.clipping.to_dict(self.clips),
            **({"judged": judged} if plan.conditions else {}),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], plan: Any) -> EngineState:
        """The state for a bound engine (or a Plan): what is known by name is kept, what is new starts empty.

        It fits after rules were renamed (baselines stay), thresholds changed, or parameters came or went. Raises
        `GradwatchError` for a dict that no `to_dict` of this format wrote.
        """
        plan = getattr(plan, "plan", plan)
        if saved.get("format") != FORMAT:
            raise GradwatchError(
                f"engine state of format {saved.get('format')!r}; this version reads {FORMAT}"
            )
        try:
            return _restored(saved, plan)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise GradwatchError(f"not an engine state: {type(error).__name__}: {error}") from error


def rules_anew(plan: Plan, begun: NewBaselines) -> dict[int, BoolArray]:
    """By rule number, bool[K] the series of which all baselines begin anew, for rules with any such baseline."""
    found = {}
    for number, one in enumerate(plan.rules):
        masks = [begun.masks[each.bank][each.part] for each in one.yardsticks]
        if any(mask.any() for mask in masks):
            found[number] = np.logical_and.reduce(masks)
    return found


def empty_state(plan: Plan) -> EngineState:
    """The state before the first step: nothing learned, nothing pending."""
    return EngineState(
        plan,
        tuple(bank.detector.init(bank.size) for bank in plan.banks),
        (IDLE,) * len(plan.rules),
        (0,) * len(plan.rules),
        clips=plan.clipping.init(),
        unjudged=plan.joined,
        stage=plan.stages[0],
    )


def _rows(segment: Series, state: State, part: slice) -> dict[str, Any]:
    names = state._fields  # type: ignore[attr-defined]  # every state is a NamedTuple
    fields = {name: array[..., part].tolist() for name, array in zip(names, state, strict=True)}
    return {"names": list(segment.names), "fields": fields}


def _track_rows(series: Series, track: FiringState, consecutive: int) -> dict[str, Any]:
    return {
        "names": [] if track.idle else list(series.names),
        "streak": track.streak.tolist(),
        "firing": track.firing.tolist(),
        "quiet_since": track.quiet_since.tolist(),
        "incident": track.incident,
        "resolved_at": track.resolved_at,
        "acted": list(track.acted),
        "consecutive": consecutive,
    }


def _restored(saved: Mapping[str, Any], plan: Plan) -> EngineState:
    baselines = []
    for bank in plan.banks:
        state = bank.detector.init(bank.size)
        for segment, part in zip(bank.segments, bank.parts, strict=True):
            rows = saved["baselines"].get(f"{bank.key}|{segment.key}")
            if rows is not None:
                _fill(state, segment, part, rows)
        baselines.append(state)
    rules = [saved["rules"].get(one.rule.id) for one in plan.rules]
    tracks = [_track(one.shown, rows) for one, rows in zip(plan.rules, rules, strict=True)]
    consecutive = [0 if rows is None else int(rows["consecutive"]) for rows in rules]
    lr = None if saved["lr"] is None else float(saved["lr"])
    clips = plan.clipping.restored(saved.get("clips", {}))  # none in what an earlier version saved
    judged = saved.get("judged", ())  # as well; then it is known after the next step of each rule
    unjudged = frozenset(number for number in plan.joined if plan.rules[number].rule.id not in judged)
    return EngineState(
        plan,
        tuple(baselines),
        tuple(tracks),
        tuple(consecutive),
        lr,
        clips=clips,
        unjudged=unjudged,
        stage=plan.stages[0],
    )


def _matches(names: tuple[str, ...], saved: list[str]) -> tuple[list[int], list[int]]:
    """Positions of the names known to both sides: here, and in the saved state."""
    place = {name: k for k, name in enumerate(saved)}
    here = [k for k, name in enumerate(names) if name in place]
    return here, [place[names[k]] for k in here]


def _fill(state: State, segment: Series, part: slice, rows: Mapping[str, Any]) -> None:
    """Write the saved rows into a state that `init` has just made and nothing else refers to."""
    here, there = _matches(segment.names, rows["names"])
    if not here:
        return
    for name, array in zip(state._fields, state, strict=True):  # type: ignore[attr-defined]
        if name not in rows["fields"]:  # an earlier version did not know it
            continue
        values, target = np.asarray(rows["fields"][name], array.dtype), array[..., part]
        if values.shape[:-1] == target.shape[:-1]:  # a warm-up ring that had been dropped stays empty
            target[..., here] = values[..., there]


def _track(series: Series, rows: Mapping[str, Any] | None) -> FiringState:
    if rows is None:
        return IDLE
    acted = tuple(map(int, rows.get("acted", ())))  # earlier versions had no ladders
    track = IDLE._replace(incident=str(rows["incident"]), resolved_at=int(rows["resolved_at"]), acted=acted)
    here, there = _matches(series.names, rows["names"])
    if not here:
        return track._replace(resolved_at=track.resolved_at if track.incident else NEVER)
    track = awake(track, len(series))
    for target, name in (
        (track.streak, "streak"),
        (track.firing, "firing"),
        (track.quiet_since, "quiet_since"),
    ):
        target[here] = np.asarray(rows[name], target.dtype)[there]
    return track
