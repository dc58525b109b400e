"""norm, norm_applied, total_norm and norm_local in every parallel mode, against float64 in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.launch import WORLD
from tests.ranks.situations import CLIP, NORMS, STEPS
from tests.support.rounding import RELATIVE, near_norms

JOB = "tests.ranks.situations"
SHARDED = [name for name in NORMS if name.startswith(("fsdp", "hsdp"))]


def came_home(homes: dict[str, list[Any]], name: str) -> list[Any]:
    """What a situation returned on each rank."""
    for home in homes[name]:
        assert home["errors"] == {}
        assert [found["step"] for found in home["found"]] == list(range(STEPS))
    return homes[name]


def total(norms: dict[str, float]) -> float:
    return float(sum(norm * norm for norm in norms.values()) ** 0.5)


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_is_that_of_the_reduced_gradient_before_clipping(
    homes: dict[str, list[Any]], name: str
) -> None:
    """Per parameter and in total, on both ranks, at every step, within 1e-5 of an independent computation."""
    for home in came_home(homes, name):
        for found, told in zip(home["found"], home["told"], strict=True):
            assert found["total"] == pytest.approx(total(told["expected"]), rel=RELATIVE)
            if name != "fsdp1 flat":  # one flat parameter
                assert found["norm"] == near_norms(told["expected"])


@pytest.mark.parametrize("name", NORMS)
def test_what_the_optimizer_gets_is_seen_too(homes: dict[str, list[Any]], name: str) -> None:
    """norm_applied is the norm after the user's clipping, where there is any."""
    for home in came_home(homes, name):
        for found, told in zip(home["found"], home["told"], strict=True):
            applied = {site: norm * told["factor"] for site, norm in told["expected"].items()}
            if name != "fsdp1 flat":
                assert found["applied"] == near_norms(applied)
            if told["factor"] < 1:
                assert found["total_applied"] == pytest.approx(CLIP, rel=RELATIVE)


@pytest.mark.parametrize("name", NORMS)
def test_both_ranks_report_the_same_bits(homes: dict[str, list[Any]], name: str) -> None:
    """Every rank judges the same numbers, so every rank reaches the same verdict."""
    first, second = (home["found"] for home in came_home(homes, name))
    keys = ("norm", "applied", "total", "total_applied")
    assert [{key: one[key] for key in keys} for one in first] == [
        {key: one[key] for key in keys} for one in second
    ]


@pytest.mark.parametrize("name", SHARDED)
def test_a_shard_is_described_as_the_whole(homes: dict[str, list[Any]], name: str) -> None:
    """Sizes and dimensions are the parameter's, not those of the shard this rank happens to hold."""
    if name == "fsdp1 flat":
        assert came_home(homes, name)[1]["found"][0]["numels"] == {"_flat_param": 85}
        return
    for key in ("numels", "ndims"):
        assert came_home(homes, name)[1]["found"][0][key] == came_home(homes, "ddp")[1]["found"][0][key]


@pytest.mark.parametrize(
    "name", ["ddp", "ddp clipped", "ddp checkpoint", "fsdp2", "fsdp2 clipped", "fsdp1 flat"]
)
def test_every_rank_knows_the_local_norms_of_all(homes: dict[str, list[Any]], name: str) -> None:
    """norm_local is this rank's own gradient, before the reduction; both are known from the second step on."""
    for home in came_home(homes, name):
        for found, told in list(zip(home["rank_norm"], home["told"], strict=True))[1:]:
            assert found == pytest.approx(told["local"], rel=RELATIVE)
            assert len(found) == WORLD


@pytest.mark.parametrize("name", NORMS)
def test_the_number_of_micro_batches_is_learned(homes: dict[str, list[Any]], name: str) -> None:
    """One window per optimizer step, however many backwards it holds."""
    wanted = 3 if "no_sync" in name else 2 if "accumulated" in name else 4 if "pipeline" in name else 1
    for home in came_home(homes, name):
        # A split backward announces itself on some stages only.
        assert {found["micro"] for found in home["found"]} <= {wanted, 0 if "bubble" in name else wanted}


@pytest.mark.parametrize(
    ("name", "micros"), [("ddp no_sync", 3), ("fsdp2 accumulated", 2), ("fsdp2 held back", 3), ("hsdp2", 1)]
)
def test_every_backward_counts_as_one_that_reached_the_model(
    homes: dict[str, list[Any]], name: str, micros: int
) -> None:
    """Also those whose gradients DDP or FSDP2 keeps back until the last of the step."""
    for home in came_home(homes, name):
        assert home["reached"] == micros * len(home["found"])


def test_a_column_that_shards_cannot_make_is_told_as_that(homes: dict[str, list[Any]]) -> None:
    """The maximum of a part is not that of the parameter: its rule is without data, for that reason."""
    reason = "parameters are sharded over ranks, and max_abs of the whole is not made of its parts'"
    assert homes["columns of shards"] == [{"parts": reason}] * WORLD
