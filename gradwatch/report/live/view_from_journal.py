"""State of one process by its journal so far, kept small: the last steps, norms and events.

Axes: K recorded steps, S sites.
"""

from __future__ import annotations

import math
import platform
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gradwatch.account import Account
from gradwatch.incidents.explanation import sentence
from gradwatch.journal import Entry, EventsEntry, LostEntry, NormsEntry, RunEntry, SitesEntry, StepsEntry
from gradwatch.journal.columnar_steps import StepRow
from gradwatch.journal.entries import EndEntry
from gradwatch.records.columns import OBSERVED_ONLY
from gradwatch.records.event import Event, severity_rank
from gradwatch.records.run_info import RunInfo
from gradwatch.records.snapshot import Sites
from gradwatch.report.live.parameter_ranking import ranked, worst_first
from gradwatch.report.live.view_records import (
    Firing,
    Happened,
    LiveView,
    OptimizerLine,
    ParameterLine,
    Process,
)
from gradwatch.report.reservations import reservations
from gradwatch.runtime.process_identity import alive

STEPS_KEPT = 600
NORMS_KEPT = 64
LATELY_KEPT = 32
MOST_PARAMETERS = 64
PACE_STEPS = 100
"""Steps over which the speed is averaged."""
STALL_FACTOR, STALL_SECONDS = 20.0, 30.0
"""A run without a step for so many average steps, and at least so long, is said to be stalled."""
TRANSITIONS = ("firing", "resolved", "escalated", "failed", "rebaselined")


@dataclass(slots=True)
class _Optimizer:
    """The last steps of one optimizer; `names`, `present_KS` and `norms_KS` are of the sites in force."""

    rows: deque[StepRow] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    sites: Sites | None = None
    norms: list[tuple[int, NDArray[np.float32], NDArray[np.bool_]]] = field(default_factory=list)
    firing: dict[str, NDArray[np.bool_]] = field(default_factory=dict)

    def take_norms(self, entry: NormsEntry, sites: Sites) -> None:
        if self.sites is not sites:
            self.norms.clear()
            self.sites = sites
        if len(entry.norm) != len(sites):
            return
        # Steps that have the same columns are written together: those of several blocks come out of order.
        if not self.norms or entry.step >= self.norms[-1][0]:
            self.firing = dict(entry.firing)
        self.norms.append((entry.step, entry.norm, entry.calls > 0))
        self.norms.sort(key=lambda one: one[0])
        del self.norms[:-NORMS_KEPT]

    def line(self, number: int) -> OptimizerLine:
        rows = list(self.rows)
        last = rows[-1]
        return OptimizerLine(
            number,
            last.step,
            pace(rows),
            last.total_norm,
            last.total_norm_applied,
            [row.total_norm for row in rows],
            last.scalars.get("loss"),
            [row.scalars["loss"] for row in rows if "loss" in row.scalars],
            last.scalars.get("lr"),
            last.loss_scale,
        )

    def parameters(self, firing: Iterable[str]) -> list[ParameterLine]:
        if self.sites is None or not self.norms:
            return []
        kinds = self.sites.kinds
        now = set(firing)
        return ranked(
            self.sites.names,
            np.stack([norm for _, norm, _ in self.norms]),
            np.stack([present for _, _, present in self.norms]),
            {rule: sites for rule, sites in self.firing.items() if rule in now},
            [at for at, kind in enumerate(kinds) if kind == "param"],
            MOST_PARAMETERS,
        )


def pace(rows: Sequence[StepRow]) -> float:
    """Steps per second over the last PACE_STEPS rows; 0 where that cannot be said."""
    near = rows[-PACE_STEPS:]
    seconds = near[-1].wall_time - near[0].wall_time
    return (near[-1].step - near[0].step) / seconds if seconds > 0 else 0.0


