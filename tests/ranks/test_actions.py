"""Two ranks decide alike: the same clips, skips and stops from the same numbers, and the same weights after."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.ranks.launch import ALL, FEW, launch


@cache
def homes(trials: int) -> dict[str, list[Any]]:
    """Every situation, from both ranks, out of one launch."""
    return launch("tests.ranks.actions", trials=trials)


@pytest.mark.parametrize("trials", [FEW, pytest.param(ALL, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ["trials under ddp", "trials under fsdp2"])
def test_faults_on_one_rank_are_acted_on_alike(name: str, trials: int) -> None:
    """Weights and optimizer state bit-identical after every one of them; the same orders with the same numbers."""
    first, second = homes(trials)[name]
    assert len(first["hashes"]) == trials
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
    assert len({tuple(pair) for pair in first["hashes"]}) > trials / 2  # training went on in between


def test_a_stop_is_a_stop_on_all_ranks() -> None:
    """The same step, the same message, weights as they were, the Record written first."""
    first, second = homes(FEW)["stopping"]
    assert first == second
    assert (first["step"], first["moved"], first["recorded"], first["errors"]) == (6, False, True, {})
    assert "rule r says stop" in first["said"]
