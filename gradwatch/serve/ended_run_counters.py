"""Summary of a process that has ended: who it was, its final counters, how and when it ended.

Worked out from its journal, once, and kept in gradwatch's own folder: thousands of journals cannot be read again at
every start.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gradwatch.journal.entries import EndEntry, Entry, EventsEntry, LostEntry
from gradwatch.journal.reader import JournalReader
from gradwatch.journal.records_from_entries import join_records
from gradwatch.records.event import severity_rank
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.atomic_files import write_whole
from gradwatch.serve.process_discovery import Process
from gradwatch.sinks.prometheus.metric_values import OptimizerView, RunEnd, View, optimizer_labels, outcome_of
from gradwatch.sinks.prometheus.run_totals import Histogram, RunTotals

_SHOWN = 5
_FORMAT = 4
_HISTOGRAMS = ("grad_norm", "step_seconds", "observe_seconds")
_COUNTS = (
    "steps",
    "provisional_steps",
    "nonfinite_steps",
    "nonfinite_elements",
    "clipped_steps",
    "skipped_steps",
    "scaler_skips",
    "irreproducible_steps",
)


Known = Literal["all", "firings", "nothing"]
"""Which counters are at least what a scrape has seen: a counter that goes back looks like one that began anew."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A process that has ended. `complete`: it closed its journal. `recent` are five of its firings: the gravest
    first, of those of one severity the last ones, oldest first.

    `known` says which of its counters can be told: all where the journal holds every step; of a killed process only
    firings, which are written at once, for its last seconds of steps are not; none where events were given up.
    """

    run: RunInfo
    end: RunEnd
    totals_by_index: dict[int, RunTotals]
    recent: tuple[str, ...] = ()
    complete: bool = False
    known: Known = "all"

    @property
    def steps(self) -> int:
        """Optimizer steps of all optimizers."""
        return sum(run_totals.steps for run_totals in self.totals_by_index.values())

    @property
    def firings(self) -> int:
        """Times any rule fired."""
        return sum(sum(run_totals.firings.values()) for run_totals in self.totals_by_index.values())

    def view(self) -> View:
        """View for the families that outlive a process (`gradwatch.sinks.prometheus.final_metrics`)."""
        labels = optimizer_labels(self.totals_by_index)
        optimizers = [
            OptimizerView(labels[index], run_totals) for index, run_totals in self.totals_by_index.items()
        ]
        return View(
            self.run, tuple(optimizers) or (OptimizerView("", RunTotals.of(self.run.rules)),), end=self.end
        )


def summarise(process: Process) -> Summary | None:
    """Read a journal to its end, damaged or not; None where it does not even say whose it is.

    The counters are those the process would have shown in a last scrape, but for elements that are not finite at
    steps of which no norms were recorded (one each).
    """
    if process.journal is None:
        return None
    reader = JournalReader(process.journal)
    found = reader.run()
    if found is None:
        return None
    totals_by_index: dict[int, RunTotals] = {}
    stopped, last = False, found.run.start_time
    beside = _BesideSteps()
    for step in join_records(beside.heed(reader.entries())):
        record = step.record
        run_totals = totals_by_index.setdefault(
            record.snapshot.optimizer, RunTotals.of(found.run.rules, rank=found.run.rank)
        )
        run_totals.observe(record, record.wall_time)
        run_totals.discard_record()  # a run of many parameters would be kept alive by its last step
        stopped |= record.decision.stop
        last = max(last, record.wall_time)
    for optimizer, firings in beside.firings.items():
        run_totals = totals_by_index.setdefault(optimizer, RunTotals.of(found.run.rules, rank=found.run.rank))
        run_totals.add_firings(firings)
    outcome = outcome_of(beside.ended, stopped) if stopped or reader.complete else "died"
    end = RunEnd(outcome, max(last, process.sign_of_life))
    known = beside.known(sum(run_totals.steps for run_totals in totals_by_index.values()))
    return Summary(found.run, end, totals_by_index, beside.recent(), reader.complete, known)


@dataclass(slots=True)
class _BesideSteps:
    """Entries of a journal beside its steps: firings, which are written before the row of their step, and losses."""

    firings: dict[int, dict[tuple[str, str, str], int]] = field(default_factory=dict)
    last: dict[str, deque[str]] = field(default_factory=dict)
    """By severity, those shown if none is graver."""
    given: int | None = None
    ended: str = ""
    lost_events: bool = False
    _seen: set[int] = field(default_factory=set)

    def heed(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """The same entries."""
        for entry in entries:
            if isinstance(entry, EventsEntry) and entry.number not in self._seen:
                self._seen.add(entry.number)
                self._count(entry)
            elif isinstance(entry, LostEntry):
                self.lost_events |= bool(entry.events or entry.rotated)
            elif isinstance(entry, EndEntry):
                self.given, self.ended = entry.steps, entry.ended
            yield entry

    def _count(self, entry: EventsEntry) -> None:
        firings = self.firings.setdefault(entry.optimizer, {})
        for event in entry.events:
            if event.kind == "firing":
                key = (event.rule, event.detector, event.severity)
                firings[key] = firings.get(key, 0) + 1
                last = self.last.setdefault(event.severity, deque(maxlen=_SHOWN))
                last.append(f"step {event.step}: {event.rule} ({event.severity})")

    def recent(self) -> tuple[str, ...]:
        """Five firings, the gravest first."""
        shown: list[str] = []
        for severity in sorted(self.last, key=severity_rank):
            room = _SHOWN - len(shown)
            shown.extend(list(self.last[severity])[-room:] if room else ())
        return tuple(shown)

    def known(self, steps: int) -> Known:
        """Counters that are known, where so many steps were found."""
        return "nothing" if self.lost_events else "all" if self.given == steps else "firings"


# -- kept on disk ----------------------------------------------------------------------------------------------


class _Kept(BaseModel):
    """A Summary as JSON; anything else in its place is read as nothing."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    format: int
    journal: str
    stamp: list[tuple[str, int, int]]
    run: RunInfo
    end: RunEnd
    totals_by_index: dict[int, dict[str, Any]]
    recent: list[str]
    complete: bool
    known: Known


