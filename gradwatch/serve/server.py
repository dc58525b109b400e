"""The aggregator at work: one thread looks at the folders, another answers from what it last saw."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gradwatch.endpoint.address import Address
from gradwatch.endpoint.http_protocol import Content, RequestError
from gradwatch.endpoint.http_server import Endpoint, Limits, Route
from gradwatch.endpoint.listening_port import listening_socket
from gradwatch.endpoint.run_reports import PREFIX as REPORTS
from gradwatch.endpoint.run_reports import RunPlace, ServedReports, path_of
from gradwatch.errors import GradwatchError
from gradwatch.monitoring.export import stack_directory
from gradwatch.runtime.printable import printable
from gradwatch.serve.health import ScanHealth
from gradwatch.serve.responses import metrics, runs, sd
from gradwatch.serve.run_scanner import Fleet, Member, Scanner
from gradwatch.serve.runs_page import fleet_page, reading_page, runbook_index, runbook_page
from gradwatch.sinks.prometheus.file_sd import sweep

DEFAULT_LISTEN = "127.0.0.1:29439"
LIMITS = Limits(connections=256, deadline_seconds=15.0, cpu_share=0.5, cpu_burst_seconds=2.0)
"""It has a process of its own: more of everything than an endpoint inside a training job."""


class Server:
    """Scans every `every_seconds` and serves `/`, `/metrics`, `/sd`, `/runs.json`, `/healthz`,
    `/runbooks/NAME`, and the report of each run at `/run/NAME`.

    Raises GradwatchError where the port is taken: Prometheus is configured with one address, another would not be
    found. A scan that fails is counted, and the answers stay those of the last one that did not; `/healthz` is 503
    when nothing could be read for a minute and three intervals. `lists` are folders of file_sd, from which processes
    of this machine that were killed are to be taken after a quarter of an hour.
    """

    def __init__(
        self,
        scanner: Scanner,
        address: Address,
        every_seconds: float = 5.0,
        ended_for: float = 3600.0,
        lists: Sequence[str] = (),
        on_error: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.scanner, self._every, self._ended_for = scanner, every_seconds, ended_for
        self._lists = tuple(lists)
        self._on_error = on_error
        self._stop = threading.Event()
        self._health = ScanHealth(every_seconds)
        self._read = "nothing read yet"
        self._outer_progress = scanner.report_to(self._progress)
        self._answers: Mapping[str, Content] = {}
        self._places: Mapping[str, RunPlace] = {}
        self._reports = ServedReports(lambda path: self._places.get(path))
        listener = listening_socket(address)
        bound = Address(*listener.getsockname()[:2])
        if address.port and bound.port != address.port:
            listener.close()
            raise GradwatchError(f"port {address.port} of {address.host} is taken; say another one: --listen")
        below = {REPORTS: self._reports.answer}
        self._endpoint = Endpoint(listener, self._routes(), self._failed, LIMITS, below)

    @property
    def address(self) -> Address:
        """The listening address."""
        return self._endpoint.address

    def serve(self) -> None:
        """Scan and answer until `stop`; before the first scan is done (it reads what ended) all but `/` is 503."""
        self._endpoint.start()
        try:
            self._scan()
            while not self._stop.wait(self._every):
                self._scan()
        finally:
            self.close()

    def close(self) -> None:
        """Give the port back; `serve` does so itself. Idempotent."""
        self._endpoint.close()
        self._reports.close()

    def stop(self) -> None:
        """Let `serve` return; may be called from a signal handler."""
        self._stop.set()

    def _scan(self) -> None:
        try:
            fleet = self.scanner.scan()
            for member in fleet.refused:
                self._on_error(PermissionError(_why_refused(member)))
            for each in self._lists:
                sweep(each, time.time())
            self._answers = {
                "/": fleet_page(fleet, time.time()),
                "/metrics": metrics(fleet, self._ended_for),
                "/sd": sd(fleet, self.scanner.reach.host),
                "/runs.json": runs(fleet),
            }
            self._places = places(fleet)
            self._health.progressed()
        except Exception as error:
            self._failed(error)

    def _progress(self, done: int, total: int) -> None:
        """A folder was read: a long first look at thousands of runs is no hang."""
        self._health.progressed()
        self._read = f"{done:,} of {total:,}"
        self._outer_progress(done, total)

    def _failed(self, error: BaseException) -> None:
        self.scanner.count_error()
        self._on_error(error)

    def _routes(self) -> dict[str, Route]:
        books = {path.stem: path for path in sorted((stack_directory() / "runbooks").glob("*.md"))}
        pages = {
            f"/runbooks/{name}": runbook_page(name, path.read_text(encoding="utf-8"))
            for name, path in books.items()
        }
        pages["/runbooks"] = runbook_index(books)
        return {
            **{path: _always(content) for path, content in pages.items()},
            **{path: self._latest(path) for path in ("/", "/metrics", "/sd", "/runs.json")},
            "/healthz": self._health.answer,
        }

    def _latest(self, path: str) -> Route:
        def answer(hurried: bool) -> Content:
            found = self._answers.get(path)
            if found is None and path == "/":
                return reading_page(self._read)
            if found is None:
                raise RequestError(503, f"The run folders are being read for the first time: {self._read}.")
            return found

        return answer


def places(fleet: Fleet) -> dict[str, RunPlace]:
    """The runs that have a page, by its path: of each its lowest rank."""
    found: dict[str, RunPlace] = {}
    running = {member.run_id for member in fleet.members if member.state == "running"}
    for member in sorted(fleet.members, key=lambda one: (one.rank, one.place)):
        where = RunPlace(member.folder, member.rank, member.run_id in running)
        found.setdefault(path_of(member.run_id), where)
    return found


def _always(content: Content) -> Route:
    return lambda hurried: content


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Default folder for summaries of ended runs; https://specifications.freedesktop.org/basedir-spec."""
    base = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "/")) / ".cache")
    return Path(base) / "gradwatch" / "serve"


def _why_refused(member: Member) -> str:
    """One line: which target is not handed out, and what would have it handed out."""
    host = member.refused.host if member.refused else ""
    node = printable(member.node) or "an unnamed machine"
    of_rank = f", process {member.place}," if member.place else ""
    who = f"run {printable(member.run_id)} rank {member.rank}{of_rank} at {member.refused} of {node}"
    if member.refused and member.refused.is_loopback:
        return (
            f"{who} is left out of the scrape targets: it listens on that machine's loopback address only; run "
            "it with --listen 0.0.0.0:PORT"
        )
    word = node if host in ("0.0.0.0", "::") else host
    return (
        f"{who} is on another machine, so it is left out of the scrape targets; allow it with --allow {word}"
    )
