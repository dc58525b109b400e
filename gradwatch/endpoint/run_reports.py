"""Reports of runs over HTTP: `/run/NAME`, made by a process of their own, so that no training waits for one.

A page is made anew where the journal has grown since, and served as it is until then. A request never waits: the first
one of a run gets a page that asks again.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple
from urllib.parse import quote

from gradwatch.endpoint.http_protocol import POLICY, Content, RequestError
from gradwatch.runtime.printable import one_line, printable

PREFIX = "/run/"
REFRESH_SECONDS = 60
"""A browser asks so often for the page of a run that goes on."""
LEAST_AGE_SECONDS, AGE_BY_TIME = 10.0, 10.0
"""Seconds that a page of a growing journal is served, at least; and that time by the time it takes to make it."""
STALE_SECONDS = 2.0 * REFRESH_SECONDS
"""A page of a journal that has grown since is not shown when it is older: the request is answered as a first one is."""
LONGEST_SECONDS = 120.0
NICENESS = 10
_POLICY = re.compile(rb'<meta http-equiv="Content-Security-Policy" content="([^"]+)">')
_HEADER = re.compile(rb"<header>.*?</header>")
_MOST_PAGES = 4
_LONGEST_MESSAGE = 500


class _Reload(NamedTuple):
    """A script that loads a page again, and the source of it for a policy.

    Not a refresh by `meta`: of an address with a fragment that only goes to the fragment, in the page that there is.
    """

    html: str
    source: str


def _reload_after(seconds: int) -> _Reload:
    script = f"setTimeout(() => location.reload(), {seconds * 1000})"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _Reload(f"<script>{script}</script>", f"'sha256-{digest}'")


_SOON, _NOW_AND_THEN = _reload_after(1), _reload_after(REFRESH_SECONDS)
_WAITING = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>gradwatch: a report is made</title>'
    f"<p>The journal is being read.</p>{_SOON.html}</html>\n"
)


class RunPlace(NamedTuple):
    """A run that can be shown: its folder, the rank whose steps are shown, and whether it goes on."""

    folder: Path
    rank: int
    running: bool


class _Page(NamedTuple):
    """A page of a journal of this state, as it was read at this monotonic time, made in so many seconds."""

    content: Content
    journal: tuple[int, int]
    read_at: float
    seconds: float


@dataclass(slots=True)
class _Making:
    """A process that makes a page: what it writes, its complaints, and when it began, by `monotonic` and by `time`."""

    place: RunPlace
    journal: tuple[int, int]
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    errors: IO[bytes]
    began: float
    began_at: float

    def seconds(self) -> float:
        """Seconds that it took, whenever that is asked: until it wrote what it had made; by `time.time`."""
        return max(0.0, os.fstat(self.out.fileno()).st_mtime - self.began_at)


def path_of(run_id: str) -> str:
    """The path of a run's page, as a browser asks for it."""
    return PREFIX + quote(printable(run_id), safe="")


class ServedReports:
    """Pages of runs, at most four of them held; `find(path)` says what run a path is of, None where of none."""

    def __init__(self, find: Callable[[str], RunPlace | None]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._pages: dict[RunPlace, _Page] = {}
        self._making: _Making | None = None
        self._failed: dict[RunPlace, tuple[float, str]] = {}

    def answer(self, path: str) -> Content:
        """The page of a run, as of a short while ago; raises RequestError where there is no such run."""
        place = self._find(path)
        if place is None:
            raise RequestError(404, "No run of that name here: see /.")
        with self._lock:
            self._collect()
            page = self._pages.get(place)
            age = math.inf if page is None else time.monotonic() - page.read_at
            outdated = page is None or _outdated(place, page, age)
            if outdated and self._making is None and not _just_failed(self._failed.get(place)):
                self._start(place)
            if outdated and age > STALE_SECONDS:
                page = None
            failed = self._failed.get(place)
        if page is not None:
            return page.content
        if failed is not None:
            raise RequestError(503, f"The report could not be made: {failed[1]}")
        policy = f"{POLICY}; script-src {_SOON.source}"
        return Content("text/html; charset=utf-8", _WAITING.encode(), policy)

    def close(self) -> None:
        """End the process that makes a page, if there is one."""
        with self._lock:
            making, self._making = self._making, None
            if making is not None:
                making.process.kill()
                making.process.wait()
                making.out.close()
                making.errors.close()

    def _start(self, place: RunPlace) -> None:
        try:
            self._making = make(place)
        except OSError as error:
            self._failed[place] = time.monotonic(), f"no process can be started: {error}"

    def _collect(self) -> None:
        """Take the page of a process that has ended; one that takes too long is killed."""
        making, now = self._making, time.monotonic()
        if making is None:
            return
        if making.process.poll() is None:
            if now - making.began > LONGEST_SECONDS:
                making.process.kill()
            return
        self._making = None
        with making.out, making.errors:
            making.out.seek(0)
            making.errors.seek(0)
            content = served(making.out.read(), making.place.running, making.began_at)
            seconds = making.seconds()
            complaint = one_line(making.errors.read().decode("utf-8", "replace").strip(), _LONGEST_MESSAGE)
        self._failed.pop(making.place, None)
        if making.process.returncode:
            self._failed[making.place] = now, complaint or f"exit status {making.process.returncode}"
            return
        self._pages.pop(making.place, None)
        self._pages[making.place] = _Page(content, making.journal, making.began, seconds)
        while len(self._pages) > _MOST_PAGES:
            del self._pages[next(iter(self._pages))]


def _outdated(place: RunPlace, page: _Page, age: float) -> bool:
    old = age > max(LEAST_AGE_SECONDS, AGE_BY_TIME * page.seconds)
    return old and page.journal != journal_state(place)


def _just_failed(failed: tuple[float, str] | None) -> bool:
    return failed is not None and time.monotonic() - failed[0] <= LEAST_AGE_SECONDS


def make(place: RunPlace) -> _Making:
    """Start the process that makes a page, at a low priority; it is not to be watched itself."""
    command = [sys.executable, "-m", "gradwatch", "report", str(place.folder), "--rank", str(place.rank)]
    state = journal_state(place)
    with ExitStack() as stack:
        out, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        process = subprocess.Popen(
            [*command, "-o", "-"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            env={**os.environ, "GRADWATCH": "0"},
        )
        stack.pop_all()  # closed where its page is taken
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
    return _Making(place, state, process, out, errors, time.monotonic(), time.time())


def journal_state(place: RunPlace) -> tuple[int, int]:
    """The last change of the journals of a run, in nanoseconds, and their bytes."""
    found = [path.stat() for path in place.folder.glob("*.gwj") if path.is_file()]
    return max((one.st_mtime_ns for one in found), default=0), sum(one.st_size for one in found)


def served(body: bytes, running: bool, read_at: float) -> Content:
    """A report, read at a `time.time`, as a server gives it: with a way back; asked for again while the run goes on."""
    again = _NOW_AND_THEN.html if running else ""
    clock = time.strftime("%H:%M:%S", time.localtime(read_at))
    header = f'{again}<header><a href="/">gradwatch</a> report, read at {clock}</header>'
    policy = _POLICY.search(body)
    if policy is None:
        return Content("text/html; charset=utf-8", body)
    page = _HEADER.sub(lambda _: header.encode(), body, count=1)
    allowed = policy[1].decode()
    if running:
        allowed = allowed.replace("script-src ", f"script-src {_NOW_AND_THEN.source} ", 1)
        page = page.replace(policy[1], allowed.encode(), 1)  # the page's own word counts as well
    return Content("text/html; charset=utf-8", page, allowed)
