"""The health tag of one watch, kept up to date by the journal's thread: training never waits for its disk."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from pathlib import Path

from gradwatch.checkpoint.health_tag import HealthTag, write_tag
from gradwatch.checkpoint.health_tracker import joined
from gradwatch.records.record import CheckpointHealth, Record
from gradwatch.records.run_info import RunInfo
from gradwatch.records.snapshot import Sites
from gradwatch.runtime.process_identity import PROGRAM, start_ticks

SECONDS = 1.0
"""While a checkpoint stays as healthy or unhealthy as it is, the file is written no more often than this."""


class HealthTagWriter:
    """Checkpoint health from the Records of all optimizers of a watch, and when the file is to be written."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._found: dict[int, CheckpointHealth] = {}
        self._sites: dict[int, Sites] = {}
        self._weights: frozenset[str] = frozenset()
        self._end: CheckpointHealth | None = None
        self._closing = False
        self._step = -1
        self._written: CheckpointHealth | None = None
        self._written_step = -1
        self._next = 0.0

    def add(self, batch: Iterable[Record]) -> None:
        """Take in the Records of some steps."""
        for record in batch:
            snapshot = record.snapshot
            if record.checkpoint is not None:
                self._found[snapshot.optimizer] = record.checkpoint
                self._step = max(self._step, snapshot.step)
                if self._sites.get(snapshot.optimizer) is not snapshot.sites:
                    self._sites[snapshot.optimizer] = snapshot.sites
                    self._weights |= {_digest(snapshot.sites)}

    def end_with(self, health: CheckpointHealth) -> None:
        """The last that is written is this: the weights were looked at after the last Record."""
        self._end = health

    def close(self) -> None:
        """Mark what is written from now on as the last."""
        self._closing = True

    def write(self, directory: Path, attempt: int, last: bool = False) -> None:
        """Write the file if it is due; raises `OSError`, and is due again then.

        Each second while the watch takes steps, whether or not its health is another: so long as it is written, no
        later watch takes its place. `last`: a reader may ask now, so it is to say all that is known.
        """
        if not self._found:
            return
        health, now = joined(self._found.values()), time.monotonic()
        if last and self._end is not None:
            health = self._end
        stepped = health != self._written or self._step != self._written_step
        changed = self._written is None or health.healthy != self._written.healthy
        # A last look says more of the same step.
        ended = self._closing or (last and self._end is not None)
        if changed or ended or (stepped and (last or now >= self._next)):
            self._next = now + SECONDS
            write_tag(directory, self._tag(health, attempt))
            self._written, self._written_step = health, self._step

    def _tag(self, health: CheckpointHealth, attempt: int) -> HealthTag:
        run = self._run
        return HealthTag(
            rank=run.rank,
            step=self._step,
            health=health,
            attempt=attempt,
            world_size=run.world_size,
            began=run.start_time,
            written=time.time(),
            ended=self._closing,
            launch=run.launch or PROGRAM,
            program=PROGRAM,
            host=run.host,
            pid=run.pid,
            started=start_ticks(run.pid),
            weights=self._weights,
        )


def _digest(sites: Sites) -> str:
    """Of the names and sizes of the parameters, in any order: the same for another optimizer of the same weights."""
    sized = zip(sites.names, sites.kinds, sites.numels.tolist(), strict=True)
    words = sorted(f"{name}\0{numel}" for name, kind, numel in sized if kind == "param")
    return hashlib.sha256("\0".join(words).encode("utf-8", "surrogatepass")).hexdigest()[:16]
