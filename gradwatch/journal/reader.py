"""Read journals back: entries, incidents, and the Records a backtest needs. Never writes, never runs.

One journal is what one process (a rank, an attempt) wrote: a head file and the numbered files after it.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gradwatch.journal.crash_safe_frames import Damage, FrameScanner
from gradwatch.journal.entries import EndEntry, Entry, EventsEntry, RunEntry, decode_entries
from gradwatch.journal.records_from_entries import RecordedStep, join_records
from gradwatch.records.event import Event
from gradwatch.records.finding import Finding

_TAIL = 1 << 20
_NAME = re.compile(r"(?P<stem>rank(?P<rank>\d+)-attempt(?P<attempt>\d+))(?:\.(?P<segment>\d+))?\.gwj")


@dataclass(frozen=True, slots=True, order=True)
class JournalName:
    """Parts of a journal's file name; `segment` is 0 for the head, `rank3-attempt0.gwj`."""

    rank: int
    attempt: int
    segment: int = 0

    @classmethod
    def parse(cls, name: str) -> JournalName | None:
        """The parts of a file name; None where it is not a journal's."""
        found = _NAME.fullmatch(name)
        return found and cls(int(found["rank"]), int(found["attempt"]), int(found["segment"] or 0))

    def __str__(self) -> str:
        number = f".{self.segment:05d}" if self.segment else ""
        return f"rank{self.rank}-attempt{self.attempt}{number}.gwj"


