"""Files and folders that others read and write: replaced whole or not at all, read only where they are regular."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_SPECIAL = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def replacing(
    path: str | os.PathLike[str], mode: int = 0o600, *, durable: bool = False, temporary: str | None = None
) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` at the end of the block; after an exception nothing is left of it.

    A reader sees the old file or the new one. `mode` are its permissions, less the umask; `durable` waits until it is
    on the disk. It is written beside `path` under a name of its own that ends in `.tmp` (Prometheus reads `*.json`,
    its collectors `*.prom`), or as `temporary`, where one left by a killed process is written over. Raises OSError.
    """
    # Strings: pathlib interns each part of a path, and CPython's table of interned strings keeps a place for every one
    # that is gone until it doubles, to 8 MB: a file written each second would see to that.
    target = os.fspath(path)
    fresh = f"{target}.{os.urandom(8).hex()}.tmp" if temporary is None else temporary
    new = os.O_EXCL if temporary is None else os.O_TRUNC
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | new | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(fresh, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(fresh)
        raise


def write_whole(
    path: str | os.PathLike[str], content: str | bytes, mode: int = 0o600, *, durable: bool = False
) -> None:
    """Replace the file by one with this content, text as UTF-8; see `replacing`."""
    with replacing(path, mode, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def not_replaceable(path: str | os.PathLike[str]) -> str:
    """The reason why a file that a user has named is not to be written; "" for a new name, and for a regular file."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ""  # what is wrong with the folder is reported when it is written
    if stat.S_ISLNK(mode):
        return "it is a link, which is not written through"
    return "" if stat.S_ISREG(mode) else f"it is {_SPECIAL.get(stat.S_IFMT(mode), 'no regular file')}"


def write_named(path: str | os.PathLike[str], content: str | bytes, mode: int = 0o644) -> None:
    """Write a file that a user has named: a new one, or a regular one, which keeps its permissions.

    Raises OSError, with the reason as its `strerror`, for anything else: to replace a device is to destroy it.
    """
    if reason := not_replaceable(path):
        raise OSError(errno.EINVAL, reason, os.fspath(path))
    kept = stat.S_IMODE(os.lstat(path).st_mode) if os.path.lexists(path) else None
    with replacing(path, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if kept is not None:
            os.fchmod(file.fileno(), kept)


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Up to `most_bytes` of a regular file. Raises OSError for anything else.

    Others may write to the folder: a FIFO would wait for a writer for ever, and a link may lead anywhere.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{os.fspath(path)} is not a regular file")
        return file.read(most_bytes)


def make_directory(directory: Path) -> None:
    """Make a run directory: 0700, its name durable, with a `.gitignore` of its own. Raises OSError.

    The parent gets one as well where it is made here; a folder that the user already had is left as it is.
    """
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
        sync_directory(each.parent)
    for each in {directory, *(each for each in missing if each == directory.parent)}:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(FileExistsError):
            fd = os.open(each / ".gitignore", flags, 0o600)
            try:
                os.write(fd, b"*\n")
            finally:
                os.close(fd)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
