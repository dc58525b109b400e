"""A file for node_exporter's textfile collector: metrics of a process that may open no port at all.

https://github.com/prometheus/node_exporter#textfile-collector: written beside and renamed, without timestamps.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.atomic_files import write_whole
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.prometheus.exposition import render
from gradwatch.sinks.prometheus.periodic_export import PeriodicExport

_CLOSE_SECONDS = 2.0
_FORGOTTEN_SECONDS = 86_400.0


class TextfileSink:
    """Writes all metrics but those of single parameters into `dir` every `every_seconds`, one file a process.

    Every series carries `run_id` and `rank` (and `process`, of a second one of a rank): to Prometheus the file is part
    of the machine. A clean exit removes the file, for its gauges would stay for ever. A killed process leaves it, so
    `GradwatchRunStalled` fires; what is older than a day is removed by the next run. Written by a thread: a slow disk
    delays no step.
    """

    name = "textfile"
    needs_place = True

    def __init__(self, dir: str, every_seconds: float = 15.0) -> None:
        if not 1 <= every_seconds < float("inf"):
            raise ValueError("every_seconds must be 1 or more")
        self.directory, self._every = dir, every_seconds
        self._path = ""
        self._export = PeriodicExport(self.name, self._write)

    def open(self, run: RunInfo, health: Health) -> None:
        """Name the file; it is first written in the worker's thread."""
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", run.run_id)[:128]
        self._path = os.path.join(self.directory, f"gradwatch-{name}-rank{run.rank_and_place}.prom")
        self._export.open(run, health)

    def write(self, record: Record) -> None:
        """Add one step to the totals."""
        self._export.add(record)

    def flush(self, timeout: float) -> bool:
        """Write the file now; False where it is not there after `timeout` seconds."""
        return self._export.wait_for(timeout)

    def close(self) -> None:
        """Stop writing and take the file away."""
        if self._export.end():
            Path(self._path).unlink(missing_ok=True)

    def _write(self) -> float:
        """The file, whole or not at all; returns when it is due again."""
        _remove_forgotten(Path(self.directory), time.time())
        content = render(self._export.families())
        write_whole(self._path, content, 0o644)
        if not self._export.is_open:  # closed meanwhile, which took away the file before this one
            Path(self._path).unlink(missing_ok=True)
        return self._every


def _remove_forgotten(directory: Path, now: float) -> None:
    """Files of processes that were killed more than a day ago, or have hung for so long."""
    for path in directory.glob("gradwatch-*-rank*.prom"):
        if now - path.stat().st_mtime > _FORGOTTEN_SECONDS:
            path.unlink(missing_ok=True)
