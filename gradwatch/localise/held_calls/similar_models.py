"""Kinds of models: what is learned of one model and presumed of the next that is built like it (a fold, a copy)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CodeType
from typing import TypeAlias

from torch import nn

from gradwatch.localise.diagnosis.python_frames import Callers
from gradwatch.localise.held_calls.random_generators import Draws

MOST = 64  # kinds remembered
MOST_CALLERS = 16  # of a kind
ALONE = 8  # models in a row beside which nothing stood, before that is presumed of the next ones
AGAIN = 64  # models after which it is looked again


@dataclass(slots=True)
class Kind:
    """Models of the same classes of modules: `whole` where one was called itself and not by its parts.

    `lines` are those that call one. `callers` are the lines that called one often enough for what stands beside them to
    be known; `alone` counts, for a line, the models in a row beside which nothing stood. `keeps_weights`: the first
    calls of one wrote into none of its own parameters.
    """

    whole: bool = False
    draws: Draws = field(default_factory=Draws)
    lines: Callers = field(default_factory=Callers)
    callers: set[tuple[CodeType, int]] = field(default_factory=set)
    alone: dict[tuple[CodeType, int], int] = field(default_factory=dict)
    keeps_weights: bool = False

    def is_alone(self, caller: tuple[CodeType, int]) -> bool:
        """True if nothing need be looked for beside this line: nothing stood there for models in a row."""
        count = self.alone.get(caller, 0)
        if count < ALONE:
            return False
        self.alone[caller] = count + 1
        return count % AGAIN != 0

    def called_whole(self) -> None:
        """Note that a model of this kind was called itself, and not by its parts."""
        self.whole = True

    def learned_weights(self, kept: bool) -> None:
        """Note if the first calls of a model wrote into none of its own parameters."""
        self.keeps_weights = kept

    def stood_beside(self, caller: tuple[CodeType, int], found: bool) -> None:
        """Note if something was found beside a line that called a model for the first time."""
        if len(self.alone) >= MOST_CALLERS:
            self.alone.clear()
        self.alone[caller] = 0 if found else self.alone.get(caller, 0) + 1

    def looked_beside(self, caller: tuple[CodeType, int]) -> None:
        """Note that the scope of this line was searched."""
        if len(self.callers) >= MOST_CALLERS:
            self.callers.clear()
        self.callers.add(caller)


_qualname: Callable[[type], str] = operator.attrgetter("__qualname__")
Kinds: TypeAlias = dict[tuple[str, ...], Kind]
"""What is known of kinds of models, by the names of the classes of their modules."""


def kind_of(modules: Iterable[nn.Module], kinds: Kinds) -> Kind:
    """Knowledge of models like the one of these modules; a kind that was not met before is remembered."""
    names = tuple(map(_qualname, map(type, modules)))
    found = kinds.get(names)
    if found is None:
        if len(kinds) >= MOST:
            kinds.clear()
        found = kinds[names] = Kind()
    return found
