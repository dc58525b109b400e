"""One rank in trouble: both name it, neither hangs, and their weights stay the same."""

from __future__ import annotations

from typing import Any

import pytest

from gradwatch.distributed import process_group
from tests.ranks.faults import SITES, SITUATIONS, TRIALS_PER_WATCH
from tests.ranks.launch import ALL, FEW, launch

JOB = "tests.ranks.faults"
PATIENCE = process_group.WAIT_SECONDS  # of a whole run: one in which a rank was left waiting takes longer
FAULTS = [f"fault in {site}" for site in SITES]
AFTER_THE_EXCHANGE = {"hear", "assemble", "evaluate", "decide", "clipped"}
HARMLESS = {"read", "sample"}  # read again at the step; nothing samples in these rules


@pytest.mark.parametrize("trials", [FEW, pytest.param(ALL, marks=pytest.mark.soak)])
def test_both_ranks_name_the_poisoned_rank_its_parameter_and_the_step(
    homes: dict[str, list[Any]], trials: int
) -> None:
    """NaN or Inf on rank 1 alone: named alike on both ranks, skipped on both, the weights bit-identical."""
    name = "nan on one rank"
    ranks = (homes if trials == FEW else launch(JOB, name, trials=trials))[name]
    seen = 0
    for home in ranks:
        for watch in home:
            assert watch["errors"] == {}
            assert [(step, sites, cause) for step, sites, cause, _ in watch["outlier"]] == [
                (step, ["rank 1"], name) for step, name in watch["chosen"]
            ]
            assert [(step, sites) for step, sites, _, _ in watch["nonfinite"]] == [
                (step, [name]) for step, name in watch["chosen"]
            ]
            assert all("Rank 1 " in text for _, _, _, text in watch["outlier"])
            assert watch["skipped"] == [step for step, _ in watch["chosen"]]
            for step, _ in watch["chosen"]:
                assert watch["hashes"][step] == watch["hashes"][step - 1]
                assert watch["hashes"][step + 1] != watch["hashes"][step]
            seen += len(watch["chosen"])
    assert seen == 2 * trials
    assert len(ranks[0]) == trials // TRIALS_PER_WATCH
    assert [watch["hashes"] for watch in ranks[0]] == [watch["hashes"] for watch in ranks[1]]


@pytest.mark.parametrize("name", ["acting under ddp", "acting under fsdp2", "default pack under fsdp2"])
def test_ranks_act_alike(homes: dict[str, list[Any]], name: str) -> None:
    """Skip and clip armed, NaN on one rank: both skip those steps and clip the others, weights bit-identical."""
    first, second = homes[name]
    assert first["hashes"] == second["hashes"]
    for home in (first, second):
        assert home["errors"] == {}
        assert home["skipped"] == [3, 4, 9]
        assert home["hashes"][2] == home["hashes"][3] == home["hashes"][4] != home["hashes"][5]
        if name != "default pack under fsdp2":
            clipped = [norm for step, norm in enumerate(home["clipped"]) if step not in (3, 4, 9)]
            assert min(home["totals"]) > 0.05
            assert clipped == pytest.approx([0.05] * 9, rel=1e-4)
        assert [entry[:2] for entry in home["outlier"]][:1] == [[3, ["rank 1"]]]


def test_sharded_and_replicated_training_come_to_the_same_weights(homes: dict[str, list[Any]]) -> None:
    """A total norm made of shards clips as one made of whole gradients does."""
    replicated, sharded = homes["acting under ddp"][0], homes["acting under fsdp2"][0]
    assert replicated["totals"][:2] == pytest.approx(sharded["totals"][:2], rel=1e-5)


@pytest.mark.parametrize("name", [name for name in SITUATIONS if "fault in" in name])
def test_a_fault_of_ours_on_one_rank_parts_nobody(homes: dict[str, list[Any]], name: str) -> None:
    """Whatever fails inside gradwatch on rank 1, at a NaN or a healthy step: no wait, and equal weights."""
    first, second = homes[name]
    assert first["hash"] == second["hash"]
    assert max(first["seconds"], second["seconds"]) < PATIENCE
    assert not first["alone"]
    assert not second["alone"]
    site = name.rpartition(" ")[2]
    if site != "sample":
        own = {key: count for key, count in second["errors"].items() if key not in ("ranks", "action")}
        assert sum(own.values()) == 2
    if site in AFTER_THE_EXCHANGE | HARMLESS and "fsdp2" not in name:
        assert first["skipped"] == [7, 9]  # rank 1 had the numbers, so it skipped with the others
    elif "fsdp2" not in name:
        assert 7 not in first["skipped"]  # rank 1 was blind: nobody acts on such a step
        assert first["errors"]["ranks"] == 2


@pytest.mark.parametrize("how", ["missing", "other rules", "observing", "leaves", "late"])
def test_nobody_acts_alone(homes: dict[str, list[Any]], how: str) -> None:
    """Without the other rank a NaN is reported, and not acted on: the weights stay equal. Nobody hangs."""
    first, second = homes[f"rank 1: {how}"]
    assert first["hash"] == second["hash"]
    assert max(first["seconds"], second["seconds"]) < PATIENCE
    assert first["skipped"] == second["skipped"] == []
    assert [step for step, *_ in first["fired"]][:1] == [6]
    assert first["errors"]["ranks"] == 1
    assert not first["up"]["ranks"]


