"""A sink for tests that look at what a watch tells."""

from __future__ import annotations

from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.internal_errors import Health


class Kept:
    """A sink that keeps every Record."""

    name = "kept"

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.closed = False

    def open(self, run: RunInfo, health: Health) -> None:
        """Know the run."""
        self.run = run

    def write(self, record: Record) -> None:
        """Keep it."""
        self.records.append(record)

    def flush(self, timeout: float) -> bool:
        """Nothing waits here."""
        return True

    def close(self) -> None:
        """Remember it."""
        self.closed = True
