"""A process that writes a journal until it is killed, for the crash tests.

    python -m tests.journal.victim write DIRECTORY MODE       one victim; acknowledged steps on stdout
    python -m tests.journal.victim kill DIRECTORY MODE N      N victims, forked and killed at random moments

Victim i of `kill` journals into DIRECTORY/i/run-1; DIRECTORY/i/acknowledged lists what it was told is safe.

Modes: "plain"; "lossy": what was written since the last fdatasync of a file is lost at the kill, as in a
power cut (writes are held in memory until then); "careless": lossy, and fdatasync does nothing: the mistake
that the tests must be able to see.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from gradwatch.records.event import Event
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.journal import JournalSink
from tests.support.sink_records import make_event, make_record, make_run, make_sites


class LossyDisk:
    """Holds every `os.pwrite` in memory until `os.fdatasync` of that file."""

    def __init__(self, careless: bool) -> None:
        self._held: dict[int, list[tuple[bytes, int]]] = {}
        self._careless = careless
        self._pwrite, self._fdatasync, self._close = os.pwrite, os.fdatasync, os.close

    def install(self) -> None:
        os.pwrite, os.fdatasync, os.close = self.pwrite, self.fdatasync, self.close  # type: ignore[assignment]

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        self._held.setdefault(fd, []).append((bytes(data), offset))
        return len(data)

    def fdatasync(self, fd: int) -> None:
        if not self._careless:
            for data, offset in self._held.pop(fd, []):
                self._pwrite(fd, data, offset)
            self._fdatasync(fd)

    def close(self, fd: int) -> None:
        self._held.pop(fd, None)
        self._close(fd)


def write(directory: Path, mode: str, acknowledged: int) -> None:
    """Journal for ever, a third of the steps with an incident; rotates every few dozen steps."""
    if mode != "plain":
        LossyDisk(careless=mode == "careless").install()

    def tell(event: Event) -> None:
        os.write(acknowledged, b"%d\n" % event.step)

    sink = JournalSink(max_bytes=1 << 20, on_acknowledged=tell)
    sink.open(make_run(directory), Health())
    sites = make_sites(256)
    step = 0
    while True:
        events = (make_event(step=step, description="x" * 200),) if step % 3 == 0 else ()
        sink.write(make_record(sites, step, step=step, events=events))
        step += 1
        time.sleep(0.0003)


def kill(directory: Path, mode: str, count: int) -> None:
    """Fork victims one after the other; kill each at a random moment after a random number of incidents."""
    chance = random.Random(count)
    for number in range(count):
        place = directory / str(number)
        place.mkdir()
        reading, writing = os.pipe()
        victim = os.fork()
        if victim == 0:
            os.close(reading)
            write(place, mode, writing)
        os.close(writing)
        told = b""
        wanted = chance.randrange(200) if number % 5 else 0  # every fifth dies while it starts
        while told.count(b"\n") < wanted:
            told += os.read(reading, 4096)
        time.sleep(chance.uniform(0, 0.02))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        while rest := os.read(reading, 4096):
            told += rest
        os.close(reading)
        (place / "acknowledged").write_bytes(told)


if __name__ == "__main__":
    command, where, how, *rest = sys.argv[1:]
    if command == "kill":
        kill(Path(where), how, int(rest[0]))
    else:
        write(Path(where), how, 1)
