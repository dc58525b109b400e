"""`gradwatch rules …`: everything about rule files, without torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from gradwatch.cli.rules import formatting, listing, reference, unit_tests
from gradwatch.cli.terminal import complain, framed, paint, table
from gradwatch.errors import GradwatchError, RuleFileError
from gradwatch.runtime.printable import plural
from gradwatch.runtime.spelling import did_you_mean

if TYPE_CHECKING:
    from torch import nn


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch rules …` to argparse."""
    parser = commands.add_parser("rules", help="check, test, explain and list rule files")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    check = verbs.add_parser(
        "check",
        help="everything that is wrong with a rule file, with its place",
        description="Report everything that is wrong with rule files, with file, line, column and code. "
        "Exit 1 where something is wrong, 2 where a file cannot be read.",
    )
    check.add_argument("files", nargs="+", metavar="FILE", help="rule file, or a shipped pack by name")
    check.add_argument(
        "--cost", action="store_true", help="also print how often rules read whole tensors beyond the norms"
    )
    check.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="with --cost: function that returns the model whose bytes per step are printed",
    )
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(handler=handle_check)

    formatting.add_parser(verbs)
    unit_tests.add_parser(verbs)
    reference.add_parsers(verbs)

    explain = verbs.add_parser(
        "explain",
        help="what an error code such as GW101 means and how to fix it; or what a kind of detector does",
        description="Say what an error code of `gradwatch rules check` means, with an example and how to fix it.",
    )
    explain.add_argument(
        "code", metavar="CODE", nargs="?", help="the code, or a kind; without one, all codes are listed"
    )
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.set_defaults(handler=handle_explain)

    listing.add_parser(verbs)

    schema = verbs.add_parser(
        "schema",
        help="JSON Schema of the rule language, for editors",
        description="Print the JSON Schema of rule files, for completion and checks in an editor.",
    )
    schema.set_defaults(handler=handle_schema)


def handle_check(arguments: argparse.Namespace) -> int:
    """Report on each file; 1 where any has a problem, 2 where one cannot be read.

    Raises GradwatchError for wrong options.
    """
    from gradwatch.cli.rules.check_cost import lines_of, model_of

    if arguments.model and not arguments.cost:
        raise GradwatchError("--model MODULE:FUNCTION needs --cost: it is the model whose reads are counted")
    model = model_of(arguments.model) if arguments.model else None
    reports = [check_one(path, arguments.cost, model) for path in arguments.files]
    wrong = [problem for report in reports for problem in report["problems"]]
    if arguments.json:
        documents = [
            {**report, "problems": [each._asdict() for each in report["problems"]]} for report in reports
        ]
        print(json.dumps({"files": documents, "problems": len(wrong)}, indent=2))
    else:
        for report in reports:
            for problem in report["problems"]:
                complain(f"{framed(problem)}\n")
            if not report["problems"]:
                print(
                    f"{paint('ok', 'green')}  {report['path']}: {counted(report)}, digest {report['digest'][:12]}"
                )
            for note in report["notes"]:
                print(f"{paint('note', 'yellow')}  {note}")
            if "cost" in report:
                print("\n".join(lines_of(report["cost"])))
        if wrong:
            codes = sorted({problem.code for problem in wrong})
            complain(
                f"{plural(len(wrong), 'problem')} found; explained by: gradwatch rules explain {codes[0]}"
            )
    unreadable = any(problem.code.startswith("GW00") for problem in wrong)
    return 2 if unreadable else int(bool(wrong))


def check_one(path: str, cost: bool = False, model: nn.Module | None = None) -> dict[str, Any]:
    """Contents of one rule file: how much of what it has, and its digest, or its problems; notes; what it costs."""
    from gradwatch.cli.preflight import load
    from gradwatch.cli.rules.check_cost import cost_of
    from gradwatch.cli.rules.check_notes import notes_on

    report: dict[str, Any] = {
        "path": path,
        "ok": True,
        "enabled": 0,
        "clips_total": False,
        "clip_groups": 0,
        "sinks": None,
        "digest": "",
        "notes": [],
        "problems": [],
    }
    try:
        ruleset = load(path)
    except RuleFileError as error:
        return report | {"ok": False, "problems": list(error.problems)}
    enabled = sum(rule.enabled for rule in ruleset.rules)
    clip = ruleset.clip
    report |= {
        "enabled": enabled,
        "clips_total": clip is not None and clip.total is not None,
        "clip_groups": 0 if clip is None else len(clip.groups),
        "sinks": None if ruleset.sinks is None else len(ruleset.sinks),
        "digest": ruleset.digest,
        "notes": notes_on(ruleset, path),
    }
    return report | {"cost": cost_of(ruleset, model)} if cost else report


def counted(report: Mapping[str, Any]) -> str:
    """The numbers of rules, clip policies and sinks of a file, in words."""
    words = [plural(report["enabled"], "rule")]
    words += ["a clip of the total"] if report["clips_total"] else []
    words += [plural(report["clip_groups"], "clip group")] if report["clip_groups"] else []
    words += [] if report["sinks"] is None else [plural(report["sinks"], "sink")]
    return ", ".join(words)


def handle_explain(arguments: argparse.Namespace) -> int:
    """Print what a code means; 2 for a code that does not exist."""
    from gradwatch.rules.problem_codes import CODES

    if arguments.code is None:
        if arguments.json:
            print(json.dumps({code: asdict(entry) for code, entry in CODES.items()}, indent=2))
        else:
            print(table(("code", "meaning"), [(code, entry.title) for code, entry in CODES.items()]))
        return 0
    code = arguments.code.upper()
    entry = CODES.get(code)
    if entry is None:
        topic = reference.topic_of(arguments.code)
        if topic is not None:
            arguments.topic, arguments.name = topic, arguments.code
            return reference.handle(arguments)
        hint = did_you_mean(arguments.code, reference.entries_of("kinds"))
        complain(
            f"gradwatch: there is no code and no kind of detector {arguments.code!r}{hint}, no column, action, policy "
            "or sink; `gradwatch rules explain` lists all codes, `gradwatch rules kinds` all kinds"
        )
        return 2
    print(json.dumps({"code": code, **asdict(entry)}, indent=2) if arguments.json else explained(code, entry))
    return 0


def explained(code: str, entry: Any) -> str:
    """One catalogue entry as text: title, then whatever paragraphs it has."""
    parts = [f"{paint(code, 'bold')} {entry.title}"]
    parts += [
        str(getattr(entry, each.name)).strip() for each in fields(entry) if each.name not in ("code", "title")
    ]
    return "\n\n".join(part for part in parts if part)


def handle_schema(arguments: argparse.Namespace) -> int:
    """Print the JSON Schema."""
    from gradwatch.rules.files import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
