"""Generators that forwards draw from: learned by kind of model, and never missed where torch's own are drawn from."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from gradwatch.localise.held_calls import random_generators
from gradwatch.localise.held_calls.random_generators import (
    CPU,
    FIRST,
    NUMPY,
    PYTHON,
    RECHECK,
    Draws,
    Held,
    Source,
)


def held_of(held: Held, model: nn.Module) -> list[Source]:
    """The generators that are held before a forward, which is then run."""
    found = held.before()
    model(torch.ones(1, 4))
    held.after()
    return [source for source, _ in found.states]


class Noisy(nn.Module):
    """Draws from Python's generator, and from numpy's where `late`."""

    late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random() + (float(np.random.rand()) if self.late else 0)


def test_the_first_of_a_kind_is_asked_for_everything_the_next_for_what_it_drew() -> None:
    """Python's generator, which the first drew from, is held from the next one's first call on; numpy's is not."""
    draws, first, second = Draws(), Noisy(), Noisy()
    held = Held(lambda: first, draws)
    assert {PYTHON, NUMPY, CPU} <= set(held_of(held, first))
    for _ in range(FIRST):
        held_of(held, first)
    asked = held_of(Held(lambda: second, draws), second)
    assert PYTHON in asked
    assert CPU in asked
    assert NUMPY not in asked


def test_a_dropout_that_only_the_second_model_has_is_seen_at_once() -> None:
    """`p` is no part of a kind: torch's generators are looked at in the first calls of every model."""
    draws, first, second = Draws(), nn.Dropout(0.0), nn.Dropout(0.5)
    held = Held(lambda: first, draws)
    for _ in range(FIRST + 1):
        assert held_of(held, first) is not None
    assert held_of(held, first) == []
    held = Held(lambda: second, draws)
    for _ in range(FIRST + 2):
        assert CPU in held_of(held, second)


def test_models_that_live_short_share_the_recheck() -> None:
    """One call in 256 of a kind, of whatever model of it, looks at every generator again."""
    draws, learned = Draws(), []
    for number in range(RECHECK):
        model = Noisy()
        model.late = number >= 10
        held = Held(lambda model=model: model, draws)  # type: ignore[misc]
        for _ in range(2):
            held_of(held, model)
            learned.append(NUMPY in draws.sources)
    assert learned.index(True) == RECHECK


def test_a_generator_of_the_models_own_is_held_of_each() -> None:
    """Every model of a kind that has its own is asked for its own, and not for another's."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(1, generator=self.generator)

    draws = Draws()
    for _ in range(3):
        model = Own()
        held = Held(lambda model=model: model, draws)  # type: ignore[misc]
        for _ in range(FIRST + 1):
            before = model.generator.get_state().clone()
            states = held.before()
            model(torch.ones(1))
            held.after()
            own = [state for source, state in states.states if source.generator is model.generator]
            assert len(own) == 1
            assert torch.equal(own[0], before)
    assert draws.sources == []


def test_everything_of_the_process_is_torchs_and_pythons_and_numpys() -> None:
    """No generator is in two of the lists, and none is forgotten."""
    assert list(random_generators.of_process()) == [PYTHON, NUMPY, *random_generators.of_torch()]
