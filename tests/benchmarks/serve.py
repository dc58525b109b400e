"""What `gradwatch serve` takes for thousands of runs: `python -m tests.benchmarks.serve [--runs N] [--keep DIR]`.

Real journals, of which one in ten ends in the middle and one in fifty holds no journal at all. Told are the time from
the start of the command to its first complete answer (journals read) and to the same after a restart (summaries kept),
the resident memory after it, and how long each page takes then.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.journal import JournalSink
from tests.deploy.run_folders import a_run, history
from tests.support.ports import free_port

PAGES = ("/", "/metrics", "/sd", "/runs.json")


def fill(folder: Path, runs: int, steps: int) -> None:
    """Run folders as real ones are left; the process that wrote them is gone."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    (folder / "runs").mkdir()
    with ThreadPoolExecutor(16) as pool:  # a journal waits for its disk
        for done, _ in enumerate(
            pool.map(lambda number: leave(folder, number, gone.pid, steps), range(runs))
        ):
            if done % 100 == 0:
                print(f"\r{done} of {runs} runs written", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def leave(folder: Path, number: int, pid: int, steps: int) -> None:
    """One run folder."""
    run = a_run(folder / "runs", f"sweep-{number // 100:02}-lr{number % 100:02}", pid=pid)
    if number % 50 == 49:
        Path(run.directory).mkdir()
        (Path(run.directory) / "endpoint-rank0.json").write_text('{"host": "127.')
        return
    sink = JournalSink()
    sink.open(run, Health())
    for record in history(steps):
        sink.write(record)
    sink.close()
    if number % 10 == 9:
        journal = Path(run.directory) / "rank0-attempt0.gwj"
        journal.write_bytes(journal.read_bytes()[: journal.stat().st_size * 2 // 3])


@contextmanager
def served(folder: Path, runs: int) -> Iterator[tuple[str, float, int]]:
    """The URL, the seconds until every run was known, and the process."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "gradwatch", "serve", "--dir", str(folder / "runs")]
    where = ["--state", str(folder / "state"), "--listen", f"127.0.0.1:{port}"]
    began = time.monotonic()
    with subprocess.Popen([*command, *where], stderr=subprocess.DEVNULL) as process:
        try:
            while b'gradwatch_serve_processes{state="finished"} 0' in (text := asked(url)) or not text:
                time.sleep(0.1)
            yield url, time.monotonic() - began, process.pid
        finally:
            process.terminate()


def asked(url: str) -> bytes:
    """/metrics, or nothing while nobody listens or nobody knows yet."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
            return bytes(response.read())
    except (urllib.error.URLError, ConnectionError):
        return b""


def resident(pid: int) -> tuple[float, float]:
    """MiB in memory now, and at most so far."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    sizes = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Vm")}
    return int(sizes["VmRSS"]) / 1024, int(sizes["VmHWM"]) / 1024


def main() -> None:
    """Print what it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--keep", type=Path, help="an empty folder for the runs, kept")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.keep or Path(temporary)
        fill(folder, chosen.runs, chosen.steps)
        for what in ("first start", "restart"):
            with served(folder, chosen.runs) as (url, seconds, pid):
                now, most = resident(pid)
                print(f"{what}: {seconds:.1f} s, {now:.0f} MiB (at most {most:.0f})", flush=True)
                for page in PAGES:
                    began = time.monotonic()
                    with urllib.request.urlopen(url + page, timeout=60) as response:
                        size = len(response.read())
                    print(f"  {page}: {(time.monotonic() - began) * 1000:.0f} ms, {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