@dataclass(slots=True)
class Summaries:
    """Summaries by journal, kept in `folder` ("" = only in memory) for the next start.

    A file that is half-written, of another version or of a journal that has changed since is as good as none.
    """

    folder: str
    _known: dict[Path, tuple[tuple[tuple[str, int, int], ...], Summary | None]] = field(default_factory=dict)

    def get(self, process: Process) -> Summary | None:
        """The summary of a process that has ended; read from its journal where it is not known yet."""
        journal = process.journal
        if journal is None:
            return None
        known = self._known.get(journal)
        if known is not None and known[0] == process.stamp:
            return known[1]
        summary = self._load(process)
        if summary is None:
            try:
                summary = summarise(process)
            except OSError:
                return None  # gone meanwhile, or not ours to read: looked at again next time
            if summary is not None:
                self._save(process, summary)
        self._known[journal] = (process.stamp, summary)
        return summary

    def discard(self, journals: set[Path]) -> None:
        """Keep only these in memory; what is on disk of folders that were deleted is small and harmless."""
        for journal in self._known.keys() - journals:
            del self._known[journal]

    def _path(self, process: Process) -> Path:
        name = hashlib.sha256(os.fsencode(str(process.journal))).hexdigest()[:32]
        return Path(self.folder) / f"{name}.json"

    def _load(self, process: Process) -> Summary | None:
        if not self.folder:
            return None
        try:
            kept = _Kept.model_validate_json(self._path(process).read_bytes())
            same = (kept.format, kept.journal) == (_FORMAT, str(process.journal))
            if not same or tuple(map(tuple, kept.stamp)) != process.stamp:
                return None
            totals_by_index = {index: _run_totals(fields) for index, fields in kept.totals_by_index.items()}
        except (OSError, ValidationError, ValueError, LookupError, TypeError, AttributeError):
            return None
        return Summary(kept.run, kept.end, totals_by_index, tuple(kept.recent), kept.complete, kept.known)

    def _save(self, process: Process, summary: Summary) -> None:
        if not self.folder:
            return
        kept = _Kept(
            format=_FORMAT,
            journal=str(process.journal),
            stamp=list(process.stamp),
            run=summary.run,
            end=summary.end,
            totals_by_index={
                index: _fields(run_totals) for index, run_totals in summary.totals_by_index.items()
            },
            recent=list(summary.recent),
            complete=summary.complete,
            known=summary.known,
        )
        # Without it the next start reads the journal again: slower, not wrong.
        with suppress(OSError, UnicodeEncodeError):
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            write_whole(self._path(process), kept.model_dump_json())


def _fields(run_totals: RunTotals) -> dict[str, Any]:
    return {
        **{name: getattr(run_totals, name) for name in _COUNTS},
        "firings": [[*key, count] for key, count in run_totals.firings.items()],
        "actions": [[*key, count] for key, count in run_totals.actions.items()],
        "shadow_actions": [[*key, count] for key, count in run_totals.shadow_actions.items()],
        "action_failures": run_totals.action_failures,
        "escalations": run_totals.escalations,
        **{name: [getattr(run_totals, name).counts, getattr(run_totals, name).sum] for name in _HISTOGRAMS},
    }


def _run_totals(fields: dict[str, Any]) -> RunTotals:
    numbers: dict[str, Any] = {name: int(fields[name]) for name in _COUNTS}
    numbers |= {name: _histogram(getattr(RunTotals(), name), *fields[name]) for name in _HISTOGRAMS}
    return RunTotals(
        **numbers,
        firings={(rule, kind, severity): int(n) for rule, kind, severity, n in fields["firings"]},
        actions={(rule, action): int(n) for rule, action, n in fields["actions"]},
        shadow_actions={(rule, action): int(n) for rule, action, n in fields["shadow_actions"]},
        action_failures={str(rule): int(n) for rule, n in fields["action_failures"].items()},
        escalations={str(rule): int(n) for rule, n in fields["escalations"].items()},
    )


def _histogram(empty: Histogram, counts: list[Any], total: Any) -> Histogram:
    if len(counts) != len(empty.counts):
        raise ValueError("other buckets")
    return Histogram(empty.bounds, [int(count) for count in counts], float(total))
