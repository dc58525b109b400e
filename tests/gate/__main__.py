"""Run every promise at its number: `python -m tests.gate [P1 …] [--results FILE] [--again] [--list]`.

Each promise is a pytest of its own. What has passed at this commit is kept in the results and not run again, so that a
gate that was broken off goes on where it was. The table at the end is Markdown; exit 1 unless all of it is green.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch

from gradwatch.runtime.atomic_files import write_whole
from tests.benchmarks import tables
from tests.benchmarks.versions import ROOT
from tests.gate.promises import PROMISES, Promise

WITHOUT_NETWORK = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
WORKERS = ("-n", "2")
SUITE = "tests"
"""The test command of the README, which leaves out what stands behind a marker."""


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of the tests of one promise at `commit`; `seen` are the values that they recorded."""

    commit: str
    passed: int
    failed: int
    skipped: list[str]
    seconds: float
    seen: list[str]

    @property
    def green(self) -> bool:
        """True if something ran and nothing failed."""
        return self.passed > 0 and not self.failed


def command(promise: Promise, report: str) -> list[str]:
    """The pytest of one promise, which writes its JUnit report."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    words += WORKERS
    if promise.tests != (SUITE,):
        words += ["-m", "soak or bench or not (soak or bench)", "--timeout", "14400"]
    words += promise.tests
    return [*WITHOUT_NETWORK, *words] if promise.without_network else words


def run(promise: Promise, commit: str) -> Result:
    """Run the tests of one promise."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.xml")
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command(promise, report), cwd=ROOT, env=environ, stdout=sys.stderr, check=False)
        if not os.path.exists(report):
            return Result(commit, 0, 1, [], time.monotonic() - began, ["pytest did not come to its end"])
        return read(Path(report), commit, time.monotonic() - began)


def read(report: Path, commit: str, seconds: float) -> Result:
    """The result in a JUnit report."""
    passed = failed = 0
    skipped: list[str] = []
    seen: list[str] = []
    # Written by the pytest above, and by no one else.
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif (why := case.find("skipped")) is not None:
            skipped.append(f"{case.get('name')}: {why.get('message')}")
        else:
            passed += 1
        seen += [str(each.get("value")) for each in case.iter("property") if each.get("name") == "seen"]
    return Result(commit, passed, failed, list(dict.fromkeys(skipped)), seconds, seen)


def table(results: dict[str, Result]) -> str:
    """All promises with what was seen, as Markdown."""
    rows = [["", "promise", "number", "seen", "outcome"]]
    for promise in PROMISES:
        result = results.get(promise.key)
        if promise.missing:
            outcome, seen = "**not held**", promise.missing
        elif result is None:
            outcome, seen = "not run", ""
        else:
            counts = f"{result.passed} passed" + (f", {result.failed} failed" if result.failed else "")
            counts += f", {len(result.skipped)} skipped" if result.skipped else ""
            outcome = ("green" if result.green else "**red**") + f" ({counts}, {result.seconds:,.0f} s)"
            seen = "; ".join(result.seen)
        rows.append([promise.key, promise.says, promise.number, seen, outcome])
    return tables.as_markdown(rows)


def commit_of(folder: Path) -> str:
    """The commit that is checked out, and whether files differ from it."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gate", description=__doc__)
    parser.add_argument("keys", nargs="*", metavar="P", help="promises (default: all)")
    parser.add_argument(
        "--results", default="gate.json", help="where results are kept (default: %(default)s)"
    )
    parser.add_argument("--again", action="store_true", help="run also what has passed at this commit")
    parser.add_argument(
        "--list", action="store_true", help="list the promises and their tests, and run nothing"
    )
    arguments = parser.parse_args(argv)
    unknown = set(arguments.keys) - {promise.key for promise in PROMISES}
    if unknown:
        parser.error(f"no such promise: {', '.join(sorted(unknown))}")
    chosen = [one for one in PROMISES if not arguments.keys or one.key in arguments.keys]
    if arguments.list:
        for promise in chosen:
            print(f"{promise.key}: {promise.says} ({promise.number})")
            print("\n".join(f"    {test}" for test in promise.tests or (promise.missing,)))
        return 0
    commit, place = commit_of(ROOT), Path(arguments.results)
    kept = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {}
    results = {key: Result(**one) for key, one in kept.items()}
    for promise in chosen:
        known = results.get(promise.key)
        if promise.missing or (known and known.green and known.commit == commit and not arguments.again):
            continue
        if promise.without_network and shutil.which("unshare") is None:
            print(f"{promise.key}: not run, there is no unshare(1) here", file=sys.stderr)
            continue
        print(f"{promise.key}: {promise.says} ({promise.number})", file=sys.stderr)
        results[promise.key] = run(promise, commit)
        write_whole(place, json.dumps({key: asdict(one) for key, one in results.items()}, indent=1))
    at_commit = {key: one for key, one in results.items() if one.commit == commit}
    print(f"{commit}, {time.strftime('%Y-%m-%d')}, {tables.machine(torch.get_num_threads())}\n")
    print(table(at_commit))
    return int(
        not all(one.key in at_commit and at_commit[one.key].green for one in chosen if not one.missing)
    )


if __name__ == "__main__":
    raise SystemExit(main())
