"""Start the demo's script under `gradwatch run` and follow it: stdout for progress, journal for health."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import gradwatch
from gradwatch.demo.faults import Plan
from gradwatch.journal import EventsEntry, JournalReader, StepsEntry
from gradwatch.records.event import Event

SCRIPT = Path(__file__).with_name("train.py")
RECENT = 200  # steps over which the speed is averaged


@dataclass(slots=True)
class Seen:
    """State of the run so far. `faults` maps an injected fault's name to its step."""

    step: int = -1
    loss: float = float("nan")
    done: bool = False
    faults: dict[str, int] = field(default_factory=dict)
    judged: int = -1
    total_norm: float = float("nan")
    events: list[Event] = field(default_factory=list)
    firing: set[str] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)
    times: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    own_seconds: float = 0.0
    all_seconds: float = 0.0
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=400))

    @property
    def steps_per_second(self) -> float:
        """Pace of the last RECENT steps; 0 before the second."""
        spent = self.times[-1] - self.times[0] if len(self.times) > 1 else 0.0
        return (len(self.times) - 1) / spent if spent > 0 else 0.0

    @property
    def overhead(self) -> float:
        """gradwatch's share of the time since the first step, 0..1."""
        return self.own_seconds / self.all_seconds if self.all_seconds > 0 else 0.0


class Run:
    """A child process training under `gradwatch run`; `seen` grows while it lives. A context manager."""

    def __init__(self, plan: Plan, rules: str, directory: Path, run_id: str, listen: str, hold: bool) -> None:
        self.plan = plan
        self.directory = directory / run_id
        self.seen = Seen()
        self.lock = threading.Lock()
        # A copy beside the run: what lies in the package is no code of the user's, which causes are traced to.
        copied = shutil.copy(SCRIPT, directory / f"{run_id}.py")
        options = ["--rules", rules, "--dir", str(directory), "--run-id", run_id, "--listen", listen]
        script = [sys.executable, str(copied), *plan.arguments, *(["--wait"] if hold else [])]
        self._process = subprocess.Popen(
            [*launcher(), "run", *options, "--", *script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the demo, which then ends the script
        )
        readers = (
            (self._read_stdout, self._process.stdout),
            (self._read_stderr, self._process.stderr),
            (self._read_journal, None),
        )
        self._threads = [threading.Thread(target=target, args=(of,), daemon=True) for target, of in readers]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """True if the process is there."""
        return self._process.poll() is None

    @property
    def finished(self) -> bool:
        """True if training is over: the script said so, or is gone."""
        return self.seen.done or not self.alive

    def wait_for_journal(self, timeout: float = 10.0) -> None:
        """Wait until the journal holds the last step (at once if the process is gone)."""
        deadline = time.monotonic() + timeout
        while self.alive and self.seen.judged < self.seen.step and time.monotonic() < deadline:
            time.sleep(0.05)

    def wait(self) -> int:
        """Wait for the script, no longer held back, and for the last of its journal; returns its exit status."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        status = self._process.wait()
        for thread in self._threads:
            thread.join(timeout=10.0)
        return status

    def close(self) -> None:
        """End the process if it still lives."""
        if self.alive:
            self._process.terminate()
            try:
                self._process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def url(self) -> str | None:
        """URL of /metrics; None before that is known and after the process has gone."""
        try:
            return str(
                json.loads((self.directory / "endpoint-rank0.json").read_text(encoding="utf-8"))["url"]
            )
        except (OSError, ValueError, KeyError):
            return None

    def _read_stdout(self, stream: IO[str]) -> None:
        for line in stream:
            said = dict(word.split("=", 1) for word in line.split() if "=" in word)
            with self.lock:
                if "fault" in said:
                    self.seen.faults[said["fault"]] = int(said["step"])
                elif "loss" in said:
                    self.seen.step, self.seen.loss = int(said["step"]), float(said["loss"])
                    self.seen.times.append(time.monotonic())
                elif line.startswith("done"):
                    self.seen.done = True

    def _read_stderr(self, stream: IO[str]) -> None:
        for line in stream:
            with self.lock:
                self.seen.stderr.append(line.rstrip("\n"))

    def _read_journal(self, _: object) -> None:
        path = self.directory / "rank0-attempt0.gwj"
        while not path.is_file():
            if not self.alive:
                return
            time.sleep(0.05)
        for entry in JournalReader(path).follow(0.1, stop=lambda: not self.alive):
            with self.lock:
                if isinstance(entry, EventsEntry):
                    self._note_events(entry.events)
                elif isinstance(entry, StepsEntry):
                    self._note_steps(entry)

    def _note_events(self, events: Iterable[Event]) -> None:
        for event in events:
            self.seen.events.append(event)
            if event.kind == "firing":
                self.seen.firing.add(event.rule)
            elif event.kind == "resolved":
                self.seen.firing.discard(event.rule)

    def _note_steps(self, entry: StepsEntry) -> None:
        for row in entry.rows:
            self.seen.judged = row.step
            self.seen.total_norm = row.total_norm
            if row.decision.skip:
                self.seen.skipped.add(row.step)
            if row.step_seconds:
                self.seen.own_seconds += row.overhead_seconds
                self.seen.all_seconds += row.step_seconds


def launcher() -> list[str]:
    """A command line that runs this very gradwatch, installed or not, whatever the cwd holds."""
    parent = str(Path(gradwatch.__file__).resolve().parent.parent)
    code = "import sys; sys.path[0] = sys.argv.pop(1); import gradwatch.cli as c; sys.exit(c.main())"
    return [sys.executable, "-c", code, parent]


def fresh_directory(directory: Path) -> Path:
    """`directory` made if need be; OSError where it cannot be written, for the demo lives off its journal."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK):
        raise PermissionError(13, "not writable", str(directory))
    return directory.resolve()
