"""Several ranks: each keeps its own bundle under its own name, and acts as the others do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.bundles import SITUATIONS

JOB = "tests.ranks.bundles"


@pytest.mark.parametrize("name", SITUATIONS)
def test_each_rank_has_its_own(homes: dict[str, list[Any]], name: str) -> None:
    """Named by rank, in one folder; weights stay equal, and nothing of ours failed."""
    for rank, home in enumerate(homes[name]):
        assert home["names"] == ["nan-0-4-rank0", "nan-0-4-rank1"]
        assert home["rank"] == [rank, 2]
        assert home["errors"] == {}
    assert homes[name][0]["weights"] == homes[name][1]["weights"]


def test_replicas_can_be_run_again_rank_by_rank(homes: dict[str, list[Any]]) -> None:
    """Only rank 1 had the NaN, and only its bundle leads to the batch."""
    first, second = homes["ddp"]
    assert (first["obstacle"], second["obstacle"]) == ("", "")
    assert (first["inputs"], second["inputs"]) == (0, 1)
    assert second["cause"] == "input"
    assert first["cause"] == "unknown"


def test_what_is_spread_over_ranks_is_kept_as_parts(homes: dict[str, list[Any]]) -> None:
    """The shards of the gradients that this rank had; weights are not among it, and the bundle says so."""
    for home in homes["fsdp2"]:
        assert home["gradients"]
        for name, shape in home["gradients"].items():
            assert shape == home["local"][name], name
        assert any("sharded over ranks" in one for one in home["left_out"])


def test_a_sharded_step_is_run_again_in_one_process(homes: dict[str, list[Any]]) -> None:
    """On a plain model with the weights of a checkpoint: the NaN of rank 1 is in its own batch."""
    first, second = homes["fsdp2"]
    assert (first["obstacle"], second["obstacle"]) == ("", "")
    assert (first["cause"], second["cause"]) == ("unknown", "input")
    assert "its parameters were sharded over ranks" in second["note"]
