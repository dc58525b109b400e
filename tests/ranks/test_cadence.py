"""Rules on ranks that only observe: who is named within ten steps, in its own step where a rule acts, and no waits."""

from __future__ import annotations

from typing import Any

import pytest

from gradwatch.distributed import process_group
from tests.ranks.cadence import FLIPPED, POISONED, SHIFTED

JOB = "tests.ranks.cadence"
PATIENCE = process_group.WAIT_SECONDS  # of a whole run: one in which a rank was left waiting takes longer
DUE = list(range(0, 95, 10))


@pytest.mark.parametrize("name", ["poisoned", "poisoned under fsdp2"])
def test_a_rank_with_one_nan_is_named_within_ten_steps(homes: dict[str, list[Any]], name: str) -> None:
    """Its step is skipped by both; what a small parameter has seen there names the rank at the next exchange."""
    first, second = homes[name]
    assert first == second
    assert [entry[:2] for entry in first["outlier"]] == [[POISONED + 7, ["rank 1"]]]
    assert first["skipped"] == [POISONED]
    assert first["errors"] == {}


def test_a_rank_with_one_nan_is_named_in_its_step_where_a_rule_acts(homes: dict[str, list[Any]]) -> None:
    """A rule on ranks with a `do` has what it needs at each step."""
    first, second = homes["poisoned, acting"]
    assert first == second
    assert [entry[:2] for entry in first["outlier"]] == [[POISONED, ["rank 1"]]]
    assert first["skipped"] == [POISONED]


@pytest.mark.parametrize(
    ("name", "step"),
    [("shifted", SHIFTED + 7), ("shifted under fsdp2", SHIFTED + 7), ("shifted, acting", SHIFTED)],
)
def test_a_rank_out_of_line_is_named(homes: dict[str, list[Any]], name: str, step: int) -> None:
    """Within ten steps; at once where a rule acts."""
    first, second = homes[name]
    assert first == second
    assert first["outlier"][0][:2] == [step, ["rank 1"]]
    assert first["errors"] == {}


@pytest.mark.parametrize(
    "name", ["diverged", "diverged beside a rule at each step", "diverged beside a rule at every third step"]
)
def test_replicas_that_diverge_once_are_named_within_ten_steps(
    homes: dict[str, list[Any]], name: str
) -> None:
    """A reduction that differed at one step is seen at the next step of the rule, however many exchanges before it."""
    for home in homes[name]:
        assert [[step, sorted(sites)] for step, sites, *_ in home["mismatch"]] == [
            [FLIPPED + 3, ["rank 0", "rank 1"]]
        ]
        assert home["errors"] == {}


def test_replicas_that_diverge_are_stopped_in_their_step(homes: dict[str, list[Any]]) -> None:
    """A rule that acts on it does so before the step is taken, on both ranks."""
    for home in homes["diverged, acting"]:
        assert home["stopped"] == [FLIPPED, "TrainingStopped"]
        assert [entry[0] for entry in home["mismatch"]] == [FLIPPED]


def test_ranks_read_and_exchange_at_every_tenth_step_only(homes: dict[str, list[Any]]) -> None:
    """No step waits for it once the loop is known: what was begun at one boundary is awaited at the next."""
    for home in homes["work done"]:
        assert home["errors"] == {}
        assert home["read"] == home["started"] == home["ranked"] == DUE
        assert all(end - start in (0, 1) for start, end in zip(home["started"], home["ended"], strict=True))
        assert home["ended"][-1] == DUE[-1] + 1
        assert home["steps"] == list(range(95))
        assert home["waiting"] > 1  # judged together


def test_a_fault_on_one_rank_between_two_exchanges_is_told(homes: dict[str, list[Any]]) -> None:
    """Both ranks report it, nobody waits, norms of such steps are not compared, and both count on alike."""
    for home in homes["faults"]:
        assert home["seconds"] < PATIENCE
        assert not home["alone"]
        assert home["mismatch"] == []
        assert home["ranked"] == [0, 10, 20, 40, 50, 60]  # at step 30 rank 1 was blind
        assert home["compared"] == [0, 10, 40, 50, 60]
        assert any("rank 1 (2) did not judge some steps" in line for line in home["said"])
    assert homes["faults"][0]["hash"] == homes["faults"][1]["hash"]


def test_other_numbers_of_backwards_part_nobody(homes: dict[str, list[Any]]) -> None:
    """Exchanges are counted by step boundaries, whatever each rank does between them."""
    for home in homes["accumulating"]:
        assert home["seconds"] < PATIENCE
        assert home["ranked"] == [0, 10, 20, 30, 40]
        assert (home["mismatch"], home["errors"]) == ([], {})
    assert homes["accumulating"][0]["hash"] == homes["accumulating"][1]["hash"]


def test_uneven_epochs_make_nobody_wait(homes: dict[str, list[Any]]) -> None:
    """Steps that one rank takes alone count for no exchange, and are compared with nothing."""
    for home in homes["joined"]:
        assert home["seconds"] < PATIENCE
        assert home["ranked"][:2] == [0, 10]
        assert (home["mismatch"], home["errors"]) == ([], {})
    assert homes["joined"][0]["hash"] == homes["joined"][1]["hash"]


def test_a_rank_that_leaves_is_missed_at_the_next_exchange(homes: dict[str, list[Any]]) -> None:
    """The other one goes on alone, and says so."""
    first, second = homes["leaves"]
    assert first["errors"] == {"ranks": 1}
    assert second["errors"] == {}
    assert first["seconds"] < PATIENCE
    assert first["hash"] == second["hash"]


def test_what_has_begun_is_ended_before_a_watch_closes(homes: dict[str, list[Any]]) -> None:
    """The last step has its columns although it was never followed by another."""
    for home in homes["ends with an exchange"]:
        assert (home["last"], home["ranked"]) == (60, 60)
        assert home["seconds"] < PATIENCE


def test_a_forked_child_has_no_part_in_what_has_begun(homes: dict[str, list[Any]]) -> None:
    """Neither its steps nor its closing wait for threads that only its parent has; the parent's exchange goes on."""
    for home in homes["forked"]:
        assert home == {"child": 0, "ranked": [70, 80], "errors": {}}


@pytest.mark.parametrize("name", ["unchanged ddp", "unchanged fsdp2"])
def test_watching_changes_no_bit(homes: dict[str, list[Any]], name: str) -> None:
    """Hooks that come and go leave the weights as they would be."""
    for home in homes[name]:
        assert home["hashes"][0] == home["hashes"][1]
