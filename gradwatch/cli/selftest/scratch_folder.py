"""A copy of the working folder for a script that is to be broken: what it writes there is thrown away."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from gradwatch.errors import GradwatchError

LARGEST_FILE = 1 << 20
MOST_BYTES = 64 << 20
MOST_FILES = 4000
MADE_ANEW = frozenset({"__pycache__"})
"""Folders that Python makes by itself."""
LEFT_OUT = frozenset({".git", "node_modules", "gradwatch-runs", "wandb", "mlruns"})
"""Folders that a training seldom reads."""


@dataclass(slots=True)
class Copied:
    """Result of a copy: files copied, and the paths, from the folder, of what is not in it.

    `left_out` are files that were too many or too large, `symlinks` links to folders, `by_rule` folders of LEFT_OUT and
    virtual environments.
    """

    files: int = 0
    size: int = 0
    left_out: list[str] = field(default_factory=list)
    symlinks: list[str] = field(default_factory=list)
    by_rule: list[str] = field(default_factory=list)


def copy_folder(source: Path, target: Path, links: Sequence[str]) -> Copied:
    """Copy the small files of `source` to `target`, and link there what `links` name, paths from `source`.

    Raises GradwatchError for a link to nothing, to the whole folder, or into another link.
    """
    linked = _checked(source, links)
    copied = Copied()
    for folder, folders, names in os.walk(source):
        near = os.path.relpath(folder, source)
        folders[:] = [
            name for name in sorted(folders) if _enters(copied, source, _joined(near, name), linked)
        ]
        for name in sorted(names):
            path = _joined(near, name)
            if path not in linked and (source / path).is_file():
                _copy(copied, source, target, path)
    for link in linked:
        (target / link).parent.mkdir(parents=True, exist_ok=True)
        (target / link).symlink_to(source / link)
    return copied


def _joined(near: str, name: str) -> str:
    return os.path.normpath(os.path.join(near, name))


def _checked(source: Path, links: Sequence[str]) -> list[str]:
    linked = sorted({os.path.normpath(link) for link in links})
    for link in linked:
        if link == os.curdir:
            raise GradwatchError(f"--link {link}: that is the whole folder; name what the script reads in it")
        if os.path.isabs(link) or PurePath(link).parts[0] == os.pardir or not (source / link).exists():
            raise GradwatchError(f"--link {link}: there is no such file or folder below {source}")
        around = [one for one in linked if one != link and PurePath(link).is_relative_to(one)]
        if around:
            raise GradwatchError(
                f"--link {link}: it lies in {around[0]}, which is linked as well; leave one out"
            )
    return linked


def _enters(copied: Copied, source: Path, path: str, linked: Sequence[str]) -> bool:
    """True if a folder is copied; else it is noted why not."""
    name = os.path.basename(path)
    if path in linked or name in MADE_ANEW:
        return False
    if name in LEFT_OUT or (source / path / "pyvenv.cfg").exists():
        copied.by_rule.append(path)
    elif (source / path).is_symlink():
        copied.symlinks.append(path)
    else:
        return True
    return False


def _copy(copied: Copied, source: Path, target: Path, path: str) -> None:
    size = (source / path).stat().st_size
    if size > LARGEST_FILE or copied.files >= MOST_FILES or copied.size + size > MOST_BYTES:
        copied.left_out.append(path)
        return
    (target / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / path, target / path)
    copied.files += 1
    copied.size += size
