"""Prefixes of names: a model keeps its own while it lives, and leaves it to the one that comes after it."""

from __future__ import annotations

import gc

from torch import nn

from gradwatch.capture.parameter_names import WatchedModels


def prefixes(watched: WatchedModels, *models: nn.Module) -> list[str]:
    """The prefixes of models that come together."""
    return [prefix for prefix, _, _ in watched.add(models)]


def test_one_model_alone_has_no_prefix_and_several_have_their_class() -> None:
    """Numbered where it repeats; one that joins a single model leaves that its names."""
    several, one = WatchedModels(), WatchedModels()
    kept = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)]
    assert prefixes(several, *kept[:3]) == ["Linear.", "Linear1.", "Tanh."]
    assert prefixes(one, kept[0]) == [""]
    assert prefixes(one, kept[3]) == ["Linear1."]


def test_a_model_that_is_known_is_not_added_again() -> None:
    """Only those that were not watched are returned, and the others keep their prefixes."""
    watched, first, second = WatchedModels(), nn.Linear(2, 2), nn.Linear(2, 2)
    prefixes(watched, first)
    assert prefixes(watched, first, second) == ["Linear1."]
    assert [prefix for prefix, _ in watched.prefixed()] == ["", "Linear1."]


def test_a_successor_takes_up_the_prefix_that_was_left_and_no_living_ones() -> None:
    """Whichever of three is replaced, the two others keep theirs."""
    watched = WatchedModels()
    models = [nn.Linear(2, 2) for _ in range(3)]
    before = prefixes(watched, *models)
    for gone in (0, 2, 1, 0):
        models[gone] = nn.Linear(2, 2)
        assert prefixes(watched, *models) == [before[gone]]
    assert watched.undecided == ()


def test_those_that_went_first_are_succeeded_first() -> None:
    """In whatever order they had come: each look at the models tells what has gone since the one before."""
    watched = WatchedModels()
    models = [nn.Linear(2, 2) for _ in range(3)]
    first, second, _ = prefixes(watched, *models)
    del models[1]
    watched.note_gone()
    del models[0]
    assert prefixes(watched, nn.Linear(2, 2), nn.Linear(2, 2)) == [second, first]
    assert watched.undecided == ()


def test_a_successor_is_one_of_the_same_shapes_or_else_of_the_same_names() -> None:
    """A generator and a critic of one class are each succeeded by their like, though both are gone at one time."""
    watched = WatchedModels()
    models = [
        nn.Sequential(nn.Linear(2, 3)),
        nn.Sequential(nn.Linear(3, 1)),
        nn.Sequential(nn.Tanh(), nn.Linear(2, 2)),
    ]
    one, other, deep = prefixes(watched, *models)
    models.clear()
    new = [
        nn.Sequential(nn.Linear(3, 1)),
        nn.Sequential(nn.Tanh(), nn.Linear(5, 5)),
        nn.Sequential(nn.Linear(9, 9)),
    ]
    assert prefixes(watched, *new) == [other, deep, one]
    assert watched.undecided == ()


def test_successors_of_models_alike_that_went_at_one_time_are_undecided() -> None:
    """They are taken in their order, and it is noted once which prefixes that concerns."""
    watched = WatchedModels()
    models = [nn.Linear(2, 2) for _ in range(2)]
    before = prefixes(watched, *models)
    models.clear()
    new = [nn.Linear(2, 2) for _ in range(2)]
    assert prefixes(watched, *new) == before
    assert watched.undecided == tuple(before)


def test_lazy_parameters_have_no_shape_to_compare() -> None:
    """A lazy module joins, and is succeeded by its like."""
    watched, model = WatchedModels(), nn.LazyLinear(2)
    assert prefixes(watched, model) == [""]
    del model
    gc.collect()  # its hooks refer to it
    assert prefixes(watched, nn.LazyLinear(2)) == [""]
