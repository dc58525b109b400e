"""Random generators a forward may draw from: Python's, numpy's, torch's on the host and on every CUDA device in use,
and generators of the user's own, in attributes of modules and in the globals of their code."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.localise.held_calls.module_attributes import written_in_place
from gradwatch.reading.generator_state import get_state, set_state
from gradwatch.taps import module_tree

FIRST = 2  # calls of the first model of a kind in which it is learned what it draws from; of later ones, one
RECHECK = 256  # calls between looks at generators that no forward has drawn from
OWN = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One generator: how its state is read, and restored; the `generator` itself where it is the user's own."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    generator: Any = None


def _of_torch(generator: torch.Generator, own: Any = None) -> Source:
    return Source(partial(get_state, generator), partial(set_state, generator), own)


PYTHON = Source(random.getstate, random.setstate)
NUMPY = Source(np.random.get_state, np.random.set_state)
CPU = _of_torch(torch.default_generator)


class Generators:
    """The states of some generators at one moment."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self.states = [(source, source.read()) for source in sources]  # each with its state

    @classmethod
    def now(cls, models: Iterable[nn.Module] = ()) -> Generators:
        """All of the process, and those that the code of `models` can draw from."""
        return cls([*of_process(), *(source for model in models for source in own(model))])

    @classmethod
    def of(cls, states: Iterable[tuple[Source, Any]]) -> Generators:
        """Generators with the states they are to be put into."""
        found = cls(())
        found.states = list(states)
        return found

    def restore(self) -> None:
        """Put the generators' states back."""
        for source, state in self.states:
            source.write(state)

    def moved(self) -> list[Source]:
        """Generators that have been drawn from since."""
        return [source for source, state in self.states if not _same(state, source.read())]


NONE = Generators(())


class Draws:
    """Generators that the forwards of one kind of model draw from: learned from some, presumed of the next.

    `calls` counts those of all models of the kind; before the one numbered `idle_until` none need be read for a model
    that is `Held.learned`. `has_own`: whether one had generators of its own (None = not known).
    """

    def __init__(self) -> None:
        self.calls = 0
        self.idle_until = 0
        self.has_own: bool | None = None
        self.sources: list[Source] = []


class Held:
    """Generators before each forward of `model`, less those that forwards of its kind were seen not to draw from.

    Reading them all takes 70 us, and most forwards draw from none. torch's are read before and after the first call of
    each model (`p=` of a dropout is no part of a kind). `looking` is true in the first calls of a kind and one of 256
    ever after, in which all are.
    """

    def __init__(self, model: Callable[[], nn.Module | None], draws: Draws | None = None) -> None:
        self._model = model
        self._calls = 0
        self._draws = draws = draws or Draws()
        self._first = FIRST if draws.calls < FIRST else 1
        self._own: list[Source] = []
        self._drawn: list[Source] = []
        self.learned = False  # after its first calls, if it draws from none of its own
        self.looked_at: Generators | None = None  # before a forward of which `after` learns what it drew from
        self.looking = False  # True while a call checks more generators than those known to matter

    def before(self) -> Generators:
        """The states at the beginning of a forward."""
        draws, first = self._draws, self._calls < self._first
        since = draws.calls % RECHECK
        self.looking = every = since < FIRST
        if first and draws.has_own is not False and (model := self._model()) is not None:
            known = {id(source.generator) for source in self._own}
            self._own += [source for source in own(model) if id(source.generator) not in known]
            draws.has_own = bool(self._own)
        self._calls += 1
        draws.calls += 1
        if not (every or first):
            self.learned = not self._drawn
            if draws.sources or self._drawn:
                return Generators([*draws.sources, *self._drawn])
            draws.idle_until = draws.calls - 1 - since + RECHECK
            return NONE
        looked_at = [*(of_process() if every else of_torch()), *draws.sources, *self._own]
        self.looked_at = Generators(dict.fromkeys(looked_at))
        return self.looked_at

    def after(self) -> None:
        """Learn what a forward that has ended drew from."""
        before, self.looked_at = self.looked_at, None
        self.learn(before)

    def learn(self, before: Generators | None) -> None:
        """Code that is to be run again from `before` on has ended: from now on, read what it drew from."""
        for source, state in () if before is None else before.states:
            if not _same(state, source.read()):
                mine = self._drawn if source in self._own else self._draws.sources
                if source not in mine:
                    mine.append(source)
                self._draws.idle_until, self.learned = 0, False


def of_process() -> list[Source]:
    """Generators that all code of the process shares."""
    return [PYTHON, NUMPY, *of_torch()]


def of_torch() -> list[Source]:
    """Generators of torch. A CUDA generator's state is kept on the host: reading it waits for no device."""
    return [CPU, *of_cuda()] if torch.cuda.is_initialized() else [CPU]


def of_cuda() -> list[Source]:
    """Generators of the CUDA devices, in their order."""
    return [_of_cuda(generator) for generator in torch.cuda.default_generators]


@cache
def _of_cuda(generator: torch.Generator) -> Source:
    return _of(generator)


def own(model: nn.Module) -> Iterator[Source]:
    """Generators in attributes of its modules, and in the globals of the modules' code."""
    found = {id(one): one for one in written_in_place(model)[1] if isinstance(one, OWN)}
    seen: set[int] = set()
    for kind in {base for module in module_tree.modules(model) for base in type(module).__mro__}:
        for method in () if kind.__module__.startswith("torch.") else vars(kind).values():
            if isinstance(method, FunctionType) and id(method.__globals__) not in seen:
                seen.add(id(method.__globals__))
                found |= {id(one): one for one in list(method.__globals__.values()) if isinstance(one, OWN)}
    yield from map(_of, found.values())


def _of(generator: Any) -> Source:
    if isinstance(generator, torch.Generator):
        return _of_torch(generator, generator)
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return Source(lambda: bits.state, lambda state: setattr(bits, "state", state), generator)
    if isinstance(generator, np.random.RandomState):
        return Source(generator.get_state, generator.set_state, generator)
    return Source(generator.getstate, generator.setstate, generator)


def _same(one: Any, other: Any) -> bool:
    """True if two states are equal, arrays and tensors in them by their numbers."""
    if isinstance(one, Tensor):  # of bytes, on the host; `torch.equal` takes twice as long
        return bool(one.numpy().tobytes() == other.numpy().tobytes())
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and len(one) < 16:
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
