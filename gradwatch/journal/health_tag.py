"""The checkpoint tag of one rank, kept up to date by the journal's thread: training never waits for its disk."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from gradwatch.checkpoint import joined, write_tag
from gradwatch.records.record import CheckpointHealth, Record

SECONDS = 1.0
"""While a checkpoint stays as healthy or unhealthy as it is, the file is written no more often than this."""


class HealthTag:
    """Checkpoint health from the Records of all optimizers, and when the file is to be written."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._found: dict[int, CheckpointHealth] = {}
        self._end: CheckpointHealth | None = None
        self._step = -1
        self._written: CheckpointHealth | None = None
        self._written_step = -1
        self._next = 0.0

    def add(self, batch: Iterable[Record]) -> None:
        """Take in the Records of some steps."""
        for record in batch:
            if record.checkpoint is not None:
                self._found[record.snapshot.optimizer] = record.checkpoint
                self._step = max(self._step, record.snapshot.step)

    def end_with(self, health: CheckpointHealth) -> None:
        """The last that is written is this: the weights were looked at after the last Record."""
        self._end = health

    def write(self, directory: Path, last: bool = False) -> None:
        """Write the file if it is due; raises `OSError`, and is due again then."""
        if not self._found:
            return
        health, written, now = joined(self._found.values()), self._written, time.monotonic()
        if last and self._end is not None:
            health = self._end
        changed = written is None or health.healthy != written.healthy
        # While it is unhealthy, it may stay the same for long; a last look says more of the same step.
        ended = last and (self._step != self._written_step or self._end is not None)
        if changed or ended or (health != written and (last or now >= self._next)):
            self._next = now + SECONDS
            write_tag(directory, self._rank, self._step, health)
            self._written, self._written_step = health, self._step
