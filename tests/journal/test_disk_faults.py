"""The journal when the disk is full, broken, gone or hung: training goes on, and so does the journal."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwatch.journal import JournalReader, LostEntry, read_journal
from gradwatch.records.event import Event
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.journal import MAX_QUEUE, JournalSink
from tests.support import warm
from tests.support.sink_records import make_event, make_record, make_run, make_sites

SITES = make_sites(4)
ROOT = Path(__file__).parents[2]


class Journal:
    """An open sink, its health, and the steps of the incidents it acknowledged."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.directory = directory
        self.health = Health()
        self.acknowledged: list[int] = []
        self._some = threading.Condition()
        self.sink = JournalSink(on_acknowledged=self._tell, **options)
        self.sink.open(make_run(directory), self.health)
        self._step = -1

    def _tell(self, event: Event) -> None:
        with self._some:
            self.acknowledged.append(event.step)
            self._some.notify_all()

    def write(self, incident: bool = False, description: str = "") -> int:
        self._step += 1
        events = (make_event(step=self._step, description=description),) if incident else ()
        self.sink.write(make_record(SITES, self._step, step=self._step, events=events))
        return self._step

    def await_acknowledged(self, step: int) -> None:
        with self._some:
            assert self._some.wait_for(lambda: step in self.acknowledged, 30.0)

    def reader(self) -> JournalReader:
        *_, last = read_journal(self.directory / "run-1")
        return last

    def steps(self) -> list[int]:
        return [step.record.snapshot.step for step in self.reader().records()]

    def incidents(self) -> list[int]:
        return [event.step for event in self.reader().events()]

    def undamaged(self) -> bool:
        reader = self.reader()
        return list(reader.entries()) != [] and reader.damage == [] and reader.missing == 0


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Journal]]:
    """Makes journals and closes them."""
    journals: list[Journal] = []

    def make(directory: Path = tmp_path, **options: Any) -> Journal:
        journals.append(Journal(directory, **options))
        return journals[-1]

    yield make
    for each in journals:
        each.sink.close()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    """Take every free byte of a file system."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


def test_a_full_disk_keeps_the_first_incident_and_recovers(
    small_disk: Path, opened: Callable[..., Journal]
) -> None:
    """ENOSPC: steps are refused and counted, the incident is in the reserve; with room all goes on (P19)."""
    journal = opened(small_disk)
    journal.write()
    assert journal.sink.flush(10.0)
    ballast = fill(small_disk)
    while not journal.health.errors():
        journal.write(description="x" * 1000)
        journal.sink.flush(10.0)
    first = journal.write(incident=True, description="y" * 1000)
    journal.await_acknowledged(first)
    assert first in journal.incidents()
    assert journal.undamaged()
    ballast.unlink()
    later = journal.write(incident=True)
    assert journal.sink.flush(10.0)
    assert journal.incidents() == [first, later]
    assert {0, later} <= set(journal.steps())
    lost = sum(entry.scalars for entry in journal.reader().entries() if isinstance(entry, LostEntry))
    assert lost + len(journal.steps()) == later + 1
    assert journal.undamaged()
    assert journal.health.up()["journal"]


def test_a_disk_full_from_the_start(small_disk: Path, opened: Callable[..., Journal]) -> None:
    """With no room for even a file nothing is left behind; incidents wait in memory until there is."""
    ballast = fill(small_disk)
    journal = opened(small_disk)
    incident = journal.write(incident=True)
    eventually(lambda: "journal" in journal.health.errors())
    eventually(lambda: not list(small_disk.glob("run-1/*.gwj")))  # the next try has one for a moment
    ballast.unlink()
    assert journal.sink.flush(10.0)
    assert journal.incidents() == [incident]


def test_a_read_only_disk(small_disk: Path, opened: Callable[..., Journal]) -> None:
    """EROFS is counted, and over once the disk can be written again."""
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    journal = opened(small_disk)
    incident = journal.write(incident=True)
    assert not journal.sink.flush(10.0)
    assert journal.health.errors()["journal"] > 0
    assert not journal.health.up()["journal"]
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert journal.sink.flush(10.0)
    assert journal.incidents() == [incident]


def test_a_directory_that_cannot_be_made(tmp_path: Path, opened: Callable[..., Journal]) -> None:
    """A file in the place of the run directory is an error counted, not raised, and overcome when it goes."""
    (tmp_path / "run-1").write_text("in the way")
    journal = opened()
    incident = journal.write(incident=True)
    assert not journal.sink.flush(10.0)
    assert journal.health.errors()["journal"] > 0
    (tmp_path / "run-1").unlink()
    assert journal.sink.flush(10.0)
    assert journal.incidents() == [incident]


def test_a_linked_run_directory_is_not_followed(tmp_path: Path, opened: Callable[..., Journal]) -> None:
    """A symbolic link in the place of the run directory leads nowhere (P36)."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run-1").symlink_to(tmp_path / "elsewhere")
    journal = opened()
    journal.write(incident=True)
    assert not journal.sink.flush(10.0)
    assert list((tmp_path / "elsewhere").glob("*.gwj")) == []


