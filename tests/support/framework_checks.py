"""What the tests of the integrations ask after a job: which steps were seen, and whether anything is left behind."""

from __future__ import annotations

from typing import Any

from gradwatch.taps import step_hooks
from tests.integrations.test_frameworks import WINDOWS
from tests.support.framework_jobs import EPOCHS
from tests.support.kept import Kept

STEPS = EPOCHS * len(WINDOWS)
"""Optimizer steps of a whole job."""


def steps(sink: Kept) -> list[int]:
    """The steps a sink was told of."""
    return [record.snapshot.step for record in sink.records]


def nothing_left() -> bool:
    """Whether no hook of ours is on any optimizer."""
    return step_hooks.installed() == 0


def but_weights(state: dict[str, Any]) -> dict[str, Any]:
    """A Watch's state but for the reference of its weights, which is of the last look; when it looks, time decides."""
    assert state["weights"]["rms"]
    return {name: value for name, value in state.items() if name != "weights"}
