"""The loop at the moment of a backward: its functions under way, with the values of their names."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from gradwatch.localise.diagnosis.python_frames import is_of_user, locals_of

OUTWARD = 4  # functions of the user's


@dataclass(frozen=True, slots=True, eq=False)
class LoopScope:
    """One function under way: its code, the line it is at, its names; `exact`: that line calls `backward`."""

    code: CodeType
    line: int
    values: dict[str, Any]
    around: Mapping[str, Any]
    exact: bool


@dataclass(frozen=True, slots=True, eq=False)
class LoopAtBackward:
    """The functions under way, innermost first, at or after a backward.

    Calls of models numbered below `before` were made before it.
    """

    before: int
    scopes: list[LoopScope]


def scopes(exact: bool) -> list[LoopScope]:
    """The user's functions under way, innermost first."""
    return [
        LoopScope(frame.f_code, frame.f_lineno, locals_of(frame), frame.f_globals, exact)
        for frame in _frames(sys._getframe(1))
    ]


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    looked = 0
    while frame is not None and looked < OUTWARD:
        if is_of_user(frame):
            looked += 1
            yield frame
        frame = frame.f_back
