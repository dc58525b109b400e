"""Columns and histograms of activations on two ranks: of each rank's own forwards, where parameters are sharded too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.activations import SITUATIONS

JOB = "tests.ranks.activations"


@pytest.mark.parametrize("name", SITUATIONS)
def test_each_rank_has_those_of_its_own_forwards(homes: dict[str, list[Any]], name: str) -> None:
    """Right values for each module; histograms of gradients only where a rank holds whole ones."""
    for home in homes[name]:
        assert home["errors"] == {}
        assert set(home["module"]) >= {"0", "1", "2"}
        assert home["param"] == (["0.bias", "0.weight", "2.bias", "2.weight"] if name == "ddp" else [])
