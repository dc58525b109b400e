"""`gradwatch rules …`: everything about rule files, without torch."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from gradwatch.cli.rules import formatting, reference, unit_tests
from gradwatch.cli.terminal import complain, framed, paint, table
from gradwatch.errors import GradwatchError, RuleFileError
from gradwatch.runtime.printable import plural
from gradwatch.runtime.spelling import did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from gradwatch.rules.rule_set import Rule, RuleSet


STAGGERED_RULES = (
    "each parameter or module is judged every {} steps, in turns (`every: 1`: all at each step): {}"
)

MISSING_SINKS = (
    "no {}: `sinks:` takes the place of the default list, prometheus (/metrics), journal (all that report, explain "
    "and audit read) and log; name what is to stay"
)


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

    listing = verbs.add_parser(
        "list",
        help="the rules of a file and what it resolves to",
        description="List the rules of a file after `extends:` and defaults: what each detects, on which column, "
        "after how many samples it fires, and what it does.",
    )
    listing.add_argument(
        "--rules", metavar="FILE", default="default", help="rule file or pack (default: default)"
    )
    listing.add_argument(
        "--resolved", action="store_true", help="every setting of every rule, defaults filled in"
    )
    listing.add_argument(
        "--origin", action="store_true", help="the same, with the file and line that set each"
    )
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(handler=handle_list)

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
                counted = plural(report["enabled"], "rule")
                print(f"{paint('ok', 'green')}  {report['path']}: {counted}, digest {report['digest'][:12]}")
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
    """Contents of one rule file: its rules and digest, or its problems; notes on rules and sinks; what it costs."""
    from gradwatch.cli.preflight import load
    from gradwatch.cli.rules.check_cost import cost_of
    from gradwatch.session.settings import DEFAULT_SINKS

    report: dict[str, Any] = {
        "path": path,
        "ok": True,
        "enabled": 0,
        "digest": "",
        "notes": [],
        "problems": [],
    }
    try:
        ruleset = load(path)
    except RuleFileError as error:
        return report | {"ok": False, "problems": list(error.problems)}
    staggered: dict[int, list[str]] = {}
    for rule in ruleset.rules:
        if rule.enabled and rule.staggered:
            staggered.setdefault(rule.every, []).append(rule.id)
    notes = [STAGGERED_RULES.format(every, ", ".join(ids)) for every, ids in sorted(staggered.items())]
    if ruleset.sinks is not None:
        listed = {spec.kind for spec in ruleset.sinks}
        missing = [name for name in DEFAULT_SINKS if name not in listed]
        notes += [MISSING_SINKS.format(", no ".join(missing))] if missing else []
    enabled = sum(rule.enabled for rule in ruleset.rules)
    report |= {"enabled": enabled, "digest": ruleset.digest, "notes": notes}
    return report | {"cost": cost_of(ruleset, model)} if cost else report


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


def handle_list(arguments: argparse.Namespace) -> int:
    """Print the rules; RuleFileError (exit 2) where the file is refused."""
    from gradwatch.rules.files import load_rules

    ruleset = load_rules(arguments.rules)
    if arguments.json:
        print(json.dumps(document(ruleset, arguments.origin), indent=2, default=str))
    elif arguments.resolved or arguments.origin:
        print("\n\n".join(resolved(rule, ruleset, arguments.origin) for rule in ruleset.rules))
        print_inactive(ruleset)
    else:
        header = ("rule", "detects", "of", "for", "scope", "severity", "does")
        print(table(header, [summary(rule) for rule in ruleset.rules]))
        print_inactive(ruleset)
    return 0


def summary(rule: Rule) -> tuple[str, ...]:
    """One line of the listing."""
    styles = {"critical": "red", "warning": "yellow", "info": "cyan"}
    does = ", ".join(action.name for action in rule.do) or "alert"
    does = "off" if not rule.enabled else f"would {does}" if rule.mode == "shadow" else does
    column = str(getattr(rule.detect, "of", "–")) + (f" (every {rule.every})" if rule.every > 1 else "")
    severity = paint(rule.severity, styles[rule.severity])
    return rule.id, rule.kind, column, str(rule.for_), rule.scope, severity, does


def resolved(rule: Rule, ruleset: RuleSet, origin: bool) -> str:
    """Every setting of one rule, one to a line, with where it was set if asked for."""
    rows = []
    for key, value in settings(rule).items():
        setting = json.dumps(value, default=str, ensure_ascii=False)
        if origin:
            setting += "  " + paint(placed(ruleset.origins.get(f"{rule.id}.{key}", "default")), "dim")
        rows.append((key, setting))
    return f"{paint(rule.id, 'bold')}\n{table((), rows, indent='  ')}"


def settings(rule: Rule) -> dict[str, Any]:
    """A rule as the file would spell it in full: `detect.*` flattened, `for` without its underscore."""
    from gradwatch.rules.condition import OF_DETECTOR, When  # not at the top: it needs numpy

    if isinstance(rule.detect, When):
        return {"when": rule.detect.spelled()} | _beside(rule, OF_DETECTOR)
    flat: dict[str, Any] = {"detect.kind": rule.kind}
    own = (
        {each.name for each in fields(rule.detect)} - {"warmup", "half_life"}
        if is_dataclass(rule.detect)
        else set()
    )
    flat |= {f"detect.{name}": getattr(rule.detect, name) for name in sorted(own)}
    return flat | _beside(rule, ("detect",))


def _beside(rule: Rule, without: Collection[str]) -> dict[str, Any]:
    """The settings of a rule beside what it judges."""
    flat: dict[str, Any] = {}
    for each in fields(rule):
        if each.name != "id" and each.name not in without:
            value = getattr(rule, each.name)
            if each.name == "do":
                value = [
                    {action.name: dict(action.params)} if action.params else action.name for action in value
                ]
            flat[each.name.rstrip("_")] = dict(value) if isinstance(value, Mapping) else value
    return flat


def placed(origin: str) -> str:
    """An origin as one would type it: relative to here where that is shorter."""
    path, colon, line = origin.rpartition(":")
    if not colon:
        return origin
    near = os.path.relpath(path)
    return f"{near if len(near) < len(path) else path}:{line}"


def document(ruleset: RuleSet, origin: bool) -> dict[str, Any]:
    """The rule set for a machine."""
    rules = {rule.id: settings(rule) for rule in ruleset.rules}
    report = {"digest": ruleset.digest, "rules": rules, "inactive": dict(ruleset.inactive)}
    return report | ({"origins": dict(ruleset.origins)} if origin else {})


def print_inactive(ruleset: RuleSet) -> None:
    """Rules that cannot run here, with the reason."""
    if ruleset.inactive:
        print(f"\n{paint('inactive', 'bold')}")
        print("\n".join(f"  {rule}: {reason}" for rule, reason in ruleset.inactive.items()))


def handle_schema(arguments: argparse.Namespace) -> int:
    """Print the JSON Schema."""
    from gradwatch.rules.files import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
