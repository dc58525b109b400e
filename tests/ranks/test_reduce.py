"""The vector of facts: what ranks put in is what all of them read, whoever holds which part of what."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.capture.parameter_shards import ShardPlacement
from gradwatch.capture.window.window_norms import WindowNorms
from gradwatch.distributed import all_reduce_layout, all_reduce_packing, replica_divergence, sharded_norms
from gradwatch.distributed.all_reduce_layout import Layout, ReducedFacts
from gradwatch.distributed.all_reduce_packing import Usual
from gradwatch.reading.batched_norms import FLOAT32_MAX, Detail
from gradwatch.reading.cpu_norms import CpuNorms
from gradwatch.records.snapshot import Column
from tests.engine.cases import make_sites
from tests.support.examples import examples

K = 4


def layout(rank: int, world: int, pooled: bool, counts: list[float] | None = None) -> Layout:
    """K parameters on `world` ranks."""
    return Layout(
        sites=make_sites(K),
        own=np.arange(K),
        counts=np.array(counts or [1.0] * K),
        share=np.full(K, 1 / world),
        rank=rank,
        world=world,
        pooled=pooled,
        costly=sharded_norms.REDUCED_COLUMNS if pooled else (),
    )


def window(norms: np.ndarray, step: int = 3, details: dict[int, Detail] | None = None) -> WindowNorms:
    """A window with these norms, not clipped."""
    calls = np.where(norms != 0, 2, 0).astype(np.int32)
    reading = CpuNorms.of(norms, details or {})
    return WindowNorms(make_sites(K), step, reading, reading, calls, 2, False)


def spoken(layouts: list[Layout], windows: list[WindowNorms], **more: object) -> ReducedFacts:
    """What everybody hears."""
    vectors = [
        all_reduce_packing.encode(one, w, w.wait(), {}, {}, None, Usual(np.full(K, np.nan)))
        for one, w in zip(layouts, windows, strict=True)
    ]
    return ReducedFacts(layouts[0], np.sum(vectors, axis=0))


@settings(max_examples=examples(25))
@given(st.integers(1, 9), st.integers(0, 10**6))
def test_shards_add_up_to_the_whole(world: int, seed: int) -> None:
    """Norms, calls and total of a parameter cut into pieces are those of the uncut one."""
    rng = np.random.default_rng(seed)
    pieces = [rng.normal(size=(K, 5)) * (rng.random((K, 1)) < 0.8) for _ in range(world)]
    layouts = [layout(rank, world, pooled=True) for rank in range(world)]
    windows = [window(np.linalg.norm(piece, axis=1)) for piece in pieces]
    told = spoken(layouts, windows)
    assert told.complete
    found = sharded_norms.pooled_window(told, windows[0])
    whole = np.linalg.norm(np.concatenate(pieces, axis=1), axis=1)
    np.testing.assert_allclose(found.raw.norms(), whole, rtol=1e-12)
    assert found.after is found.raw
    assert found.calls.tolist() == [2 if norm else 0 for norm in whole]


def test_a_replica_is_not_counted_twice() -> None:
    """Parts that stand for another rank's are left out."""
    layouts = [layout(0, 2, True, [1, 1, 1, 1]), layout(1, 2, True, [0, 1, 0, 1])]
    norms = np.array([3.0, 3.0, 4.0, 4.0])
    found = sharded_norms.pooled_window(spoken(layouts, [window(norms), window(norms)]), window(norms))
    np.testing.assert_allclose(found.raw.norms(), [3, 3 * math.sqrt(2), 4, 4 * math.sqrt(2)])


def test_counts_of_nan_and_inf_are_those_of_all_shards() -> None:
    """Which elements are broken is told apart although a sum of squares with both is NaN; an overflow is neither."""
    first = np.array([math.nan, 1.0, math.inf, FLOAT32_MAX])
    second = np.array([1.0, math.inf, math.inf, FLOAT32_MAX])
    details = [{0: Detail(math.nan, 3, 1), 2: Detail(math.inf, 0, 2)}, {1: Detail(math.inf, 0, 5)}]
    layouts = [layout(rank, 2, True) for rank in range(2)]
    windows = [window(norms, details=known) for norms, known in zip((first, second), details, strict=True)]
    found = sharded_norms.pooled_window(spoken(layouts, windows), windows[0]).details
    assert [(found[k].nan, found[k].inf) for k in range(4)] == [(3, 1), (0, 5), (0, 3), (0, 0)]
    assert found[3].overflow


