"""What a journal is worth after the process, the power or the bytes themselves gave way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest

from gradwatch.journal import Damage, JournalReader, read_journal
from gradwatch.journal.crash_safe_frames import Frame, FrameScanner
from gradwatch.journal.entries import decode_entries
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.journal import JournalSink
from tests.support.sink_records import make_event, make_record, make_run, make_sites

ROOT = Path(__file__).parents[2]
VICTIM = (sys.executable, "-m", "tests.journal.victim")
SOAK = pytest.mark.soak


def found(directory: Path) -> set[int]:
    """The steps whose incident a run's journal holds; no file may show anything but records as written."""
    if not list(directory.glob("run-1/*.gwj")):
        return set()
    (reader,) = read_journal(directory / "run-1")
    events = list(reader.events())
    assert all(event.description == "x" * 200 for event in events)
    for step in reader.records():
        assert step.norms is None or set(step.norms.norm) == {step.record.snapshot.step}
    # The write that the kill interrupted may be there in part, as the last thing; nothing before it is touched.
    assert len(reader.damage) <= 1
    assert reader.missing == 0
    return {event.step for event in events}


def acknowledged_and_lost(directory: Path, mode: str, kills: int) -> tuple[int, int, int]:
    """Kill that many victims; how many incidents were acknowledged, how many lost, how many rotations."""
    subprocess.run([*VICTIM, "kill", str(directory), mode, str(kills)], cwd=ROOT, check=True)
    told = lost = rotations = 0
    for place in directory.iterdir():
        acknowledged = {int(line) for line in (place / "acknowledged").read_bytes().split()}
        told += len(acknowledged)
        lost += len(acknowledged - found(place))
        rotations += max(0, len(list(place.glob("run-1/*.gwj"))) - 1)
    return told, lost, rotations


@pytest.mark.parametrize("kills", [10, pytest.param(500, marks=SOAK)])
def test_an_acknowledged_incident_survives_kill_9(tmp_path: Path, kills: int) -> None:
    """Killed at any moment, from the first millisecond on and across rotations, nothing is lost (P16)."""
    told, lost, rotations = acknowledged_and_lost(tmp_path, "plain", kills)
    assert told > kills
    assert rotations > 0
    assert lost == 0


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=SOAK)])
def test_an_acknowledged_incident_survives_the_loss_of_unsynced_writes(tmp_path: Path, kills: int) -> None:
    """Where everything since the last fdatasync vanishes with the process, nothing told is lost (P17)."""
    told, lost, _ = acknowledged_and_lost(tmp_path, "lossy", kills)
    assert told > kills
    assert lost == 0


def test_the_loss_of_unsynced_writes_would_be_seen(tmp_path: Path) -> None:
    """With an fdatasync that does nothing the same check finds losses: it can fail."""
    told, lost, _ = acknowledged_and_lost(tmp_path, "careless", 3)
    assert told > 0
    assert lost == told


@contextmanager
def mounted(image: Path, place: Path) -> Iterator[None]:
    place.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True, capture_output=True)


def can_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("mkfs.ext4") is not None and Path("/dev/loop-control").exists()


