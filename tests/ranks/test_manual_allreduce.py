"""Ranks that average by hand after the backward stay equal, though `.data` moves no version."""

from __future__ import annotations

from typing import Any

import pytest

JOB = "tests.ranks.by_hand"


@pytest.mark.parametrize("way", ["data", "grad"])
def test_a_nan_of_one_rank_is_skipped_by_both_in_its_step(way: str, homes: dict[str, Any]) -> None:
    """Averaging spreads it, so both ranks skip that step and no other, and hold the same weights after it."""
    for home in homes[f"nan {way}"]:
        assert home["errors"] == {}
        assert home["finite"]
        assert home["skipped"] == [3]
    assert len({home["weights"] for home in homes[f"nan {way}"]}) == 1


def test_a_clip_multiplies_alike_on_both_ranks(homes: dict[str, Any]) -> None:
    """Both clip by the averaged gradient, however it was written: one set of weights, never above the bound."""
    both = homes["clip data"] + homes["clip grad"]
    assert len({home["weights"] for home in both}) == 1
    assert all(home["errors"] == {} for home in both)
    assert all(home["largest"] == pytest.approx(0.05, rel=1e-4) for home in both)
