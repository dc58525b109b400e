"""Orders to `snapshot`, carried out: what a step was made of is copied before it is taken, and written beside training.

A sink, so that what is written knows what became of the step: the tensors are copied when the step is judged (`take`),
the bundle is written when its Record is published (`write`). The disk is touched in a thread of its own only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.incidents.bundle.background_jobs import Background
from gradwatch.incidents.bundle.bundle_folders import FOLDER, count, folder_name
from gradwatch.incidents.bundle.bundle_writer import write_bundle
from gradwatch.incidents.bundle.incident_json import DOCUMENT, PAGE, Document, LeftOut
from gradwatch.incidents.bundle.snapshot_rules import SNAPSHOT, snapshots
from gradwatch.incidents.incident import AROUND, Incident, StepNorms, ordered
from gradwatch.incidents.incident_page import markdown, page, usual_levels
from gradwatch.localise.replay.bundle_evidence import Evidence, gather
from gradwatch.records.decision import Decision
from gradwatch.records.event import Event
from gradwatch.records.finding import Finding
from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.records.snapshot import Snapshot
from gradwatch.records.verdict import Verdict
from gradwatch.rules.rule_set import Action, RuleSet
from gradwatch.runtime.internal_errors import Health
from gradwatch.session.actions.localise_action import SUSPICIONS, Causes, Usual, incident_of
from gradwatch.sinks.registry import state_restored

MOST_INCIDENTS = 1024
STOP_SECONDS = 30.0  # a stop ends training for good: its bundle is worth more than this much of idle time
CLOSE_SECONDS = 0.5  # the journal may need 1.5 more, and a script is to end within 2
BUSY = BufferError("two bundles are being written already: this one is not written")
LATE = "its norms were copied from the device after the step was taken"
INSIDE = "its optimizer steps inside the backward"
REJECTED = "the GradScaler rejected the step, and its recorded calls were already released"


@dataclass(slots=True, eq=False)
class Taken:
    """Copies for one incident, until the Record of its step is published."""

    event: Event
    finding: Finding | None
    evidence: Evidence
    keep: int
    usual: Mapping[str, float]


@dataclass(slots=True, eq=False)
class _Waiting:
    """The incidents of one step of one optimizer that are to be written."""

    step: int = -1
    taken: list[Taken] = field(default_factory=list)


class Bundles:
    """The bundles of a watch's incidents; one per incident, the first `keep` of a run, each within its `max_bytes`.

    `causes` holds the steps; `failed` counts an internal error. As a sink it is called `bundle`.
    """

    name = "bundle"
    stop_seconds = STOP_SECONDS

    def __init__(
        self, ruleset: RuleSet, causes: Causes, failed: Callable[[str, BaseException], None], run: RunInfo
    ) -> None:
        self._asked = snapshots(ruleset)
        self._causes = causes
        self._failed = failed
        self._run = run
        self._health = Health()
        self._background = Background(self._lost)
        self._waiting: dict[int, _Waiting] = {}
        self._around: dict[int, deque[StepNorms]] = {}
        self._incidents: dict[str, None] = {}  # that have been dealt with, in order
        self._kept = 0  # bundles in the run's folder, as far as this process knows

    # -- at the boundary ---------------------------------------------------------------------------------

    def take(
        self,
        captured: OptimizerCapture,
        snapshot: Snapshot,
        verdict: Verdict,
        decision: Decision,
        findings: tuple[Finding, ...],
        usual: Usual = dict,
    ) -> Decision:
        """Copy what this step was made of where a rule orders it; the Decision without orders that are not followed.

        `usual` gives the usual norm of each parameter's gradient that is known, by its name.
        A rule orders a bundle on every step it acts on, and each incident gets one.
        """
        orders = decision.orders
        rules = {one.rule for one in orders if one.action == SNAPSHOT and not one.shadow}
        if not rules:
            return decision
        of = captured, snapshot, verdict, findings, usual
        followed = {rule for rule in sorted(rules) if self._guarded(rule, *of)}
        kept = (one for one in orders if one.action != SNAPSHOT or one.shadow or one.rule in followed)
        return replace(decision, orders=frozenset(kept))

    def _guarded(self, *args: Any) -> bool:
        """True if a copy was taken for a rule; an internal error costs the bundle, not the verdict."""
        try:
            return self._take(*args)
        except Exception as error:
            self._failed(self.name, error)
            return False

    def _take(
        self,
        rule: str,
        captured: OptimizerCapture,
        snapshot: Snapshot,
        verdict: Verdict,
        findings: tuple[Finding, ...],
        usual: Usual,
    ) -> bool:
        event, action = incident_of(verdict, rule), self._asked.get(rule)
        if event is None or action is None or event.incident in self._incidents:
            return False
        self._incidents[event.incident] = None
        if len(self._incidents) > MOST_INCIDENTS:
            self._incidents.pop(next(iter(self._incidents)))
        if self._kept >= int(action.params["keep"]):
            return False
        finding = next((one for one in findings if one.incident == event.incident), None)
        evidence = self._gathered(captured, event, snapshot, action, finding)
        waiting = self._waiting.setdefault(captured.index, _Waiting())
        if waiting.step != snapshot.step:  # what was left by a step whose Record never came
            waiting.step, waiting.taken = snapshot.step, []
        waiting.taken.append(Taken(event, finding, evidence, int(action.params["keep"]), dict(usual())))
        return True

    def _gathered(
        self,
        captured: OptimizerCapture,
        event: Event,
        snapshot: Snapshot,
        action: Action,
        finding: Finding | None,
    ) -> Evidence:
        """The copies; where they cannot be had the bundle says why, and is written all the same."""
        evidence = Evidence(int(action.params["max_bytes"]))
        evidence.obstacle = _gone(captured, snapshot)
        if evidence.obstacle:
            return evidence
        try:
            held = self._causes.held()
            gather(
                evidence,
                held,
                self._causes.models(),
                _gradients(captured, event),
                batch=bool(action.params["batch"]),
                parameters=bool(action.params["parameters"]),
                finding=finding,
            )
            evidence.obstacle = self._causes.refusal(held) or evidence.obstacle
            if self._causes.dropped:
                why = f"{self._causes.dropped} were not held: beyond max_bytes"
                evidence.left_out.append(LeftOut("earlier micro-batches", 0, why))
        except Exception as error:
            evidence.obstacle = f"it could not be copied: {type(error).__name__}: {error}"
            self._failed(self.name, error)
        return evidence

    # -- as a sink ---------------------------------------------------------------------------------------

    def open(self, run: RunInfo, health: Health) -> None:
        """Know the run, and import what writes; the disk is first touched at an incident."""
        with state_restored():
            import safetensors.torch  # noqa: F401
        self._run, self._health = run, health
        health.mark(self.name, True)

    def write(self, record: Record) -> None:
        """Remember the norms of a step, and hand over what was copied of it."""
        snapshot = record.snapshot
        around = self._around.setdefault(snapshot.optimizer, deque(maxlen=AROUND + 1))
        around.append(norms_of(record))
        waiting = self._waiting.get(snapshot.optimizer)
        if waiting is None or waiting.step != snapshot.step:
            return
        taken, waiting.taken = waiting.taken, []
        for one in taken:
            incident = self._incident(one, record, tuple(around))
            if self._background.submit(partial(self._write, one, incident, snapshot)):
                self._kept += 1
            else:
                self._health.report(self.name, BUSY)

    def flush(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until every bundle is on the disk."""
        return self._background.wait(timeout)

    def close(self) -> None:
        """Wait for what is being written, at most 0.5 s; what is not done by then is lost, and reported."""
        if not self._background.wait(CLOSE_SECONDS):
            self._health.report(
                self.name, TimeoutError("the disk did not respond in time: a bundle is incomplete")
            )
        self._health.mark(self.name, False)

    def _incident(self, one: Taken, record: Record, around: tuple[StepNorms, ...]) -> Incident:
        run = self._run
        return Incident(
            one.event.incident,
            record.snapshot.step,
            record.snapshot.optimizer,
            run.rank,
            run.world_size,
            run.run_id,
            run.script,
            record.wall_time,
            run.versions,
            one.event,
            one.finding,
            ordered(record.decision),
            around,
        )

    # -- in the background -------------------------------------------------------------------------------

    def _write(self, one: Taken, incident: Incident, snapshot: Snapshot) -> None:
        run = self._run
        there = count(Path(run.directory), run.rank, run.world_size)
        if there >= one.keep:  # by an attempt before this one
            self._kept = max(self._kept, there)
            return
        evidence = one.evidence
        document = Document(
            incident,
            SUSPICIONS.get(one.event.detector, "nonfinite"),
            evidence.obstacle,
            evidence.calls,
            evidence.watched,
            evidence.models,
            snapshot.sites.names,
            evidence.gradients,
            snapshot.loss_scale,
            tuple(evidence.left_out),
        )
        name = folder_name(incident.name, run.rank, run.world_size, run.attempt)
        intended = Path(run.directory, FOLDER, name)
        lines = page(incident, str(intended), evidence.obstacle, map(str, evidence.left_out))
        levels = usual_levels(_arrived(snapshot), one.usual)
        files = {DOCUMENT: document.encode(), PAGE: markdown([*lines, *levels]).encode()}
        tensors = {**evidence.tensors, **_sites(snapshot, one.usual)}
        write_bundle(Path(run.directory), name, files, lambda path: _save(tensors, path))

    def _lost(self, error: BaseException) -> None:
        """A bundle could not be written: it counts for nothing, and the next incident may have one."""
        self._kept -= 1
        self._health.report(self.name, error)


