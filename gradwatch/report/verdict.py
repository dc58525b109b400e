"""The verdict on a run: one sentence, with the worst of it first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradwatch.account import Account, gaps
from gradwatch.report.run_report import RuleState, RunVerdict, State
from gradwatch.report.track import Track
from gradwatch.runtime.printable import one_line

LONGEST_CAUSE = 200
_HEAD: dict[State, str] = {
    "healthy": "Healthy",
    "warning": "Look at this",
    "critical": "Not healthy",
    "broken off": "Broken off",
    "running": "So far",
    "nothing": "Nothing to see",
}


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Everything that the sentence is made of.

    `account` None: not even who recorded is known. `damaged`: part of a journal cannot be read; `unwritten`: steps or
    events of rules never came to be in it. Either keeps a run from being called healthy.
    """

    tracks: Sequence[Track]
    rules: Sequence[RuleState]
    account: Account | None
    damaged: bool = False
    unwritten: bool = False

    @property
    def fired(self) -> list[RuleState]:
        """The rules that fired, the worst first."""
        return [one for one in self.rules if one.state == "fired"]


def verdict(run: RunFacts) -> RunVerdict:
    """The state of the run and its sentence."""
    state = _state(run)
    return RunVerdict(state, f"{_HEAD[state]}: {'; '.join(_parts(run))}.")


def _state(run: RunFacts) -> State:
    fired, account = run.fired, run.account
    if any(one.severity == "critical" for one in fired):
        return "critical"
    if not run.tracks:
        return "running" if account is not None and account.running else "nothing"
    if account is not None and account.running:
        return "running"
    if fired or run.damaged or run.unwritten or account is None:
        return "warning"
    if account.unended:
        return "broken off"
    return "warning" if gaps(account) or account.ended == "failed" else "healthy"


def _parts(run: RunFacts) -> Iterator[str]:
    account, steps = run.account, sum(track.steps for track in run.tracks)
    if not run.tracks:
        yield "no step was recorded"
    if run.fired:
        yield _fired(run.fired)
        yield from _done(run.tracks, steps)
    elif run.tracks:
        yield f"no rule fired in {_many(steps, 'recorded step')}"
        yield from _done(run.tracks, steps)
    if run.damaged:
        yield "part of the journal cannot be read"
    if run.unwritten:
        yield "part of the journal could not be written (see below)"
    if run.tracks and account is not None and not account.unended and gaps(account):
        yield "not everything was watched (see below)"
    yield from _end(account)


def _fired(fired: Sequence[RuleState]) -> str:
    """The first of the most severe rules, with its cause, and how many others there are."""
    worst = fired[0]
    assert worst.fired is not None
    severity = f" ({worst.severity})" if worst.severity else ""
    on = "" if worst.rank is None else f" on rank {worst.rank}"
    cause = f" ({one_line(worst.fired.cause, LONGEST_CAUSE)})" if worst.fired.cause else ""
    others = f", and {_many(len(fired) - 1, 'other rule')}" if len(fired) > 1 else ""
    if worst.fired.first_step < 0:
        times = _many(worst.fired.times, "time")
        return f"rule {worst.rule}{severity} fired{on} {times}, which the journal does not hold{others}"
    return f"rule {worst.rule}{severity} fired{on} at step {worst.fired.first_step:,}{cause}{others}"


def _done(tracks: Sequence[Track], steps: int) -> Iterator[str]:
    done = [
        f"{word} {count:,}"
        for word, name in (("skipped", "skipped"), ("clipped", "clipped"))
        if (count := sum(track.total(name) for track in tracks))
    ]
    if done:
        yield f"gradwatch {' and '.join(done)} of {_many(steps, 'recorded step')}"


def _end(account: Account | None) -> Iterator[str]:
    if account is None:
        yield "how it ended is not known"
    elif account.running:
        yield "the training goes on"
    elif account.unended:
        yield "the process was killed, or ended without an account"
    else:
        endings = {"stopped": "the training was stopped", "failed": "the training ended with an exception"}
        yield endings.get(account.ended, "the training finished")


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
