"""The cause among ranks: one finding on all of them, of the rank at fault, and nobody trains otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from gradwatch.localise.replay.cause_among_ranks import chosen
from gradwatch.records.finding import Finding
from tests.ranks import causes

JOB = "tests.ranks.causes"
REPLAYED = (
    "ddp",
    "fsdp1",
    "fsdp1 blocks, mixed",
    "fsdp2",
    "fsdp2 block and root",
    "fsdp2 mixed",
    "fsdp2 hybrid",
)
UNKNOWN = {
    "ddp with a replay that fails": "MemoryError",
    "fsdp2 with a replay that fails": "MemoryError",
    "fsdp2 without room": "no replay: on rank 1: its parameters, gathered, take",
    "fsdp1 flattened": "FSDP1 has flattened its parameters (`use_orig_params=True` leaves them)",
    "tensor parallel, counting": "run again on whole parameters, its outputs are others",
    "fsdp1 with a replay that fails": "MemoryError",
}


@pytest.mark.parametrize("name", REPLAYED)
def test_all_ranks_tell_the_cause_of_the_rank_at_fault(homes: dict[str, list[Any]], name: str) -> None:
    """One finding, the same on both ranks: the operation and the line on rank 1, from one replayed step."""
    first, second = homes[name]
    assert first["found"] == second["found"]
    (found,) = first["found"]
    assert found[:3] == ["forward", "div", "unit"]
    assert found[3].endswith(f"causes.py:{causes.line()}")
    assert found[4:] == [causes.FAULTY, causes.AT]
    assert first["by"] == ["replay"]
    assert first["samples"] == [[2]]
    assert "on rank 1, not on rank 0" in first["notes"][0]


@pytest.mark.parametrize("name", REPLAYED)
def test_what_is_run_again_is_the_step_bit_by_bit(homes: dict[str, list[Any]], name: str) -> None:
    """The outputs of the replay hash to those of the step, on whole parameters gathered from shards too; it is told."""
    assert [home["exact"] for home in homes[name]] == [[True], [True]]
    assert [home["deterministic"] for home in homes[name]] == [[True], [True]]


@pytest.mark.parametrize("name", ["tensor parallel", "tensor parallel, sharded"])
def test_parts_of_layers_are_put_together(homes: dict[str, list[Any]], name: str) -> None:
    """The operation and the line on all ranks, which train on the same batch; whether it comes again is not known."""
    first, second = homes[name]
    assert first["found"] == second["found"]
    (found,) = first["found"]
    assert found[:3] == ["forward", "div", "unit"]
    assert found[3].endswith(f"causes.py:{causes.line()}")
    assert "whether the step comes again is not known" in first["notes"][0]


@pytest.mark.parametrize("name", ["ddp, in the loss", "fsdp1, in the loss", "fsdp2, in the loss"])
def test_loss_code_is_run_again_on_whole_parameters(homes: dict[str, list[Any]], name: str) -> None:
    """The operation and the line of the loop, of the rank at fault."""
    first, second = homes[name]
    assert first["found"] == second["found"], first["notes"]
    (found,) = first["found"]
    assert found[:3] == ["backward", "sqrt", ""], first["notes"]
    assert found[3].endswith(f"causes.py:{causes.line(causes.train, '# in the loss')}")
    assert found[4:] == [causes.FAULTY, causes.AT]


def test_no_rank_waits_for_the_cause_of_a_loss_that_others_do_not_see(homes: dict[str, list[Any]]) -> None:
    """Under DDP each rank has a loss of its own: the one at fault searches alone, and says so of itself."""
    first, second = homes["own loss"]
    assert first["found"] == []
    assert [each[:3] for each in second["found"]] == [["loss-non-finite", causes.FAULTY, causes.AT]]
    assert first["met"] == second["met"] == []
    assert first["errors"] == second["errors"] == {}


def test_where_ranks_share_their_losses_all_tell_the_cause(homes: dict[str, list[Any]]) -> None:
    """A rule on the loss that acts is judged by the losses of all: they meet, and name the rank at fault."""
    first, second = homes["own loss, whose rule searches"]
    assert first["found"] == second["found"]
    assert [each[:3] for each in first["found"]] == [["loss-non-finite", causes.FAULTY, causes.AT]]
    assert first["met"]
    assert first["errors"] == second["errors"] == {}


@pytest.mark.parametrize("name", sorted(causes.TOLD))
def test_training_does_not_notice(homes: dict[str, list[Any]], name: str) -> None:
    """Weights and generators are, after every step, those of a training that leaves the broken step out by hand."""
    for home in homes[name]:
        assert home["same"]
        assert home["errors"] == {}


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_what_one_rank_cannot_do_none_pretends_to_have_done(homes: dict[str, list[Any]], name: str) -> None:
    """A replay that raises, that has no room, or that would talk leaves a reason on both ranks."""
    first, second = homes[name]
    assert [found[0] for found in first["found"]] == [found[0] for found in second["found"]]
    assert first["found"][0][0] == "unknown"
    for home in (first, second):
        assert UNKNOWN[name] in home["notes"][0]


@pytest.mark.parametrize("name", sorted(causes.ROWS))
def test_all_ranks_tell_the_row_that_carries_the_gradient(homes: dict[str, list[Any]], name: str) -> None:
    """The row, rank and step of a gradient that is finite; no row where one rank cannot gather whole gradients."""
    first, second = homes[name]
    alike = "one rank only" not in name
    assert first["found"] == second["found"]
    ((rank, step, rows),) = first["found"]
    assert (step, rows) == (causes.AT, [1] if alike else [])
    assert rank == causes.FAULTY or not alike
    assert first["errors"] == second["errors"] == {}


def test_the_surest_finding_is_chosen() -> None:
    """A named operation before the loss side, that before nothing; the lowest rank's among equals."""
    unknown, loss = Finding("unknown", "replay", note="n"), Finding("loss", "replay")
    named = Finding("backward", "replay", op="sqrt")
    assert chosen([unknown, loss, named]).amended(note="") == named.amended(rank=2)
    between = Finding("after_backward", "norms")
    assert chosen([between, unknown, named]).amended(note="") == named.amended(rank=2)
    assert chosen([unknown, loss, named]).note == "on rank 2, not on ranks 0, 1"
    assert chosen([named, unknown, named]).note == "on ranks 0, 2, not on rank 1"
    assert chosen([unknown, unknown]) == unknown
    assert chosen([unknown, unknown.amended(note="m")]).note == "rank 0: n; rank 1: m"
