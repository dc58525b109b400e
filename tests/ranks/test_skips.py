"""Skips on two ranks are exact, sharded or not; acting inside the backward is refused there unless insisted on."""

from __future__ import annotations

from typing import Any

import pytest

JOB = "tests.ranks.skips"
SKIPS = ["skip fsdp2", "skip fsdp2 foreach", "skip fsdp2 fused", "skip fsdp2 sgd", "skip ddp fused"]


@pytest.mark.parametrize("name", SKIPS)
def test_parameters_and_state_are_untouched_where_a_step_is_skipped(name: str, homes: dict[str, Any]) -> None:
    """On both ranks, to the bit, also on the first step; every other step moves, and the gradients are back."""
    for home in homes[name]:
        assert home["errors"] == {}
        assert home["moved"] == [False, True, True, False, False, True]
        assert home["back"]


def test_a_sharded_optimizer_of_torchs_own_is_skipped_whole(homes: dict[str, Any]) -> None:
    """ZeroRedundancyOptimizer steps an inner optimizer on each rank's share: none of them moves."""
    for home in homes["skip zero"]:
        assert home["moved"] == [False, True, True, False, False, True]
        assert home["back"]


@pytest.mark.parametrize("name", ["refused ddp", "refused fsdp2"])
def test_acting_inside_the_backward_is_refused_with_the_alternative(name: str, homes: dict[str, Any]) -> None:
    """The reason and what to write instead, on both ranks alike."""
    for home in homes[name]:
        bounds, drops = home["said"]
        assert "2 ranks" in bounds
        assert "at: step" in bounds
        assert "local: true" in bounds
        assert "skip_step" in drops


def test_insisting_bounds_what_each_rank_has_and_keeps_the_weights_alike(homes: dict[str, Any]) -> None:
    """The mean of bounded gradients is bounded, and the same on both ranks."""
    first, second = homes["insisted ddp"]
    assert first["errors"] == second["errors"] == {}
    assert first["hash"] == second["hash"]
    assert max(first["largest"], second["largest"]) <= 1e-3 * (1 + 1e-4)
