"""Rules of one optimizer with their state, and how a step's numbers become those of its Record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.actions.backward.clipper import BackwardClipper
from gradwatch.actions.clip_section import ClipSection, NormBound
from gradwatch.actions.drop_micro import MicroDrop
from gradwatch.actions.elementwise_clip import Elementwise
from gradwatch.capture.columns.column_reader import ColumnReader
from gradwatch.capture.columns.histograms import HistogramReader
from gradwatch.capture.columns.norm_local import LocalNorms
from gradwatch.capture.columns.pending_columns import NO_SITES_OVERDUE, OverdueSites
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.checkpoint.health_tracker import CheckpointHealthTracker
from gradwatch.engine import BoundEngine, EngineState
from gradwatch.engine.clipping.clip_section_factors import Clipping
from gradwatch.engine.judged_steps.staggered_judging import NO_SERIES_OVERDUE, OverdueSeries
from gradwatch.records.decision import Decision
from gradwatch.records.record import Record
from gradwatch.records.snapshot import Sites, Snapshot
from gradwatch.records.verdict import Verdict

ORDINARY = 50  # such steps before judging may be put off; beyond every warm-up of the shipped rules
ORDINARY_AGAIN = 8  # after something unusual in an ordinary loop: no rule is warming up any more
MOST_BACKOFF = 64
"""Steps that are judged alone, at most, before several are tried together again."""


class Clock(NamedTuple):
    """Timing of a step: own cost since the last Record, time since the last step, seconds since the epoch."""

    overhead_seconds: float
    step_seconds: float | None
    wall_time: float


@dataclass(slots=True)
class OptimizerRules:
    """Rules of one capture: its bound rules and their state, what reads its columns, its clock."""

    bound: BoundEngine
    state: EngineState
    sites: Sites
    column_reader: ColumnReader
    local: LocalNorms | None
    health_tracker: CheckpointHealthTracker
    captured: OptimizerCapture
    last_step: float | None = None
    observed: int = 0
    block_backoff: int = 0  # steps to be judged one by one since several together were last tried in vain
    block_retry_in: int = 0  # those of them that are left
    ordinary_steps: int = 0  # judged in a row without events, or anything about to act, or out of the usual
    begins_anew: bool = False  # the next step to be measured is another optimizer's first
    record: Record | None = field(default=None)
    clip_section: ClipSection | None = None  # what `clip:` asks of it beside the total
    clipper: BackwardClipper | None = None
    micro: MicroDrop | None = None
    histograms: HistogramReader | None = None
    own: NDArray[np.intp] | None = None  # the sites of the capture's own parameters
    _overdue: tuple[OverdueSeries, OverdueSites, OverdueSites] = (
        NO_SERIES_OVERDUE,
        NO_SITES_OVERDUE,
        NO_SITES_OVERDUE,
    )

    def overdue(self) -> tuple[OverdueSites, OverdueSites]:
        """bool[S], and bool[M] of the modules among the sites: those without a value since their turn."""
        series = self.state.overdue
        if self._overdue[0] is not series:
            sites = self.bound.turns.sites(series, len(self.sites))
            modules = np.array([kind == "module" for kind in self.sites.kinds], np.bool_)
            self._overdue = series, sites, {columns: mask[modules] for columns, mask in sites.items()}
        return self._overdue[1:]

    def judge(self, snapshot: Snapshot, failed: Callable[[Exception], None]) -> tuple[Verdict, Decision]:
        """Judge one step and learn from it; an error in a rule raises, and then nothing has been learned.

        `failed` is called with an error in a policy of `clip:`, which costs that policy's clip alone.
        """
        verdict, state = self.bound.evaluate(self.state, snapshot)
        decision, self.state = self.bound.decide(state, verdict, snapshot, failed)
        return verdict, decision

    def decide_without_verdict(self, snapshot: Snapshot, failed: Callable[[Exception], None]) -> Decision:
        """Clip by `clip:`, and skip a total that is not finite: no rule could judge the step."""
        unjudged = self.bound.fallback(snapshot.total_norm, snapshot.step)
        decision, self.state = self.bound.clip(unjudged, self.state, snapshot, failed)
        return decision

    def take_state(self, state: EngineState) -> None:
        """Go on from the state that several steps led to, which were judged in one call."""
        self.state = state

    def step_measured(self, now: float) -> tuple[float | None, bool]:
        """Note that a step was measured `now`, in seconds of `time.perf_counter`.

        Gives the seconds since the step before (None = it is the first), and True if it is another optimizer's first.
        """
        before, begins_anew = self.last_step, self.begins_anew
        self.last_step, self.begins_anew = now, False
        return None if before is None else now - before, begins_anew

    def keep_record(self, record: Record) -> None:
        """Keep the Record of the last step, in place of the one before."""
        self.record = record

    def judged_together(self, count: int, last: Record) -> None:
        """Count ordinary steps that were judged in one call, the `last` of them with this Record."""
        self.block_backoff = 0
        self.ordinary_steps += count
        self.record = last

    def tried_together_in_vain(self) -> None:
        """Judge the next steps alone, each time for longer: some step was not surely as usual."""
        self.block_backoff = min(2 * self.block_backoff + 1, MOST_BACKOFF)
        self.block_retry_in = self.block_backoff

    def judged_alone(self) -> None:
        """Count a step that is judged alone before several are tried together again."""
        self.block_retry_in -= 1

    def count_ordinary(self, unusual: bool) -> None:
        """One more ordinary step in a row, or an `unusual` one, after which fewer are needed in an ordinary loop."""
        if unusual:
            self.ordinary_steps = (
                ORDINARY - ORDINARY_AGAIN if self.ordinary_steps >= ORDINARY - ORDINARY_AGAIN else 0
            )
        else:
            self.ordinary_steps += 1

    def clip_in_backward(self, clipper: BackwardClipper | None, own: NDArray[np.intp]) -> None:
        """Clip inside the backward from now on; `own` are the sites of the capture's own parameters."""
        self.clipper, self.own = clipper, own

    def go_by(self, bound: BoundEngine, clip_section: ClipSection | None) -> None:
        """Judge by other rules on the same sites from now on: what was learned goes on."""
        self.state = bound.adopt(self.state, self.bound)
        self.bound, self.sites, self.clip_section = bound, bound.sites, clip_section

    def begin_anew(self, captured: OptimizerCapture) -> None:
        """Go on with another optimizer: baselines go on, its pace, its rate and its weights are its own.

        Steps of the one before may still wait to be judged, so that its rate is discarded with the first of this one.
        """
        self.captured, self.begins_anew = captured, True
        self.column_reader.discard()
        self.last_step = self.record = None
        self.observed = 0

    def rebaseline(self, reason: str, params: str, rules: Sequence[str]) -> None:
        """Start the baselines of parameters whose names match `params` afresh, of some `rules` or of all."""
        self.state = self.bound.restarts.rebaseline(self.state, params, reason, rules)
        if not rules:
            self.health_tracker.begin_anew()

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what was saved of another process's rules."""
        self.state = EngineState.from_dict(saved["engine"], self.bound)
        self.health_tracker.load(saved.get("checkpoint"))

    def drop_micro_batches(self, micro: MicroDrop | None) -> None:
        """Separate micro-batches by these hooks from now on."""
        self.micro = micro

    def unseen(self, observed: Mapping[str, tuple[int, Any]], count: int) -> dict[str, Any]:
        """Values observed since this optimizer's last step; each optimizer gets every value once."""
        fresh = {name: value for name, (number, value) in observed.items() if number > self.observed}
        self.observed = count
        return fresh

    def discard_rate(self) -> None:
        """Discard the learning rate: the step that is about to be judged is another optimizer's first."""
        self.state = self.bound.restarts.for_another_optimizer(self.state)


def clip_section_of(
    clipping: Clipping, own: Sequence[int], names: Sequence[str], sharded: Sequence[int]
) -> ClipSection | None:
    """The `clip:` section for a capture beside the total; None without any, or where it acts inside the backward.

    `own[K]` are the sites of its parameters, which have these `names[K]`; those at the positions `sharded` are
    sharded, and left alone by policies on whole rows.
    """
    if clipping.at == "backward":
        return None
    bounds = tuple(
        NormBound(one.policy.constant_bound(), tuple(tuple(members) for members in one.members()))
        for one in clipping.policies
        if one.policy.works_on_device()
    )
    elementwise = None
    if clipping.elementwise:
        whole = np.ones(len(own), np.bool_)
        whole[list(sharded)] = False
        covered = [(policy, mask[list(own)]) for policy, mask in clipping.elementwise]
        elementwise = Elementwise(
            [(policy, mask & whole if policy.rowwise else mask) for policy, mask in covered], names
        )
    return ClipSection(elementwise, bounds) if bounds or elementwise is not None else None
