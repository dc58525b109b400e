"""The verdict on a run: one sentence, with the worst of it first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradwatch.account import Account, gaps
from gradwatch.records.record import CheckpointHealth
from gradwatch.report.firing_periods import FiringEnd
from gradwatch.report.reservations import reservations
from gradwatch.report.run_report import RuleState, RunVerdict, State
from gradwatch.report.saved_states import NO_SAVED_STATES, SavedStates, sentence
from gradwatch.report.track import Track
from gradwatch.runtime.printable import one_line, plural, printable

LONGEST_CAUSE = 200
LONGEST_REASONS = 300
MOST_REASONS = 2  # of weights that are not healthy; the health tag has all
LONGEST_SENTENCE = 1500
_HEAD: dict[State, str] = {
    "healthy": "Healthy",
    "warning": "Look at this",
    "critical": "Went wrong",
    "broken off": "Broken off",
    "running": "So far",
    "nothing": "Nothing to see",
}
NOTHING_FOUND = "Nothing found"
"""Of a run in which nothing is wrong as far as is known, and too little is: of its weights, its steps, its rules."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Everything that the sentence is made of.

    `account` None: not even who recorded is known. `damaged`: part of a journal cannot be read; `unwritten`: steps or
    events of rules never came to be in it. Either keeps a run from being called healthy, as do weights that are not.
    `end` is that of the worst rule. `weights` are those after `weights_after`; None: nothing is known of them.
    `unfit_before` says why those of earlier watches of this launch were not healthy when these ended, and `replaced`
    why those were not that another optimizer's have replaced. `saved` are the states that the script took.
    """

    tracks: Sequence[Track]
    rules: Sequence[RuleState]
    account: Account | None
    damaged: bool = False
    unwritten: bool = False
    end: FiringEnd | None = None
    weights: CheckpointHealth | None = None
    weights_after: int | None = None
    unfit_before: Sequence[str] = ()
    replaced: Sequence[str] = ()
    saved: SavedStates = NO_SAVED_STATES

    @property
    def fired(self) -> list[RuleState]:
        """The rules that fired, the worst first."""
        return [one for one in self.rules if one.state == "fired"]


def verdict(run: RunFacts) -> RunVerdict:
    """The state of the run and its sentence."""
    state = _state(run)
    unseen = run.weights is not None and run.weights.weights_step is None
    too_little = (state == "healthy" and unseen) or (state == "nothing" and run.tracks)
    head = NOTHING_FOUND if too_little else _HEAD[state]
    return RunVerdict(state, one_line(f"{head}: {'; '.join(_parts(run))}.", LONGEST_SENTENCE))


def _state(run: RunFacts) -> State:
    fired, account = run.fired, run.account
    if any(one.severity == "critical" for one in fired):
        return "critical"
    if not run.tracks:
        return "running" if account is not None and account.running else "nothing"
    if account is not None and account.running:
        return "running"
    unfit = bool(run.unfit_before or run.replaced) or (run.weights is not None and not run.weights.healthy)
    skipped = any(track.total("skipped") for track in run.tracks)
    if fired or skipped or unfit or run.damaged or run.unwritten or account is None:
        return "warning"
    if account.unended:
        return "broken off"
    if gaps(account) or account.ended == "failed":
        return "warning"
    return "nothing" if _reservations(run) else "healthy"


def _parts(run: RunFacts) -> Iterator[str]:
    account, steps = run.account, sum(track.steps for track in run.tracks)
    if not run.tracks:
        yield "no step was recorded"
    if run.fired:
        yield from _fired(run)
        yield from _done(run.tracks, steps)
    elif run.tracks:
        yield f"no rule fired in {plural(steps, 'recorded step')}"
        yield from _reservations(run)
        yield from _done(run.tracks, steps)
    if run.damaged:
        yield "part of the journal cannot be read"
    if run.unwritten:
        yield "part of the journal could not be written (see below)"
    if run.tracks and account is not None and not account.unended and gaps(account):
        yield "not everything was watched (see below)"
    yield f"{_ended(account)}{_weights(run)}"
    if run.weights is not None and not run.weights.healthy:
        last = run.weights.last_healthy_step
        yield (
            "no step before is known to be healthy" if last is None else f"the last healthy step was {last:,}"
        )
    if run.saved.taken:
        yield sentence(run.saved)
    if run.unfit_before:
        yield f"those of an earlier watch were not healthy when it ended{_because(run.unfit_before)}"
    if run.replaced:
        yield f"weights that others replaced were not healthy when they were last seen{_because(run.replaced)}"


def _reservations(run: RunFacts) -> list[str]:
    known = {one.rule: one.severity for one in run.rules}
    return [] if run.account is None else reservations(run.account, known)


def _fired(run: RunFacts) -> Iterator[str]:
    """The first of the most severe rules, with its cause and its end, and how many others there are."""
    worst, *others = run.fired
    assert worst.fired is not None
    severity = f" ({printable(worst.severity)})" if worst.severity else ""
    on = "" if worst.rank is None else f" on rank {worst.rank}"
    times, step = plural(worst.fired.times, "time"), f"at step {worst.fired.first_step:,}"
    cause = f" ({one_line(worst.fired.cause, LONGEST_CAUSE)})" if worst.fired.cause else ""
    if worst.fired.first_step < 0:
        when = f"{on} {times}, which the journal does not hold"
    elif worst.fired.times == 1:
        when = f"{on} {step}{cause}{_over(run)}"
    else:
        when = f"{on} {times}, first {step}{cause},{_over(run)}".removesuffix(",")
    yield f"rule {printable(worst.rule)}{severity} fired{when}"
    if others:
        yield f"{plural(len(others), 'other rule')} fired"


def _over(run: RunFacts) -> str:
    if run.end is None or run.damaged or run.unwritten:  # the end may be what is missing
        return ""
    if run.end.step is not None:
        return f" and was over at step {run.end.step:,}"
    if not run.end.last:
        return " and was still firing when its process ended or took up other rules"
    running = run.account is not None and run.account.running
    return " and is still firing" if running else " and was still firing at the end"


def _done(tracks: Sequence[Track], steps: int) -> Iterator[str]:
    done = [
        f"{word} {count:,}"
        for word, name in (("skipped", "skipped"), ("clipped", "clipped"))
        if (count := sum(track.total(name) for track in tracks))
    ]
    if done:
        yield f"gradwatch {' and '.join(done)} of {plural(steps, 'recorded step')}"


def _ended(account: Account | None) -> str:
    if account is None:
        return "how it ended is not known"
    if account.running:
        return "the training goes on"
    if account.unended:
        return "the process was killed, or ended without an account"
    endings = {"stopped": "the training was stopped", "failed": "the training ended with an exception"}
    return endings.get(account.ended, "the training finished")


def _weights(run: RunFacts) -> str:
    """The health of the weights; nothing where it is not known."""
    if run.weights is None:
        return ""
    after = "" if run.weights_after is None else f" after step {run.weights_after:,}"
    looked = run.weights.weights_step
    if run.weights.healthy and looked is None:
        return ", and its weights were not looked at"
    if (
        run.weights.healthy
        and run.weights_after is not None
        and looked is not None
        and looked < run.weights_after
    ):
        return f", and its weights were healthy after step {looked:,}, when they were last looked at"
    if run.weights.healthy:
        return f", and its weights{after} are healthy"
    return f", and its weights{after} are not healthy{_because(run.weights.reasons)}"


def _because(reasons: Sequence[str]) -> str:
    more = (
        f"; and {plural(len(reasons) - MOST_REASONS, 'other reason')}" if len(reasons) > MOST_REASONS else ""
    )
    found = one_line("; ".join(reasons[:MOST_REASONS]), LONGEST_REASONS) + more
    return f" ({found})" if found else ""
