"""A sink may fail in every way; training must not notice, and the count must be exact."""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path

import pytest

from gradwatch.errors import TrainingStopped
from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks import Sink
from gradwatch.sinks.circuit_breaker import Breaker
from tests.support.sink_records import make_record, make_run, make_sites

FAULTS = [
    ValueError("no"),
    OSError(errno.ENOSPC, "full"),
    OSError(errno.EMFILE, "files"),
    OSError(errno.EIO, "disk"),
    MemoryError(),
    RecursionError(),
    UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogate"),
    StopIteration(),
    KeyError("x"),
    ZeroDivisionError(),
    AssertionError(),
    NotImplementedError(),
    TimeoutError(),
]
CALLS = ["open", "write", "flush", "close"]
RECORD = make_record(make_sites())


class Faulty:
    """A sink that fails wherever `faults` names the call, and counts what reaches it."""

    name = "faulty"

    def __init__(self, **faults: BaseException) -> None:
        self.faults = faults
        self.reached: Counter[str] = Counter()

    def _reach(self, call: str) -> None:
        self.reached[call] += 1
        if call in self.faults:
            raise self.faults[call]

    def open(self, run: RunInfo, health: Health) -> None:
        self._reach("open")

    def write(self, record: Record) -> None:
        self._reach("write")

    def flush(self, timeout: float) -> bool:
        self._reach("flush")
        return True

    def close(self) -> None:
        self._reach("close")


class Clock:
    """A monotonic clock that moves when told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def drive(breaker: Breaker, run: RunInfo) -> None:
    breaker.open(run)
    breaker.write(RECORD)
    breaker.flush(0.1)
    breaker.close()


def test_a_breaker_is_a_sink() -> None:
    """Whoever holds sinks need not know whether one is guarded."""
    assert isinstance(Breaker(Faulty(), Health()), Sink)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_no_fault_gets_out_and_each_is_counted_once(fault: Exception, call: str, tmp_path: Path) -> None:
    """Every call of a sink may fail with anything; the error count says exactly how often."""
    health, sink = Health(), Faulty(**{call: fault})
    drive(Breaker(sink, health), make_run(tmp_path))
    assert health.errors() == {"faulty": 1}
    assert sink.reached[call] == 1


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("passes", [KeyboardInterrupt(), SystemExit(3), TrainingStopped("rule")])
def test_what_must_pass_passes(passes: BaseException, call: str, tmp_path: Path) -> None:
    """An interrupt, an exit and a requested stop are not faults of a sink."""
    health = Health()
    with pytest.raises(type(passes)):
        drive(Breaker(Faulty(**{call: passes}), health), make_run(tmp_path))
    assert health.errors() == {}


def test_three_failures_in_a_row_switch_it_off_for_a_minute(tmp_path: Path) -> None:
    """A sink that keeps failing is left alone, shown as down, and tried again once after 60 s."""
    clock, health, sink = Clock(), Health(), Faulty(write=OSError("disk"))
    breaker = Breaker(sink, health, clock=clock)
    breaker.open(make_run(tmp_path))
    assert health.up() == {"faulty": True}
    for _ in range(10):
        breaker.write(RECORD)
    assert sink.reached["write"] == 3
    assert health.errors() == {"faulty": 3}
    assert health.up() == {"faulty": False}
    assert not breaker.flush(0.1)

    clock.now += 59.9
    breaker.write(RECORD)
    assert sink.reached["write"] == 3

    clock.now += 0.1
    breaker.write(RECORD)  # half-open: one trial, which fails
    breaker.write(RECORD)
    assert sink.reached["write"] == 4

    clock.now += 60
    sink.faults.clear()
    breaker.write(RECORD)
    breaker.write(RECORD)
    assert sink.reached["write"] == 6
    assert health.up() == {"faulty": True}
    assert health.errors() == {"faulty": 4}


def test_failures_that_are_not_in_a_row_do_not_switch_it_off(tmp_path: Path) -> None:
    """A success in between starts the count anew."""
    health, sink = Health(), Faulty()
    breaker = Breaker(sink, health)
    breaker.open(make_run(tmp_path))
    for i in range(30):
        sink.faults = {"write": ValueError()} if i % 3 else {}
        breaker.write(RECORD)
    assert sink.reached["write"] == 30
    assert health.errors() == {"faulty": 20}


def test_a_sink_that_could_not_be_opened_is_opened_again(tmp_path: Path) -> None:
    """A disk that was full at the start does not cost the whole run's journal."""
    clock, health, sink = Clock(), Health(), Faulty(open=OSError(errno.ENOSPC, "full"))
    breaker = Breaker(sink, health, clock=clock)
    breaker.open(make_run(tmp_path))
    breaker.write(RECORD)
    assert sink.reached == {"open": 1}
    assert health.up() == {"faulty": False}
    sink.faults.clear()
    clock.now += 60
    breaker.write(RECORD)
    breaker.write(RECORD)
    assert sink.reached == {"open": 2, "write": 2}
    assert health.up() == {"faulty": True}


def test_written_before_it_was_opened_is_a_fault_and_no_crash() -> None:
    """A wrong order of calls is counted like everything else."""
    health, sink = Health(), Faulty()
    Breaker(sink, health).write(RECORD)
    assert health.errors() == {"faulty": 1}
    assert sink.reached == {}


def test_close_happens_once_even_when_switched_off(tmp_path: Path) -> None:
    """Threads and files are given back whatever state the circuit is in, and only once."""
    sink = Faulty(open=OSError())
    breaker = Breaker(sink, Health())
    breaker.open(make_run(tmp_path))
    breaker.close()
    breaker.close()
    breaker.write(RECORD)
    assert sink.reached == {"open": 1, "close": 1}


def test_strict_lets_faults_pass_and_still_counts_them(tmp_path: Path) -> None:
    """In CI a fault of ours should be seen."""
    health = Health()
    breaker = Breaker(Faulty(write=ValueError("seen")), health, strict=True)
    breaker.open(make_run(tmp_path))
    with pytest.raises(ValueError, match="seen"):
        breaker.write(RECORD)
    assert health.errors() == {"faulty": 1}


def test_at_the_very_end_of_the_stack_nothing_gets_out(tmp_path: Path) -> None:
    """Where no frame is left even to count the error, it is counted on the next call."""
    health, sink = Health(), Faulty()
    breaker = Breaker(sink, health, max_failures=10_000)
    breaker.open(make_run(tmp_path))
    entered: list[bool] = []

    def dig() -> None:
        try:
            dig()
        except RecursionError:
            return
        # From here on this runs at every depth, the deepest first.
        try:
            breaker.write(RECORD)
        except RecursionError as error:
            # Python could not call `write` at all, or something in it got out.
            inside = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            entered.append(inside)

    dig()
    assert not any(entered), "a fault inside the breaker got out"
    assert health.errors()["faulty"] >= 1
    assert sink.reached["write"] > 100
