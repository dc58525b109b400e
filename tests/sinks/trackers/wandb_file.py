"""Reads the `.wandb` file of an offline run: LevelDB's log format around W&B's own protobuf."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK, _IDENT, _HEADER = 32768, 7, 7
_FULL, _LAST = 1, 4


@dataclass
class OfflineRun:
    """What a run would have sent to the server."""

    name: str = ""
    project: str = ""
    group: str = ""
    job_type: str = ""
    exit_code: int | None = None
    folder: Path = Path()
    rows: list[dict[str, Any]] = field(default_factory=list)
    alerts: list[tuple[str, str, str]] = field(default_factory=list)
    step_metrics: dict[str, str] = field(default_factory=dict)


def offline_runs(directory: Path) -> list[OfflineRun]:
    """Every run that was made offline below `directory`."""
    return [_read(path) for path in sorted(directory.glob("wandb/offline-run-*/*.wandb"))]


def _read(path: Path) -> OfflineRun:
    from wandb.proto.wandb_internal_pb2 import Record  # half a second: not for all who collect the tests

    run = OfflineRun(folder=path.parent / "files")
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.name, run.project = record.run.display_name, record.run.project
            run.group, run.job_type = record.run.run_group, record.run.job_type
        elif kind == "history":
            items = record.history.item
            run.rows.append(
                {item.key or "/".join(item.nested_key): _value(item.value_json) for item in items}
            )
        elif kind == "alert":
            run.alerts.append((record.alert.title, record.alert.text, record.alert.level))
        elif kind == "metric":
            run.step_metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def _value(text: str) -> Any:
    return json.loads(text)


def _records(data: bytes) -> Iterator[bytes]:
    at, parts = _IDENT, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""
