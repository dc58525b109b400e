"""`gradwatch rules test`: run the unit tests of rule files; 0 all passed, 1 some failed, 2 a file is refused."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gradwatch.cli.terminal import complain, framed, paint
from gradwatch.errors import AttachError, Problem, RuleFileError
from gradwatch.runtime.json_numbers import json_ready
from gradwatch.runtime.printable import plural

if TYPE_CHECKING:
    from gradwatch.rule_tests import Case, Outcome, RuleTests


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch rules test` to argparse."""
    test = verbs.add_parser(
        "test",
        help="run unit tests of rule files: series in, expected events and actions out",
        description="Run *.test.yaml files as `promtool test rules` does: made-up series go through the rules, and the "
        "events and actions that come are compared with those expected. Exit status: 0 all passed, 1 some failed, "
        "2 a test file or a rule file is refused.",
    )
    test.add_argument("tests", nargs="+", metavar="FILE", help="test file, such as rules/default.test.yaml")
    test.add_argument("--run", metavar="TEXT", default="", help="only tests whose name holds this text")
    test.add_argument("--json", action="store_true", help="print JSON")
    test.set_defaults(handler=handle_test)


def handle_test(arguments: argparse.Namespace) -> int:
    """Run every file, telling of each as soon as it is done."""
    reports = []
    for path in arguments.tests:
        reports.append(report := test_one(path, arguments.run))
        if not arguments.json:
            show(report)
    ran = sum(len(report["tests"]) for report in reports)
    failed = sum(not one["ok"] for report in reports for one in report["tests"])
    refused = sum(bool(report["problems"]) for report in reports)
    if arguments.json:
        print(json.dumps({"files": [documented(one) for one in reports], "failed": failed}, indent=2))
    elif not refused and not ran:
        complain(f"gradwatch: no test has {arguments.run!r} in its name")
    return 2 if refused or not ran else int(bool(failed))


def test_one(path: str, wanted: str) -> dict[str, Any]:
    """Result of one test file: its tests, or the problems for which it was refused."""
    from gradwatch.rule_tests import load_tests

    report: dict[str, Any] = {"path": path, "tests": [], "problems": []}
    try:
        tests = load_tests(path)
        chosen = [case for case in tests.cases if wanted in case.name]
        report["tests"] = [document(outcome_of(tests, case)) for case in chosen]
    except RuleFileError as error:
        report["problems"] = list(error.problems)
    return report


def outcome_of(tests: RuleTests, case: Case) -> Outcome:
    """Run one test. Raises `RuleFileError` where the rules do not fit its parameters."""
    from gradwatch.rule_tests import compared, simulate

    try:
        return compared(case, simulate(tests.ruleset, case))
    except AttachError as error:
        mark = case.at
        line = mark.source.lines[mark.line - 1]
        problem = Problem(mark.source.path, mark.line, mark.column, "GW305", str(error), line, mark.width)
        raise RuleFileError((problem,)) from None


def document(outcome: Outcome) -> dict[str, Any]:
    """An outcome as plain values: what is missing, with its line, and what came beside it."""
    case = outcome.case
    return {
        "name": case.name,
        "line": case.at.line,
        "column": case.at.column,
        "ok": outcome.passed,
        "differences": [*_differences(outcome)],
    }


def _differences(outcome: Outcome) -> Iterator[dict[str, Any]]:
    lists = (
        ("event", outcome.missing_events, outcome.further_events),
        ("action", outcome.missing_actions, outcome.further_actions),
    )
    for what, missing, further in lists:
        for item in missing:
            at = {"line": item.at.line, "column": item.at.column}
            yield {"what": what, "expected": True, "step": item.step, **at, "fields": dict(item.fields)}
        for step, fields in further:
            yield {"what": what, "expected": False, "step": step, "fields": dict(fields)}


def documented(report: Mapping[str, Any]) -> dict[str, Any]:
    """A report for a machine; NaN and the infinities as strings, which JSON has no numbers for."""
    safe: Any = json_ready(report["tests"])
    problems = [problem._asdict() for problem in report["problems"]]
    ok = not problems and all(one["ok"] for one in report["tests"])
    return {"path": report["path"], "ok": ok, "tests": safe, "problems": problems}


# -- for people ------------------------------------------------------------------------------------------


def show(report: Mapping[str, Any]) -> None:
    """One line for a file whose tests passed; of each that failed what was expected (-) and what came (+)."""
    for problem in report["problems"]:
        complain(f"{framed(problem)}\n")
    failed = [one for one in report["tests"] if not one["ok"]]
    for one in failed:
        place = f"{report['path']}:{one['line']}:{one['column']}"
        print(f"{paint('FAILED', 'red')}  {place}  {one['name']}")
        for difference in sorted(one["differences"], key=lambda each: (each["step"], not each["expected"])):
            print(f"    {_line(difference, one['differences'])}")
    if report["tests"] and not failed and not report["problems"]:
        print(f"{paint('ok', 'green')}  {report['path']}: {plural(len(report['tests']), 'test')}")
    elif failed:
        print(f"{report['path']}: {len(failed)} of {plural(len(report['tests']), 'test')} failed")
    sys.stdout.flush()


SHOWN = (
    "kind",
    "action",
    "severity",
    "sites",
    "site",
    "count",
    "value",
    "before",
    "after",
    "coefficient",
    "shadow",
)
"""Fields of what came unexpectedly that a person is shown; --json has them all."""


def _line(difference: Mapping[str, Any], others: list[Mapping[str, Any]]) -> str:
    """`- step 30  rule  firing …` in red, or `+ …` in green; and the line of the test file."""
    fields = difference["fields"]
    text = f"step {difference['step']}  {fields['rule']}"
    if difference["expected"]:
        rest = [name for name in fields if name != "rule"]
        said = " ".join(_field(name, fields[name]) for name in rest)
        return paint(f"- {text}  {said}  (line {difference['line']})", "red")
    # What was expected of this very rule and step is what there is to compare with.
    asked = {
        name for other in others if other["expected"] and _near(other, difference) for name in other["fields"]
    }
    rest = [
        name for name in SHOWN if name in fields and (name in asked or _worth_showing(name, fields[name]))
    ]
    said = " ".join(_field(name, fields[name]) for name in (*rest, *sorted(asked - {*rest, "rule"})))
    return paint(f"+ {text}  {said}", "green")


def _near(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(
        one["what"] == other["what"]
        and one["step"] == other["step"]
        and one["fields"]["rule"] == other["fields"]["rule"]
    )


def _worth_showing(name: str, value: Any) -> bool:
    return name in ("kind", "action") or value not in (None, "", [], False, 0)


def _field(name: str, value: Any) -> str:
    if name in ("kind", "action", "severity"):
        return str(value)
    return f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
