"""A recorded run as rules are judged on it: steps in blocks, what fired live, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from gradwatch.backtest.measured import Measured, measured_by
from gradwatch.backtest.outcome import OutcomeTotals, RulesOutcome
from gradwatch.engine.actions.norms_after_actions import ROUNDING, unclipped
from gradwatch.engine.changed_parameters import changed_parameters
from gradwatch.journal import JournalReader, RecordedStep
from gradwatch.records.decision import CLIP_SECTION, Order
from gradwatch.records.event import Event
from gradwatch.records.snapshot import Sites, Snapshot
from gradwatch.runtime.printable import plural

BLOCK = 64
"""Steps that are judged in one go, at most."""
FOLLOWS = (
    "process {}: optimizer {} begins at step {:,}: what its rules had learned before is in no journal, and they learn "
    "anew here"
)
MISSING = (
    "process {}: optimizer {}: {:,} steps, from step {:,} on, are missing from the journal: rules with a baseline end "
    "there"
)
PARTLY_REBASELINED = (
    "process {}: step {:,}: the script had some baselines begin anew, which is not recorded: here none do"
)
NOT_CLOSED = "process {}: the journal has no end: the process was killed, or still runs"
UNREAD = "process {}: nothing of its journal can be read"
DAMAGED = "process {}: {} of the journal cannot be read"


class Restart(NamedTuple):
    """A script has baselines begin anew, for a reason: those of the rules that are `named`, of the run's `rules`."""

    reason: str
    named: frozenset[str]
    rules: frozenset[str]


class MeasuredStep(NamedTuple):
    """A recorded step, and its Snapshot as rules are judged on it: before gradwatch changed anything of its gradients.

    `found` is None where that is not recorded. `restarts` are what the script had begin anew before the step, of all
    parameters; `follows_gap`: steps of its optimizer right before it are missing from the journal.
    """

    recorded: RecordedStep
    found: Snapshot | None
    restarts: tuple[Restart, ...] = ()
    follows_gap: bool = False


class RecordedRun:
    """The journals of one rank of a run, in blocks of steps; what fired and was done live, and what is missing.

    `measured` is of the process whose journal was read last.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.run_id = ""
        self.measured = Measured()
        self.notes: list[str] = []
        self._totals = OutcomeTotals()
        self._rules: frozenset[str] = frozenset()
        self._next: dict[int, int] = {}
        self._missing: dict[int, tuple[int, int]] = {}
        self._sites: dict[int, Sites] = {}

    def blocks(self, journal: JournalReader) -> Iterator[list[MeasuredStep]]:
        """The steps of a journal, consecutive ones of one optimizer and the same sites together."""
        found = journal.run()
        self.measured = measured_by(None if found is None else found.run)
        if found is not None:
            self.run_id = found.run.run_id
            self._rules = frozenset(rule.id for rule in found.run.rules)
        self._next, self._missing, self._sites = {}, {}, {}
        block: list[MeasuredStep] = []
        for recorded in journal.records():
            follows_gap = self._take(journal.attempt, recorded)
            restarts = self._restarts(journal.attempt, recorded)
            step = MeasuredStep(recorded, before_own_clip(recorded), restarts, follows_gap)
            if block and (len(block) == BLOCK or not _go_together(block[-1], step)):
                yield block
                block = []
            block.append(step)
        if block:
            yield block
        self._note_gaps(journal)

    def _take(self, process: int, step: RecordedStep) -> bool:
        """Count a step; True if some of its optimizer are missing before it."""
        self.steps += 1
        record = step.record
        snapshot = record.snapshot
        self._totals.take(process, record, record.verdict.events, record.decision)
        expected = self._next.get(snapshot.optimizer)
        if expected is None and snapshot.step > 0:
            self.notes.append(FOLLOWS.format(process, snapshot.optimizer, snapshot.step))
        elif expected is not None and snapshot.step > expected:
            count, first = self._missing.get(snapshot.optimizer, (0, expected))
            self._missing[snapshot.optimizer] = count + snapshot.step - expected, first
        self._next[snapshot.optimizer] = snapshot.step + 1
        return expected is not None and snapshot.step > expected

    def _restarts(self, process: int, step: RecordedStep) -> tuple[Restart, ...]:
        """Baselines that the script had begin anew before a step."""
        snapshot, events = step.record.snapshot, step.record.verdict.events
        known = self._sites.get(snapshot.optimizer)
        if known is not snapshot.sites:
            self._sites[snapshot.optimizer] = snapshot.sites
            self.measured = self.measured.with_sites(snapshot.sites)
        if not events:
            return ()
        # Those of other parameters than before follow from these, here as live.
        own = "" if known is None else changed_parameters(known, snapshot.sites)
        asked = [event for event in events if event.kind == "rebaselined" and event.summary != own]
        partly = [event for event in asked if not of_all(event, snapshot)]
        self.notes += [PARTLY_REBASELINED.format(process, event.step) for event in partly]
        whole = (event for event in asked if event not in partly)
        return tuple(
            Restart(event.summary, frozenset(event.description.split(", ")), self._rules) for event in whole
        )

    def _note_gaps(self, journal: JournalReader) -> None:
        for optimizer, (count, first) in self._missing.items():
            self.notes.append(MISSING.format(journal.attempt, optimizer, count, first))
        if journal.unread:
            self.notes.append(UNREAD.format(journal.attempt))
        elif not journal.complete:
            self.notes.append(NOT_CLOSED.format(journal.attempt))
        damage = [one for one in journal.damage if journal.complete or one.reason != "torn"]
        if damage:
            self.notes.append(DAMAGED.format(journal.attempt, plural(len(damage), "part")))

    def outcome(self) -> RulesOutcome:
        """Outcome of the rules of the run itself, live."""
        return self._totals.outcome()


def _go_together(one: MeasuredStep, other: MeasuredStep) -> bool:
    """True if two steps, one after the other, can be in one block: nothing happened between them."""
    before, after = one.recorded.record.snapshot, other.recorded.record.snapshot
    return (
        before.optimizer == after.optimizer
        and before.sites is after.sites
        and (one.recorded.norms is None) == (other.recorded.norms is None)
        and not (other.restarts or other.follows_gap)
        and math.isfinite(before.total_norm)
        and math.isfinite(after.total_norm)
        and one.found is not None
        and other.found is not None
    )


def before_own_clip(step: RecordedStep) -> Snapshot | None:
    """The Snapshot of a step before gradwatch changed its gradients; None where that does not follow from the record.

    It does where nothing was changed but by a clip of the total, whose order has the norm before: where that is the
    total norm, nothing else had clipped.
    """
    snapshot = step.record.snapshot
    changed = [order for order in step.record.decision.orders if changes_gradients(order)]
    if not changed:
        return snapshot
    (one, *others), total = changed, snapshot.total_norm
    of_total = one.rule == CLIP_SECTION and not one.site and not others and one.before is not None
    if of_total and abs(float(one.before or 0.0) - total) <= ROUNDING * total:
        return unclipped(snapshot)
    return None


def changes_gradients(order: Order) -> bool:
    """True if an order was carried out that changes gradients."""
    return not order.shadow and (order.coefficient is not None or order.action == "zero_nonfinite")


def of_all(event: Event, snapshot: Snapshot) -> bool:
    """True if baselines of all parameters began anew."""
    return event.count >= sum(kind == "param" for kind in snapshot.sites.kinds)
