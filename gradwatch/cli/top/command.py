"""`gradwatch top [RUN|URL]`: the command line, and the loop that draws until the run is over."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from gradwatch.cli.run_argument import add_directory, add_rank, default_directory, newest
from gradwatch.cli.terminal import redrawable

if TYPE_CHECKING:
    from gradwatch.report.live import JournalSource, LiveView, MetricsSource

DESCRIPTION = """What a run does right now, drawn again and again: healthy or not, rules that are firing, parameters
furthest from their usual gradient norm, total norm and loss, what gradwatch did, steps per second.

RUN is a run's folder or one of its journal files; without one, the newest run of --dir. URL is the address of a
process that trains (http://HOST:PORT), for a run on another machine. q or Ctrl-C leaves; the run goes on. Into a pipe,
with --once or with --json it is written once. Exit status 0 whatever it shows, 2 where there is no such run."""
FIRST_SECONDS = 60.0
"""What was recorded before is read for so long where it is written once."""
_READ_SHARE = 0.5
_CLOCK_SECONDS = 1.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch top` to argparse."""
    parser = commands.add_parser(
        "top",
        help="a run as it goes on: health, worst parameters, firing rules, loss, steps/s",
        description=DESCRIPTION,
    )
    parser.add_argument(
        "run", nargs="?", metavar="RUN|URL", help="folder of a run, a journal file, or an address"
    )
    parser.add_argument(
        "--interval", type=interval, default=1.0, metavar="SECONDS", help="between two looks (1)"
    )
    parser.add_argument("--once", action="store_true", help="write it once, and leave")
    parser.add_argument("--json", action="store_true", help="write it once, as JSON")
    # For `gradwatch run --live`: the run that process PID is about to begin; with --stay until a key is pressed.
    parser.add_argument("--beside", type=int, metavar="PID", help=argparse.SUPPRESS)
    parser.add_argument("--stay", action="store_true", help=argparse.SUPPRESS)
    add_directory(parser)
    add_rank(parser, "show the steps")
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Draw until the run is over or the user leaves. Raises GradwatchError where there is no such run."""
    from gradwatch.cli.top.screen import lines

    if arguments.beside is not None:
        return beside(arguments)
    with source_of(arguments) as source:
        if arguments.json or arguments.once or not redrawable(sys.stdout):
            view = once(source)
            print(json.dumps(document(view)) if arguments.json else "\n".join(lines(view, sys.stdout)))
            return 0
        watch(source, sys.stdout, arguments.interval)
    return 0


def beside(arguments: argparse.Namespace) -> int:
    """Draw the run that a process is about to begin, until that is over."""
    from gradwatch.cli.top.beside_script import wait_for_run
    from gradwatch.cli.top.keyboard import Keyboard
    from gradwatch.report.live import JournalSource

    run = wait_for_run(Path(arguments.dir), arguments.beside, time.time() - _CLOCK_SECONDS)
    if run is None:
        return 0
    with JournalSource(run) as source:
        watch(source, sys.stdout, arguments.interval, keys=arguments.stay)
    if arguments.stay:
        with Keyboard() as keyboard:
            print("q closes this pane", end="", flush=True)
            while not keyboard.quit_pressed(3600):
                pass
    return 0


def source_of(arguments: argparse.Namespace) -> JournalSource | MetricsSource:
    """The run, or the address, that the arguments name."""
    from gradwatch.report.live import JournalSource, MetricsSource

    url = address(arguments.run)
    if url is not None:
        return MetricsSource(url)
    run = Path(arguments.run) if arguments.run else newest(Path(arguments.dir or default_directory()))
    return JournalSource(run, arguments.rank)


def address(text: str | None) -> str | None:
    """The URL that `text` is, also without its scheme; None where it names a run on disk."""
    from gradwatch.endpoint.address import parse_listen

    if text is None or text.startswith(("http://", "https://")):
        return text
    if Path(text).exists():
        return None
    try:
        return f"http://{parse_listen(text)}"
    except ValueError:
        return None


def interval(text: str) -> float:
    """Seconds between two looks, as argparse's `type`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.1 to 3600")
    return seconds


def once(source: JournalSource | MetricsSource) -> LiveView:
    """The run as of now, with everything that was recorded before."""
    deadline = time.monotonic() + FIRST_SECONDS
    view = source.view(FIRST_SECONDS)
    while view.reading and time.monotonic() < deadline:
        view = source.view(FIRST_SECONDS)
    return view


def document(view: LiveView) -> dict[str, object]:
    """The view for a machine; numbers that are not finite as strings."""
    from gradwatch.runtime.json_numbers import json_ready

    found: dict[str, object] = json_ready(asdict(view))
    return found


def watch(source: JournalSource | MetricsSource, stream: TextIO, seconds: float, keys: bool = True) -> None:
    """Draw on the terminal `stream` every so many seconds until the run is over, or the user has enough.

    The last picture stays on the terminal. Without `keys` nothing is read from standard input.
    """
    from gradwatch.cli.processes.ending_signals import ended_by_signals
    from gradwatch.cli.top.keyboard import Keyboard
    from gradwatch.cli.top.screen import Picture, lines

    view = None
    try:
        with ended_by_signals(), Keyboard(keys) as keyboard, Picture(stream) as picture:
            while True:
                view = source.view(seconds * _READ_SHARE)
                picture.draw(view)
                if view.over or keyboard.quit_pressed(0.01 if view.reading else seconds):
                    break
    except KeyboardInterrupt:
        pass
    if view is not None:
        print("\n".join(lines(view, stream)), file=stream, flush=True)