@pytest.mark.skipif(not can_mount(), reason="needs root, mkfs.ext4 and loop devices")
@pytest.mark.parametrize("cuts", [1, pytest.param(50, marks=SOAK)])
def test_an_acknowledged_incident_survives_a_power_cut(tmp_path: Path, cuts: int) -> None:
    """An ext4 image copied at an instant holds every incident acknowledged before that instant (P17)."""
    told = 0
    for cut in range(cuts):
        image, copy = tmp_path / f"{cut}.img", tmp_path / f"{cut}-after.img"
        with image.open("wb") as file:
            file.truncate(24 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
        with mounted(image, tmp_path / f"{cut}"):
            command = [*VICTIM, "write", str(tmp_path / f"{cut}"), "plain"]
            victim = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
            assert victim.stdout is not None
            with victim.stdout as stdout:
                acknowledged = {int(stdout.readline())}
                time.sleep(0.1 + 0.01 * (cut % 40))
                os.kill(victim.pid, signal.SIGSTOP)
                os.set_blocking(stdout.fileno(), False)
                acknowledged |= {int(line) for line in (stdout.read() or b"").split(b"\n")[:-1]}
                shutil.copyfile(image, copy)
                victim.kill()
                victim.wait()
        with mounted(copy, tmp_path / f"{cut}-after"):
            assert acknowledged <= found(tmp_path / f"{cut}-after")
        told += len(acknowledged)
        image.unlink()
        copy.unlink()
    assert told > 10 * cuts


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small finished journal with every kind of entry."""
    directory = tmp_path_factory.mktemp("pristine")
    sink = JournalSink()
    sink.open(make_run(directory), Health())
    sites, event = make_sites(2), make_event(step=1, value=float("nan"))
    first, *others = (
        make_record(sites, [step, -0.0], step=step, events=(event,) if step == 1 else ()) for step in range(4)
    )
    sink.write(first)
    assert sink.flush(30.0)
    sink.write_all(others)  # in one batch: their norms are a block
    sink.close()
    (reader,) = read_journal(directory / "run-1")
    data = reader.path.read_bytes()
    assert all(
        f'"kind":"{kind}"'.encode() in data for kind in ("norms", "norms_block", "steps", "events", "end")
    )
    return data


def payloads(data: bytes) -> tuple[list[bytes], list[Damage]]:
    """The frames and the damage a reader finds in these bytes."""
    frames, damage = [], []
    fd = os.memfd_create("journal")
    try:
        os.write(fd, data)
        scanner = FrameScanner(fd)
        while (each := scanner.read()) is not None:
            if isinstance(each, Frame):
                frames.append(each.payload)
            else:
                damage.append(each)
    finally:
        os.close(fd)
    return frames, damage


def is_subsequence(some: list[bytes], all_: list[bytes]) -> bool:
    rest = iter(all_)
    return all(each in rest for each in some)


def test_truncated_at_every_byte(pristine: bytes) -> None:
    """Cut anywhere, a journal shows exactly the frames that are whole, and says that one is torn (P18)."""
    whole, _ = payloads(pristine)
    assert len(whole) > 6
    ends = [0]
    for payload in whole:
        ends.append(ends[-1] + 24 + len(payload))
    for size in range(len(pristine)):
        frames, damage = payloads(pristine[:size])
        assert frames == whole[: sum(end <= size for end in ends) - 1]
        assert [each.reason for each in damage] == ([] if size in ends else ["torn"])


def test_a_bit_flipped_in_every_byte(pristine: bytes) -> None:
    """One wrong bit costs at most the frame it is in; no frame is ever shown altered (P18)."""
    whole, _ = payloads(pristine)
    for at in range(len(pristine)):
        damaged = bytearray(pristine)
        damaged[at] ^= 1 << at % 8
        frames, damage = payloads(bytes(damaged))
        assert len(frames) == len(whole) - 1
        assert is_subsequence(frames, whole)
        assert len(damage) == 1


def test_damaged_journals_read_without_an_error(tmp_path: Path, pristine: bytes) -> None:
    """The typed reader, too, takes any damage: it shows what was written, less the entries of one frame."""
    path = tmp_path / "rank0-attempt0.gwj"
    frames, _ = payloads(pristine)
    entries = [[repr(entry) for entry in decode_entries(frame)] for frame in frames]
    less_one = [list(chain(*entries[:at], *entries[at + 1 :])) for at in range(len(entries))]
    for at in range(0, len(pristine), 13):
        path.write_bytes(pristine[:at] + bytes([pristine[at] ^ 0x40]) + pristine[at + 1 :])
        reader = JournalReader(path)
        shown = [repr(entry) for entry in reader.entries()]
        assert shown in less_one
        assert len(list(reader.records())) <= 4


def test_four_kibibytes_of_zeros(tmp_path: Path) -> None:
    """A zeroed block anywhere costs the frames it touches; zeros at the end are space in reserve (P18)."""
    sink = JournalSink()
    sink.open(make_run(tmp_path), Health())
    for step in range(60):
        sink.write(make_record(make_sites(100), step, step=step))
    sink.close()
    (reader,) = read_journal(tmp_path / "run-1")
    data = reader.path.read_bytes()
    whole, _ = payloads(data)
    assert len(data) > 6 * 4096
    for start in range(0, len(data) - 4096, 1024):
        frames, damage = payloads(data[:start] + bytes(4096) + data[start + 4096 :])
        assert is_subsequence(frames, whole)
        assert len(frames) >= len(whole) - 14
        assert damage
    frames, damage = payloads(data + bytes(70_000))
    assert (frames, damage) == (whole, [])


def test_a_stale_block_of_another_journal_is_not_taken_for_ours(tmp_path: Path, pristine: bytes) -> None:
    """Frames that carry another file's salt are damage, however good their checksums."""
    directory = tmp_path / "other"
    sink = JournalSink()
    sink.open(make_run(directory), Health())
    sink.write(make_record(make_sites(2), 9.0, step=9))
    sink.close()
    other = (directory / "run-1" / "rank0-attempt0.gwj").read_bytes()
    whole, _ = payloads(pristine)
    frames, damage = payloads(pristine + other)
    assert frames == whole
    assert [each.reason for each in damage] == ["garbage"]


def test_a_repeated_frame_is_shown_once(pristine: bytes) -> None:
    """A frame found twice, as after a half-done repair of a file system, counts once."""
    whole, _ = payloads(pristine)
    first = 24 + len(whole[0])
    frames, damage = payloads(pristine[:first] + pristine)
    assert frames == whole
    assert [each.reason for each in damage] == ["repeated"]
