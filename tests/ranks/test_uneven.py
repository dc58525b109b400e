"""DDP with uneven inputs: no rank waits for one that has run out of batches, and those that step act alike."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.uneven import STEPS

JOB = "tests.ranks.uneven"


def test_nobody_waits_for_a_rank_that_has_joined(homes: dict[str, list[Any]]) -> None:
    """Every step of both ranks is judged, nothing is reported, and no step takes as long as a lost rank would cost."""
    for rank, home in enumerate(homes["healthy"]):
        assert home["errors"] == {}
        assert home["judged"] == 2 * STEPS[rank]
        assert not home["waited"]


@pytest.mark.parametrize("situation", ["nan while both step", "nan after one has joined"])
def test_a_nan_is_skipped_by_every_rank_that_steps(situation: str, homes: dict[str, list[Any]]) -> None:
    """The averaged gradient is the same wherever a step is taken, so nobody needs to ask the others."""
    first, second = homes[situation]
    assert first["errors"] == second["errors"] == {}
    assert first["finite"]
    assert second["finite"]
    assert first["weights"] == second["weights"]
    assert len(second["skipped"]) == 2
    assert len(first["skipped"]) == (2 if situation == "nan while both step" else 0)
