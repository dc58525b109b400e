"""Two ranks decide alike: the same clips, skips and stops from the same numbers, and the same weights after."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.actions import SITUATIONS, TRIALS
from tests.ranks.launch import launch


@pytest.fixture(scope="module")
def homes() -> dict[str, list[Any]]:
    """Every situation, from both ranks, out of one launch."""
    found = launch("tests.ranks.actions")
    assert set(found) == set(SITUATIONS)
    for name, ranks in found.items():
        for rank, home in enumerate(ranks):
            assert "raised" not in home, f"{name}, rank {rank}\n{home['raised']}"
    return found


@pytest.mark.parametrize("name", ["trials under ddp", "trials under fsdp2"])
def test_a_hundred_faults_on_one_rank_are_acted_on_alike(homes: dict[str, list[Any]], name: str) -> None:
    """Weights and optimizer state bit-identical after every one of them; the same orders with the same numbers."""
    first, second = homes[name]
    assert len(first["hashes"]) == TRIALS
    assert first["hashes"] == second["hashes"]
    for key in ("coef", "told", "skipped", "health", "did"):
        assert first[key] == second[key], key
    assert first["errors"] == second["errors"] == {}
    assert set(first["did"]) >= {
        "nan skip_step",
        "spike clip",
        "total clip",
        "slow rescale",
        "spike skip_step",
    }
    assert len({tuple(pair) for pair in first["hashes"]}) > TRIALS / 2  # training went on in between


def test_a_stop_is_a_stop_on_all_ranks(homes: dict[str, list[Any]]) -> None:
    """The same step, the same message, weights as they were, the Record written first."""
    first, second = homes["stopping"]
    assert first == second
    assert (first["step"], first["moved"], first["recorded"], first["errors"]) == (6, False, True, {})
    assert "rule r says stop" in first["said"]
