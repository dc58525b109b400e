"""Actions taken in a training, read from its journal: how often, by which rule, how hard.

Counts are of the steps that the journal still holds: where a long run was thinned to stay within its cap they are lower
bounds, and `pruned` says so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median

from gradwatch.account import Account
from gradwatch.account.launch_total import Part, by_launch, launch_total
from gradwatch.incidents.explanation import sentence
from gradwatch.journal import Entry, EventsEntry, JournalReader, StepsEntry
from gradwatch.journal.crash_safe_frames import Damage
from gradwatch.journal.incidents import better
from gradwatch.journal.process_account import Recorded
from gradwatch.records.decision import Order
from gradwatch.records.event import Event
from gradwatch.records.finding import Finding
from gradwatch.runtime.printable import plural
from gradwatch.runtime.process_identity import alive

_CLIPPED = 1 - 1e-6
_MOST_SITES = 5
_MOST_INCIDENTS = 5


@dataclass(slots=True)
class Line:
    """One rule and action: `times` it was carried out (or, in shadow mode, would have been).

    `coefficients` are those of every time there was one, in order; `sites` how often each was the worst; `hardest`
    the step of the smallest coefficient, with the norms before and after it.
    """

    rule: str
    action: str
    shadow: bool = False
    times: int = 0
    first_step: int = -1
    last_step: int = -1
    coefficients: list[float] = field(default_factory=list)
    sites: dict[str, int] = field(default_factory=dict)
    hardest: tuple[int, float | None, float | None] | None = None

    def add(self, step: int, order: Order) -> None:
        """Count one order."""
        self.times += 1
        self.first_step = step if self.first_step < 0 else min(self.first_step, step)
        self.last_step = max(self.last_step, step)
        if order.site:
            self.sites[order.site] = self.sites.get(order.site, 0) + 1
        if order.coefficient is not None:
            if order.coefficient < min(self.coefficients, default=math.inf):
                self.hardest = (step, order.before, order.after)
            self.coefficients.append(order.coefficient)

    def to_dict(self, steps: int) -> dict[str, object]:
        """JSON-safe; `steps` is what the share is of."""
        found = sorted(self.sites.items(), key=lambda item: (-item[1], item[0]))
        hardest = None
        if self.hardest is not None:
            hardest = dict(zip(("step", "norm_before", "norm_after"), self.hardest, strict=True))
        return {
            "rule": self.rule,
            "action": self.action,
            "shadow": self.shadow,
            "times": self.times,
            "share_of_steps": self.times / steps if steps else 0.0,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "coefficient_min": min(self.coefficients, default=None),
            "coefficient_median": median(self.coefficients) if self.coefficients else None,
            "hardest": hardest,
            "worst_sites": dict(found[:_MOST_SITES]),
        }


@dataclass(slots=True)
class Fired:
    """One rule that fired, `times` in all; `incidents` names the first few, that of `first_step` before the others.

    `cause` is the first that was found, of an incident at `cause_step`: it says so itself where that is not the first
    incident. Steps of -1: none of its events is in the journal, no cause is known.
    """

    rule: str
    severity: str
    times: int = 0
    first_step: int = -1
    last_step: int = -1
    incidents: list[str] = field(default_factory=list)
    cause: str = ""
    cause_step: int = -1

    @property
    def steps(self) -> tuple[str, str]:
        """The first and the last step at which it fired, to be shown."""
        if self.first_step < 0:
            return "not in the journal", ""
        return f"{self.first_step:,}", f"{self.last_step:,}"

    def add(self, event: Event) -> None:
        """Count one firing."""
        self.times += 1
        earliest = self.first_step < 0 or event.step < self.first_step
        self.first_step = event.step if earliest else self.first_step
        self.last_step = max(self.last_step, event.step)
        if event.incident not in self.incidents:
            self.incidents.insert(0 if earliest else len(self.incidents), event.incident)
            del self.incidents[_MOST_INCIDENTS:]

    def take_cause(self, causes: Mapping[str, Finding]) -> None:
        """Keep the first cause that was found, by incident: with its own step where that is not the first one."""
        for incident in self.incidents:
            cause = causes.get(incident)
            if cause is not None and cause.found:
                own = "" if incident == self.incidents[0] else f"at step {cause.step:,}: "
                self.cause, self.cause_step = own + sentence(cause), cause.step
                return


@dataclass(slots=True)
class Audit:
    """Everything done in one or more attempts of a run, as one rank recorded it; `clipped_by_others` counts steps
    whose gradients got smaller though no action was due: by a clip of the script's own, or another write to `.grad`.
    `unfinished`: some journal
    has no end, for its process was killed or still runs, so that its last steps may be missing; `unrecorded` counts,
    by rule and action, the incidents that were acknowledged at steps which are missing. `damage` is what could not be
    read of the journals, but for the last entry of a process that was killed; `unread` are the journals of which
    nothing could. `missing` counts the steps between recorded ones that the journal does not hold, of which
    `first_missing` is the first. `parts` are what each journal says of its process, `accounts` what they come to.
    """

    steps: int = 0
    pruned: bool = False
    skipped: int = 0
    clipped_by_others: int = 0
    lines: dict[tuple[str, str, bool], Line] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    escalated: dict[str, int] = field(default_factory=dict)
    unfinished: bool = False
    damage: list[Damage] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    missing: int = 0
    first_missing: int = -1
    unrecorded: dict[tuple[str, str], int] = field(default_factory=dict)
    rules: dict[str, Fired] = field(default_factory=dict)
    causes: dict[str, Finding] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)

    def add_damage(self, journal: JournalReader) -> None:
        """Add what could not be read of a journal, but for the last entry of a process that was killed."""
        if journal.unread:
            self.unread.append(str(journal.path))
        self.damage += [one for one in journal.damage if journal.complete or one.reason != "torn"]

    def add_rank(self, other: Audit) -> None:
        """Add the firings and causes of another rank; of one rule those of the rank on which it fired most often."""
        for rule, one in other.rules.items():
            if one.times > getattr(self.rules.get(rule), "times", 0):
                self.rules[rule] = one
        self.unfinished |= other.unfinished
        self.damage += other.damage
        self.unread += other.unread
        self._add_missing(other.missing, other.first_missing)
        self.take_findings(other.causes.values())

    def fired(self) -> list[Fired]:
        """The rules that fired, most severe first, then by their first step; each with a cause if one was found."""
        found = sorted(
            self.rules.values(), key=lambda one: (one.severity != "critical", one.first_step, one.rule)
        )
        for one in found:
            one.take_cause(self.causes)
        return found

    def accounts(self) -> list[Account]:
        """One account for each launch, as it was printed if it was: the last one is the latest."""
        return [launch_total(parts, _runs) for parts in by_launch(self.parts)]

    def sorted(self) -> list[Line]:
        """The lines, most frequent first; shadow last."""
        return sorted(
            self.lines.values(), key=lambda line: (line.shadow, -line.times, line.rule, line.action)
        )

    def not_read(self) -> Iterator[tuple[str, str]]:
        """Sentences on what may be missing, each with "damaged", "missing" or "" before it."""
        if self.unfinished:
            whole = "" if self.damage or self.unread or self.missing else "; no incident is missing"
            yield (
                "",
                "the journal has no end (killed, ended by os._exit, or still running): "
                f"the last 31 ordinary steps, and those of its last second, may be missing{whole}",
            )
        for path in self.unread:
            name = os.path.basename(path)
            yield "damaged", f"nothing of {name} can be read: what its process did is not known"
        if self.missing:
            yield (
                "missing",
                f"{plural(self.missing, 'step')}, from step {self.first_missing:,} on, not in the journal (thinned to "
                "stay within its cap, or not written): what is counted of the others is a lower bound",
            )
        lost: dict[str, int] = {}
        for one in self.damage:
            lost[one.path] = lost.get(one.path, 0) + one.length
        for path, size in lost.items():
            yield (
                "damaged",
                f"{size:,} bytes of {os.path.basename(path)} cannot be read: "
                "steps, rules that fired and causes may be missing here",
            )

    def to_dict(self) -> dict[str, object]:
        """The audit, JSON-safe."""
        return {
            "steps": self.steps,
            "thinned": self.pruned,
            "unfinished": self.unfinished,
            "damage": [asdict(one) for one in self.damage],
            "unread": self.unread,
            "missing_steps": self.missing,
            "skipped_steps": self.skipped,
            "clipped_by_others": self.clipped_by_others,
            "actions": [line.to_dict(self.steps) for line in self.sorted()],
            "fired": [asdict(one) for one in self.fired()],
            "accounts": [account.to_dict() for account in self.accounts()],
            "failed": self.failed,
            "escalated": self.escalated,
            "unrecorded": [
                {"rule": rule, "action": action, "incidents": count}
                for (rule, action), count in sorted(self.unrecorded.items())
            ],
        }

    def take_gap(self, entry: StepsEntry, expected: int | None) -> None:
        """Count the steps that are missing before and between these, of which `expected` should have been the first.

        None: these are the first of their optimizer, which may have gone on from a checkpoint.
        """
        for row in entry.rows:
            if expected is not None and row.step > expected:
                self._add_missing(row.step - expected, expected)
            expected = row.step + 1

    def _add_missing(self, count: int, first: int) -> None:
        if count:
            self.first_missing = first if not self.missing else min(self.first_missing, first)
            self.missing += count

    def take_steps(self, entry: StepsEntry) -> None:
        """Count some steps."""
        self.pruned |= entry.every > 1
        for row in entry.rows:
            self.steps += 1
            self.skipped += row.decision.skip
            orders = row.decision.orders
            for order in orders:
                self._line(order).add(row.step, order)
            smaller = not row.decision.skip and row.total_norm_applied < row.total_norm * _CLIPPED
            ours = any(order.changed_gradients for order in orders)
            self.clipped_by_others += smaller and not ours

    def take_events(self, events: Iterable[Event]) -> None:
        """Count what fired, what failed and what escalated."""
        for event in events:
            if event.kind == "firing":
                self.rules.setdefault(event.rule, Fired(event.rule, event.severity)).add(event)
            elif event.kind == "failed":
                self.failed[event.rule] = self.failed.get(event.rule, 0) + 1
            elif event.kind == "escalated":
                self.escalated[event.rule] = self.escalated.get(event.rule, 0) + 1

    def take_findings(self, findings: Iterable[Finding]) -> None:
        """Keep the best cause of each incident."""
        for finding in findings:
            if better(finding, self.causes.get(finding.incident)):
                self.causes[finding.incident] = finding

    def take_unrecorded(self, events: Iterable[Event]) -> None:
        """Count incidents whose steps were lost; an incident is durable before its step is."""
        for event in events:
            for action in event.actions:
                key = (event.rule, action)
                self.unrecorded[key] = self.unrecorded.get(key, 0) + 1

    def _line(self, order: Order) -> Line:
        key = (order.rule, order.action, order.shadow)
        return self.lines.setdefault(key, Line(*key))


def read(
    journal: JournalReader, audit: Audit, also: Callable[[Entry], None] = lambda entry: None
) -> Iterable[int]:
    """Add one journal to an audit; yields the number of steps so far, for whoever shows progress.

    Each entry is given to `also` too, so that one pass over a large journal serves several readers.
    """
    seen: set[int] = set()
    last: dict[int, int] = {}
    opened: list[Event] = []
    recorded = Recorded()
    for entry in journal.entries():
        also(entry)
        recorded.take(entry)
        if isinstance(entry, StepsEntry):
            before = last.get(entry.optimizer)
            audit.take_gap(entry, None if before is None else before + 1)
            audit.take_steps(entry)
            last[entry.optimizer] = max((row.step for row in entry.rows), default=-1)
            yield audit.steps
        elif isinstance(entry, EventsEntry) and entry.number not in seen:
            seen.add(entry.number)
            audit.take_events(entry.events)
            audit.take_findings(entry.findings)
            opened += [event for event in entry.events if event.kind == "firing" and event.actions]
    part = recorded.part()
    if part is not None and (part.ended or not journal.complete):  # earlier versions ended without an account
        audit.parts.append(part)
    audit.add_damage(journal)
    if not journal.complete:
        audit.unfinished = True
        audit.take_unrecorded(event for event in opened if event.step > last.get(event.optimizer, -1))


def _runs(part: Part) -> bool | None:
    """True if the process of a part still runs; None for one of another machine."""
    return alive(part.pid, part.since) if part.host == os.uname().nodename else None
