"""The criterion beside the model: modules in scope of the lines which call a model.

A loss that is a module of its own (`nn.CrossEntropyLoss()`, a focal loss of the user's) is called like a model, so its
call can be held and run again like one. It has no parameters, so it is looked for where the model is
called from: in the locals there, in the globals that code names, and in what `self` holds.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from types import FrameType
from typing import Any

from torch import nn

from gradwatch.localise.diagnosis.python_frames import is_of_user, locals_of
from gradwatch.taps import module_tree

OUTWARD = 3  # functions of the user's, from the call of the model outwards
MOST = 8  # modules


def beside(frame: FrameType | None, known: Container[int]) -> list[nn.Module]:
    """Modules without trainable parameters that are not among the `known` (by id), from the innermost line outwards."""
    found: dict[int, nn.Module] = {}
    looked = 0
    while frame is not None and looked < OUTWARD:
        if is_of_user(frame):
            looked += 1
            for value in _in_scope(frame):
                if isinstance(value, nn.Module) and id(value) not in known and not _trains(value):
                    found.setdefault(id(value), value)
        frame = frame.f_back
    return list(found.values())[:MOST]


def _in_scope(frame: FrameType) -> Iterator[Any]:
    names = locals_of(frame)
    yield from names.values()
    owner = names.get("self")
    if hasattr(owner, "__dict__"):
        yield from list(vars(owner).values())
    if isinstance(owner, nn.Module):
        yield from list(owner._modules.values())
    for name in frame.f_code.co_names:
        if name in frame.f_globals:
            yield frame.f_globals[name]


def _trains(module: nn.Module) -> bool:
    return any(param.requires_grad for param in module_tree.parameters(module))
