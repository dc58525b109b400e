"""Clip policies on two ranks: weights stay bit-identical, and sharded training comes to the same as replicated."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.policies import AFTER_THE_EXCHANGE, INJURED, SITUATIONS, WRAPS

JOB = "tests.ranks.policies"


BLIND = [name for name in SITUATIONS if name.startswith("blind")]
REFUSED = ["rows fsdp2", "rows fsdp1", "sharded later"]
TRAINED = [name for name in SITUATIONS if name not in (*REFUSED, *BLIND)]


@pytest.mark.parametrize("name", TRAINED)
def test_ranks_multiply_alike(homes: dict[str, list[Any]], name: str) -> None:
    """The same weights, the same factors, the same states on both ranks at every step, whatever fails on one."""
    first, second = homes[name]
    assert first["hashes"] == second["hashes"]
    assert first["states"] == second["states"]
    assert first["skipped"] == list(INJURED)
    shown = first["coefs"].keys() & second["coefs"].keys()
    assert len(shown) >= 14
    if name != "fault measured":  # it is what tells rank 1 what was left
        same = [step for step in shown if not name.startswith("fault") or step not in ("8", "9")]
        assert {step: first["coefs"][step] for step in same} == {step: second["coefs"][step] for step in same}
    assert any(min(coefs) < 1 for coefs in first["coefs"].values())
    assert first["errors"] == {}
    assert bool(second["errors"]) == name.startswith("fault")


@pytest.mark.parametrize("where", AFTER_THE_EXCHANGE)
def test_a_rank_that_fails_after_the_exchange_decides_and_learns_as_the_other(
    homes: dict[str, list[Any]], where: str
) -> None:
    """A rule with a memory acts too: its baseline of the total norm is the same on both ranks."""
    for how in WRAPS:
        first, second = homes[f"fault {where} {how}"]
        assert first["acted"] == second["acted"]
        assert 8 in first["acted"]  # where rank 1 failed
        assert first["baselines"] == second["baselines"] != {}
        assert list(first["coefs"]) == list(second["coefs"])
        assert second["errors"]["boundary"] == 2


@pytest.mark.parametrize("name", BLIND)
def test_of_a_step_that_one_rank_cannot_tell_of_nobody_learns(homes: dict[str, list[Any]], name: str) -> None:
    """Nobody acts on it either: the same weights, policies and baselines on both ranks, then and later."""
    first, second = homes[name]
    assert first["hashes"] == second["hashes"]
    assert first["states"] == second["states"]
    assert first["baselines"] == second["baselines"] != {}
    assert first["skipped"] == second["skipped"] == list(INJURED)
    assert first["errors"] == {"ranks": 2}
    assert first["acted"] == second["acted"] != []


@pytest.mark.parametrize("sharded", ["fsdp2", "fsdp1"])
def test_sharded_factors_are_those_of_whole_gradients(homes: dict[str, list[Any]], sharded: str) -> None:
    """Made of reduced norms: as under DDP, where every rank holds every gradient."""
    whole, part = homes["ddp"][0]["coefs"], homes[sharded][0]["coefs"]
    for step, coefs in whole.items():
        assert part[step] == pytest.approx(coefs, rel=2e-3), step


@pytest.mark.parametrize("name", ["rows fsdp2", "rows fsdp1"])
def test_rows_of_a_shard_are_refused_at_attach(homes: dict[str, list[Any]], name: str) -> None:
    """On both ranks, with the parameter, the reason and what to use."""
    for home in homes[name]:
        assert (
            "clip method 'agc' looks at whole rows, and 'a.weight' is sharded over the ranks" in home["said"]
        )
        assert "use a method that multiplies" in home["said"]


def test_rows_sharded_after_the_attach_are_left_alone(homes: dict[str, list[Any]]) -> None:
    """Said as a failed action; training goes on, the same on both ranks."""
    first, second = homes["sharded later"]
    assert first["hashes"] == second["hashes"]
    assert first["errors"].keys() == second["errors"].keys() == {"action"}
