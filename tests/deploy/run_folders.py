"""Run folders as training leaves them, for the tests of `gradwatch serve`."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from gradwatch.account import Account, Ending
from gradwatch.records.decision import Decision
from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.internal_errors import Health
from gradwatch.serve.allowed_targets import AllowedTargets
from gradwatch.serve.ended_run_counters import Summaries
from gradwatch.serve.run_scanner import Fleet, Scanner
from gradwatch.sinks.journal import JournalSink
from tests.support.sink_records import make_event, make_record, make_run, make_sites, skip

SITES = make_sites(4)


def a_run(root: Path, run_id: str = "run-1", **fields: Any) -> RunInfo:
    """A run of this machine whose folder lies in `root`."""
    run = make_run(root, host=platform.node(), start_time=time.time(), script="train.py", **fields)
    return RunInfo(
        **{
            **{name: getattr(run, name) for name in run.__slots__},
            "run_id": run_id,
            "directory": str(root / run_id),
        }
    )


def history(steps: int = 20, last: Decision | None = None) -> list[Record]:
    """A few steps; the third has NaN in one gradient, is skipped, and fires a rule."""
    records = []
    for step in range(steps):
        norm = np.ones(4, np.float32)
        if step == 2:
            norm[1] = np.nan
        records.append(
            make_record(
                SITES,
                norm,
                step=step,
                events=(make_event(step=step, sites=("layers.1.weight",), count=1),) if step == 2 else (),
                decision=skip() if step == 2 else last if step == steps - 1 else None,
                wall_time=time.time(),
            )
        )
    return records


def record_run(
    run: RunInfo, records: list[Record], close: bool = True, ended: Ending = "finished"
) -> list[Record]:
    """Write a journal as training does, which `ended` so; not closed, it is what a kill leaves."""
    sink = JournalSink()
    sink.open(run, Health())
    for record in records:
        sink.write(record)
    assert sink.flush(10)
    if close:
        sink.conclude(Account(ended=ended))
        sink.close()
    else:
        sink._discard()
    return records


def scan(*roots: Path, reach: AllowedTargets | None = None, state: str = "") -> Fleet:
    return Scanner(roots, Summaries(state), reach=reach or AllowedTargets()).scan()


def series(text: bytes) -> dict[str, float]:
    """Every sample, as `name{labels sorted}`."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}"
            assert key not in found, f"{key} twice: that voids the scrape"
            found[key] = sample.value
    return found