def test_a_deleted_directory_is_made_again(tmp_path: Path, opened: Callable[..., Journal]) -> None:
    """Whoever deletes the run directory gets a new one with the next incident, acknowledged there (P19)."""
    journal = opened()
    journal.write()
    assert journal.sink.flush(10.0)
    shutil.rmtree(tmp_path / "run-1")
    incident = journal.write(incident=True)
    journal.await_acknowledged(incident)
    assert journal.incidents() == [incident]
    assert journal.health.errors()["journal"] > 0
    assert journal.undamaged()


def test_an_unlinked_file_is_noticed(tmp_path: Path, opened: Callable[..., Journal]) -> None:
    """Nothing is acknowledged on the strength of a file without a name."""
    journal = opened()
    before = journal.write(incident=True)
    journal.await_acknowledged(before)
    journal.reader().path.unlink()
    after = journal.write(incident=True)
    journal.await_acknowledged(after)
    assert journal.incidents() == [after]


@pytest.mark.parametrize("taken", [False, True])
def test_a_descriptor_that_the_script_closed_is_used_no_more(
    tmp_path: Path, opened: Callable[..., Journal], taken: bool
) -> None:
    """As daemons close all; the file of the script's that has its number then is neither written nor closed."""
    journal = opened(tmp_path)
    journal.await_acknowledged(journal.write(incident=True))
    (number,) = descriptors_of(tmp_path)
    own = tmp_path / "own"
    if taken:  # at once: between a close and an open the journal's own thread may take the number
        other = os.open(own, os.O_CREAT | os.O_RDWR)
        os.dup2(other, number)
        os.close(other)
    else:
        os.close(number)
    journal.await_acknowledged(journal.write(incident=True))
    journal.sink.close()
    assert journal.incidents() == [0, 1]
    if taken:
        assert own.read_bytes() == b""
        os.close(number)


def descriptors_of(folder: Path) -> list[int]:
    """Of the journals there that this process has open."""
    numbers = map(int, os.listdir("/proc/self/fd"))
    return [one for one in numbers if str(folder) in _target(one) and _target(one).endswith(".gwj")]


