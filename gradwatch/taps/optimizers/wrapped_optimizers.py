"""Optimizers that an optimizer wraps, found in its attributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.optim import Optimizer

TORCHS = ("params", "state", "param_groups", "defaults")
"""Attributes that torch gives every optimizer."""
DEPTH = 3
"""Containers within containers in which an optimizer may keep parameters and other optimizers."""


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer and those it wraps, in containers too."""
    found = [optimizer]
    for one in found:  # grows on the way
        for name, value in vars(one).items():
            if name not in TORCHS:
                found += [
                    inner for inner in _optimizers(value, DEPTH) if not any(inner is each for each in found)
                ]
    return found


def _optimizers(value: Any, depth: int) -> Iterator[Optimizer]:
    if isinstance(value, Optimizer):
        yield value
    elif depth:
        for each in contained(value):
            yield from _optimizers(each, depth - 1)


def contained(value: Any) -> Iterable[Any]:
    """The items of a plain container, keys too; nothing of anything else."""
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    return value if isinstance(value, (list, tuple, set, frozenset)) else ()
