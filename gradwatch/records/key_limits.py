"""Limits of a number or text in a rule file, said beside its type; pydantic is imported when it checks them.

To import pydantic takes a tenth of a second, and a run by a shipped pack, which is right, has nothing to check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Limits:
    """`Annotated[float, Limits(gt=0)]` is to pydantic what `Annotated[float, pydantic.Field(gt=0)]` is.

    pydantic asks such a "grouped" annotation for the annotations that it stands for. `check` is called with a value
    that is within the limits, and returns it or raises.
    """

    __is_annotated_types_grouped_metadata__ = True

    def __init__(self, *, check: Callable[[Any], Any] | None = None, **limits: Any) -> None:
        self._check, self._limits = check, limits

    def __iter__(self) -> Iterator[Any]:
        from pydantic import AfterValidator, Field

        yield from Field(**self._limits).metadata
        if self._check is not None:
            yield AfterValidator(self._check)
