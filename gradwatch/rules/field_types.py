"""The types of the keys in a rule file, and the base of the pydantic models that hold them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

MOST_STEPS = 1_000_000_000
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
LABEL = r"^[a-zA-Z][a-zA-Z0-9_]{0,63}$"

Glob = Annotated[str, Field(min_length=1, max_length=500)]
Globs = Annotated[list[Glob], Field(min_length=1)]
Text = Annotated[str, Field(max_length=2_000)]
Steps = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Count = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
Names = Annotated[list[str], Field(min_length=1)]
Words = dict[Annotated[str, Field(pattern=LABEL)], Text]

# Built when first used: a file that names no detector of a kind should not pay for it.
CONFIG = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)


class Model(BaseModel):
    """One map of a rule file."""

    model_config = CONFIG


def unset(description: str, **constraints: Any) -> Any:
    """A key that may be left out; what then applies depends on `defaults` and on the kind."""
    return Field(default=None, description=description, **constraints)
