"""The benchmark of checkpoints tells a good one from a lost one."""

from __future__ import annotations

from dataclasses import replace

from tests.benchmarks.checkpoints import faults
from tests.benchmarks.checkpoints import trainings as t
from tests.benchmarks.checkpoints.__main__ import line
from tests.benchmarks.checkpoints.faults import Fault
from tests.benchmarks.checkpoints.runs import checkpoints
from tests.benchmarks.checkpoints.sets import HEALTHY, RUINED
from tests.benchmarks.checkpoints.trainings import Training


def marks(training: Training, fault: Fault | None) -> str:
    """Of a training of two checkpoints."""
    short = replace(training, steps=100)
    return line(short, fault, checkpoints(short, fault, "observe-only")).rsplit(maxsplit=1)[-1]


def test_a_healthy_training_is_worth_keeping() -> None:
    """Nothing is lost, and healthy says so."""
    assert marks(t.LORA, None) == "++"


def test_what_is_beyond_recovery_is_lost_whatever_is_said_of_it() -> None:
    """Targets broken for one step at step 57: NaN at once. Without a step that shows it, a small harm is none."""
    assert marks(t.MLP, replace(faults.burst(1e4), begins=57)) == "+-"
    assert marks(t.LORA, replace(faults.burst(1.0), begins=57)) == "++"


def test_each_half_has_as_many() -> None:
    """What was added while tuning stands at the end of that half; no case is in both."""
    assert (len(RUINED["reporting"]), len(HEALTHY["reporting"])) == (10, 10)
    named = [
        {(training.name, fault.name, fault.begins) for training, fault in RUINED[half]} for half in RUINED
    ]
    assert not named[0] & named[1]
