"""The types of keys in a rule file, and the parameters of actions and sinks: all that is said of them without pydantic.

`gradwatch.rules.files.model_base` makes pydantic models of them when a rule file is read.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from gradwatch.records.key_limits import Limits

MOST_STEPS = 1_000_000_000
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
LABEL = r"^[a-zA-Z][a-zA-Z0-9_]{0,63}$"

Glob = Annotated[str, Limits(min_length=1, max_length=500)]
Globs = Annotated[list[Glob], Limits(min_length=1)]
Text = Annotated[str, Limits(max_length=2_000)]
Steps = Annotated[int, Limits(ge=0, le=MOST_STEPS)]
Count = Annotated[int, Limits(ge=1, le=MOST_STEPS)]
Positive = Annotated[float, Limits(gt=0)]
NotNegative = Annotated[float, Limits(ge=0)]
Share = Annotated[float, Limits(gt=0, lt=1)]
Names = Annotated[list[str], Limits(min_length=1)]
Words = dict[Annotated[str, Limits(pattern=LABEL)], Text]


class Key(NamedTuple):
    """Default and description of a parameter; a default of `...` = it must be given."""

    default: Any
    description: str


def key(default: Any = ..., *, description: str = "") -> Any:
    """A parameter of an action or a sink, where its class says what the default is."""
    return Key(default, description)


def unset(description: str) -> Any:
    """A parameter that may be left out: what then applies is the sink's own business."""
    return Key(None, description)


class Parameters:
    """Base of the classes that list the parameters of an action, or the options of a sink: their types and `key`s."""