class LiveState:
    """Takes in the entries of one journal in the order written; `view` is what they amount to."""

    def __init__(self) -> None:
        self.run: RunInfo | None = None
        self.ended = ""
        self.steps = 0
        self.firing: dict[tuple[int, str], Firing] = {}
        self._optimizers: dict[int, _Optimizer] = {}
        self._sites: dict[int, Sites] = {}
        self._known: set[int] = set()
        self._fired: Counter[str] = Counter()
        self._worst: tuple[int, int, str, str] | None = None
        self._lately: deque[Happened] = deque(maxlen=LATELY_KEPT)
        self._actions: Counter[str] = Counter()
        self._skipped = self._clipped = 0
        self._lost = 0
        self._coverage: float | None = None
        self._reservations: Sequence[str] = ()
        self._another = False  # a journal of its own begins

    def begin_another(self) -> None:
        """Go on with the journal of another attempt: what has happened so far still counts."""
        self.ended, self._another = "", True
        self._known.clear()  # they are numbers of the journal before
        self._sites.clear()

    def take(self, entry: Entry) -> None:
        """Add one entry."""
        if isinstance(entry, StepsEntry):
            for row in entry.rows:
                self._take_row(entry.optimizer, row)
        elif isinstance(entry, NormsEntry):
            if entry.sites_id in self._sites:
                self._optimizer(entry.optimizer).take_norms(entry, self._sites[entry.sites_id])
        elif isinstance(entry, SitesEntry):
            self._take_sites(entry)
        elif isinstance(entry, EventsEntry):
            self._take_events(entry)
        elif isinstance(entry, RunEntry):
            self._take_run(entry.run)
        elif isinstance(entry, LostEntry):
            self._lost += entry.queue + entry.scalars
        elif isinstance(entry, EndEntry):
            # A watch that was closed within a process that goes on says nothing of how that ended.
            self.ended = entry.ended or ("" if self._alive() else "finished")
            self._take_account(entry)

    def _take_account(self, entry: EndEntry) -> None:
        rules = self.run.rules if self.run is not None else ()
        with suppress(ValueError):  # what cannot be read is as if it was not given
            account = Account.from_dict(entry.account)
            self._reservations = reservations(account, {rule.id: rule.severity for rule in rules})

    def _take_run(self, run: RunInfo) -> None:
        """Of another attempt in the same process, by other rules, what fires goes on; one of another begins anew."""
        before, self.run = self.run, run
        if not self._another:
            return
        self._another = False
        if before is None or (before.pid, before.host, before.launch) != (run.pid, run.host, run.launch):
            self.firing.clear()
            self._optimizers.clear()
        rules = {rule.id for rule in run.rules}
        for key in [key for key in self.firing if key[1] not in rules]:
            del self.firing[key]

    def _take_sites(self, entry: SitesEntry) -> None:
        """A file after the first brings the same sites again: they are not taken for others."""
        held = self._optimizer(entry.optimizer).sites
        same = held is not None and held.names == entry.sites.names
        self._sites[entry.sites_id] = held if same and held is not None else entry.sites

    def _optimizer(self, number: int) -> _Optimizer:
        return self._optimizers.setdefault(number, _Optimizer())

    def _take_row(self, optimizer: int, row: StepRow) -> None:
        if OBSERVED_ONLY in row.scalars:
            return
        self._optimizer(optimizer).rows.append(row)
        self.steps += 1
        self._coverage = row.coverage
        self._skipped += row.decision.skip
        self._clipped += any(one.coefficient is not None and not one.shadow for one in row.decision.orders)
        for action in {order.action for order in row.decision.orders if not order.shadow}:
            self._actions[action] += 1

    def _take_events(self, entry: EventsEntry) -> None:
        if entry.number in self._known:  # written again where a disk failed
            return
        self._known.add(entry.number)
        for event in entry.events:
            self._take_event(event)
        for finding in entry.findings:
            self._lately.append(Happened(finding.step, "cause", finding.rule, text=sentence(finding)))

    def _take_event(self, event: Event) -> None:
        key = event.optimizer, event.rule
        if event.kind == "firing":
            self._fired[event.rule] += 1
            first = severity_rank(event.severity), event.step, event.rule, event.severity
            self._worst = first if self._worst is None else min(self._worst, first)
            self.firing[key] = Firing(
                event.rule, event.severity, event.step, event.sites, event.count, event.actions
            )
        elif event.kind == "resolved":
            self.firing.pop(key, None)
        if event.kind in TRANSITIONS:
            text = event.summary or ", ".join(event.sites[:1])
            self._lately.append(Happened(event.step, event.kind, event.rule, event.severity, text))

    def _alive(self) -> bool:
        run = self.run
        return run is not None and run.host == platform.node() and alive(run.pid, run.start_time)

    @property
    def gone(self) -> bool:
        """True if the process that writes the journal is known to be gone."""
        run = self.run
        return run is not None and run.host == platform.node() and not alive(run.pid, run.start_time)

    def process(self, now: float) -> Process:
        """State of the process, as far as it is known."""
        if self.ended:
            return (
                "stopped" if self.ended == "stopped" else "failed" if self.ended == "failed" else "finished"
            )
        if self.gone:
            return "killed"
        return "running" if self.steps else "waiting"

    def view(self, where: str, now: float, others: Iterable[Firing] = (), **fields: object) -> LiveView:
        """Everything so far, at a Unix time; `others` are rules that fire on other ranks."""
        run, process = self.run, self.process(now)
        lines = [each.line(number) for number, each in sorted(self._optimizers.items()) if each.rows]
        last = max((each.rows[-1].wall_time for each in self._optimizers.values() if each.rows), default=None)
        quiet = None if last is None or process not in ("running", "waiting") else max(0.0, now - last)
        usual = max((1 / line.steps_per_second for line in lines if line.steps_per_second > 0), default=0.0)
        firing = sorted(
            [*self.firing.values(), *others],
            key=lambda one: (severity_rank(one.severity), one.since),
        )
        worst = self._worst
        return LiveView(
            where=where,
            run_id=run.run_id if run else "",
            script=run.script if run else "",
            rank=run.rank if run else 0,
            world_size=run.world_size if run else 1,
            process=process,
            started=run.start_time if run else 0.0,
            steps=self.steps,
            quiet_seconds=quiet,
            stalled=quiet is not None and bool(lines) and quiet > max(STALL_FACTOR * usual, STALL_SECONDS),
            optimizers=lines,
            coverage=self._coverage,
            own_share=self._own_share(),
            parameters=self._parameters(),
            norms_step=max(
                (each.norms[-1][0] for each in self._optimizers.values() if each.norms), default=-1
            ),
            firing=firing,
            fired=dict(self._fired),
            worst=worst[2] if worst else "",
            worst_severity=worst[3] if worst else "",
            worst_step=worst[1] if worst else -1,
            lately=tuple(self._lately),
            actions=dict(self._actions),
            skipped=self._skipped,
            clipped=self._clipped,
            reservations=self._reservations if self.ended else (),
            **fields,  # type: ignore[arg-type]
        )

    @property
    def lost(self) -> int:
        """Steps that could not be written."""
        return self._lost

    def _own_share(self) -> float | None:
        rows = [row for each in self._optimizers.values() for row in each.rows if row.step_seconds]
        seconds = math.fsum(row.step_seconds or 0.0 for row in rows)
        return math.fsum(row.overhead_seconds for row in rows) / seconds if seconds > 0 else None

    def _parameters(self) -> list[ParameterLine]:
        found = [
            line
            for number, each in self._optimizers.items()
            for line in each.parameters(rule for optimizer, rule in self.firing if optimizer == number)
        ]
        return worst_first(found, MOST_PARAMETERS)