def test_columns_of_whole_tensors_add_up() -> None:
    """Shares by elements, norms by squares, root mean squares by both, and ‖Δw‖/‖w‖ by both of its norms."""
    layouts = [layout(rank, 2, True) for rank in range(2)]
    here = np.ones(K, bool)
    vectors = []
    for one, zero, change, size in zip(layouts, (0.2, 0.6), (0.3, 0.4), (3.0, 4.0), strict=True):
        columns = {
            "zero_fraction": Column(np.full(K, zero), here),
            "weight_norm": Column(np.full(K, size), here),
            "moment_norm": Column(np.full(K, size), here),
            "second_moment_rms": Column(np.full(K, size), here),
            "second_moment_near_zero": Column(np.full(K, zero), here),
            "update_ratio": Column(np.full(K, change / size), here),
            all_reduce_layout.UPDATED: Column(np.full(K, size), here),
        }
        w = window(np.ones(K))
        vectors.append(
            all_reduce_packing.encode(one, w, w.wait(), {}, columns, None, Usual(np.full(K, np.nan)))
        )
    found = sharded_norms.pooled_columns(ReducedFacts(layouts[0], np.sum(vectors, axis=0)))
    np.testing.assert_allclose(found["zero_fraction"].values, 0.4, rtol=1e-6)
    np.testing.assert_allclose(found["weight_norm"].values, 5.0, rtol=1e-6)
    np.testing.assert_allclose(found["update_ratio"].values, 0.5 / 5.0, rtol=1e-6)
    np.testing.assert_allclose(found["moment_norm"].values, 5.0, rtol=1e-6)
    np.testing.assert_allclose(found["second_moment_rms"].values, math.sqrt(12.5), rtol=1e-6)
    np.testing.assert_allclose(found["second_moment_near_zero"].values, 0.4, rtol=1e-6)


@settings(max_examples=examples(25))
@given(st.integers(2, 40), st.integers(0, 10**6))
def test_one_bit_on_one_rank_is_found(world: int, seed: int) -> None:
    """The rank and the parameter whose norm differs in its last bit; equal norms, NaN included, are equal."""
    rng = np.random.default_rng(seed)
    norms = np.exp(rng.normal(size=K))
    norms[0] = rng.choice([norms[0], math.nan])
    layouts = [layout(rank, world, pooled=False) for rank in range(world)]
    same = spoken(layouts, [window(norms)] * world)
    assert not replica_divergence.deviating(same).any()
    assert len(replica_divergence.differing_sites(same)) == 0
    odd, site = int(rng.integers(world)), int(rng.integers(1, K))
    other = norms.copy()
    other[site] = np.nextafter(other[site], 9.0)
    told = spoken(layouts, [window(other if rank == odd else norms) for rank in range(world)])
    assert replica_divergence.differing_sites(told).tolist() == [site]
    expected = [rank == odd for rank in range(world)] if world > 2 else [True, True]
    assert replica_divergence.deviating(told).tolist() == expected


def test_a_blind_rank_makes_the_facts_incomplete() -> None:
    """All hear that somebody had nothing to tell, and who; steps that do not match are incomplete too."""
    layouts = [layout(rank, 3, True) for rank in range(3)]
    w = window(np.ones(K))
    vector = all_reduce_packing.encode(layouts[0], w, w.wait(), {}, {}, None, Usual(np.full(K, np.nan)))
    late = all_reduce_packing.encode(
        layouts[2], window(np.ones(K), step=4), w.wait(), {}, {}, None, Usual(np.zeros(K))
    )
    told = ReducedFacts(layouts[0], vector + all_reduce_layout.blind(layouts[1]) + late)
    assert not told.complete
    assert told.blind == [1]
    third = all_reduce_packing.encode(layouts[1], w, w.wait(), {}, {}, None, Usual(np.zeros(K)))
    assert not ReducedFacts(layouts[0], vector + late + third).complete


def test_the_loss_of_a_step_is_the_mean_of_those_observed() -> None:
    """Ranks that observed none do not count; one NaN is not averaged away."""
    layouts, w = [layout(rank, 3, False) for rank in range(3)], window(np.ones(K))

    def heard(*losses: float | None) -> float | None:
        total = np.zeros(1)
        for one, loss in zip(layouts, losses, strict=True):
            values = {} if loss is None else {"loss": loss}
            total = total + all_reduce_packing.encode(one, w, w.wait(), values, {}, None, Usual(np.zeros(K)))
        return ReducedFacts(layouts[0], total).averages.get("loss")

    assert heard(1.0, None, 4.0) == 2.5
    assert heard(None, None, None) is None
    assert math.isnan(heard(1.0, math.nan, 4.0) or 0.0)


def test_a_rank_names_the_parameter_that_explains_it_best() -> None:
    """The deepest that is not finite, else the one farthest from its usual norm."""
    usual, here = Usual(np.full(K, np.nan)), np.ones(K, bool)
    for _ in range(20):
        usual.strangest(Column(np.array([1.0, 10.0, 100.0, 1000.0]), here))
    assert usual.strangest(Column(np.array([1.0, 30.0, 110.0, 900.0]), here)) == 1
    assert usual.strangest(Column(np.array([1.0, 10.0, 100.0, 1.0]), here)) == 3
    assert usual.strangest(Column(np.array([math.nan, 10.0, math.inf, 1000.0]), here)) == 2
    assert np.isfinite(usual.level).all()


@pytest.mark.parametrize(
    ("ranks", "first", "leader", "expected"),
    [
        (None, True, 0, [True, False]),
        (frozenset({0, 1}), True, 0, [True, True]),
        (frozenset({0, 1}), False, 0, [False, False]),
    ],
)
def test_who_counts(ranks: frozenset[int] | None, first: bool, leader: int, expected: list[bool]) -> None:
    """A whole parameter once, by its leader; shards each; other replicas' shards not at all."""
    holding = ShardPlacement(8, 1, ranks is not None, ranks, first)
    assert [holding.counts(rank, leader) for rank in range(2)] == expected
