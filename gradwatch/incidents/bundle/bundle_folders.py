"""Folders of the bundles of a run, and their names."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

FOLDER = "bundles"
LONGEST = 128
_SUFFIX = re.compile(r"(?P<rank>-rank\d+)?(?:-attempt\d+)?(?:\.\d+)?")


def folder_name(incident: str, rank: int = 0, world_size: int = 1, attempt: int = 0) -> str:
    """The folder of an incident: its id, then the rank where there are several, then the attempt after the first."""
    of_rank = f"-rank{rank}" if world_size > 1 else ""
    return safe(incident) + of_rank + (f"-attempt{attempt}" if attempt else "")


def safe(incident: str) -> str:
    """An id as the name of one folder, wherever it comes from; ids of rule files are as they are."""
    kept = "".join(char if char.isascii() and (char.isalnum() or char in "-_.") else "-" for char in incident)
    if kept == incident and 0 < len(kept) <= LONGEST and not kept.startswith("."):
        return kept
    digest = hashlib.sha256(incident.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{kept[:LONGEST].lstrip('.')}~{digest}"


def bundles_of(run: Path, incident: str) -> list[Path]:
    """The bundles of one incident in the folder of a run, of every rank and attempt."""
    name = safe(incident)
    return [
        path
        for path in _bundles(run)
        if path.name.startswith(name) and _SUFFIX.fullmatch(path.name[len(name) :])
    ]


def count(run: Path, rank: int, world_size: int) -> int:
    """Number of bundles of this rank in the folder of a run."""
    if world_size == 1:
        return len(_bundles(run))
    own = re.compile(rf".*-rank{rank}(?:-attempt\d+)?(?:\.\d+)?")
    return sum(own.fullmatch(path.name) is not None for path in _bundles(run))


def _bundles(run: Path) -> list[Path]:
    """Every folder that was finished: one that is being written begins with a dot."""
    try:
        found = sorted((run / FOLDER).iterdir())
    except OSError:
        return []
    return [
        path for path in found if not path.name.startswith(".") and path.is_dir() and not path.is_symlink()
    ]
