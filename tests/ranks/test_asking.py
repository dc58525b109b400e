"""`healthy` is a look at what a rank holds: one rank may ask alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.asking import RUINED_AT, STEPS

JOB = "tests.ranks.asking"


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_one_rank_may_ask_alone(name: str, homes: dict[str, list[Any]]) -> None:
    """Rank 0 asks after every step, rank 1 never: nobody waits, and what rank 0 holds is what its answer is about."""
    first, second = homes[name]
    assert first["answers"] == [True] * RUINED_AT + [False] + [True] * (STEPS - RUINED_AT)
    assert first["errors"] == second["errors"] == {}
    assert not first["waited"]
    assert not second["waited"]
    assert first["weights"] == second["weights"]
