"""The files of one journal on disk: append whole frames or nothing, never share a file, never exceed the cap.

Every method may raise `OSError`; after one, the object is ready to be tried again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gradwatch.journal.crash_safe_frames import encode_frame
from gradwatch.journal.reader import JournalName
from gradwatch.journal.retention import RESERVE, Retention
from gradwatch.runtime.atomic_files import make_directory

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class JournalFiles:
    """Appends payloads to the journal of one rank, in `directory`; `retention` keeps what is sealed.

    `preamble(attempt, segment)` gives the payloads every file begins with (run, sites). The head is the first
    free `rank{rank}-attempt{n}.gwj` with n ≥ `attempt`, taken with O_EXCL: two processes never share a file.
    `generation` changes whenever a file is opened or given up: what was not synced before that may be lost.

    Space is allocated ahead of the end of the file and always more than `RESERVE`, so that a disk that fills
    up refuses the next ordinary append while there is room left for essential ones.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        rank: int,
        attempt: int,
        retention: Retention,
        preamble: Callable[[int, int], list[bytes]],
    ) -> None:
        self.directory = Path(directory)
        self.path: Path | None = None  # of the file begun last
        self.generation = 0
        self.retention = retention
        self._preamble = preamble
        self._name = JournalName(rank, attempt)
        self._started = False
        self._fd: int | None = None
        self._file = 0, 0  # device and inode of the file that was opened
        self._fallocates = True
        self._dirty = False
        self._end = self._allocated = self._sequence = self._salt = self._sampled = 0

    @property
    def attempt(self) -> int:
        """The number in the name of the files, once the first is open."""
        return self._name.attempt

    @property
    def due_for_rotation(self) -> bool:
        """True if the present file has reached its size."""
        return self._fd is not None and self._end >= self.retention.segment_bytes(self._name.segment)

    def ensure_open(self) -> None:
        """Begin a file where none is open."""
        self._release_if_closed()
        if self._fd is None:
            self.path = None
            self._open()

    def append(self, payloads: list[bytes], essential: bool = False, sampled: bool = False) -> None:
        """Write the payloads as consecutive frames, all of them or none.

        `essential` may use the reserve; `sampled` may be thinned out first when the cap is reached.
        """
        self.ensure_open()
        self._append(payloads, essential)
        self._sampled += sum(map(len, payloads)) if sampled else 0

    def _append(self, payloads: list[bytes], essential: bool) -> None:
        frames = [encode_frame(each, self._salt, self._sequence + at) for at, each in enumerate(payloads)]
        data = b"".join(frames)
        self._allocate(len(data), essential)
        self._write(data)
        self._end += len(data)
        self._sequence += len(frames)
        self._dirty = True

    def sync(self) -> None:
        """Return once everything appended is on the disk.

        After a failed fsync the kernel may have dropped the very pages it could not write and reports success
        the next time, so the file is given up and the next append begins a new one.
        """
        self._release_if_closed()
        if self._fd is None or not self._dirty:
            return
        try:
            os.fdatasync(self._fd)
            if os.fstat(self._fd).st_nlink == 0:
                self._started = False  # the directory may be another's by now: take a free head again
                raise FileNotFoundError(errno.ENOENT, "the journal was deleted", str(self.path))
        except OSError:
            self.abandon()
            raise
        self._dirty = False

    def rotate(self) -> None:
        """Seal the present file; the next append begins another."""
        self._release_if_closed()
        if self._fd is None:
            return
        self.sync()
        os.ftruncate(self._fd, self._end)
        self._allocated = self._end
        self.abandon()

    def close(self) -> None:
        """Cut the reserve off, sync, close."""
        self._release_if_closed()
        if self._fd is None:
            return
        try:
            os.ftruncate(self._fd, self._end)
            os.fdatasync(self._fd)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the present file as it is."""
        fd, self._fd = self._fd, None
        if fd is not None:
            self.generation += 1
            if self._is_ours(fd):
                os.close(fd)
            if self.path is not None:
                self.retention.seal(self.path, max(self._end, self._allocated), self._sampled)

    def discard(self) -> None:
        """Release the parent's file in a forked child, and touch nothing on the disk."""
        fd, self._fd = self._fd, None
        if fd is not None and self._is_ours(fd):
            os.close(fd)

    def _release_if_closed(self) -> None:
        """Begin anew where the script has closed all descriptors, as daemons do: another file may have its number."""
        if self._fd is not None and not self._is_ours(self._fd):
            self.abandon()

    def _is_ours(self, fd: int) -> bool:
        try:
            found = os.fstat(fd)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._file

    def _allocate(self, size: int, essential: bool) -> None:
        wanted = self._end + size + RESERVE
        if wanted <= self._allocated or not self._fallocates:
            return
        assert self._fd is not None
        for target in (wanted + self.retention.ahead_bytes, wanted):
            try:
                os.posix_fallocate(self._fd, self._end, target - self._end)
            except OSError as error:
                if error.errno in _NO_FALLOCATE:
                    self._fallocates = False
                    return
                if error.errno not in _FULL:
                    raise
                refusal = error
            else:
                self._allocated = target
                return
        if not essential or self._end + size > self._allocated:
            raise refusal

    def _write(self, data: bytes) -> None:
        assert self._fd is not None
        view, at = memoryview(data), 0
        try:
            while at < len(data):
                at += os.pwrite(self._fd, view[at:], self._end + at)
        except OSError:
            # No torn frame stays behind. Where even this fails, the next append overwrites it.
            os.ftruncate(self._fd, self._end)
            self._allocated = self._end
            raise

    def _open(self) -> None:
        """Begin the next file: create it, write its preamble, make its name durable."""
        make_directory(self.directory)
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._create(fd)
            try:
                self._begin()
                os.fsync(fd)
            except BaseException:
                self.abandon()
                os.unlink(str(self._name), dir_fd=fd)
                raise
        finally:
            os.close(fd)
        self.path = self.directory / str(self._name)
        self._started = True
        self.generation += 1

    def _begin(self) -> None:
        preamble = self._preamble(self._name.attempt, self._name.segment)
        size = sum(map(len, preamble))
        if self.retention.max_bytes and size > self.retention.max_bytes // 4:
            raise ValueError(f"the names of the parameters take {size} bytes, over a quarter of max_bytes")
        self._append(preamble, essential=False)

    def _create(self, directory_fd: int) -> None:
        """The first free name: the next number of this journal, or the next attempt for a head."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        name = replace(self._name, segment=self._name.segment + 1 if self._started else 0)
        while self._fd is None:
            try:
                self._fd = os.open(str(name), flags, 0o600, dir_fd=directory_fd)
                found = os.fstat(self._fd)
                self._file = found.st_dev, found.st_ino
            except FileExistsError:
                name = (
                    replace(name, segment=name.segment + 1)
                    if self._started
                    else replace(name, attempt=name.attempt + 1)
                )
        self._name = name
        self._salt = int.from_bytes(os.urandom(4), "little")
        self._end = self._allocated = self._sequence = self._sampled = 0
        self._dirty = False
