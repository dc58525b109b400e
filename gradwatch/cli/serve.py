"""`gradwatch serve`: one address for all runs whose folders it can read."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from gradwatch.cli.terminal import Counter, complain, paint
from gradwatch.errors import GradwatchError

DESCRIPTION = """Find training runs by their folders: give Prometheus its targets (/sd), keep the last counters of
runs that have ended (/metrics), show all runs (/) and the runbooks of their alerts. Needs no torch, writes nothing
into the folders, and may be restarted at any time. Stop it with Ctrl-C or SIGTERM."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch serve` to argparse."""
    parser = commands.add_parser(
        "serve",
        help="one address for many runs",
        description=DESCRIPTION,
    )
    parser.add_argument(
        "--dir",
        metavar="DIR",
        action="append",
        type=Path,
        help="folder that holds run folders; may be given several times (default: ./gradwatch-runs)",
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help="default: 127.0.0.1:29439")
    parser.add_argument(
        "--every",
        metavar="SECONDS",
        type=float,
        default=5.0,
        help="between two scans of the folders (default: 5)",
    )
    parser.add_argument(
        "--ended-for",
        metavar="SECONDS",
        type=float,
        default=3600.0,
        help="how long the last counters of an ended run are served (default: 3600)",
    )
    parser.add_argument(
        "--state", metavar="DIR", help="where summaries of ended runs are kept (default: the user's cache)"
    )
    parser.add_argument(
        "--reach",
        metavar="HOST",
        default="",
        help="host name of this machine as Prometheus reaches it, for processes that listen on 0.0.0.0",
    )
    parser.add_argument(
        "--allow",
        metavar="NETWORK|NAME",
        action="append",
        default=[],
        help="other machines that Prometheus may be sent to, by network (10.0.0.0/8) or by the machine's name; "
        "may be given several times (default: this machine only)",
    )
    parser.add_argument(
        "--file-sd",
        metavar="DIR",
        action="append",
        default=[],
        help="list of targets to tidy: killed processes of this machine leave it after 15 minutes",
    )
    parser.add_argument("--once", action="store_true", help="scan once, print all runs as JSON, and exit")
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; 0. Raises GradwatchError for a wrong option, and a port that is taken."""
    from gradwatch.endpoint.address import parse_listen
    from gradwatch.serve.allowed_targets import AllowedTargets
    from gradwatch.serve.ended_run_counters import Summaries
    from gradwatch.serve.responses import runs
    from gradwatch.serve.run_scanner import Scanner
    from gradwatch.serve.server import DEFAULT_LISTEN, Server, cache_folder

    if not 0.1 <= arguments.every <= 3600 or not 0 <= arguments.ended_for < float("inf"):
        raise GradwatchError("--every must be between 0.1 and 3600 seconds, --ended-for 0 or more")
    folders = arguments.dir or [Path("gradwatch-runs")]
    state = arguments.state or str(cache_folder(os.environ))
    reach = AllowedTargets.parse(arguments.reach, arguments.allow)
    scanner = Scanner(folders, Summaries(state), progress(), reach)
    if arguments.once:
        sys.stdout.write(runs(scanner.scan()).body.decode())
        return 0
    try:
        address = parse_listen(arguments.listen or DEFAULT_LISTEN)
        server = Server(
            scanner,
            address,
            arguments.every,
            arguments.ended_for,
            arguments.file_sd,
            complain_once(),
        )
    except ValueError as error:
        raise GradwatchError(str(error)) from None
    except OSError as error:
        raise GradwatchError(f"cannot listen on {arguments.listen}: {error.strerror}") from error
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.stop())
    for folder in folders:
        if not folder.is_dir():
            complain(f"gradwatch: {folder} does not exist yet; it is looked for every {arguments.every:g} s")
    where = f"http://{server.address}/"
    complain(paint(f"gradwatch: {', '.join(map(str, folders))} at {where}", "bold", sys.stderr))
    server.serve()
    return 0


def progress() -> Callable[[int, int], None]:
    """A function that shows on a terminal how far a scan is, where it takes long."""
    counter = Counter("gradwatch: {:,} of {:,} run folders read")

    def show(done: int, total: int) -> None:
        counter(done, total)
        if done == total:
            counter.close()

    return show


def complain_once() -> Callable[[BaseException], None]:
    """A function that says each error once: a disk that fails every five seconds must not fill a log."""
    said: set[str] = set()

    def say(error: BaseException) -> None:
        text = f"gradwatch: {type(error).__name__}: {error}"
        if text not in said and len(said) < 100:
            said.add(text)
            complain(text)

    return say