def test_a_rank_that_pauses_comes_back(homes: dict[str, list[Any]]) -> None:
    """It takes part blind while it pauses; afterwards it counts steps as the others and acts with them."""
    first, second = homes["paused"]
    assert first["hash"] == second["hash"]
    assert first["skipped"] == second["skipped"] == [27]
    assert first["last"] == second["last"] == 29


def test_one_different_bit_is_a_mismatch(homes: dict[str, list[Any]]) -> None:
    """A reduction that gives one rank another bit is seen at that very step, on both ranks."""
    for home in homes["corrupted"]:
        assert home["errors"] == {}
        assert [(step, sorted(sites)) for step, sites, _, _ in home["mismatch"]] == [
            (5, ["rank 0", "rank 1"])
        ]
        assert home["mismatch"][0][2] in {"a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "c.bias"}


def test_a_flipped_bit_is_an_outlier(homes: dict[str, list[Any]]) -> None:
    """A finite local gradient that is far too large names its rank and parameter, and nothing else fires."""
    for home in homes["flipped"]:
        assert home["errors"] == {}
        assert [entry[:3] for entry in home["outlier"]] == [[33, ["rank 1"], "b.weight"]]


def test_replicas_without_a_rule_on_ranks_do_not_talk(homes: dict[str, list[Any]]) -> None:
    """Plain DDP needs no collective: none is made, neither to observe nor to skip."""
    for home in homes["silent"]:
        assert home == {"observing": {}, "skipping": {}, "alone": False}


def test_one_collective_a_step(homes: dict[str, list[Any]]) -> None:
    """Whatever the rules read of the ranks travels in one vector."""
    for home in homes["one collective"]:
        assert home == {"calls": 6, "records": 6}


def test_an_action_on_the_loss_is_decided_on_its_mean(homes: dict[str, list[Any]]) -> None:
    """One rank observes NaN: both skip. The loss of a step is the mean over ranks."""
    first, second = homes["on the loss"]
    assert first == second
    assert first["skipped"] == [3]
    assert first["losses"] == [1.5] * 5
    assert first["errors"] == {}


def test_an_action_on_an_observed_value_is_decided_on_its_mean(homes: dict[str, list[Any]]) -> None:
    """The mean is over the ranks that observed one: both judge the same number, also where one rank has none."""
    first, second = homes["on an observed value"]
    assert first == second
    assert first["skipped"] == [1, 3]
    assert first["values"] == [0.8, 0.4, 0.8, 0.1, None, 0.8]
    assert first["errors"] == {}


@pytest.mark.parametrize("how", ["fsdp2", "fsdp1"])
def test_moments_of_shards_are_those_of_the_whole(homes: dict[str, list[Any]], how: str) -> None:
    """Norm, root mean square and share of an optimizer's sharded state, alike on both ranks and equal to float64."""
    first, second = homes[f"moments under {how}"]
    assert first["found"] == second["found"]
    assert first["errors"] == {}
    assert not any(first["found"][0].values())
    for found, by_hand in zip(first["found"], first["by hand"], strict=True):
        for column, values in by_hand.items():
            assert found[column] == pytest.approx(values, rel=1e-5, abs=1e-12), column


def test_the_noise_scale_is_that_of_the_ranks_own_gradients(homes: dict[str, list[Any]]) -> None:
    """Alike on both ranks and equal to float64 by hand; no value where a step has several backwards."""
    first, second = homes["noise scale"]
    assert first["found"] == second["found"]
    values = [
        (one, other)
        for one, other in zip(first["found"], first["expected"], strict=True)
        if other is not None
    ]
    assert [one for one, _ in values] == pytest.approx([other for _, other in values], rel=1e-4)
    assert len(values) == sum(one is not None for one in first["found"]) >= 2
    assert first["errors"] == {}
    assert first["hash"] == second["hash"]


def test_an_action_on_a_local_column_is_refused(homes: dict[str, list[Any]]) -> None:
    """Before training starts, with the rule, the column and what to do instead."""
    for home in homes["on the local norm"]:
        for word in ("'far'", "norm_local", "mode: shadow"):
            assert word in home["refused"]


def test_a_launcher_goes_on_without_an_action_on_a_local_column(homes: dict[str, list[Any]]) -> None:
    """The rule observes, its action is off on both ranks, and both skip the NaN of one by the other rule."""
    first, second = homes["on the local norm"]
    assert first["hash"] == second["hash"]
    assert first["skipped"] == second["skipped"] == [3]
    assert first["off"] == second["off"]
    assert first["off"]["far"].startswith("not armed: acts on norm_local")
    assert first["measured"]
    assert first["errors"] == second["errors"] == {}


def test_every_optimizer_has_its_own_place_among_the_ranks(homes: dict[str, list[Any]]) -> None:
    """Of two optimizers only the one with the NaN skips, on both ranks."""
    first, second = homes["two optimizers"]
    assert first == second
    assert first["skipped"] == [[1, 4]]
    assert first["errors"] == {}
