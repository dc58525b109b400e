"""What a process of a recorded run measured because its rules asked for it, and others may miss."""

from __future__ import annotations

from typing import NamedTuple

from gradwatch.records.columns import BATCH_HASH, COMPARING_RANKS, is_scalar
from gradwatch.records.run_info import RunInfo

ASKED_FOR = COMPARING_RANKS | {BATCH_HASH}
"""Columns of steps and ranks that are measured only where a rule reads them."""


class Measured(NamedTuple):
    """What one process measured: `columns` are those that its rules read."""

    columns: frozenset[str] = frozenset()

    def knows(self, column: str) -> bool:
        """True if the process would have had this column, had there been a value of it."""
        return column in self.columns or (is_scalar(column) and column not in ASKED_FOR)


def measured_by(run: RunInfo | None) -> Measured:
    """What a process measured by what it said of itself; None where nothing is left of that."""
    return Measured() if run is None else Measured(frozenset(rule.of for rule in run.rules))
