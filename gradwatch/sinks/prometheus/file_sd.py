"""Discovery by file: each training process puts itself on Prometheus' list of targets (`file_sd_configs`).

One file a process, so no lock is needed. It goes at a clean exit, at once. A process that was killed
stays on the list, so that `up == 0` can alert, and is taken off 15 minutes after that was noticed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradwatch.endpoint.address import Address
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.atomic_files import read_regular, write_whole
from gradwatch.runtime.process_identity import is_running, start_ticks

MOURNING_SECONDS = 900.0
_META = "__meta_gradwatch_"
_MOST_BYTES = 1 << 16
# Deeply nested brackets end in RecursionError.
_NOT_AN_ENTRY = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


def process_labels(run_id: str, rank: int, place: int) -> dict[str, str]:
    """Labels of every series of a process: a changed port must not start new series, so `instance` has none.

    Only of a second process of a rank (see `RunInfo.place`) there is a `process`: series of the first one go on.
    """
    labels, instance = {"run_id": run_id, "rank": str(rank)}, f"{run_id}/{rank}"
    if place:
        labels, instance = {**labels, "process": str(place)}, f"{instance}/{place}"
    return {**labels, "instance": instance}


def target_labels(run: RunInfo) -> dict[str, str]:
    """`process_labels` of this process."""
    return process_labels(run.run_id, run.rank, run.place)


def target_address(address: Address, node: str) -> str:
    """HOST:PORT to scrape: an endpoint open to all is reached by the machine's name."""
    if address.host in ("0.0.0.0", "::"):
        return f"{node}:{address.port}"
    return str(address)


def write_target(directory: str, run: RunInfo, address: Address) -> str:
    """Put this process on the list and return its file; whole or not at all. Raises OSError.

    Readable by others as far as the umask allows: Prometheus runs as a user of its own. Labels that begin
    with `__meta_` are dropped by Prometheus; they say whose entry this is.
    """
    os.makedirs(directory, exist_ok=True)
    sweep(directory, time.time())
    node = run.host or platform.node()
    _replace_dead(directory, node, address.port)
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", run.run_id)[:128]
    path = os.path.join(directory, f"gradwatch-{name}-rank{run.rank_and_place}.json")
    pid = os.getpid()
    meta = {f"{_META}node": node, f"{_META}pid": str(pid), f"{_META}started": str(start_ticks(pid))}
    groups = [{"targets": [target_address(address, node)], "labels": {**target_labels(run), **meta}}]
    write_whole(path, json.dumps(groups) + "\n", 0o644)
    return path


def remove_target(path: str, address: Address) -> None:
    """Take what listened on `address` off the list, unless another process or watch has written its own entry."""
    if _labels(path).get(f"{_META}pid") == str(os.getpid()) and _port(path) == str(address.port):
        with suppress(OSError):
            os.unlink(path)


def strangers(directory: str) -> list[str]:
    """Names in the list's folder that look like entries and cannot be read as one: junk, a FIFO, a link."""
    return [path.name for path in _entries(directory) if not _labels(str(path))]


def sweep(directory: str, now: float) -> None:
    """Mark the entries of dead processes of this machine, and remove those dead for 15 minutes.

    `now` is Unix time. What cannot be read or written is left alone: another program may have put it there.
    """
    for path in _entries(directory):
        labels = _labels(str(path))
        pid, started = _number(labels, "pid"), _number(labels, "started")
        if labels.get(f"{_META}node") != platform.node() or not pid or is_running(pid, started):
            continue
        with suppress(*_NOT_AN_ENTRY):
            noticed = _number(labels, "dead_since")
            if not noticed:
                groups = _groups(str(path))
                groups[0]["labels"][f"{_META}dead_since"] = str(int(now))
                write_whole(path, json.dumps(groups) + "\n", 0o644)
            elif now - noticed > MOURNING_SECONDS:
                path.unlink()


def _replace_dead(directory: str, node: str, port: int) -> None:
    """Remove entries of dead processes of this machine that had this port: the new one would be scraped as them."""
    for path in _entries(directory):
        labels = _labels(str(path))
        if labels.get(f"{_META}node") == node and _number(labels, "dead_since"):
            with suppress(*_NOT_AN_ENTRY):
                if _port(str(path)) == str(port):
                    path.unlink()


def _entries(directory: str) -> list[Path]:
    return sorted(Path(directory).glob("gradwatch-*-rank*.json"))


def _labels(path: str) -> dict[str, str]:
    """The labels of an entry; empty where the file is gone, half-written or another program's."""
    try:
        return {str(key): str(value) for key, value in _groups(path)[0]["labels"].items()}
    except _NOT_AN_ENTRY:
        return {}


def _port(path: str) -> str:
    """The port of an entry; "" where the file is none."""
    try:
        (target,) = _groups(path)[0]["targets"]
        return str(target.rpartition(":")[2])
    except _NOT_AN_ENTRY:
        return ""


def _groups(path: str) -> Any:
    """The document in an entry's file; raises one of `_NOT_AN_ENTRY`."""
    return json.loads(read_regular(path, _MOST_BYTES))


def _number(labels: dict[str, str], name: str) -> int:
    text = labels.get(_META + name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
