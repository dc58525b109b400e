"""A bundle on its way to the disk: all of it or nothing, readable by its owner only, never over another one."""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from gradwatch.incidents.bundle.bundle_folders import FOLDER
from gradwatch.incidents.bundle.incident_json import TENSORS
from gradwatch.runtime.atomic_files import make_directory, sync_directory

_TAKEN = {errno.EEXIST, errno.ENOTEMPTY}
_FRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_bundle(run: Path, name: str, files: Mapping[str, bytes], tensors: Callable[[Path], None]) -> Path:
    """Write a bundle into the folder of a run and return its own folder; `tensors` writes its tensors to a path.

    `name`, or `name.2`, `name.3`, … where that is taken. The folder is made under another name (0700, files 0600) and
    renamed when all of it is on the disk, so that no reader sees half a bundle. Raises
    `OSError`, and leaves nothing then; `NotADirectoryError` where the place is a link.
    """
    make_directory(run)
    place = run / FOLDER
    place.mkdir(mode=0o700, exist_ok=True)
    os.close(os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
    fresh = place / f".{name}.{secrets.token_hex(4)}.new"
    fresh.mkdir(mode=0o700)
    try:
        for file, content in files.items():
            _write(fresh / file, content)
        # Made here for its mode; a library that replaces it does so in a folder of this bundle's own.
        os.close(os.open(fresh / TENSORS, _FRESH, 0o600))
        tensors(fresh / TENSORS)
        _sync(fresh / TENSORS)
        sync_directory(fresh)
        found = _renamed(fresh, place, name)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    sync_directory(place)
    return found


def _write(path: Path, content: bytes) -> None:
    with open(os.open(path, _FRESH, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Make a file that a library wrote readable by its owner only, and sync it to disk."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _renamed(fresh: Path, place: Path, name: str) -> Path:
    for number in itertools.count(1):
        target = place / (name if number == 1 else f"{name}.{number}")
        try:
            # Onto a folder only an empty one gives way, onto a file or a link nothing does.
            os.rename(fresh, target)
        except OSError as error:
            if error.errno not in (*_TAKEN, errno.ENOTDIR):
                raise
        else:
            return target
    raise AssertionError("unreachable")
