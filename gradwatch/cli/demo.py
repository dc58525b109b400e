"""`gradwatch demo`: train something small, break it three ways, see what is found."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from gradwatch.cli.run import listen_address
from gradwatch.cli.terminal import complain, paint
from gradwatch.errors import GradwatchError
from gradwatch.runtime.printable import plural

if TYPE_CHECKING:
    from gradwatch.cli.demo_screen import Screen
    from gradwatch.demo.faults import Finding
    from gradwatch.demo.follow_run import Run, Seen

DESCRIPTION = """Train a small character transformer on Python's own standard library, as an unmodified script
under `gradwatch run`, while the script injects three faults into itself: a layer's gradients vanish, a batch gives
NaN, the learning rate explodes. Offline; about a minute on two cores. Exit status 1 if a fault was missed."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch demo` to argparse."""
    parser = commands.add_parser(
        "demo",
        help="see it find three faults in a training of its own",
        description=DESCRIPTION,
    )
    add = parser.add_argument
    add(
        "--seconds", type=float, default=60.0, metavar="N", help="how long on two ordinary cores (default 60)"
    )
    add("--hold", action="store_true", help="keep the process and its /metrics endpoint up at the end")
    add("--rules", default="default", metavar="FILE", help="rule file or pack (default: default)")
    add("--listen", default="127.0.0.1:29440", type=listen_address, metavar="HOST:PORT", help="of /metrics")
    add("--dir", default="gradwatch-runs", metavar="DIR", help="where the run goes (default: gradwatch-runs)")
    add("--plain", action="store_true", help="no progress bar, even on a terminal")
    add("--json", action="store_true", help="print only the verdict, as JSON")
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Run it; 1 where a fault was missed or the script failed. Raises GradwatchError if `--dir` cannot be written."""
    from gradwatch.cli.demo_screen import Screen
    from gradwatch.demo.faults import make_plan
    from gradwatch.demo.follow_run import Run, fresh_directory
    from gradwatch.rules.files import load_rules

    load_rules(arguments.rules)
    try:
        directory = fresh_directory(Path(arguments.dir))
    except OSError as error:
        raise GradwatchError(
            f"cannot write to {error.filename}: {error.strerror}; give another --dir"
        ) from None
    plan = make_plan(arguments.seconds)
    screen = None if arguments.json else Screen(plan, plain=arguments.plain)
    run_id = f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    with (
        Run(plan, arguments.rules, directory, run_id, arguments.listen, arguments.hold) as run,
        screen or nullcontext(),
    ):
        if screen is not None:
            print(
                f"{plan.steps} steps of a character transformer; {len(plan.faults)} faults to come",
                flush=True,
            )
        follow(run, screen)
        if not arguments.hold:
            return conclude(run, screen, run.wait())
        run.wait_for_journal()
        missed = conclude(run, screen, 0)
        hold(run)
        return missed


def follow(run: Run, screen: Screen | None) -> None:
    """Draw until training is over."""
    while not run.finished:
        _draw(run, screen)
        time.sleep(0.1)


def _draw(run: Run, screen: Screen | None) -> None:
    if screen is not None:
        with run.lock:
            screen.update(run.seen)


def conclude(run: Run, screen: Screen | None, status: int) -> int:
    """Print the verdict and what to do next; the exit status of the demo."""
    from gradwatch.cli import demo_screen as drawn
    from gradwatch.demo import faults

    _draw(run, screen)
    with run.lock:
        seen = run.seen
        findings = faults.judge(run.plan, seen.events, seen.skipped)
        alarms = faults.false_alarms(run.plan, seen.events)
    url = run.url()
    if screen is None:
        document = drawn.report(run.plan, findings, alarms, seen)
        document |= {"directory": str(run.directory), "url": url, "script_status": status}
        print(json.dumps(document, indent=2), flush=True)
    else:
        screen.finish()
        print(f"\n{drawn.verdict(findings)}\n\n{_sum_up(findings, len(alarms), seen)}")
        print(drawn.next_commands(run.directory, url))
    if status:
        complain("\n".join(seen.stderr))
        complain(f"gradwatch: the demo's script ended with status {status}; its stderr is above")
    return int(bool(status) or not all(finding.found for finding in findings))


def _sum_up(findings: Sequence[Finding], alarms: int, seen: Seen) -> str:
    found = sum(finding.found for finding in findings)
    words = f"{found} of {len(findings)} faults found"
    style = "green" if found == len(findings) else "red"
    return (
        f"{paint(words, style)} · {plural(alarms, 'false alarm')} · overhead {seen.overhead:.1%} of step time"
    )


def hold(run: Run) -> None:
    """Keep the endpoint up until Ctrl-C."""
    try:  # before it is said: who reads that line may press at once
        print(f"\nholding {run.url() or 'the process'} up; Ctrl-C ends it", flush=True)
        while run.alive:
            time.sleep(0.2)
    except KeyboardInterrupt:
        print("\nended")
