"""The sentence at the head of a report."""

from __future__ import annotations

import numpy as np
import pytest

from gradwatch.account import Account, Taken, Watched
from gradwatch.journal.audit import Fired
from gradwatch.records.record import CheckpointHealth
from gradwatch.report.firing_periods import FiringEnd
from gradwatch.report.run_report import RuleState
from gradwatch.report.run_verdict import RunFacts, verdict
from gradwatch.report.track import COUNTS, Axis, Parameters, Track

ALL_SEEN = Account(Taken(steps=9, backwards=9), Watched(steps=9, backwards=9), ended="finished")


def track(skipped: int = 0, clipped: int = 0) -> Track:
    counts = {name: np.zeros(1, np.int64) for name in COUNTS}
    counts["skipped"][0], counts["clipped"][0] = skipped, clipped
    return Track(0, 0, 9, 0, 8, Axis((0,), 16), {}, counts, Parameters())


def fired(severity: str, rule: str = "nan", cause: str = "", times: int = 2) -> RuleState:
    found = Fired(rule, severity, times, 1234, 2000, [], cause)
    return RuleState(rule, "fired", severity=severity, fired=found)


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
            "Went wrong: rule nan (critical) fired 2 times, first at step 1,234 (the backward of sqrt); "
            "1 other rule fired; gradwatch skipped 1 and clipped 2 of 9 recorded steps; the training finished.",
        ),
        (
            [track()],
            [fired("warning")],
            ALL_SEEN,
            False,
            "Look at this: rule nan (warning) fired 2 times, first at step 1,234; the training finished.",
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


BAD = CheckpointHealth(False, 39, ("rule nan is firing", "a gradient was not finite at step 59"))


@pytest.mark.parametrize(
    ("times", "end", "weights", "said"),
    [
        (
            1,
            FiringEnd(1241, True),
            CheckpointHealth(True, 59, weights_step=59),
            "Went wrong: rule nan (critical) fired at step 1,234 (sqrt) and was over at step 1,241; "
            "the training finished, and its weights after step 59 are healthy.",
        ),
        (
            1,
            FiringEnd(None, True),
            BAD,
            "Went wrong: rule nan (critical) fired at step 1,234 (sqrt) and was still firing at the end; the training "
            "finished, and its weights after step 59 are not healthy (rule nan is firing; a gradient was not finite at "
            "step 59); the last healthy step was 39.",
        ),
        (
            3,
            FiringEnd(1300, True),
            CheckpointHealth(False),
            "Went wrong: rule nan (critical) fired 3 times, first at step 1,234 (sqrt), and was over at step 1,300; "
            "the training finished, and its weights after step 59 are not healthy; no step before is known to be "
            "healthy.",
        ),
        (
            1,
            FiringEnd(None, False),
            None,
            "Went wrong: rule nan (critical) fired at step 1,234 (sqrt) and was still firing when its process ended or "
            "took up other rules; "
            "the training finished.",
        ),
    ],
    ids=["over", "firing", "often", "an earlier process"],
)
def test_the_end_of_the_worst_rule_and_the_weights(
    times: int, end: FiringEnd, weights: CheckpointHealth | None, said: str
) -> None:
    """One sentence for both, in which only weights are called healthy or not."""
    rule = fired("critical", cause="sqrt", times=times)
    facts = RunFacts([track()], [rule], ALL_SEEN, end=end, weights=weights, weights_after=59)
    assert verdict(facts).sentence == said


WARM_UP = "warm-up not over: 3 of 20 samples"


@pytest.mark.parametrize(
    ("rules", "no_data", "cleared", "said"),
    [
        (20, {"nan": WARM_UP}, 0, "; 1 of 20 rules had seen too few steps to judge"),  # it is critical
        (20, {"slow": WARM_UP}, 0, None),
        (9, {"slow": WARM_UP}, 0, "; 1 of 9 rules had seen too few steps to judge"),
        (9, {"nan": "no GradScaler was seen"}, 0, None),
        (9, {}, 9, None),
        (9, {}, 10, "; after the last step gradients were computed and cleared 10 times, with no step taken"),
    ],
)
def test_a_run_of_which_too_little_was_seen_is_not_called_healthy(
    rules: int, no_data: dict[str, str], cleared: int, said: str | None
) -> None:
    """Rules that matter were still learning, or gradients were thrown away from some step on to the end."""
    account = Account(
        Taken(steps=9), Watched(steps=9, cleared_last=cleared), "finished", rules=rules, no_data=no_data
    )
    known = [
        RuleState("nan", "no data", severity="critical"),
        RuleState("slow", "no data", severity="warning"),
    ]
    found = verdict(RunFacts([track()], known, account))
    head, state = ("Healthy", "healthy") if said is None else ("Nothing found", "nothing")
    assert found.sentence == f"{head}: no rule fired in 9 recorded steps{said or ''}; the training finished."
    assert found.state == state


def test_weights_that_are_not_healthy_keep_a_run_from_it() -> None:
    """Though no rule fired; and an end that may be among what is missing is not told."""
    found = verdict(RunFacts([track()], [], ALL_SEEN, weights=BAD, weights_after=59))
    assert (found.state, found.sentence[:31]) == ("warning", "Look at this: no rule fired in ")
    rule, end = fired("critical"), FiringEnd(None, True)
    for missing in ({"damaged": True}, {"unwritten": True}):
        assert "firing at" not in verdict(RunFacts([track()], [rule], ALL_SEEN, end=end, **missing)).sentence
    running = Account(running=1)
    assert "and is still firing;" in verdict(RunFacts([track()], [rule], running, end=end)).sentence


def test_of_many_reasons_the_first_are_in_the_sentence() -> None:
    """And how many others there are."""
    weights = CheckpointHealth(False, 39, ("a", "b", "c", "d"))
    sentence = verdict(RunFacts([track()], [], ALL_SEEN, weights=weights, weights_after=59)).sentence
    assert "are not healthy (a; b; and 2 other reasons)" in sentence


def test_a_cause_is_one_printable_line() -> None:
    """Whatever a module or a file is called."""
    rules = [fired("critical", cause="a\n\x1b[31mb" + "c" * 500)]
    rules += [fired("\x1b[31mcritical", "r\n" * 5000)]
    for order in (rules, rules[::-1]):
        sentence = verdict(RunFacts([track()], order, ALL_SEEN)).sentence
        assert sentence.isprintable()
        assert len(sentence) < 600


@pytest.mark.parametrize(
    ("looked", "said"),
    [
        (
            None,
            "Nothing found: no rule fired in 9 recorded steps; the training finished, and its weights were not looked "
            "at.",
        ),
        (
            40,
            "Healthy: no rule fired in 9 recorded steps; the training finished, and its weights were healthy after "
            "step 40, when they were last looked at.",
        ),
        (
            59,
            "Healthy: no rule fired in 9 recorded steps; the training finished, and its weights after step 59 are "
            "healthy.",
        ),
    ],
)
def test_weights_are_called_healthy_only_as_of_a_look_at_them(looked: int | None, said: str) -> None:
    """A tag says healthy where nothing speaks against it, which is less."""
    weights = CheckpointHealth(True, 59, weights_step=looked)
    assert verdict(RunFacts([track()], [], ALL_SEEN, weights=weights, weights_after=59)).sentence == said
