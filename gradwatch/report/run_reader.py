"""From the journals of a run to its report, in one pass over each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import NamedTuple

from gradwatch.account import Account
from gradwatch.account.account_line import PREFIX, lines
from gradwatch.checkpoint.health_tag import HealthTag, read_tags, sorted_out, step_of_all
from gradwatch.checkpoint.health_tracker import joined, least
from gradwatch.incidents.incident import Incident
from gradwatch.journal import (
    Entry,
    EventsEntry,
    JournalReader,
    LostEntry,
    NormsEntry,
    RunEntry,
    SavedStatesEntry,
    SitesEntry,
    StepsEntry,
)
from gradwatch.journal.audit import Audit, read
from gradwatch.journal.incidents import IncidentCollector, better
from gradwatch.journal.rank_journals import rank_journals, refuse_unread
from gradwatch.records.record import CheckpointHealth
from gradwatch.records.run_info import RunInfo
from gradwatch.records.snapshot import Sites
from gradwatch.report.explained import explained
from gradwatch.report.fired_rules import OtherRank, fired_rules
from gradwatch.report.firing_periods import FiringEnd, FiringPeriods, firing_end
from gradwatch.report.rule_states import rule_states
from gradwatch.report.run_report import Cost, RuleState, RunReport
from gradwatch.report.run_verdict import LONGEST_REASONS, MOST_REASONS, RunFacts, verdict
from gradwatch.report.saved_states import SavedStateCollector, of_ranks
from gradwatch.report.track import Track, span
from gradwatch.report.track_collector import TrackCollector, tracks
from gradwatch.runtime.printable import one_line

MOST_INCIDENTS = 100
MOST_TRACKS = 16
MOST_ACCOUNTS = 5
Progress = Callable[[int], None]


def load(run: str | os.PathLike[str], rank: int | None = None) -> RunReport:
    """Read a run for a notebook, which draws it: the folder of a run, or one of its journal files.

    Raises `GradwatchError` where there is no journal of that rank.
    """
    return read_run(run, rank)


def read_run(
    run: str | os.PathLike[str], rank: int | None = None, progress: Progress = lambda steps: None
) -> RunReport:
    """Read the report of a run; `progress` is called with the number of steps so far.

    Norms, steps and actions are those of one rank (None: the lowest), causes and the rules that fired of all. Raises
    `GradwatchError` where there is no journal of that rank, or nothing of it can be read; whatever else is wrong with a
    journal is said in the report.
    """
    where = Path(run)
    journals = rank_journals(where, rank)
    collector = RunCollector()
    for journal in journals.own:
        for steps in read(journal, collector.audit, collector.taking(journal)):
            progress(steps)
    for journal in journals.others:
        collector.take_other(journal)
    refuse_unread(where, journals)
    return collector.report(where, journals.rank, journals.ranks)


class RunCollector:
    """Takes in the journals of a run."""

    def __init__(self) -> None:
        self.audit = Audit()
        self._others: dict[int, OtherRank] = {}
        self._tracks: list[TrackCollector] = []
        self._incidents: list[tuple[int, IncidentCollector]] = []  # with the process
        self._periods: list[FiringPeriods] = []
        self._run: RunInfo | None = None
        self._lost = LostEntry()
        self._saved: dict[int, SavedStateCollector] = {}  # by rank

    def taking(self, journal: JournalReader) -> Callable[[Entry], None]:
        """A function that takes in the entries of a journal of the rank that is shown."""
        found = IncidentCollector(journal.rank, all_fired=True, most=MOST_INCIDENTS)
        self._incidents.append((journal.attempt, found))
        periods = FiringPeriods(journal.attempt)
        self._periods.append(periods)
        seen: set[int] = set()
        by_optimizer: dict[int, TrackCollector] = {}
        sites: dict[int, Sites] = {}

        def track(optimizer: int) -> TrackCollector:
            if optimizer not in by_optimizer:
                by_optimizer[optimizer] = TrackCollector(journal.attempt, optimizer)
                self._tracks.append(by_optimizer[optimizer])
            return by_optimizer[optimizer]

        def take(entry: Entry) -> None:
            found.take(entry)
            if isinstance(entry, NormsEntry):
                if entry.sites_id in sites:
                    track(entry.optimizer).take_norms(entry, sites[entry.sites_id])
            elif isinstance(entry, StepsEntry):
                track(entry.optimizer).take_steps(entry)
            elif isinstance(entry, SitesEntry):
                sites[entry.sites_id] = entry.sites
            elif isinstance(entry, RunEntry):
                self._run = entry.run
                sites.clear()  # a new file: it brings its own
            elif isinstance(entry, EventsEntry):
                if entry.number not in seen:  # written again where a disk failed
                    seen.add(entry.number)
                    periods.take(entry.events)
            elif isinstance(entry, SavedStatesEntry):
                self._saved_on(journal.rank).take(journal.attempt, entry)
            elif isinstance(entry, LostEntry):
                self._lost |= entry

        return take

    def take_other(self, journal: JournalReader) -> None:
        """Take in the causes that another rank has found, and which rules fired there."""
        found = IncidentCollector(journal.rank, most=MOST_INCIDENTS)

        def entries() -> Iterator[Entry]:
            for entry in journal.entries():
                found.take(entry)
                if isinstance(entry, LostEntry):
                    self._lost |= LostEntry(events=entry.events)
                elif isinstance(entry, SavedStatesEntry):
                    self._saved_on(journal.rank).take(journal.attempt, entry)
                yield entry

        self._others.setdefault(journal.rank, OtherRank()).take(entries())
        self._incidents.append((journal.attempt, found))
        self.audit.take_findings(one.finding for one in found.incidents() if one.finding is not None)
        self.audit.add_damage(journal)

    def _saved_on(self, rank: int) -> SavedStateCollector:
        return self._saved.setdefault(rank, SavedStateCollector(rank))

    def report(self, where: Path, rank: int, ranks: Sequence[int]) -> RunReport:
        """The report of what was taken in."""
        found = tracks(self._tracks)
        accounts = self.audit.accounts()
        account = accounts[-1] if accounts else None
        known = self._run.rules if self._run else ()
        fired = fired_rules(self.audit, self._others, {rule.id: rule.severity for rule in known})
        rules = rule_states(known, fired, account if account and account.counted else None)
        shown, left_out = self._shown_incidents()
        weights = checkpoint(where)
        others = [collected for of, collected in sorted(self._saved.items()) if of != rank]
        saved = of_ranks(self._saved_on(rank), others)
        facts = RunFacts(
            found,
            rules,
            account,
            bool(self.audit.damage or self.audit.unread),
            self._unwritten,
            self._end(rules),
            weights.now,
            weights.step,
            weights.unfit_before,
            _replaced(account, weights),
            saved,
        )
        return RunReport(
            folder=str(where),
            rank=rank,
            ranks=ranks,
            run=self._run,
            verdict=verdict(facts),
            accounts=tuple(
                line.removeprefix(PREFIX) for one in accounts[-MOST_ACCOUNTS:] for line in lines(one)
            ),
            notes=(*self._notes(found), *weights.attempts_before[-MOST_ACCOUNTS:]),
            tracks=found[:MOST_TRACKS],
            incidents=tuple(explained(where, one, process) for process, one in shown),
            incidents_left_out=left_out,
            periods=tuple(period for one in self._periods for period in one.periods()),
            rules=rules,
            actions=tuple(self.audit.sorted()),
            steps=self.audit.steps,
            cost=cost(account, found),
            checkpoint=weights.now,
            checkpoint_step=weights.step,
            saved=saved,
        )

    @property
    def _unwritten(self) -> bool:
        """True if steps or transitions of rules are in no journal: what they were is not known."""
        return bool(self._lost.queue or self._lost.scalars or self._lost.events)

    def _end(self, rules: Sequence[RuleState]) -> FiringEnd | None:
        """The end of the worst rule, by the journals of the rank on which it fired."""
        if not rules or rules[0].state != "fired":
            return None
        worst = rules[0]
        journals = self._periods if worst.rank is None else self._others[worst.rank].periods
        return firing_end(worst.rule, journals)

    def _shown_incidents(self) -> tuple[list[tuple[int, Incident]], int]:
        """The critical ones and the first of the others, in the order they began, and how many there are besides."""
        best = self._best()
        first = sorted(best, key=lambda one: not critical(one[1]))[:MOST_INCIDENTS]
        shown = sorted(first, key=lambda one: one[1].step)
        known = {(process, one) for process, collected in self._incidents for one in collected.left_out}
        known |= {(process, hash(one.name)) for process, one in best}
        return shown, len(known - {(process, hash(one.name)) for process, one in shown})

    def _best(self) -> list[tuple[int, Incident]]:
        """One incident of each name in each process: of the rank that knows most, the first of equals."""
        best: dict[tuple[int, str], Incident] = {}
        for process, collected in self._incidents:
            for incident in collected.incidents():
                held = best.get((process, incident.name))
                if held is None or better(incident.finding, held.finding):
                    best[process, incident.name] = incident
        found = [(process, incident) for (process, _), incident in best.items()]
        return sorted(found, key=lambda one: one[1].step)

    def _notes(self, found: Sequence[Track]) -> Iterator[str]:
        """Sentences on what is missing from the journal, and so from the report."""
        yield from (text for _, text in self.audit.not_read())
        lost = self._lost
        if lost.queue or lost.scalars or lost.norms or lost.events:
            yield (
                f"not written (disk too slow, or it refused): {lost.queue + lost.scalars:,} steps, norms of "
                f"{lost.norms:,} steps, {lost.events:,} transitions of rules"
            )
        if lost.rotated:
            yield f"{lost.rotated:,} bytes of older steps were deleted to stay within the journal's cap"
        for track in found:
            recorded = track.parameters.recorded
            if recorded < track.steps:
                yield (
                    f"{track.title}: norms of parameters were recorded at {recorded:,} of {track.steps:,} steps; "
                    "a spike of one parameter between them shows in the total norm alone"
                )
        if len(found) > MOST_TRACKS:
            yield f"{len(found) - MOST_TRACKS} more optimizers or processes are not drawn"


def critical(incident: Incident) -> bool:
    """True if a critical rule fired."""
    return incident.event is not None and incident.event.severity == "critical"


def cost(account: Account | None, found: Sequence[Track]) -> Cost | None:
    """Own time by the account; of a process without one, of the steps recorded. None without steps."""
    steps = sum(track.steps for track in found)
    if not steps:
        return None
    own = [track.curves["overhead_seconds"].high for track in found if "overhead_seconds" in track.curves]
    largest = max((span(high)[1] for high in own), default=nan)
    if account is not None and 0 < account.watched.seconds < inf:
        watched = account.watched
        return Cost(watched.own_seconds, watched.seconds, watched.steps, largest)
    return Cost(
        sum(track.own_seconds for track in found), sum(track.seconds for track in found), steps, largest
    )


def _replaced(account: Account | None, weights: Weights) -> tuple[str, ...]:
    """The reasons why weights that others have replaced were not healthy; by the tag where there is no account."""
    of_tag = () if weights.now is None else weights.now.replaced
    return tuple(dict.fromkeys((*(account.replaced_unfit if account else ()), *of_tag)))


class Weights(NamedTuple):
    """The health of the weights, and the step after which they have it; None where no tag says so.

    `unfit_before` are the reasons why weights were not healthy at the end of earlier watches of the same launch, whose
    place another one has taken; `attempts_before` says it of each attempt that was resumed, or begun anew, since.
    """

    now: CheckpointHealth | None
    step: int | None
    unfit_before: tuple[str, ...]
    attempts_before: tuple[str, ...] = ()

    @property
    def of_all(self) -> CheckpointHealth | None:
        """The health of these weights and those together."""
        if self.now is None or not self.unfit_before:
            return self.now
        before = tuple(f"of an earlier watch: {reason}" for reason in self.unfit_before)
        return replace(self.now, healthy=False, reasons=(*self.now.reasons, *before))


def checkpoint(where: Path) -> Weights:
    """The health of the weights by the tags beside the journals."""
    folder = where if where.is_dir() else where.parent
    try:
        counting, replaced = sorted_out(read_tags(folder))
    except FileNotFoundError:
        return Weights(None, None, ())
    except (OSError, ValueError) as error:
        return Weights(None, None, (), (f"whether the weights are healthy is not known: {error}",))
    unfit = [tag for tag in replaced if not tag.health.healthy]
    launch = counting[-1].launch
    before = joined(tag.health for tag in unfit if tag.launch == launch).reasons
    attempts = tuple(
        f"when attempt {tag.attempt or 0} of rank {tag.rank} ended, its weights were not healthy: "
        + one_line("; ".join(tag.health.reasons[:MOST_REASONS]), LONGEST_REASONS)
        for tag in unfit
        if tag.launch != launch
    )
    now = joined(tag.health for tag in counting)
    if now.last_healthy_step is None:
        now = replace(now, last_healthy_step=_known_before(replaced))
    return Weights(now, step_of_all(counting), before, attempts)


def _known_before(replaced: Sequence[HealthTag]) -> int | None:
    """The step at which a look found the weights of the attempt before healthy, on all its ranks; None = not known."""
    own = [tag for tag in replaced if tag.launch == replaced[-1].launch]
    return least([tag.health.weights_step if tag.health.healthy else None for tag in own])
