"""Which parameters are exported: few, the right ones, and the same ones tomorrow."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.records.snapshot import Sites
from gradwatch.sinks.parameter_selection import REVIEW_STEPS, ParamsMode, Selection, SeriesBudget
from tests.support.examples import examples
from tests.support.sink_records import make_event, make_record, make_sites


def select(
    mode: ParamsMode = "worst", top_k: int = 4, max_series: int = 200, match: tuple[str, ...] = ()
) -> Selection:
    return Selection(mode, top_k, match, SeriesBudget(max_series))


def exported(selection: Selection) -> list[str]:
    assert selection.chosen is not None
    return [selection.chosen.sites.names[i] for i in selection.chosen.indices]


def norms(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0, 0.1, size).astype(np.float32)


@pytest.mark.parametrize(
    ("mode", "match", "names", "dropped"),
    [
        ("off", (), [], 0),
        ("all", (), ["a.weight", "a.bias", "b.weight"], 1),
        ("match", ("*.weight",), ["a.weight", "b.weight"], 0),
        ("match", ("b.*", "a.bias"), ["a.bias", "b.weight", "b.bias"], 0),
    ],
)
def test_modes(mode: ParamsMode, match: tuple[str, ...], names: list[str], dropped: int) -> None:
    """Nobody, everybody, or those that match, up to `max_series`; the rest is counted as dropped."""
    selection = select(mode, max_series=3, match=match)
    selection.update(make_record(make_sites(names=["a.weight", "a.bias", "b.weight", "b.bias"])))
    assert exported(selection) == names
    assert selection.chosen is not None
    assert selection.chosen.dropped == dropped


def test_modules_are_never_exported_as_parameters() -> None:
    """A tapped module is a site but not a parameter."""
    sites = make_sites(3)
    mixed = Sites(
        sites.names, ("param", "module", "param"), sites.numels, sites.ndims, sites.depths, sites.groups
    )
    selection = select("all")
    selection.update(make_record(mixed))
    assert exported(selection) == ["layers.0.weight", "layers.2.weight"]


def test_the_worst_are_the_largest_and_the_smallest_matrices() -> None:
    """Half of the seats each way; a parameter without a gradient is neither."""
    norm = np.ones(20, np.float32)
    norm[[3, 4]], norm[[7, 8]], norm[9] = [50, 60], [1e-4, 1e-5], 1e-9
    calls = np.ones(20, np.int32)
    calls[9] = 0
    selection = select()
    selection.update(make_record(make_sites(20), norm, calls=calls))
    assert exported(selection) == [f"layers.{i}.weight" for i in (3, 4, 7, 8)]


def test_small_biases_are_not_the_worst() -> None:
    """The true gradient of a bias before a normalisation is zero."""
    norm = np.full(10, 1e-9, np.float32)
    selection = select(top_k=2)
    selection.update(make_record(make_sites(10, ndim=1), norm))
    assert len(exported(selection)) == 1  # only the seat for the largest is taken


def test_noise_changes_no_seat() -> None:
    """Thousands of steps of a healthy run make not one new series."""
    selection, sites = select(), make_sites(50)
    selection.update(make_record(sites, norms(50, 0)))
    first = exported(selection)
    for step in range(1, 3 * REVIEW_STEPS):
        selection.update(make_record(sites, norms(50, step), step=step))
    assert exported(selection) == first


def test_somebody_much_worse_gets_a_seat_at_the_next_review() -> None:
    """At least twice as far out as the least of those seated."""
    selection, sites = select(), make_sites(50)
    selection.update(make_record(sites, norms(50, 0)))
    newcomer = next(i for i in range(50) if sites.names[i] not in exported(selection))
    for step in range(1, 2 * REVIEW_STEPS):
        norm = norms(50, step)
        norm[newcomer] *= 100
        selection.update(make_record(sites, norm, step=step))
    assert sites.names[newcomer] in exported(selection)
    assert len(exported(selection)) == 4


def test_whoever_a_rule_names_is_in_at_once_and_stays() -> None:
    """The series is there when somebody looks for the reason of an alert, and after it."""
    selection, sites = select(top_k=2), make_sites(50)
    selection.update(make_record(sites))
    before = set(exported(selection))
    event = make_event(sites=("layers.20.weight", "no.such.parameter"), first_cause="layers.30.weight")
    selection.update(make_record(sites, step=1, events=(event,)))
    for step in range(2, 250):
        selection.update(make_record(sites, step=step))
    assert set(exported(selection)) == before | {"layers.20.weight", "layers.30.weight"}


def test_the_deepest_non_finite_gradients_are_in_at_once() -> None:
    """Without any rule, too; the deepest are the first causes."""
    selection, sites = select(top_k=0), make_sites(50)
    norm = np.ones(50, np.float32)
    norm[10:40] = math.nan
    selection.update(make_record(sites, norm))
    assert exported(selection) == [f"layers.{i}.weight" for i in range(35, 40)]


@settings(max_examples=examples(25))
@given(st.integers(0, 30), st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_there_are_never_more_series_than_allowed(max_series: int, top_k: int, seed: int) -> None:
    """Over the whole life of a run, however many parameters misbehave; those left out are counted."""
    chance, sites = np.random.default_rng(seed), make_sites(60)
    selection, ever = select(top_k=top_k, max_series=max_series), set()
    for step in range(120):
        norm = chance.lognormal(0, 5, 60).astype(np.float32)
        norm[chance.random(60) < 0.05] = np.nan
        named = tuple(sites.names[i] for i in chance.integers(0, 60, 2))
        selection.update(make_record(sites, norm, step=step, events=(make_event(sites=named),)))
        ever.update(exported(selection))
    assert len(ever) <= max_series
    assert selection.chosen is not None
    if max_series < 30:
        assert selection.chosen.dropped > 0


def test_parameters_that_change_keep_their_places_by_name() -> None:
    """After `add_param_group` or an unfreeze those who had a series keep it."""
    selection = select(top_k=2)
    selection.update(make_record(make_sites(names=["a", "b", "c", "d"]), [9, 1, 1, 0.1]))
    assert exported(selection) == ["a", "d"]
    selection.update(make_record(make_sites(names=["x", "d", "a", "y"]), [1, 1, 1, 1], step=1))
    assert exported(selection) == ["d", "a"]
