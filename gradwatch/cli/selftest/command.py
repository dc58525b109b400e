"""`gradwatch selftest [options] -- COMMAND…`: the command line, the processes, and what is printed."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwatch.cli.terminal import complain, paint, table
from gradwatch.errors import GradwatchError

if TYPE_CHECKING:
    from gradwatch.cli.selftest.proofs import Proof

DESCRIPTION = """Would your rules find it? COMMAND is run as by `gradwatch run`, in a copy of this folder, and faults
are injected into its gradients one after another: NaN, Inf, a spike, a layer that vanishes, one that freezes, and with
several ranks one that is wrong. After each, weights and optimizer state are put back. For each is said which rule
fired, what was done, whether /metrics shows it, and which alert Prometheus would raise (by promtool, where that is
installed). The script is ended after the last fault.

Exit status: 0 every fault that was injected was found, 1 not so, or some were not reached, 2 it could not be run."""
EXITED_EARLY_SECONDS = 15.0
START_SECONDS = 300.0
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
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    from gradwatch.cli.run import anchored
    from gradwatch.cli.selftest.proofs import not_reached, proofs
    from gradwatch.cli.selftest.scratch_folder import copy_folder
    from gradwatch.rules.files import load_rules

    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise GradwatchError("nothing to run; write: gradwatch selftest -- python train.py")
    if not (arguments.seconds > 0 and arguments.warmup > 0):
        raise GradwatchError("--seconds and --warmup are numbers above 0")
    rules = anchored(arguments.rules or os.environ.get("GRADWATCH_RULES") or "default")
    ruleset = load_rules(rules)
    scratch = Path(tempfile.mkdtemp(prefix="gradwatch-selftest-"))
    try:
        work = scratch / "cwd"
        work.mkdir()
        copied = copy_folder(Path.cwd(), work, arguments.link)
        if not arguments.json:
            print("\n".join(beforehand(copied.files, copied.left_out, arguments.link)), flush=True)
        documents, status = _run_all(command, rules, scratch, arguments)
        found = proofs(documents, ruleset, not_reached(documents[-1] if documents else {}, arguments.seconds))
        return _conclude(found, ruleset, scratch, arguments, documents, status)
    finally:
        if arguments.keep:
            complain(f"gradwatch: kept: {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)


def beforehand(files: int, left_out: Sequence[str], links: Sequence[str]) -> list[str]:
    """Lines on what is kept in, and what is not."""
    lines = [f"in a copy of this folder ({files:,} files); what the script writes below it is thrown away"]
    if left_out:
        more = f" and {len(left_out) - 3:,} more" if len(left_out) > 3 else ""
        lines.append(
            f"  not copied, being large: {', '.join(left_out[:3])}{more} (if it reads them: --link PATH)"
        )
    if links:
        lines.append(f"  linked, so that it could change them: {', '.join(links)}")
    lines.append(
        "  not kept in: absolute paths, the network (W&B is told to stay offline), other processes' files"
    )
    return lines


def _run_all(
    command: Sequence[str], rules: str, scratch: Path, arguments: argparse.Namespace
) -> tuple[list[Mapping[str, Any]], int]:
    """Run the command until every fault was injected: again where a rule has stopped it."""
    from gradwatch.cli.selftest.proofs import read_results
    from gradwatch.launch.selftest_faults import FAULTS

    left = [fault.name for fault in FAULTS]
    documents: list[Mapping[str, Any]] = []
    while True:
        results = Path(tempfile.mkdtemp(prefix="selftest-", dir=scratch))
        status = _run(command, rules, scratch, results, left, arguments)
        document = read_results(results)
        if document:
            documents.append({**document, "run": str(scratch / "runs" / results.name)})
        reached = [one["fault"] for one in document.get("results", ())]
        left = left[left.index(reached[-1]) + 1 :] if reached else []
        if document.get("done") or status != _STOPPED or not left:
            return documents, status


def _run(
    command: Sequence[str],
    rules: str,
    scratch: Path,
    results: Path,
    faults: Sequence[str],
    arguments: argparse.Namespace,
) -> int:
    """One process of the script; its output goes to a file. The exit status, -1 where it had to be ended."""
    from gradwatch.launch.script_environment import prepare
    from gradwatch.launch.selftest_faults import VARIABLE
    from gradwatch.session.settings import ROOT

    plan = {
        "directory": str(results),
        "faults": list(faults),
        "seconds": arguments.seconds,
        "warmup": arguments.warmup,
    }
    settings = {
        "GRADWATCH_RULES": rules,
        "GRADWATCH_DIR": str(scratch / "runs"),
        "GRADWATCH_RUN_ID": results.name,
        "GRADWATCH_LISTEN": "127.0.0.1:0",
        ROOT: str(scratch / "runs"),
        VARIABLE: json.dumps(plan),
    }
    environ = {**os.environ, "WANDB_MODE": "offline", "PWD": str(scratch / "cwd")}
    launch = prepare([program(command[0], scratch / "cwd"), *command[1:]], settings, environ)
    with (scratch / "output").open("ab") as output:
        try:
            process = subprocess.Popen(
                launch.argv,
                cwd=scratch / "cwd",
                env={**launch.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            raise GradwatchError(f"cannot run {command[0]}: {error.strerror}") from None
    try:
        return _waited(process, results, arguments.seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def program(name: str, work: Path) -> str:
    """The program as the copy's working folder finds it: `.venv/bin/python` is not copied."""
    return name if os.sep not in name or (work / name).exists() else os.path.abspath(name)


