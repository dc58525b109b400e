"""Trainings as users write them do not notice that they are watched, and every step of theirs is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainings.comparison import compare
from tests.trainings.situations import TRAININGS, Training


def parameter(training: Training) -> Any:
    """A training by its name, marked `soak` where it is not for every commit."""
    marks = [] if training.quick else [pytest.mark.soak]
    return pytest.param(training, id=training.name, marks=marks)


@pytest.mark.parametrize("training", [parameter(each) for each in TRAININGS])
def test_a_training_is_the_same_and_every_step_is_counted(training: Training, tmp_path: Path) -> None:
    """Same stdout (losses and a hash of the weights), same exit status; steps recorded are steps taken."""
    compared = compare(training, tmp_path)
    assert not compared.differences(), f"{compared.differences()}\n{compared.watched.stderr}"


def test_there_are_thirty_trainings() -> None:
    """Thirty scripts, none of which knows gradwatch."""
    assert len({each.script for each in TRAININGS}) >= 30
    folder = Path(__file__).parent / "scripts"
    assert not [path for path in folder.rglob("*.py") if "gradwatch" in path.read_text(encoding="utf-8")]
