"""Random generators a forward may draw from: Python's, numpy's, torch's on the host and on every CUDA device in use,
and generators of the user's own, in attributes of modules and in the globals of their code."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.localise.attributes import written_in_place
from gradwatch.taps import tree

FIRST = 2
RECHECK = 256  # calls between looks at generators that no forward has drawn from
OWN = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One generator: how its state is read, and put back."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


PYTHON = Source(random.getstate, random.setstate)
NUMPY = Source(np.random.get_state, np.random.set_state)
CPU = Source(torch.get_rng_state, torch.set_rng_state)


class Generators:
    """The states of some generators at one moment."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._states = [(source, source.read()) for source in sources]

    @classmethod
    def now(cls, models: Iterable[nn.Module] = ()) -> Generators:
        """All of the process, and those that the code of `models` can draw from."""
        return cls([*of_process(), *(source for model in models for source in own(model))])

    @classmethod
    def of(cls, states: Iterable[tuple[Source, Any]]) -> Generators:
        """Generators with the states they are to be put into."""
        found = cls(())
        found._states = list(states)
        return found

    @property
    def states(self) -> Iterator[tuple[Source, Any]]:
        """Each with its state."""
        return iter(self._states)

    def restore(self) -> None:
        """Put them back."""
        for source, state in self._states:
            source.write(state)

    def moved(self) -> list[Source]:
        """Those that have been drawn from since."""
        return [source for source, state in self._states if not _same(state, source.read())]


NONE = Generators(())


class Held:
    """Generators before each forward of `model`, without those that forwards have been seen not to draw from.

    Reading them all takes 70 us, and most forwards draw from none. `looking` is true in the first calls and in one
    of 256 ever after: then all are read, before and after.
    """

    def __init__(self, model: Callable[[], nn.Module | None]) -> None:
        self._model = model
        self._calls = 0
        self._own: list[Source] = []
        self._drawn: list[Source] = []
        self._before: Generators | None = None

    @property
    def looking(self) -> bool:
        """Whether the present call is one in which everything is looked at."""
        return self._before is not None

    def before(self) -> Generators:
        """The states at the beginning of a forward."""
        looking = self._calls % RECHECK < FIRST
        if self._calls < FIRST and (model := self._model()) is not None:
            self._own = list(own(model))
        self._calls += 1
        if not looking:
            return Generators(self._drawn) if self._drawn else NONE
        self._before = Generators([*of_process(), *self._own])
        return self._before

    def after(self) -> None:
        """The forward has ended: learn what it drew from."""
        before, self._before = self._before, None
        if before is not None:
            self._drawn += [source for source in before.moved() if source not in self._drawn]


def of_process() -> Iterator[Source]:
    """Those that everybody shares. A CUDA generator's state is kept on the host: reading it waits for no device."""
    yield from (PYTHON, NUMPY, CPU)
    if torch.cuda.is_initialized():
        yield from of_cuda()


def of_cuda() -> list[Source]:
    """Those of the CUDA devices, in their order."""
    return [_of_cuda(generator) for generator in torch.cuda.default_generators]


@functools.cache
def _of_cuda(generator: torch.Generator) -> Source:
    return _of(generator)


def own(model: nn.Module) -> Iterator[Source]:
    """Those in attributes of its modules, and in the globals of the modules' code."""
    found = {id(one): one for one in written_in_place(model)[1] if isinstance(one, OWN)}
    seen: set[int] = set()
    for kind in {base for module in tree.modules(model) for base in type(module).__mro__}:
        for method in () if kind.__module__.startswith("torch.") else vars(kind).values():
            if isinstance(method, FunctionType) and id(method.__globals__) not in seen:
                seen.add(id(method.__globals__))
                found |= {id(one): one for one in list(method.__globals__.values()) if isinstance(one, OWN)}
    yield from map(_of, found.values())


def _of(generator: Any) -> Source:
    if isinstance(generator, torch.Generator):
        return Source(generator.get_state, generator.set_state)
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return Source(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(generator, np.random.RandomState):
        return Source(generator.get_state, generator.set_state)
    return Source(generator.getstate, generator.setstate)


def _same(one: Any, other: Any) -> bool:
    """Whether two states are equal, arrays and tensors in them by their numbers."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and len(one) < 16:
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
