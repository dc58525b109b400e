"""The health tag: a small file beside each journal which says whether the weights of its process are healthy.

Every watch writes one of its own, so that none hides what another says. A tag counts until a later one takes its
place: of the same rank (or with too few ranks to have that one any more), begun when it had been written for the last
time and its process had ended, and either of another launch, which resumed the run or began it anew, or about weights
of the same names and sizes. So the tags of watches side by side, of a forked child that trains and of different models
in turn count together; those of an earlier attempt, and of a model that was made anew, do not.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwatch.checkpoint.health_tracker import joined, least
from gradwatch.records.record import CheckpointHealth
from gradwatch.runtime.atomic_files import read_regular, write_whole
from gradwatch.runtime.process_identity import is_running

FORMAT = 1
MOST_BYTES = 16 << 20
_NAME = re.compile(r"checkpoint-health-rank\d+(?:-attempt(?P<attempt>\d+))?\.json")


@dataclass(frozen=True, slots=True)
class HealthTag:
    """Words of one watch on its weights as they were after `step` (-1: before any).

    `attempt` is the number in its journal's name (None: an earlier version wrote the tag, one a rank), `began` when the
    watch began and `written` when it said this (Unix seconds), `ended` whether these are its last words. `launch` names
    what was started together; `host`, `pid` and `started` (ticks) are its process, by which `program` runs: forked
    children have that in common. `weights` holds a digest for each set of parameters that an optimizer moved.
    """

    rank: int
    step: int
    health: CheckpointHealth
    attempt: int | None = 0
    world_size: int = 1
    began: float = 0.0
    written: float = 0.0
    ended: bool = False
    launch: str = ""
    program: str = ""
    host: str = ""
    pid: int = 0
    started: int = 0
    weights: frozenset[str] = frozenset()

    def replaced_by(self, later: HealthTag) -> bool:
        """True if `later` counts in the place of this one."""
        if not (later.rank == self.rank or self.rank >= later.world_size) or self.at_work:
            return False
        # Clocks jump, and those of two machines differ: the numbers of attempts do not.
        if later.began < self.written or (
            (self.attempt or 0) > (later.attempt or 0) and later.rank == self.rank
        ):
            return False
        if not self.launch or later.launch != self.launch:
            return True
        return (self.ended or later.program != self.program) and self.weights <= later.weights

    @property
    def at_work(self) -> bool:
        """True if its process is seen to run, on this machine, and may yet train."""
        here = self.host and self.host == platform.node()
        return not self.ended and bool(here) and is_running(self.pid, self.started)


def tag_name(rank: int, attempt: int | None) -> str:
    """The file of one watch, in the run's own folder."""
    return f"checkpoint-health-rank{rank}{'' if attempt is None else f'-attempt{attempt}'}.json"


def write_tag(directory: str | os.PathLike[str], tag: HealthTag) -> None:
    """Replace this watch's tag in one piece: a reader sees the old one or the new one. Raises `OSError`."""
    health = tag.health
    document = {
        "format": FORMAT,
        "rank": tag.rank,
        "step": tag.step,
        "healthy": health.healthy,
        "last_healthy_step": health.last_healthy_step,
        "weights_step": health.weights_step,
        "reasons": list(health.reasons),
        "replaced": list(health.replaced),
        "world_size": tag.world_size,
        "began": tag.began,
        "written": tag.written,
        "ended": tag.ended,
        "launch": tag.launch,
        "program": tag.program,
        "host": tag.host,
        "pid": tag.pid,
        "started": tag.started,
        "weights": sorted(tag.weights),
    }
    content = json.dumps(document, allow_nan=False)
    write_whole(os.path.join(directory, tag_name(tag.rank, tag.attempt)), content, durable=True)


def read_tag(directory: str | os.PathLike[str]) -> CheckpointHealth:
    """Combine the health tags of all ranks in a run's folder; for savers and scripts outside the training.

    Watches side by side, forked children that train and different models in turn are as healthy as the worst of them;
    those of an attempt that was resumed, or begun anew, say nothing any more. The journal sink writes them in its own
    thread: within a second or so of a change, and of a change for the worse together with its incident. Raises
    `FileNotFoundError` where no rank wrote one, `ValueError` for a file that is none of gradwatch's.
    """
    return joined(tag.health for tag in sorted_out(read_tags(directory))[0])


def read_tag_step(directory: str | os.PathLike[str]) -> int | None:
    """The step after which weights are as `read_tag` says: the one that all ranks had reached, None = not known.

    Raises as `read_tag` does.
    """
    return step_of_all(sorted_out(read_tags(directory))[0])


def step_of_all(tags: Iterable[HealthTag]) -> int | None:
    """The step that all had reached, None = not known."""
    return least([None if tag.step < 0 else tag.step for tag in tags])


def read_tags(directory: str | os.PathLike[str]) -> list[HealthTag]:
    """All health tags of a folder, by name; raises as `read_tag` does."""
    found = [(path, _NAME.fullmatch(path.name)) for path in sorted(Path(directory).iterdir())]
    tags = [_read(path, match["attempt"]) for path, match in found if match and not path.is_dir()]
    if not tags:
        raise FileNotFoundError(f"no checkpoint-health-rank*.json in {directory}")
    return tags


def sorted_out(tags: Iterable[HealthTag]) -> tuple[list[HealthTag], list[HealthTag]]:
    """The tags that count, and those that a later one has replaced; the earliest watch first."""
    ordered = sorted(tags, key=lambda tag: (tag.began, tag.attempt or 0))
    counting: list[HealthTag] = []
    replaced: list[HealthTag] = []
    for at, tag in enumerate(ordered):
        gone = any(tag.replaced_by(later) for later in reversed(ordered[at + 1 :]))
        (replaced if gone else counting).append(tag)
    return counting, replaced


def _content(path: Path) -> bytes:
    """The bytes of a file; others may put a FIFO or a link in the place of one."""
    try:
        return read_regular(path, MOST_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(str(error)) from error


def _read(path: Path, attempt: str | None) -> HealthTag:
    try:
        found: dict[str, Any] = json.loads(_content(path))
        last, looked = found["last_healthy_step"], found.get("weights_step")  # earlier versions never looked
        if found["format"] != FORMAT or not isinstance(found["healthy"], bool):
            raise ValueError(f"format {found['format']!r}")
        health = CheckpointHealth(
            found["healthy"],
            None if last is None else int(last),
            tuple(map(str, found["reasons"])),
            None if looked is None else int(looked),
            tuple(map(str, found.get("replaced", ()))),
        )
        return HealthTag(
            rank=int(found.get("rank", 0)),
            step=int(found.get("step", -1)),
            health=health,
            attempt=None if attempt is None else int(attempt),
            world_size=int(found.get("world_size", 1)),
            began=float(found.get("began", 0.0)),
            written=float(found["written"] if "written" in found else path.stat().st_mtime),
            ended=bool(found.get("ended", False)),
            launch=str(found.get("launch", "")),
            program=str(found.get("program", "")),
            host=str(found.get("host", "")),
            pid=int(found.get("pid", 0)),
            started=int(found.get("started", 0)),
            weights=frozenset(map(str, found.get("weights", ()))),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a checkpoint health tag of this version: {error}") from error