def _waited(process: subprocess.Popen[bytes], results: Path, seconds: float) -> int:
    """The exit status of a process that has START_SECONDS to its first fault, and then so many and some more."""
    deadline = time.monotonic() + START_SECONDS
    began = False
    while process.poll() is None and time.monotonic() < deadline:
        if not began and any(results.iterdir()):
            began, deadline = True, time.monotonic() + seconds + EXITED_EARLY_SECONDS
        time.sleep(0.05)
    return -1 if process.returncode is None else process.returncode


def _conclude(
    found: Sequence[Proof],
    ruleset: Any,
    scratch: Path,
    arguments: argparse.Namespace,
    documents: Sequence[Mapping[str, Any]],
    status: int,
) -> int:
    from gradwatch.cli.selftest.alert_proof import alert_of, alerting
    from gradwatch.cli.selftest.proofs import ONE_RANK

    injected = [one for one in found if not one.why]
    if not injected:
        complain("".join(_last_lines(scratch)))
        complain(
            f"gradwatch: no fault was injected: {found[0].why} (exit status {status}); its last lines are above"
        )
        return 2
    fired = list(dict.fromkeys(rule for one in found for rule in one.rules))
    alerts = alerting(ruleset, fired, scratch)
    missed = [one for one in found if (not one.found or one.metric is False) and one.why != ONE_RANK]
    if arguments.json:
        rows = [
            {**asdict(one), "alerts": {rule: _alert(alerts, rule) for rule in one.rules}} for one in found
        ]
        steps = sum(int(document["steps"]) for document in documents)
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
    from gradwatch.cli.selftest.proofs import TITLES

    title = TITLES[one.fault]
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
    from gradwatch.cli.selftest.proofs import ONE_RANK

    count, injected = sum(one.found for one in found), sum(not one.why for one in found)
    words = paint(f"{count} of {injected} injected faults found", "green" if count == injected else "red")
    left = sum(one.why not in ("", ONE_RANK) for one in found)
    untried = f"; {left} not tried to the end, with its reason above" if left else ""
    rules = f" --rules {arguments.rules}" if arguments.rules else ""
    advice = f"; all rules: gradwatch rules list{rules}" if missed else ""
    return f"{words}{untried}{advice}"


def _last_lines(scratch: Path) -> list[str]:
    try:
        lines = (scratch / "output").read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except OSError:
        return []
    from gradwatch.runtime.printable import one_line

    return [one_line(line.rstrip("\n"), 500) + "\n" for line in lines[-_MOST_LINES:]]
