"""Columns of one step that may still be on their way from a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from gradwatch.reading.device import Floats
from gradwatch.records.snapshot import BoolArray, Column


class PendingValues(Protocol):
    """float32[K] on its way to the host."""

    def ready(self) -> bool:
        """True if `values()` would return at once."""
        ...

    def values(self) -> Floats:
        """float32[K]; waits for them."""
        ...


@dataclass(slots=True)
class MovedParameters:
    """Parameters that the optimizer moved at one step: known once that step has been judged."""

    step: int
    present: BoolArray | None = None


@dataclass(slots=True)
class PendingColumns:
    """Columns of one step by name, with the positions of K at which each has a value."""

    count: int
    parts: dict[str, PendingValues] = field(default_factory=dict)
    present: dict[str, BoolArray | MovedParameters] = field(default_factory=dict)

    def ready(self) -> bool:
        """True if `columns()` would return at once."""
        return all(part.ready() for part in self.parts.values())

    def columns(self) -> dict[str, Column]:
        """The columns measured this step."""
        found = {}
        for name, part in self.parts.items():
            known = self.present[name]
            present = known.present if isinstance(known, MovedParameters) else known
            if present is not None:  # else the step before was never judged
                found[name] = Column(part.values(), present)
        return found
