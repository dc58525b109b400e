"""Runs on disk for the tests of the report, recorded from synthetic Records: no training, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gradwatch.account import Account, Taken, Watched
from gradwatch.journal.entries import EndEntry
from gradwatch.journal.writer import Recorder
from gradwatch.records.decision import Decision, Order
from gradwatch.records.event import Event
from gradwatch.records.finding import Finding, Frame
from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.records.snapshot import Column, Sites
from tests.support.sink_records import RULES, make_event, make_record, make_run, make_sites

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">'`*_|\u202e"
"""What a parameter, a run, a file or a cause may be called."""
SITES = make_sites(6)


def recorded(
    root: Path,
    records: Iterable[Record],
    *,
    account: Account | None = None,
    closed: bool = True,
    max_bytes: int = 0,
    params: str = "full",
    **run: Any,
) -> Path:
    """The folder of a run of these Records, as a process that has ended left it; not `closed`, one that was killed."""
    run_id = run.pop("run_id", "run-1")
    info = replace(make_run(root, **{"pid": 2**22 - 1, "host": "another", **run}), run_id=run_id)
    Path(info.directory).mkdir(parents=True)
    failures: list[BaseException] = []
    recorder = Recorder(
        info, params, max_bytes, lambda error: failures.append(error) if error else None, lambda events: None
    )
    recorder.begin()
    batch: list[Record] = []
    for record in records:
        batch.append(record)
        if len(batch) == 256:
            recorder.record(batch)
            recorder.commit(durable=False)
            batch = []
    recorder.record(batch)
    if account is not None:
        recorder.end = EndEntry(0, account.ended, account.to_dict())
    if closed:
        recorder.close()
    else:
        recorder.commit(durable=True)
        recorder.files.close()
    assert not failures, failures
    return Path(info.directory)


def finished(steps: int, **fields: Any) -> Account:
    """The account of a process that finished and watched every step."""
    watched = Watched(steps, steps, optimizers=1, parameters=len(SITES), own_seconds=0.1, seconds=2.0)
    taken = Taken(backwards=steps, steps=steps, optimizers=1, stepped=1)
    return Account(**{"taken": taken, "watched": watched, "ended": "finished", "rules": len(RULES), **fields})


def steps(count: int, sites: Sites = SITES, **fields: Any) -> list[Record]:
    """Steps of a training in which nothing happens: norms scatter, the loss falls."""
    drawn = np.exp(0.2 * np.random.default_rng(0).normal(size=(count, len(sites)))).astype(np.float32)
    return [
        make_record(
            sites,
            drawn[step],
            step=step,
            scalars={"loss": 5 / (1 + step / 20), "lr": 0.1},
            wall_time=1e9 + step,
            **fields,
        )
        for step in range(count)
    ]


def broken(count: int = 60, at: int = 40, sites: Sites = SITES, name: str = "encoder.norm") -> list[Record]:
    """The same with one NaN, in the parameter in the middle: a rule fires, its cause is found, the step is skipped.

    From step 10 to 19 a rule clips, and update ratios are measured at every fourth step.
    """
    found = []
    for step, record in enumerate(steps(count, sites)):
        norm = record.snapshot.norm.copy()
        fields: dict[str, Any] = {"scalars": record.snapshot.scalars, "wall_time": record.wall_time}
        if step % 4 == 0:
            ratios = np.linspace(1e-4, 1e-2, len(sites)).astype(np.float32)
            fields["columns"] = {"update_ratio": Column(ratios, np.ones(len(sites), bool))}
        if 10 <= step < 20:
            order = Order("exploding", "clip", False, sites.names[0], 1, 4.0, 2.0, 0.5)
            fields |= {"applied": 0.5, "decision": Decision(orders=frozenset({order}))}
        if step == at:
            norm[len(sites) // 2] = np.nan
            order = Order("non-finite", "skip_step", False, sites.names[len(sites) // 2], 1)
            event = make_event(
                step=at,
                sites=(sites.names[len(sites) // 2],),
                count=1,
                value=1.0,
                summary=f"Not finite: {name}.",
            )
            fields |= {"events": (event,), "decision": Decision(skip=True, orders=frozenset({order}))}
        made = make_record(sites, norm, step=step, **fields)
        found.append(made if step != at else with_cause(made, name))
    return found


def with_cause(record: Record, name: str) -> Record:
    """The same Record with the cause of its incident."""
    cause = Finding(
        "backward",
        "replay",
        record.snapshot.step,
        module=name,
        module_type="Norm",
        op="sqrt",
        frames=(Frame("train.py", 11, "forward", f"return torch.sqrt(x)  # {name}"),),
        rule="non-finite",
        incident="incident-1",
    )
    fields = {each: getattr(record, each) for each in record.__slots__}
    return Record(**{**fields, "findings": (cause,)})


def events(count: int) -> Sequence[Event]:
    """Firings of as many incidents, one a step."""
    made = (make_event(step=step) for step in range(count))
    return [
        Event(**{**{each: getattr(one, each) for each in one.__slots__}, "incident": f"i-{one.step}"})
        for one in made
    ]


def run_info(root: Path, **fields: Any) -> RunInfo:
    """As `make_run`."""
    return make_run(root, **fields)
