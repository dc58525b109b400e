"""Totals of the Records of one optimizer: the counters, histograms and averages behind the metrics.

`observe` is all the work done on the training thread: a few additions per step, nothing per parameter unless
a gradient is not finite. A counter only ever takes finite amounts; NaN would stay in it for ever.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from gradwatch.records.columns import NOISE_SCALE, OBSERVED_ONLY, SCALAR_COLUMNS
from gradwatch.records.record import Record
from gradwatch.records.run_info import RuleInfo
from gradwatch.records.snapshot import Snapshot
from gradwatch.sinks.prometheus.metric_catalogue import NORM_BUCKETS, OBSERVE_BUCKETS, STEP_BUCKETS

MOST_OBSERVED = 50
"""Names of observed values that are exported, at most: they may be made up without end."""
NAMES_LEFT_OUT = (
    f"values of {MOST_OBSERVED} names given to observe() are exported, not those of further names"
)
OWN_SCALARS = frozenset(SCALAR_COLUMNS)
"""Names of scalars that gradwatch gives itself."""
STALL_FLOOR_SECONDS = 300.0
STALL_STEPS = 20.0
RECENT_SECONDS = 60
_DECAY = 0.5 ** (1 / 100)
_CLIPPED = 1 - 1e-6
"""A ratio of norms below this is a clip; above, it is float32 rounding of the same norm read twice."""


@dataclass(slots=True)
class Histogram:
    """A classic histogram: `counts` per bucket, not cumulated, the last one for +Inf."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe_all(self, values: Iterable[float]) -> None:
        """Count finite values; anything else is ignored, for a NaN would stay in the sum."""
        counts, bounds = self.counts, self.bounds
        for value in values:
            if isfinite(value):
                counts[bisect_left(bounds, value)] += 1
                self.sum += value

    def copy(self) -> Histogram:
        """An independent copy."""
        return Histogram(self.bounds, list(self.counts), self.sum)


class RecentMax:
    """Largest value of the last `seconds`, in slots of one second; at most `seconds + 1` numbers are kept."""

    def __init__(self, seconds: int = RECENT_SECONDS) -> None:
        self._seconds = seconds
        self._slots: deque[tuple[int, float]] = deque()

    def observe(self, value: float, now: float) -> None:
        """Take one value at the monotonic time `now`; NaN is ignored, but the window moves on."""
        slot = math.floor(now)
        while self._slots and self._slots[0][0] <= slot - self._seconds:
            self._slots.popleft()
        if math.isnan(value):
            return
        if self._slots and self._slots[-1][0] >= slot:
            last, largest = self._slots[-1]
            self._slots[-1] = (last, max(largest, value))
        else:
            self._slots.append((slot, value))

    def copy(self) -> RecentMax:
        """An independent copy."""
        frozen = RecentMax(self._seconds)
        frozen._slots.extend(self._slots)
        return frozen

    def value(self) -> float:
        """The maximum; NaN when nothing but NaN came in that time."""
        return max((value for _, value in self._slots), default=math.nan)


