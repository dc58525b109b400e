"""Frames: the crash-safe envelope of a journal, and the scan that survives any damage.

A journal file is a sequence of frames and nothing else. One frame, little-endian:

    offset  size  field
         0     4  magic, 8F 47 57 31 (0x8F never occurs in the ASCII JSON of a payload)
         4     4  salt, one random number per file: a stale block of another journal is never taken for ours
         8     4  sequence number of the frame in its file, from 0: a gap says how many frames are missing
        12     4  length of the payload, 1 .. 2^26
        16     4  CRC-32 of the payload
        20     4  CRC-32 of the 20 bytes above
        24     …  payload

The header has a checksum of its own so that a damaged payload can be stepped over exactly, and only a damaged
header needs a search for the next magic; the scan is linear in the file whatever the file holds. A run of
zeros up to the end of the file is the space a live journal holds in reserve: a clean end, not damage.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass

MAGIC = b"\x8fGW1"
MAX_PAYLOAD = 1 << 26
_FIELDS = struct.Struct("<4sIIII")
_CHECK = struct.Struct("<I")
HEADER_SIZE = _FIELDS.size + _CHECK.size
_CHUNK = 1 << 20


def encode_frame(payload: bytes, salt: int, sequence: int) -> bytes:
    """The frame around `payload`; `ValueError` where its length is not in 1 .. 2^26 bytes."""
    if not 0 < len(payload) <= MAX_PAYLOAD:
        raise ValueError(f"a payload has 1 to {MAX_PAYLOAD} bytes, not {len(payload)}")
    fields = _FIELDS.pack(MAGIC, salt, sequence, len(payload), zlib.crc32(payload))
    return fields + _CHECK.pack(zlib.crc32(fields)) + payload


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame whose checksums hold. `offset` is where it starts in its file."""

    offset: int
    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a journal that hold no readable record.

    `offset` and `length` in bytes; `reason` is "torn" (the file ends inside a frame), "checksum" (a payload
    does not match), "garbage" (no frame begins here), "repeated" (a sequence number seen before) or
    "unreadable" (the checksums hold, the content makes no sense). `path` is the file.
    """

    path: str
    offset: int
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Header:
    salt: int
    sequence: int
    length: int
    checksum: int


def _parse_header(data: bytes) -> _Header | None:
    if len(data) < HEADER_SIZE:
        return None
    magic, salt, sequence, length, checksum = _FIELDS.unpack_from(data)
    if magic != MAGIC or _CHECK.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(data[: _FIELDS.size]):
        return None
    return _Header(salt, sequence, length, checksum) if 0 < length <= MAX_PAYLOAD else None


class FrameScanner:
    """Reads the frames of one open file in order; damage is reported and stepped over, never guessed at.

    `fd` stays the caller's. `missing` counts the frames that gaps in the sequence prove to have existed.
    Reading is by `pread`, never `mmap`: the writer may truncate the file at any moment, and that would be a
    SIGBUS.
    """

    def __init__(self, fd: int, path: str = "") -> None:
        self.path = path
        self.offset = 0
        self.missing = 0
        self._fd = fd
        self._salt: int | None = None
        self._expected = 0
        self._suspect = -1
        self._growing = False
        self._buffer = b""
        self._buffer_offset = 0

    @property
    def in_doubt(self) -> bool:
        """True if the last read stopped at bytes that the next one will find damaged, unless they change."""
        return self._suspect >= 0

    def skip_to(self, offset: int) -> None:
        """Read on from this offset in bytes, which need not be the start of a frame."""
        self.offset = offset

    def read(self, live: bool = False) -> Frame | Damage | None:
        """The next frame or damage; None at the end.

        With `live` the file may be growing: bytes that make no frame yet are waited for (None), and count as
        damage only when a later call still finds them so although good frames follow.
        """
        if live or self._growing:  # the last read may have been before the file's last bytes were written
            self._buffer = b""
        self._growing = live
        size = os.fstat(self._fd).st_size
        header = self._header_at(self.offset)
        if header is None:
            return self._resync(size, live)
        end = self.offset + HEADER_SIZE + header.length
        payload = self._bytes(self.offset + HEADER_SIZE, header.length)
        if len(payload) < header.length:
            return None if live else self._skip(max(size, self.offset + 1), "torn")
        if zlib.crc32(payload) != header.checksum:
            if live and not self._confirmed(self._header_at(end) is not None):
                return None
            return self._skip(end, "checksum")
        return self._accept(header, payload, end)

    def _accept(self, header: _Header, payload: bytes, end: int) -> Frame | Damage:
        if header.sequence < self._expected:
            return self._skip(end, "repeated")
        frame = Frame(self.offset, header.sequence, payload)
        self.missing += header.sequence - self._expected
        self._expected, self._salt, self.offset, self._suspect = header.sequence + 1, header.salt, end, -1
        return frame

    def _header_at(self, offset: int) -> _Header | None:
        header = _parse_header(self._bytes(offset, HEADER_SIZE))
        return header if header is None or self._salt in (None, header.salt) else None

    def _resync(self, size: int, live: bool) -> Damage | None:
        """Step to the next plausible header; a tail of zeros is the end."""
        if self.offset >= size:
            return None
        found = self._find_header(self.offset + 1, size)
        if found is not None:
            return self._skip(found, "garbage") if not live or self._confirmed(True) else None
        if live or self._zeros(self.offset, size):
            return None
        tail = self._bytes(self.offset, HEADER_SIZE)
        torn = len(tail) < HEADER_SIZE and MAGIC.startswith(tail[: len(MAGIC)])
        return self._skip(size, "torn" if torn else "garbage")

    def _confirmed(self, followed: bool) -> bool:
        """True if a live reader has found this very damage before, with good frames behind it."""
        seen, self._suspect = self._suspect, self.offset if followed else -1
        return followed and seen == self.offset

    def _skip(self, end: int, reason: str) -> Damage:
        damage = Damage(self.path, self.offset, end - self.offset, reason)
        self.offset, self._suspect = end, -1
        return damage

    def _find_header(self, start: int, size: int) -> int | None:
        while start < size:
            chunk = self._bytes(start, min(_CHUNK, size - start))
            at = chunk.find(MAGIC)
            while at >= 0:
                if self._header_at(start + at) is not None:
                    return start + at
                at = chunk.find(MAGIC, at + 1)
            if len(chunk) < len(MAGIC):
                return None
            start += len(chunk) - len(MAGIC) + 1
        return None

    def _zeros(self, start: int, size: int) -> bool:
        while start < size:
            chunk = self._bytes(start, min(_CHUNK, size - start))
            if not chunk or chunk.count(0) != len(chunk):
                return not chunk
            start += len(chunk)
        return True

    def _bytes(self, offset: int, length: int) -> bytes:
        """`length` bytes at `offset`, fewer at the end of the file; served from a buffer of 1 MiB."""
        at = offset - self._buffer_offset
        if at >= 0 and at + length <= len(self._buffer):
            return self._buffer[at : at + length]
        if length >= _CHUNK:
            return self._pread(offset, length)
        self._buffer, self._buffer_offset = self._pread(offset, _CHUNK), offset
        return self._buffer[:length]

    def _pread(self, offset: int, length: int) -> bytes:
        """One read may return less than asked (a signal, a network file system): read on until empty."""
        parts = []
        while length > 0 and (part := os.pread(self._fd, length, offset)):
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)
