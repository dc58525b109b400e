"""`gradwatch selftest [options] -- COMMAND…`: the command line, the processes, and what is printed."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwatch.cli.terminal import complain, paint, table
from gradwatch.errors import GradwatchError

if TYPE_CHECKING:
    from gradwatch.cli.selftest.proofs import Proof
    from gradwatch.cli.selftest.scratch_folder import Copied
    from gradwatch.cli.selftest.script_run import ScriptRun

DESCRIPTION = """Would your rules find it? COMMAND is run as by `gradwatch run`, in a copy of this folder, and faults
are injected into its gradients one after another: NaN, Inf, a spike, a layer that vanishes, one that freezes, and with
several ranks one that is wrong. After each, weights and optimizer state are put back. For each is said which rule
fired, what was done, whether /metrics shows it, and which alert Prometheus would raise (by promtool, where that is
installed). The script is ended after the last fault.

Exit status: 0 every fault that was injected was found, 1 not so, or some were not reached, 2 it could not be run."""
_STOPPED = 86
_HEADER = ("", "fault", "found by", "after", "done", "/metrics", "alert")
_MOST_LINES = 15


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch selftest` to argparse."""
    parser = commands.add_parser(
        "selftest",
        help="inject faults into a script's first steps, to see whether its rules find them",
        description=DESCRIPTION,
        usage="gradwatch selftest [options] [--] COMMAND [ARG ...]",
    )
    parser.add_argument(
        "--rules", metavar="FILE", help="rule file or pack (default: GRADWATCH_RULES, else default)"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="N", help="for all steps, from the first (60)"
    )
    parser.add_argument(
        "--warmup",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="for rules whose baselines need longer: so many times the steps before and of each fault (1)",
    )
    parser.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="PATH",
        help="data of this folder that the script reads: a link to it, not a copy, so that the script could change it",
    )
    parser.add_argument("--keep", action="store_true", help="keep the copy, with the run in it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run")
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Run it and print what was found. Raises GradwatchError without a command, or for a wrong option."""
    from gradwatch.cli.processes.ending_signals import ended_by_signals
    from gradwatch.cli.run import anchored, command_of
    from gradwatch.cli.selftest.proofs import proofs
    from gradwatch.cli.selftest.scratch_folder import copy_folder
    from gradwatch.rules.files import load_rules

    command = command_of(arguments, "selftest")
    if not (arguments.seconds > 0 and arguments.warmup > 0):
        raise GradwatchError("--seconds and --warmup are numbers above 0")
    rules = anchored(arguments.rules or os.environ.get("GRADWATCH_RULES") or "default")
    ruleset = load_rules(rules)
    with ended_by_signals(), _scratch_folder(arguments.keep) as scratch:
        work = scratch / "cwd"
        work.mkdir()
        copied = copy_folder(Path.cwd(), work, arguments.link)
        if not arguments.json:
            print("\n".join(beforehand(copied, arguments.link)), flush=True)
        runs = _run_all(command, rules, scratch, arguments)
        return _conclude(proofs(runs, ruleset, arguments.seconds), ruleset, scratch, arguments, runs)


@contextmanager
def _scratch_folder(keep: bool) -> Iterator[Path]:
    scratch = Path(tempfile.mkdtemp(prefix="gradwatch-selftest-"))
    try:
        yield scratch
    finally:
        if keep:
            complain(f"gradwatch: kept: {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
            if scratch.exists():
                complain(f"gradwatch: could not be removed: {scratch}")


def beforehand(copied: Copied, links: Sequence[str]) -> list[str]:
    """Lines on what is kept in, and what is not."""
    lines = [
        f"in a copy of this folder ({copied.files:,} files); what the script writes below it is thrown away"
    ]
    for why, paths in (
        ("being large", copied.left_out),
        ("being links to folders", copied.symlinks),
        ("as trainings seldom read them", copied.by_rule),
    ):
        if paths:
            more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
            lines.append(f"  not copied, {why}: {', '.join(paths[:3])}{more} (if it reads them: --link PATH)")
    if links:
        lines.append(f"  linked, so that it could change them: {', '.join(links)}")
    lines.append("  nothing is sent: of the sinks only journal, log and prometheus are opened")
    lines.append(
        "  not kept in: absolute paths, the network (W&B is told to stay offline), other processes' files"
    )
    return lines


def _run_all(
    command: Sequence[str], rules: str, scratch: Path, arguments: argparse.Namespace
) -> list[ScriptRun]:
    """Run the command until every fault was injected: again where a rule has stopped it."""
    from gradwatch.cli.selftest.script_run import program, run_script
    from gradwatch.launch.selftest_faults import FAULTS, Plan

    left = [fault.name for fault in FAULTS]
    words = [program(command[0], scratch / "cwd"), *command[1:]]
    # The account of a process names files that are removed.
    environ = {**os.environ, **({} if arguments.keep else {"GRADWATCH_QUIET": "1"})}
    runs: list[ScriptRun] = []
    while True:
        results = tempfile.mkdtemp(prefix="selftest-", dir=scratch)
        run = run_script(
            words, rules, scratch, Plan(results, left, arguments.seconds, arguments.warmup), environ
        )
        runs.append(run)
        reached = [] if run.document is None else [one.fault for one in run.document.results]
        left = left[left.index(reached[-1]) + 1 :] if reached else []
        if run.status != _STOPPED or not left:
            return runs


def _conclude(
    found: Sequence[Proof],
    ruleset: Any,
    scratch: Path,
    arguments: argparse.Namespace,
    runs: Sequence[ScriptRun],
) -> int:
    from gradwatch.cli.selftest.alert_proof import alert_of, alerting
    from gradwatch.cli.selftest.proofs import NO_FAULT_OF_RULES

    failed = runs[-1].status not in (None, 0, _STOPPED)
    reached = any(run.document is not None and run.document.results for run in runs)
    last = "" if reached and not failed else _last_lines(scratch)
    if last:
        complain(last)
    if not reached:
        above = "; its last lines are above" if last else ""
        status = "it was ended" if runs[-1].status is None else f"exit status {runs[-1].status}"
        complain(f"gradwatch: no fault was injected: {found[0].why} ({status}){above}")
        return 2
    fired = list(dict.fromkeys(rule for one in found for rule in one.rules))
    alerts = alerting(ruleset, fired, scratch)
    missed = [
        one for one in found if (not one.found or one.metric is False) and one.why not in NO_FAULT_OF_RULES
    ]
    if arguments.json:
        rows = [
            {**asdict(one), "alerts": {rule: _alert(alerts, rule) for rule in one.rules}} for one in found
        ]
        steps = sum(run.document.steps for run in runs if run.document is not None)
        print(json.dumps({"passed": not missed, "steps": steps, "faults": rows}, indent=2))
        return int(bool(missed))
    names = {rule: alert_of(ruleset, rule) for rule in fired}
    print(f"\n{table(_HEADER, [_row(one, alerts, names) for one in found])}")
    if alerts is None:
        print("alerts were not evaluated: promtool is not installed (package prometheus)")
    print(_sum_up(found, missed, arguments))
    return int(bool(missed))


def _alert(alerts: Mapping[str, bool] | None, rule: str) -> bool | None:
    return None if alerts is None else alerts[rule]


def _row(one: Proof, alerts: Mapping[str, bool] | None, names: Mapping[str, str]) -> tuple[str, ...]:
    from gradwatch.launch.selftest_faults import FAULTS

    title = next(fault.title for fault in FAULTS if fault.name == one.fault)
    if one.why:
        return paint("–", "yellow"), title, one.why, "", "", "", ""
    if not one.found:
        return paint("MISSED", "red"), title, "no rule", "", "", "", ""
    more = f" and {len(one.rules) - 1} more" if len(one.rules) > 1 else ""
    raised = [rule for rule in one.rules if alerts is None or alerts[rule]]
    alert = ", ".join(dict.fromkeys(names[rule] for rule in raised)) or paint("none", "red")
    after = "the same step" if not one.late else f"{one.late} step{'s' * (one.late > 1)}"
    metric = {True: "shown", False: paint("MISSING", "red"), None: "not read"}[one.metric]
    done = ", ".join(one.actions) or "alert"
    return paint("found", "green"), title, one.rules[0] + more, after, done, metric, alert


def _sum_up(found: Sequence[Proof], missed: Sequence[Proof], arguments: argparse.Namespace) -> str:
    from gradwatch.cli.selftest.proofs import NO_FAULT_OF_RULES

    count, injected = sum(one.found for one in found), sum(not one.why for one in found)
    words = paint(f"{count} of {injected} injected faults found", "green" if count == injected else "red")
    left = sum(one.why not in ("", *NO_FAULT_OF_RULES) for one in found)
    untried = f"; {left} not tried to the end, with its reason above" if left else ""
    rules = f" --rules {arguments.rules}" if arguments.rules else ""
    advice = f"; all rules: gradwatch rules list{rules}" if missed else ""
    return f"{words}{untried}{advice}"


def _last_lines(scratch: Path) -> str:
    try:
        lines = (scratch / "output").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    from gradwatch.runtime.printable import one_line

    return "\n".join(one_line(line, 500) for line in lines[-_MOST_LINES:])
