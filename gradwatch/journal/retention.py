"""Keep a journal within its cap: thin the sealed files of the middle, delete at last; the head stays.

What goes first: samples of per-parameter norms off a doubled cadence, from all files; then, the oldest file
first, all its norms, then its scalars, and at last the file with its events. Work is done one file at a
time, between the writer's other duties.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gradwatch.journal.crash_safe_frames import Damage, Frame, FrameScanner, encode_frame
from gradwatch.journal.norms_block import KIND as NORMS_BLOCK
from gradwatch.journal.norms_block import decode_block
from gradwatch.journal.payload import Payload, decode_payload, encode_payload
from gradwatch.journal.reader import opened
from gradwatch.runtime.atomic_files import replacing

RESERVE = 64 << 10
SMALLEST = 512 << 10
_UNLIMITED_SEGMENT = 64 << 20
_MOST_FILES = 64
_SAMPLES, _NORMS, _SCALARS, _ALL = 1, 2, 3, 4
_KINDS = {
    _SAMPLES: {"run", "sites", "steps", "norms", NORMS_BLOCK, "events", "saved", "lost", "end"},
    _NORMS: {"run", "sites", "steps", "events", "saved", "lost", "end"},
    _SCALARS: {"run", "events", "saved", "lost", "end"},
}


@dataclass(frozen=True, slots=True)
class Segment:
    """A sealed file: its `size`, the part of it that is `sampled` norms, and how far it has been thinned."""

    path: Path
    size: int
    sampled: int
    head: bool
    level: int = 0
    factor: int = 1


class Retention:
    """The sealed files of one journal, kept within `max_bytes` together with the file being written.

    `factor` is how much rarer norms are sampled by now than at the start, `bases` the cadence each optimizer
    started with. `rotated` counts bytes deleted for good. `pause` is called now and then during long work.
    """

    def __init__(self, max_bytes: int, pause: Callable[[], None] = lambda: None) -> None:
        if max_bytes and max_bytes < SMALLEST:
            raise ValueError(f"max_bytes is 0 (no cap) or at least {SMALLEST}, not {max_bytes}")
        self.max_bytes = max_bytes
        self.segments: list[Segment] = []
        self.bases: dict[int, int] = {}
        self.factor = 1
        self.rotated = 0
        self._pause = pause

    @property
    def ahead_bytes(self) -> int:
        """Bytes allocated ahead of the writing, beyond the reserve."""
        return self.max_bytes // 64 if 0 < self.max_bytes < 16 << 20 else 256 << 10

    def segment_bytes(self, segment: int) -> int:
        """The size at which a file is sealed; the head is four times as long."""
        if not self.max_bytes:
            return _UNLIMITED_SEGMENT
        return self.max_bytes // (16 if segment else 4)

    def every(self, optimizer: int) -> int:
        """The present cadence of sampled norms: 1 step in this many."""
        return self.bases.get(optimizer, 1) * self.factor

    def seal(self, path: Path, size: int, sampled: int) -> None:
        """Count a finished file, `sampled` of whose `size` bytes are sampled norms; the first is the head."""
        self.segments.append(Segment(path, size, sampled, head=not any(each.head for each in self.segments)))

    @property
    def window_bytes(self) -> float:
        """Bytes allowed for the norms of the first steps, and those after one incident."""
        return self.max_bytes / 4 if self.max_bytes else math.inf

    @property
    def behind(self) -> bool:
        """True if `relieve` has work to do."""
        return self._limit is not None and (self.over or self._stale() is not None)

    @property
    def _limit(self) -> int | None:
        """Bytes allowed for the sealed files: the cap less the file being written and what is allocated ahead."""
        if not self.max_bytes:
            return None
        return self.max_bytes - 2 * self.segment_bytes(1) - RESERVE - self.ahead_bytes

    @property
    def over(self) -> bool:
        """True if the sealed files have outgrown their share."""
        total = sum(each.size for each in self.segments)
        return self._limit is not None and (total > self._limit or len(self.segments) > _MOST_FILES)

    @property
    def _middle(self) -> list[Segment]:
        """Files that may be thinned, oldest first: never the head, the newest only when nothing else is left."""
        rest = [each for each in self.segments if not each.head]
        return rest[:-1] or rest

    def relieve(self) -> bool:
        """Do one file's worth of work towards the cap; whether there was any. `OSError`: tried in vain."""
        if self.over and self._stale() is None and self._samples_are_worth_it():
            self.factor *= 2
        stale = self._stale()
        if stale is not None:
            self._thin(stale, _SAMPLES)
        elif self.over and (middle := self._middle):
            victim = (
                middle[0] if len(self.segments) > _MOST_FILES else min(middle, key=lambda each: each.level)
            )
            self._thin(victim, _ALL if len(self.segments) > _MOST_FILES else max(victim.level + 1, _NORMS))
        else:
            return False
        return True

    def _stale(self) -> Segment | None:
        late = (each for each in self._middle if each.sampled and each.factor < self.factor)
        return next(late, None)

    def _samples_are_worth_it(self) -> bool:
        limit = self._limit or 0
        return sum(each.sampled for each in self._middle) >= limit // 16

    def _thin(self, segment: Segment, level: int) -> None:
        at = self.segments.index(segment)
        if level >= _ALL:
            segment.path.unlink(missing_ok=True)
            self.rotated += segment.size
            del self.segments[at]
            return
        try:
            size, sampled = self._rewrite(segment.path, level)
        except OSError:
            # The disk may be full: then a copy is impossible, and room must be made all the same.
            self._thin(segment, _ALL)
            raise
        level = max(level, segment.level)
        self.segments[at] = replace(segment, size=size, sampled=sampled, level=level, factor=self.factor)

    def _rewrite(self, path: Path, level: int) -> tuple[int, int]:
        """Replace a file, atomically, by a copy with less in it; gives its size and its sampled bytes."""
        with replacing(path, durable=True, temporary=f"{path}.part") as target, opened(path) as source:
            return self._copy(source, target.fileno(), level)

    def _copy(self, source: FrameScanner, target: int, level: int) -> tuple[int, int]:
        salt = int.from_bytes(os.urandom(4), "little")
        size = sampled = sequence = 0
        while (found := source.read()) is not None:
            payload = None if isinstance(found, Damage) else self._kept(found, level)
            self._pause()
            if payload is None:
                continue
            data = memoryview(encode_frame(payload[0], salt, sequence))
            while data:
                written = os.write(target, data)
                data, size = data[written:], size + written
            sequence += 1
            sampled += len(payload[0]) if payload[1] else 0
        return size, sampled

    def _kept(self, frame: Frame, level: int) -> tuple[bytes, bool] | None:
        """The payload to copy and whether it is a sample; None to leave it out."""
        payload = decode_payload(frame.payload)
        if payload.kind not in _KINDS[level]:
            return None
        if payload.fields.get("reason") not in ("sample", "firing"):
            return frame.payload, False
        samples = _at_cadence(payload, self.every(payload.fields["optimizer"]))
        return None if samples is None else (samples, True)


def _at_cadence(payload: Payload, every: int) -> bytes | None:
    """The payload of norms with the steps of this cadence, saying so; None where it has none of them."""
    if payload.kind == NORMS_BLOCK:
        block = decode_block(payload).at_cadence(every)
        return None if block is None else block.encode()
    if payload.fields["step"] % every:
        return None
    return encode_payload("norms", {**payload.fields, "every": every}, payload.arrays)