def _target(number: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{number}")
    return ""


def failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int, times: int, half: bool = False) -> None:
    """Let the next calls of `os.<name>` fail, for a write after half of it was done."""
    real, left = getattr(os, name), [times]

    def fail(fd: int, *arguments: Any) -> Any:
        if left[0] <= 0:
            return real(fd, *arguments)
        left[0] -= 1
        if half:
            data, offset = arguments
            real(fd, bytes(data)[: len(data) // 2], offset)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("half", [False, True])
def test_a_write_that_fails_leaves_nothing_torn(
    opened: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch, code: int, half: bool
) -> None:
    """A write that fails, even half-way, is cut off again; the incident is written by a later try."""
    journal = opened()
    journal.write()
    assert journal.sink.flush(10.0)
    failing(monkeypatch, "pwrite", code, 3, half)
    incident = journal.write(incident=True)
    eventually(lambda: journal.health.errors().get("journal", 0) >= 1)
    eventually(journal.undamaged)  # not at once: another try may be half-way
    journal.await_acknowledged(incident)
    assert journal.sink.flush(10.0)
    assert journal.incidents() == [incident]
    assert journal.undamaged()
    assert journal.health.errors()["journal"] == 3


def test_a_torn_write_that_cannot_be_cut_off(
    opened: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where even the truncation fails, the next write overwrites the torn one."""
    journal = opened()
    journal.write()
    assert journal.sink.flush(10.0)
    failing(monkeypatch, "ftruncate", errno.EIO, 1)
    failing(monkeypatch, "pwrite", errno.EIO, 1, half=True)
    incident = journal.write(incident=True)
    journal.await_acknowledged(incident)
    journal.sink.close()
    assert journal.incidents() == [incident]
    assert journal.undamaged()


def test_a_failed_fsync_is_not_trusted_afterwards(
    opened: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After EIO from fdatasync the incident is written again, to a new file, before it is acknowledged."""
    journal = opened()
    journal.write()
    assert journal.sink.flush(10.0)
    failing(monkeypatch, "fdatasync", errno.EIO, 1)
    incident = journal.write(incident=True)
    journal.await_acknowledged(incident)
    assert len(list((tmp_path / "run-1").glob("*.gwj"))) == 2
    last = JournalReader(journal.reader().files[-1]).path.read_bytes()
    assert b'"kind":"events"' in last
    assert journal.incidents() == [incident]
    assert journal.undamaged()


def test_without_fallocate_the_journal_still_works(
    opened: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that cannot allocate ahead costs the reserve, nothing else."""
    failing(monkeypatch, "posix_fallocate", errno.EOPNOTSUPP, 10**9)
    journal = opened()
    incident = journal.write(incident=True)
    assert journal.sink.flush(10.0)
    assert journal.incidents() == [incident]
    assert journal.health.errors() == {}


class HungDisk:
    """`os.fdatasync` waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        real = os.fdatasync

        def hang(fd: int) -> None:
            self.entered.set()
            assert self.go.wait(60.0)
            real(fd)

        monkeypatch.setattr(os, "fdatasync", hang)


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungDisk]:
    disk = HungDisk(monkeypatch)
    yield disk
    disk.go.set()


def test_a_hung_disk_never_stalls_a_step(opened: Callable[..., Journal], hung: HungDisk) -> None:
    """While fdatasync hangs every write returns; what the queue cannot take is counted and recorded (P20)."""
    journal = opened()
    first = journal.write(incident=True)
    assert hung.entered.wait(60.0)
    for _ in range(3 * MAX_QUEUE):
        journal.write()
    late = journal.write(incident=True)
    assert not hung.go.is_set()
    assert journal.acknowledged == []
    dropped = journal.sink.dropped
    assert dropped >= 2 * MAX_QUEUE
    assert journal.health.errors() == {"journal-queue": dropped}
    hung.go.set()
    journal.await_acknowledged(late)
    assert journal.sink.flush(30.0)
    assert journal.incidents() == [first, late]
    lost = [entry for entry in journal.reader().entries() if isinstance(entry, LostEntry)]
    assert sum(entry.queue for entry in lost) == dropped
    assert len(journal.steps()) + dropped == late + 1


def test_many_records_in_one_call_fare_as_one_by_one(
    tmp_path: Path, opened: Callable[..., Journal], hung: HungDisk
) -> None:
    """`write_all` drops, counts and records what as many calls of `write` do, incidents among them."""
    singly, together = opened(tmp_path / "singly"), opened(tmp_path / "together")
    for journal in (singly, together):
        journal.write(incident=True)
    assert hung.entered.wait(60.0)
    eventually(lambda: not (singly.sink._queue or together.sink._queue))  # both hang over their first batch
    records = [
        make_record(SITES, step, step=step, events=(make_event(step=step),) if step % 10 == 0 else ())
        for step in range(1, 2 * MAX_QUEUE)
    ]
    for record in records:
        singly.sink.write(record)
    for at in range(0, len(records), 37):
        together.sink.write_all(records[at : at + 37])
    together.sink.write_all([])
    assert together.sink.dropped == singly.sink.dropped > 0
    assert together.health.errors() == singly.health.errors() == {"journal-queue": singly.sink.dropped}
    hung.go.set()
    assert singly.sink.flush(30.0)
    assert together.sink.flush(30.0)
    assert together.steps() == singly.steps()
    assert together.incidents() == singly.incidents()
    assert together.acknowledged == singly.acknowledged


def test_the_queue_is_bounded_in_bytes(opened: Callable[..., Journal], hung: HungDisk) -> None:
    """Large models fill the queue by weight: 32 MiB wait, not 1,024 records."""
    journal = opened()
    journal.write(incident=True)
    assert hung.entered.wait(60.0)
    heavy = make_record(make_sites(100_000), 1.0)
    for _ in range(60):
        journal.sink.write(heavy)
    assert journal.sink.dropped == 60 - (32 << 20) // (3 * 400_000)


def test_closing_does_not_wait_for_a_hung_disk(opened: Callable[..., Journal], hung: HungDisk) -> None:
    """`close` and `flush` return while fdatasync still hangs, and say so (P8)."""
    journal = opened()
    journal.write(incident=True)
    assert hung.entered.wait(60.0)
    assert not journal.sink.flush(0.05)
    journal.sink.close()
    assert not hung.go.is_set()
    assert journal.health.errors()["journal"] == 1


def test_incidents_without_a_disk_are_bounded(tmp_path: Path, opened: Callable[..., Journal]) -> None:
    """With no disk 1,024 incidents wait in memory, first and last among them; the rest is counted."""
    (tmp_path / "run-1").write_text("in the way")
    journal = opened()
    count = 3 * MAX_QUEUE
    for at in range(count):
        journal.write(incident=True)
        if at % 64 == 63:
            journal.sink.flush(10.0)
    (tmp_path / "run-1").unlink()
    last = journal.write(incident=True)
    journal.await_acknowledged(last)
    assert journal.sink.flush(10.0)
    incidents = journal.incidents()
    assert len(incidents) <= MAX_QUEUE
    assert incidents[0] == 0
    assert incidents[-1] == last
    lost = sum(entry.events for entry in journal.reader().entries() if isinstance(entry, LostEntry))
    assert len(incidents) + lost == last + 1


def test_ranks_and_restarts_never_share_a_file(tmp_path: Path) -> None:
    """Processes of one rank and attempt that start at once each get a file of their own, readable (P21)."""
    code = (
        "import sys; from pathlib import Path; from tests.journal.test_disk_faults import *\n"
        "journal = Journal(Path(sys.argv[1])); sys.stdin.readline()\n"
        "[journal.write() for _ in range(100)]; journal.sink.flush(60.0); journal.sink.close()\n"
        "assert journal.health.errors() == {}"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    children = [warm.Worker(command, os.environ) for _ in range(3)]
    for child in children:
        print(file=child.stdin, flush=True)
    assert [child.communicate() for child in children] == [0] * 3
    readers = read_journal(tmp_path / "run-1")
    assert [reader.attempt for reader in readers] == [0, 1, 2]
    for reader in readers:
        assert [step.record.snapshot.step for step in reader.records()] == list(range(100))
        assert (reader.damage, reader.complete) == ([], True)


def test_a_forked_child_owns_nothing_of_ours(tmp_path: Path) -> None:
    """After fork the child has no thread, file or lock of the journal's; the parent's is untouched (P7)."""
    code = """
import os, sys, threading
from pathlib import Path
from tests.journal.test_disk_faults import *
journal = Journal(Path(sys.argv[1]))
journal.write(incident=True)
assert journal.sink.flush(10)
with journal.sink._condition:  # as if the fork came at the worst moment
    child = os.fork()
if child == 0:
    links = [Path(f"/proc/self/fd/{fd}") for fd in range(64)]
    targets = [os.readlink(link) for link in links if link.exists()]
    journal.write(incident=True)
    clean = journal.sink.flush(1) and not any("gwj" in target for target in targets)
    journal.sink.close()
    os._exit(0 if clean and threading.active_count() == 1 else 1)
assert os.waitpid(child, 0)[1] == 0
journal.write(incident=True)
journal.sink.close()
assert journal.incidents() == [0, 1] and journal.undamaged() and journal.health.errors() == {}
"""
    warm.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_the_script_may_end_without_closing(tmp_path: Path) -> None:
    """A process that just ends, journal open, ends cleanly; what was acknowledged is there (P8)."""
    code = (
        "import sys; from pathlib import Path; from tests.journal.test_disk_faults import *\n"
        "journal = Journal(Path(sys.argv[1])); journal.await_acknowledged(journal.write(incident=True))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, timeout=250, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    (reader,) = read_journal(tmp_path / "run-1")
    assert [event.step for event in reader.events()] == [0]


@pytest.mark.parametrize("steps", [2_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_memory_does_not_grow(tmp_path: Path, steps: int) -> None:
    """Thousands of steps, an incident in every hundred, leave the process as large as it was (P11)."""
    code = """
import sys, resource
from pathlib import Path
from tests.journal.test_disk_faults import *
journal = Journal(Path(sys.argv[1]), max_bytes=1 << 20)
sites = make_sites(200)
def resident(): return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
def run(first, last):
    for step in range(first, last):
        events = (make_event(step=step),) if step % 100 == 0 else ()
        journal.sink.write(make_record(sites, step, step=step, events=events))
        if step % 500 == 0: assert journal.sink.flush(30)
run(0, 2_000)
before = resident()
run(2_000, 2_000 + int(sys.argv[2]))
print(resident() - before)
"""
    command = [sys.executable, "-c", code, str(tmp_path), str(steps)]
    grown = int(warm.run(command, timeout=3600, check=True).stdout)
    assert grown < 2 << 20