@dataclass(slots=True)
class RunTotals:
    """Running totals of one optimizer. Written by the training thread; others read a `copy`.

    `observed_only`: the last step was that of a loop without an optimizer, on which nothing acts. `observed`: the last
    value of each of the first names that the script has given one, which need not be of the last step; `names_left_out`
    whether there were more. `noise_scale`: the last value, of the last step at which ranks compared their gradients.
    `rank` is that of this process.
    """

    record: Record | None = None
    noise_scale: float | None = None
    observed_only: bool = False
    observed: dict[str, float] = field(default_factory=dict)
    names_left_out: bool = False
    steps: int = 0
    provisional_steps: int = 0
    nonfinite_steps: int = 0
    nonfinite_elements: int = 0
    clipped_steps: int = 0
    skipped_steps: int = 0
    scaler_skips: int = 0
    irreproducible_steps: int = 0
    firings: dict[tuple[str, str, str], int] = field(default_factory=dict)
    actions: dict[tuple[str, str], int] = field(default_factory=dict)
    shadow_actions: dict[tuple[str, str], int] = field(default_factory=dict)
    action_failures: dict[str, int] = field(default_factory=dict)
    escalations: dict[str, int] = field(default_factory=dict)
    grad_norm: Histogram = field(default_factory=lambda: Histogram(NORM_BUCKETS))
    step_seconds: Histogram = field(default_factory=lambda: Histogram(STEP_BUCKETS))
    observe_seconds: Histogram = field(default_factory=lambda: Histogram(OBSERVE_BUCKETS))
    recent_max: RecentMax = field(default_factory=RecentMax)
    stall_floor_seconds: float = STALL_FLOOR_SECONDS
    rank: int = 0
    mean_step_seconds: float = 0.0
    recent_step_seconds: float = 0.0
    recent_overhead_seconds: float = 0.0

    def discard_record(self) -> None:
        """Release the Record of the last step; the totals stay."""
        self.record = None

    def add_firings(self, firings: Mapping[tuple[str, str, str], int]) -> None:
        """Set the counts of firings, by rule, kind and severity, that were kept beside the steps."""
        self.firings |= firings

    @classmethod
    def of(
        cls, rules: Iterable[RuleInfo], stall_floor_seconds: float = STALL_FLOOR_SECONDS, rank: int = 0
    ) -> RunTotals:
        """Totals in which every counter of every rule exists at 0, so that its first increase is seen."""
        run_totals = cls(stall_floor_seconds=stall_floor_seconds, rank=rank)
        for rule in rules:
            run_totals.firings[rule.id, rule.kind, rule.severity] = 0
            if rule.actions:
                run_totals.action_failures[rule.id] = run_totals.escalations[rule.id] = 0
            for action in rule.actions:
                run_totals.actions[rule.id, action] = 0
                run_totals.shadow_actions[rule.id, action] = 0
        return run_totals

    def observe(self, record: Record, now: float) -> None:
        """Add one step; `now` is monotonic seconds."""
        snapshot, norm = record.snapshot, record.snapshot.total_norm
        self.record = record
        self.observed_only = OBSERVED_ONLY in snapshot.scalars
        self.noise_scale = snapshot.scalars.get(NOISE_SCALE, self.noise_scale)
        if not OWN_SCALARS.issuperset(snapshot.scalars):
            for name in sorted(snapshot.scalars.keys() - OWN_SCALARS):
                if name in self.observed or len(self.observed) < MOST_OBSERVED:
                    self.observed[name] = snapshot.scalars[name]
                else:
                    self.names_left_out = True
        self.steps += 1
        self.provisional_steps += snapshot.provisional
        self.skipped_steps += record.decision.skip
        self.scaler_skips += bool(snapshot.scalars.get("scaler_skip"))
        self.clipped_steps += snapshot.total_norm_applied < norm * _CLIPPED and math.isfinite(norm)
        if "nonfinite" in snapshot.columns or not math.isfinite(norm):
            elements = _nonfinite_elements(snapshot)
            self.nonfinite_elements += elements
            self.nonfinite_steps += elements > 0
        self.grad_norm.observe_all((norm,))
        self.recent_max.observe(norm, now)
        self._keep_pace(record.overhead_seconds, record.step_seconds)
        self.observe_seconds.observe_all((record.overhead_seconds,))
        if record.step_seconds is not None:
            self.step_seconds.observe_all((record.step_seconds,))
        if record.verdict.events or record.decision.orders:
            self._judge(record)
        if record.findings:  # on this rank: under DDP all ranks are told of it
            self.irreproducible_steps += any(
                one.phase == "irreproducible" and one.rank == self.rank for one in record.findings
            )

    def observe_all(self, records: Sequence[Record], now: float) -> None:
        """Count steps of one optimizer with finite norms and without events, as `observe` of each would."""
        if not all(OWN_SCALARS.issuperset(record.snapshot.scalars) for record in records):
            for record in records:
                self.observe(record, now)
            return
        norms = [record.snapshot.total_norm for record in records]
        for record, norm in zip(records, norms, strict=True):
            snapshot = record.snapshot
            self.steps += 1
            self.noise_scale = snapshot.scalars.get(NOISE_SCALE, self.noise_scale)
            self.provisional_steps += snapshot.provisional
            self.clipped_steps += snapshot.total_norm_applied < norm * _CLIPPED
            self._keep_pace(record.overhead_seconds, record.step_seconds)
            if record.decision.orders:
                self._judge(record)
        self.record, self.observed_only = records[-1], OBSERVED_ONLY in records[-1].snapshot.scalars
        self.grad_norm.observe_all(norms)
        self.recent_max.observe(max(norms), now)
        self.observe_seconds.observe_all([record.overhead_seconds for record in records])
        self.step_seconds.observe_all([one.step_seconds for one in records if one.step_seconds is not None])

    def copy(self) -> RunTotals:
        """An independent copy for a reader; the Record, being immutable, is shared."""
        frozen = copy.copy(self)
        frozen.observed = dict(self.observed)
        frozen.firings, frozen.actions = dict(self.firings), dict(self.actions)
        frozen.shadow_actions = dict(self.shadow_actions)
        frozen.action_failures, frozen.escalations = dict(self.action_failures), dict(self.escalations)
        frozen.grad_norm, frozen.step_seconds = self.grad_norm.copy(), self.step_seconds.copy()
        frozen.observe_seconds, frozen.recent_max = self.observe_seconds.copy(), self.recent_max.copy()
        return frozen

    @property
    def stall_threshold_seconds(self) -> float:
        """Time without a step after which the run counts as stalled."""
        return max(self.stall_floor_seconds, STALL_STEPS * self.mean_step_seconds)

    @property
    def overhead_ratio(self) -> float:
        """gradwatch's own share of the time of recent steps, 0 before the second step."""
        return self.recent_overhead_seconds / self.recent_step_seconds if self.recent_step_seconds else 0.0

    def _keep_pace(self, overhead: float, step: float | None) -> None:
        if step is None or not (math.isfinite(step) and math.isfinite(overhead)):
            return
        self.recent_step_seconds = self.recent_step_seconds * _DECAY + step
        self.recent_overhead_seconds = self.recent_overhead_seconds * _DECAY + overhead
        self.mean_step_seconds += (step - self.mean_step_seconds) * max(0.05, 1 / max(1, self.steps - 1))

    def _judge(self, record: Record) -> None:
        for event in record.verdict.events:
            if event.kind == "firing":
                key = (event.rule, event.detector, event.severity)
                self.firings[key] = self.firings.get(key, 0) + 1
            elif event.kind == "failed":
                self.action_failures[event.rule] = self.action_failures.get(event.rule, 0) + 1
            elif event.kind == "escalated":
                self.escalations[event.rule] = self.escalations.get(event.rule, 0) + 1
        for order in record.decision.orders:
            counts = self.shadow_actions if order.shadow else self.actions
            counts[order.rule, order.action] = counts.get((order.rule, order.action), 0) + 1


def _nonfinite_elements(snapshot: Snapshot) -> int:
    """NaN and Inf elements of this step; one for each non-finite norm where elements were not counted."""
    counted = snapshot.columns.get("nonfinite")
    if counted is not None:
        values = counted.values[counted.present]
        return int(values[np.isfinite(values)].sum(dtype=np.float64))
    unfinished = int(np.count_nonzero(~np.isfinite(snapshot.norm[snapshot.calls > 0])))
    return max(1, unfinished)
