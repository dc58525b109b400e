"""The sentence at the head of a report."""

from __future__ import annotations

import numpy as np
import pytest

from gradwatch.account import Account, Taken, Watched
from gradwatch.journal.audit import Fired
from gradwatch.report.run_report import RuleState
from gradwatch.report.track import COUNTS, Axis, Parameters, Track
from gradwatch.report.verdict import RunFacts, verdict

ALL_SEEN = Account(Taken(steps=9, backwards=9), Watched(steps=9, backwards=9), ended="finished")


def track(skipped: int = 0, clipped: int = 0) -> Track:
    counts = {name: np.zeros(1, np.int64) for name in COUNTS}
    counts["skipped"][0], counts["clipped"][0] = skipped, clipped
    return Track(0, 0, 9, 0, 8, Axis((0,), 16), {}, counts, Parameters())


def fired(severity: str, rule: str = "nan", cause: str = "") -> RuleState:
    return RuleState(rule, "fired", severity=severity, fired=Fired(rule, severity, 2, 1234, 2000, [], cause))


@pytest.mark.parametrize(
    ("tracks", "rules", "account", "damaged", "said"),
    [
        (
            [track()],
            [],
            ALL_SEEN,
            False,
            "Healthy: no rule fired in 9 recorded steps; the training finished.",
        ),
        (
            [track(skipped=1, clipped=2)],
            [fired("critical", cause="the backward of sqrt"), fired("info", "other")],
            ALL_SEEN,
            False,
            "Not healthy: rule nan (critical) fired at step 1,234 (the backward of sqrt), and 1 other rule; "
            "gradwatch skipped 1 and clipped 2 of 9 recorded steps; the training finished.",
        ),
        (
            [track()],
            [fired("warning")],
            ALL_SEEN,
            False,
            "Look at this: rule nan (warning) fired at step 1,234; the training finished.",
        ),
        (
            [track()],
            [],
            Account(Taken(steps=12), Watched(steps=9), ended="failed"),
            False,
            "Look at this: no rule fired in 9 recorded steps; not everything was watched (see below); "
            "the training ended with an exception.",
        ),
        (
            [track()],
            [],
            Account(lost=1),
            False,
            "Broken off: no rule fired in 9 recorded steps; the process was killed, or ended without an account.",
        ),
        (
            [track()],
            [],
            Account(running=1),
            False,
            "So far: no rule fired in 9 recorded steps; the training goes on.",
        ),
        (
            [],
            [],
            None,
            True,
            "Nothing to see: no step was recorded; "
            "part of the journal cannot be read; how it ended is not known.",
        ),
        (
            [track()],
            [],
            ALL_SEEN,
            True,
            "Look at this: no rule fired in 9 recorded steps; part of the journal cannot be read; "
            "the training finished.",
        ),
    ],
    ids=["healthy", "critical", "warning", "not watched", "killed", "running", "nothing", "damaged"],
)
def test_sentences(
    tracks: list[Track], rules: list[RuleState], account: Account | None, damaged: bool, said: str
) -> None:
    """The worst comes first; only a run of which all is known is healthy."""
    assert verdict(RunFacts(tracks, rules, account, damaged)).sentence == said


def test_a_cause_is_one_printable_line() -> None:
    """Whatever a module or a file is called."""
    rules = [fired("critical", cause="a\n\x1b[31mb" + "c" * 500)]
    sentence = verdict(RunFacts([track()], rules, ALL_SEEN)).sentence
    assert sentence.isprintable()
    assert len(sentence) < 400