def norms_of(record: Record) -> StepNorms:
    """Norms of a step for the page of an incident near it."""
    snapshot = record.snapshot
    return StepNorms(
        snapshot.step,
        snapshot.total_norm,
        snapshot.total_norm_applied,
        snapshot.scalars.get("loss"),
        record.decision.skip,
    )


def _gone(captured: OptimizerCapture, snapshot: Snapshot) -> str:
    """The reason why nothing is left of a step when it is judged; "" where it is about to be taken."""
    if captured.inside_backward or captured.without_optimizer:
        return INSIDE
    if captured.step != snapshot.step:
        return LATE
    return REJECTED if snapshot.scalars.get("scaler_skip") else ""


def _gradients(captured: OptimizerCapture, event: Event) -> Iterator[tuple[str, Tensor]]:
    """The gradients that an Event names, this rank's part of each."""
    wanted = dict.fromkeys((*event.sites, event.first_cause))
    grads = captured.grads()
    for name, grad in zip(captured.sites.names, grads, strict=False):
        if name in wanted and grad is not None:
            yield name, grad


def _arrived(snapshot: Snapshot) -> dict[str, float]:
    """Norms of the gradients that arrived, by the name of the parameter."""
    norms = zip(snapshot.sites.names, snapshot.norm, snapshot.calls, strict=True)
    return {name: float(norm) for name, norm, calls in norms if calls}


def _sites(snapshot: Snapshot, usual: Mapping[str, float]) -> dict[str, Tensor]:
    known = np.array([usual.get(name, math.nan) for name in snapshot.sites.names])
    arrays = {"norm": snapshot.norm, "usual": known, "calls": snapshot.calls, "coef": snapshot.coef}
    return {f"site.{name}": torch.tensor(array, device="cpu") for name, array in arrays.items()}


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, {"format": "pt"})