class JournalReader:
    """The journal of one rank and attempt, over all its files, whether finished, live or damaged.

    `path` is any of its files. Reading never fails on content: what is damaged is stepped over and listed in
    `damage`, and no record is ever shown other than as it was written. `missing` counts frames that gaps
    prove lost, `unknown` entries of kinds this version does not know; `complete` says that the writer closed
    the journal in order, `unread` that not one entry of it can be read. All of them speak of the latest full
    iteration. `in_doubt`: `incoming` has stopped at what the next look will find damaged, unless it changes. `OSError`
    where no file can be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._name = JournalName.parse(self.path.name)
        self._begin()
        if not self.path.is_file():
            raise FileNotFoundError(f"no journal at {self.path}")

    def _begin(self) -> None:
        self.damage: list[Damage] = []
        self.missing = 0
        self.unknown = 0
        self.complete = False
        self.unread = True
        self.in_doubt = False

    @property
    def rank(self) -> int:
        """The rank, from the file's name; 0 for a file that was renamed."""
        return self._name.rank if self._name else 0

    @property
    def attempt(self) -> int:
        """The attempt, from the file's name; 0 for a file that was renamed."""
        return self._name.attempt if self._name else 0

    @property
    def files(self) -> list[Path]:
        """The journal's files at this moment, head first; a renamed file stands alone."""
        if self._name is None:
            return [self.path]
        found = _journals_in(self.path.parent)
        return [path for name, path in found if (name.rank, name.attempt) == (self.rank, self.attempt)]

    def run(self) -> RunEntry | None:
        """The run that wrote this journal; None where no file says so any more."""
        return next((entry for entry in self.entries() if isinstance(entry, RunEntry)), None)

    def end(self) -> EndEntry | None:
        """The end entry, from its last MiB; None where it has none (yet)."""
        last = None
        for path in self.files[-1:]:
            with suppress(FileNotFoundError), opened(path) as scanner:
                scanner.skip_to(max(0, os.path.getsize(path) - _TAIL))
                while (found := scanner.read()) is not None:
                    last = last if isinstance(found, Damage) else found.payload
        try:
            entries = () if last is None else decode_entries(last)
        except ValueError:
            return None
        return next((entry for entry in entries if isinstance(entry, EndEntry)), None)

    def entries(self) -> Generator[Entry, None, None]:
        """Every readable entry, in the order written."""
        self._begin()
        for path in self.files:
            with suppress(FileNotFoundError), opened(path) as scanner:  # rotated away meanwhile
                while (found := self._next(scanner, live=False)) is not None:
                    if not isinstance(found, Damage):
                        yield from found
                self.missing += scanner.missing

    def events(self) -> Iterator[Event]:
        """Every rule transition, each once, in the order written."""
        seen: set[int] = set()
        for entry in self.entries():
            if isinstance(entry, EventsEntry) and entry.number not in seen:
                seen.add(entry.number)
                yield from entry.events

    def findings(self) -> Iterator[Finding]:
        """Every cause that was found, or why none was, in the order written."""
        seen: set[int] = set()
        for entry in self.entries():
            if isinstance(entry, EventsEntry) and entry.number not in seen:
                seen.add(entry.number)
                yield from entry.findings

    def records(self) -> Iterator[RecordedStep]:
        """The run as the sinks saw it, step by step, in bounded memory."""
        return join_records(self.entries())

    def follow(self, poll_seconds: float = 0.25, stop: Callable[[], bool] = lambda: False) -> Iterator[Entry]:
        """Every entry so far and then as they are written, until the journal ends or `stop()` is true.

        A journal whose process was killed has no end: give a `stop`. Moves on to the next file when the
        writer does. `stop` is asked whenever there is nothing to read.
        """
        with closing(self.incoming()) as entries:
            for entry in entries:
                if entry is not None:
                    yield entry
                elif stop():
                    return
                else:
                    time.sleep(poll_seconds)

    def incoming(self, over: Callable[[], bool] = lambda: False) -> Generator[Entry | None, None, None]:
        """Every entry as `follow` yields them, and None instead of a wait where there is nothing to read yet.

        For readers that follow several journals, or do something else meanwhile. Ends with the journal, or where
        `over()` says that no process writes it any more: then what makes no entry is damaged. Close it.
        """
        self._begin()
        done: set[Path] = set()
        while not self.complete:
            path = next((path for path in self.files if path not in done), None)
            if path is None:
                if over():
                    return
                yield None
                continue
            yield from self._incoming_in(path, over)
            done.add(path)

    def _incoming_in(self, path: Path, over: Callable[[], bool]) -> Iterator[Entry | None]:
        sealed = False
        with suppress(FileNotFoundError), opened(path) as scanner:  # rotated away meanwhile
            while True:
                found = self._next(scanner, live=not sealed)
                if found is not None:
                    if not isinstance(found, Damage):
                        yield from found
                elif sealed or self.complete:
                    break
                elif path not in self.files[-1:] or over():
                    sealed = True  # nothing more is coming here
                else:
                    self.in_doubt = scanner.in_doubt
                    yield None
                    self.in_doubt = False
            self.missing += scanner.missing

    def _next(self, scanner: FrameScanner, live: bool) -> Sequence[Entry] | Damage | None:
        """The entries of the next frame that has any, or damage; None at the end."""
        while (found := scanner.read(live)) is not None:
            if isinstance(found, Damage):
                self.damage.append(found)
                return found
            try:
                entries = decode_entries(found.payload)
            except ValueError:
                self.damage.append(Damage(scanner.path, found.offset, len(found.payload), "unreadable"))
                continue
            if entries:
                self.complete, self.unread = isinstance(entries[-1], EndEntry), False
                return entries
            self.unknown += 1
        return None


@contextmanager
def opened(path: Path) -> Iterator[FrameScanner]:
    """The frames of one file, open while the context lasts.

    Regular files only: a pipe of that name would block for ever, a link could lead anywhere.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path} is not a regular file")
        yield FrameScanner(fd, str(path))
    finally:
        os.close(fd)


def read_journal(path: str | os.PathLike[str]) -> tuple[JournalReader, ...]:
    """The journals of a run directory, one per rank and attempt in that order; or the one a file belongs to.

    `FileNotFoundError` where there is none.
    """
    path = Path(path)
    if not path.is_dir():
        return (JournalReader(path),)
    heads: dict[tuple[int, int], Path] = {}
    for name, each in _journals_in(path):
        heads.setdefault((name.rank, name.attempt), each)
    if not heads:
        raise FileNotFoundError(f"no journal in {path}")
    return tuple(JournalReader(head) for head in heads.values())


def _journals_in(directory: Path) -> list[tuple[JournalName, Path]]:
    """The journal files of a directory by rank, attempt and number; neither links nor folders."""
    named = ((JournalName.parse(path.name), path) for path in directory.iterdir())
    return sorted((name, path) for name, path in named if name and path.is_file() and not path.is_symlink())
