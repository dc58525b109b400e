"""Points for an experiment tracker: a few numbers every N steps, and every step of which something is to
be said.

W&B, TensorBoard and MLflow plot one number over the step. So there are no labels: what is a label to Prometheus
is the last part of the name here. Of single parameters something is sent only where that is asked for: the
journal has all of them.

S sites, G groups.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gradwatch.incidents import explanation
from gradwatch.records.columns import NOISE_SCALE, OBSERVED_ONLY
from gradwatch.records.event import Event, Severity
from gradwatch.records.histogram import Histogram
from gradwatch.records.record import Record
from gradwatch.records.run_info import RuleInfo
from gradwatch.records.snapshot import Sites, Snapshot
from gradwatch.runtime.printable import distinct, one_line, printable
from gradwatch.sinks.parameter_selection import ParameterChoice
from gradwatch.sinks.prometheus.run_totals import MOST_OBSERVED, OWN_SCALARS, RunTotals
from gradwatch.sinks.trackers.parameter_series import LEFT_OUT, ParameterSeries

PREFIX = "gradwatch/"
MOST_OPTIMIZERS = 16
MOST_GROUPS = 64
MOST_HISTOGRAMS = 200
HISTOGRAMS = {"param": "grad_log2", "module": "activation_log2"}
"""What the histograms of sites of each kind are called."""
SHOWN = {"loss": "loss", "lr": "learning_rate", NOISE_SCALE: "noise_scale"}
_LONGEST_TEXT = 1000
_REPORTED = ("firing", "resolved", "escalated", "failed")
_WORDS = {"failed": "action failed"}


NO_PARAMETERS = ParameterChoice("off")


@dataclass(frozen=True, slots=True)
class Note:
    """Something that happened at a step: a rule fires or is resolved, its action failed, a cause was found.

    `notify` is True where a person should be notified: a rule begins to fire. `incident` is the name by which
    `gradwatch explain` knows it, "" where it has none.
    """

    rule: str
    kind: str
    severity: Severity
    text: str
    notify: bool = False
    incident: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """One step: `values` by name, non-finite ones as they are; `time` is Unix seconds; `histograms` by name.

    `prefix` begins the name of each of the values and of `f"{prefix}step"`: "gradwatch/", and
    "gradwatch/optimizer_1/" for a second optimizer, whose steps are counted apart.
    """

    step: int
    time: float
    prefix: str
    values: Mapping[str, float]
    notes: tuple[Note, ...] = ()
    histograms: Mapping[str, Histogram] = field(default_factory=dict)


class Points:
    """Makes Points of Records: every `every` steps, and whenever something is to be said.

    That is where a norm is not finite, a step was skipped, or a rule began or ceased to fire: thinning never hides
    such a step. Values that are not there at every step (observed, or read of some parameters in turn) make Points of
    their own in between. `observe` runs on the training thread.
    """

    def __init__(
        self, rules: tuple[RuleInfo, ...] = (), every: int = 1, choice: ParameterChoice = NO_PARAMETERS
    ) -> None:
        if every < 1:
            raise ValueError(f"every: {every} is not 1 or more steps")
        self._rules, self._every = rules, every
        self._totals_by_index: dict[int, RunTotals] = {}
        self._labelled: dict[int, _Groups] = {}
        self._parameters = None if choice.params == "off" else ParameterSeries(choice, every)
        self._observed_at: dict[tuple[int, str], int] = {}
        self.names_left_out = False  # observed ones, for there are too many
        # By kind, the sites with a histogram; and those for which there is no room.
        self._with_histogram: dict[str, set[tuple[int, str]]] = {}
        self._without_room: set[tuple[int, str, str]] = set()

    @property
    def without_histogram(self) -> int:
        """Number of parameters and modules whose histograms are not sent, because there are too many."""
        return len(self._without_room)

    @property
    def left_out(self) -> int:
        """Number of series of parameters that are not sent, because there are too many."""
        return 0 if self._parameters is None else self._parameters.left_out

    def observe(self, record: Record) -> Point | None:
        """Take one step; a Point where one is due."""
        snapshot = record.snapshot
        run_totals = self._totals_by_index.get(snapshot.optimizer)
        if run_totals is None:
            if len(self._totals_by_index) >= MOST_OPTIMIZERS:
                return None  # a program that makes an optimizer every epoch must not make new names for ever
            run_totals = self._totals_by_index[snapshot.optimizer] = RunTotals.of(self._rules)
        run_totals.observe(record, time.monotonic())
        notes = tuple(_notes(record))
        applied = snapshot.total_norm_applied
        finite = math.isfinite(snapshot.total_norm) and (math.isfinite(applied) or not snapshot.applied_known)
        due = not (snapshot.step % self._every and finite and not record.decision.skip and not notes)
        found = dict(self._values(record, run_totals)) if due else {}
        found.update(self._observed(snapshot, due))
        if self._parameters is not None:
            found.update(self._parameters.values(record, due))
            if due:
                found[LEFT_OUT] = self.left_out
        histograms = dict(self._histograms(snapshot)) if snapshot.histograms else {}
        if not (found or histograms):
            return None
        several = f"optimizer_{snapshot.optimizer}/" if snapshot.optimizer else ""
        prefix = PREFIX + several
        values = {prefix + name: value for name, value in found.items()}
        histograms = {prefix + name: one for name, one in histograms.items()}
        return Point(snapshot.step, record.wall_time, prefix, values, notes, histograms)

    def _histograms(self, snapshot: Snapshot) -> Iterator[tuple[str, Histogram]]:
        """The histograms of a step, by name; they come at a cadence of their own."""
        for site, found in snapshot.histograms.items():
            name, kind = snapshot.sites.names[site], snapshot.sites.kinds[site]
            key, shown = (snapshot.optimizer, name), self._with_histogram.setdefault(kind, set())
            if key in shown or len(shown) < MOST_HISTOGRAMS:
                shown.add(key)
                yield f"{HISTOGRAMS[kind]}/{printable(name)}", found
            else:
                self._without_room.add((*key, kind))

    def _observed(self, snapshot: Snapshot, due: bool) -> Iterator[tuple[str, float]]:
        """Values that the script gave: where a point is `due`, and in between each at most every so many steps."""
        if OWN_SCALARS.issuperset(snapshot.scalars):
            return
        for name in sorted(snapshot.scalars.keys() - OWN_SCALARS):
            key = snapshot.optimizer, name
            before = self._observed_at.get(key)
            if before is None and len(self._observed_at) >= MOST_OBSERVED:
                self.names_left_out = True
                continue
            if due or before is None or snapshot.step - before >= self._every:
                self._observed_at[key] = snapshot.step
                yield f"observed/{printable(name)}", snapshot.scalars[name]

    def _values(self, record: Record, run_totals: RunTotals) -> Iterator[tuple[str, float]]:
        snapshot = record.snapshot
        yield "grad_norm", snapshot.total_norm
        if snapshot.applied_known:
            yield "grad_norm_applied", snapshot.total_norm_applied
        if OBSERVED_ONLY in snapshot.scalars:
            yield "observed_only", 1.0
        groups = self._labelled.get(snapshot.optimizer)
        if groups is None or groups.sites is not snapshot.sites:
            groups = self._labelled[snapshot.optimizer] = _Groups(snapshot.sites)
        for group, norm in groups.norms(snapshot):
            yield f"group_grad_norm/{group}", norm
        for scalar, shown in SHOWN.items():
            if scalar in snapshot.scalars:
                yield shown, snapshot.scalars[scalar]
        if snapshot.loss_scale is not None:
            yield "loss_scale", snapshot.loss_scale
        yield "nonfinite_steps_total", run_totals.nonfinite_steps
        yield "nonfinite_elements_total", run_totals.nonfinite_elements
        yield "clipped_steps_total", run_totals.clipped_steps
        yield "skipped_steps_total", run_totals.skipped_steps
        yield "scaler_skips_total", run_totals.scaler_skips
        firings: dict[str, int] = {}
        for (rule, _, _), count in run_totals.firings.items():
            firings[rule] = firings.get(rule, 0) + count
        for rule, count in firings.items():
            yield f"rule_firings_total/{printable(rule)}", count
            yield f"rule_active/{printable(rule)}", int(rule in record.verdict.firing)


class _Groups:
    """The label groups of one set of sites: root sums of squares over the parameters that have a gradient."""

    def __init__(self, sites: Sites) -> None:
        self.sites = sites
        labels = sites.groups or ("",) * len(sites)
        named = sorted({label for label in labels if label})[:MOST_GROUPS]
        codes = {label: i for i, label in enumerate(named)}
        pairs = zip(labels, sites.kinds, strict=True)
        indices = (codes.get(label, -1) if kind == "param" else -1 for label, kind in pairs)
        self._of_S: NDArray[np.intp] = np.fromiter(indices, np.intp, len(sites))
        self._shown_G = distinct(named)

    def norms(self, snapshot: Snapshot) -> Iterable[tuple[str, float]]:
        """Norms by group; none for a group without a gradient in this step."""
        if not self._shown_G:
            return
        has_S = (snapshot.calls > 0) & (self._of_S >= 0)
        group = self._of_S[has_S]
        squares = np.square(snapshot.norm[has_S], dtype=np.float64)
        totals_G = np.sqrt(np.bincount(group, squares, len(self._shown_G)))
        for i in np.flatnonzero(np.bincount(group, minlength=len(self._shown_G))):
            yield self._shown_G[i], float(totals_G[i])


def _notes(record: Record) -> Iterator[Note]:
    for event in record.verdict.events:
        if event.kind in _REPORTED:
            notify = event.kind == "firing" and event.notify
            incident = printable(event.incident)
            yield Note(printable(event.rule), event.kind, event.severity, _text(event), notify, incident)
    for finding in record.findings:
        parts = ", ".join(f"{key}: {value}" for key, value in explanation.fields(finding) if key != "rule")
        text = one_line(f"{finding.rule}: cause: {parts}", _LONGEST_TEXT)
        yield Note(printable(finding.rule), "cause", "info", text, incident=printable(finding.incident))


def _numbers(event: Event) -> Iterator[str]:
    """The worst value, of which parameter, and what its score was compared with; a failed action has none."""
    if event.kind != "failed":
        more = f" and {event.count - 1} more" if event.count > 1 else ""
        yield f"{event.sites[0] if event.sites else 'value'} = {event.value:g}{more}"
        yield f"score {event.score:g}, fires at {event.threshold:g}"


def _text(event: Event) -> str:
    parts = [f"{event.rule} ({event.severity}) {_WORDS.get(event.kind, event.kind)} at step {event.step}"]
    if event.kind != "resolved":
        parts += _numbers(event)
        if event.actions:
            parts.append(f"action: {', '.join(event.actions)}")
        parts += [text for text in (event.summary, event.description) if text]
    if event.incident:
        parts.append(f"incident: {event.incident}")
    return one_line("; ".join(parts), _LONGEST_TEXT)
