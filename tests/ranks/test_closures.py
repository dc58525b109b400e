"""Sharded parameters and closures evaluated twice: judged by the first gradient, nobody stalls or acts alone."""

from __future__ import annotations

from typing import Any

import pytest

from gradwatch.distributed import process_group
from tests.ranks.closures import INJURED, REPLICAS, SHARDED, STEPS

JOB = "tests.ranks.closures"
PATIENCE = process_group.WAIT_SECONDS  # of a whole run: one in which a rank was left waiting takes longer


@pytest.mark.parametrize("name", SHARDED)
def test_both_ranks_judge_the_first_gradient_and_step_alike(homes: dict[str, list[Any]], name: str) -> None:
    """One Snapshot a step, of the first evaluation, within 1e-5 of float64; equal weights; no wait."""
    for home in homes[name]:
        assert home["errors"] == {}
        assert not home["alone"]
        assert home["steps"] == list(range(STEPS))
        assert home["seconds"] < PATIENCE
        known = STEPS if name != "second" else INJURED + 1
        healthy = [step for step in range(known) if name != "first" or step != INJURED]
        for step in healthy:
            assert home["totals"][step] == pytest.approx(home["wants"][step], rel=1e-5)
    first, second = homes[name]
    for key in ("hashes", "skipped", "steps"):
        assert first[key] == second[key]


def test_a_nan_in_one_rank_s_shard_is_skipped_by_both(homes: dict[str, list[Any]]) -> None:
    """In the first evaluation: rank 1's own shard is finite, and it skips all the same."""
    first, second = homes["first"]
    assert [first["finite shard"], second["finite shard"]] == [[False], [True]]
    for home in (first, second):
        assert home["skipped"] == [INJURED]
        assert home["hashes"][INJURED] == home["hashes"][INJURED - 1] != home["hashes"][INJURED + 1]


def test_what_one_rank_sees_of_a_later_evaluation_moves_nobody(homes: dict[str, list[Any]]) -> None:
    """In the second evaluation: rank 0 sees NaN and rank 1 none; neither acts on that step, both on the next."""
    first, second = homes["second"]
    assert [first["finite shard"], second["finite shard"]] == [[False], [True]]
    for home in (first, second):
        assert home["skipped"] == list(range(INJURED + 1, STEPS))
        assert all(home["untouched"][: INJURED + 1])


def test_a_clip_is_that_of_the_first_gradient(homes: dict[str, list[Any]]) -> None:
    """Both ranks clip it to the bound by the total over all shards; the second gradient is nobody's to clip."""
    for home in homes["clipped"]:
        assert min(home["totals"]) > 0.05
        assert home["applied"] == pytest.approx([0.05] * STEPS, rel=1e-4)
        assert all(home["untouched"])


@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_clip_every_evaluation_alike(homes: dict[str, list[Any]], name: str) -> None:
    """DDP averages each gradient for all: both evaluations are clipped on both ranks, a NaN in either is skipped."""
    for home in homes[name]:
        assert home["errors"] == {}
        assert not home["alone"]
        assert home["skipped"] == int(name[-1] != "0")
        for pair in home["norms"]:
            assert pair == pytest.approx((0.05, 0.05), rel=1e-4)
    first, second = homes[name]
    assert first["hashes"] == second["hashes"]
    if name[-1] != "0":
        assert first["hashes"][INJURED] == first["hashes"][INJURED - 1] != first["hashes"][INJURED + 1]
