"""norm, norm_applied and total_norm of parameters cut over device meshes, against float64 in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.launch import launch
from tests.ranks.meshes import FOUR, TWO
from tests.ranks.situations import CLIP, STEPS

RELATIVE = 1e-5
NAMES = [*TWO, *FOUR]


@pytest.fixture(scope="module")
def homes() -> dict[str, list[Any]]:
    """Every situation from every rank: one launch of two ranks, one of four."""
    return {**launch("tests.ranks.meshes"), **launch("tests.ranks.meshes", world=4)}


def total(norms: dict[str, float]) -> float:
    return float(sum(norm * norm for norm in norms.values()) ** 0.5)


@pytest.mark.parametrize("name", NAMES)
def test_every_norm_is_that_of_the_whole_gradient(homes: dict[str, list[Any]], name: str) -> None:
    """On every rank, at every step, before clipping and after, whatever part of it this rank holds."""
    ranks = homes[name]
    assert len(ranks) == (4 if name in FOUR else 2)
    for home in ranks:
        assert home["errors"] == {}
        assert [found["step"] for found in home["found"]] == list(range(STEPS))
        for found, told in zip(home["found"], home["told"], strict=True):
            assert found["total"] == pytest.approx(total(told["expected"]), rel=RELATIVE)
            if told["factor"] < 1:
                assert found["total_applied"] == pytest.approx(CLIP, rel=RELATIVE)
            if "flat" in name:  # one flat parameter
                continue
            applied = {site: norm * told["factor"] for site, norm in told["expected"].items()}
            assert found["norm"] == pytest.approx(told["expected"], rel=RELATIVE)
            assert found["applied"] == pytest.approx(applied, rel=RELATIVE)


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_report_the_same_bits(homes: dict[str, list[Any]], name: str) -> None:
    """Every rank judges the same numbers, so every rank reaches the same verdict."""
    first, *others = (home["found"] for home in homes[name])
    assert all(other == first for other in others)


@pytest.mark.parametrize("name", [name for name in TWO if "offloaded" in name])
def test_no_hook_stands_on_an_offloaded_parameter(homes: dict[str, list[Any]], name: str) -> None:
    """FSDP2 would copy its gradient to the host without overlap; the norms before clipping are right without."""
    for home in homes[name]:
        assert home["hooks"] == 0


def test_gradients_that_nobody_has_summed_up_are_provisional(homes: dict[str, list[Any]]) -> None:
    """SequenceParallel leaves the norm's gradients as partial sums: said once, never learned; the others are right."""
    for home in homes["sequence parallel"]:
        assert home["errors"] == {"ranks": 1}
        assert home["provisional"] == [True] * STEPS
        for found, told in zip(home["found"], home["told"], strict=True):
            right = {name: norm for name, norm in told["expected"].items() if not name.startswith("norm.")}
            assert {name: found["norm"][name] for name in right} == pytest.approx(right, rel=RELATIVE)


@pytest.mark.parametrize("name", ["local original", "local flat"])
def test_a_slice_of_a_flat_parameter_has_no_local_norm(homes: dict[str, list[Any]], name: str) -> None:
    """FSDP1 shows nobody its local gradients by parameter: `norm_local` is absent, not wrong."""
    for home in homes[name]:
        assert home["present"] == [False] * 4
        assert home["errors"] == {}
