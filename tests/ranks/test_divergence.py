"""An action that fails on one rank: tried again, and if it fails for good, heard by all ranks one step later."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.parting import AT, STEPS

JOB = "tests.ranks.parting"


def test_a_passing_fault_parts_nobody(homes: dict[str, list[Any]]) -> None:
    """Rank 1 tries again and clips as rank 0 does: the same weights, a count, and no incident."""
    first, second = homes["for a moment"]
    assert first["hashes"] == second["hashes"]
    assert (first["errors"], second["errors"]) == ({}, {"action": 1})
    assert first["mismatch"] == second["mismatch"] == []
    assert max(first["applied"]) <= 0.05 * 1.0001


def test_ranks_that_part_say_so_on_both_sides(homes: dict[str, list[Any]]) -> None:
    """Rank 1 cannot clip at step 4: at step 5 both ranks name it, by one incident and in their own words."""
    first, second = homes["for good"]
    assert first["hashes"][:AT] == second["hashes"][:AT]
    assert first["hashes"][AT] != second["hashes"][AT]
    for home in (first, second):
        assert [(step, sites) for step, sites, *_ in home["mismatch"]] == [(AT + 1, ["rank 1"])]
        assert home["errors"]["ranks"] == 1
        told = [line for line in home["said"] if line.startswith("ranks: ")]
        assert len(told) == 1
        assert told[0].startswith(
            f"ranks: rank 1 failed to carry out the action of step {AT}, while the other ranks did"
        )
    assert first["applied"] == pytest.approx([0.05] * STEPS, rel=1e-4)
    assert second["applied"][AT] > 0.05 * 1.01
    assert second["errors"]["action"] >= 1


def test_where_no_rank_could_they_are_still_alike(homes: dict[str, list[Any]]) -> None:
    """A fault that all ranks have (memory, a broken release) parts none of them, and is not told as if it did."""
    first, second = homes["on both"]
    assert first["hashes"] == second["hashes"]
    assert first["mismatch"] == second["mismatch"] == []
    assert "ranks" not in first["errors"]
    assert first["errors"] == second["errors"]


def test_a_rank_that_cannot_tell_the_others_says_so(homes: dict[str, list[Any]]) -> None:
    """Plain replicas whose rules need no exchange: rank 1 knows, rank 0 cannot."""
    first, second = homes["untold"]
    assert "ranks" not in first["errors"]
    assert second["errors"]["ranks"] == 1
    assert any(
        f"the action of step {AT}, and the other ranks cannot be notified" in line for line in second["said"]
    )
