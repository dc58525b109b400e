"""A copy of the working folder for a script that is to be broken: what it writes there is thrown away."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradwatch.errors import GradwatchError

LARGEST_FILE = 1 << 20
MOST_BYTES = 64 << 20
MOST_FILES = 4000
LEFT_OUT = frozenset({".git", "__pycache__", "node_modules", "gradwatch-runs", "wandb", "mlruns"})
"""Folders that no training reads."""


@dataclass(slots=True)
class Copied:
    """Result of a copy: files copied, and the paths, from the folder, of those that were too many or too large."""

    files: int = 0
    size: int = 0
    left_out: list[str] = field(default_factory=list)


def copy_folder(source: Path, target: Path, links: Sequence[str]) -> Copied:
    """Copy the small files of `source` to `target`, and link there what `links` name, paths from `source`.

    Raises GradwatchError for a link to nothing.
    """
    copied = Copied()
    linked = {os.path.normpath(link) for link in links}
    for path in _files(source, linked):
        relative = path.relative_to(source)
        size = path.stat().st_size
        if size > LARGEST_FILE or copied.files >= MOST_FILES or copied.size + size > MOST_BYTES:
            copied.left_out.append(str(relative))
            continue
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target / relative)
        copied.files += 1
        copied.size += size
    for link in linked:
        place = source / link
        if os.path.isabs(link) or link.startswith("..") or not place.exists():
            raise GradwatchError(f"--link {link}: there is no such file or folder below {source}")
        (target / link).parent.mkdir(parents=True, exist_ok=True)
        (target / link).symlink_to(place)
    return copied


def _files(source: Path, linked: set[str]) -> Iterator[Path]:
    """The regular files below `source`; no links out of it, no virtual environments, nothing that is linked."""
    for folder, folders, names in os.walk(source):
        here = Path(folder)
        near = os.path.relpath(folder, source)
        folders[:] = sorted(
            name
            for name in folders
            if name not in LEFT_OUT
            and os.path.normpath(os.path.join(near, name)) not in linked
            and not (here / name / "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            path = here / name
            if path.is_file() and os.path.normpath(os.path.join(near, name)) not in linked:
                yield path
