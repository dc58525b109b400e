"""`gradwatch tune RUN… --healthy`: thresholds for a budget of false alarms, as a rule file with its evidence."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwatch.cli.report import check_replaceable, save
from gradwatch.cli.run_argument import add_jobs, add_rank, add_run
from gradwatch.cli.terminal import Counter, paint, table
from gradwatch.errors import GradwatchError, RuleFileError
from gradwatch.runtime.printable import plural, printable

if TYPE_CHECKING:
    from gradwatch.backtest.outcome import RunBacktest
    from gradwatch.backtest.tuning import Tuned
    from gradwatch.rules.rule_set import RuleSet

DESCRIPTION = """Loosen the thresholds of rules that alarm too often in runs in which nothing went wrong, until these
give at most --budget false alarms per 1,000 steps, and write the result as a rule file that says in comments what it
was made of. Rules that stay below are left as they are, and no threshold is made stricter.

Refused, with what would do: runs that are too short to tell (95 %), and alarms of rules without a threshold, such as
those on NaN: then the runs are not healthy."""
DEFAULT_BUDGET = 0.1
DEFAULT_OUTPUT = "tuned.gradwatch.yaml"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch tune` to argparse."""
    parser = commands.add_parser(
        "tune",
        help="thresholds by which healthy runs give few false alarms, as a rule file",
        description=DESCRIPTION,
    )
    add_run(parser, "runs", nargs="+")
    parser.add_argument("--healthy", action="store_true", help="say that nothing went wrong in these runs")
    parser.add_argument(
        "--budget",
        type=float,
        default=DEFAULT_BUDGET,
        metavar="N",
        help=f"false alarms per 1,000 steps, of all rules together (default: {DEFAULT_BUDGET})",
    )
    parser.add_argument(
        "--rules",
        default="default",
        metavar="FILE",
        help="rule file or pack to begin with (default: default)",
    )
    parser.add_argument(
        "-o", "--output", default=DEFAULT_OUTPUT, metavar="FILE", help=f"default: {DEFAULT_OUTPUT}"
    )
    add_rank(parser, "judge the journals")
    add_jobs(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Tune, write the file, print what was moved."""
    from gradwatch.backtest.many_runs import backtest_runs
    from gradwatch.backtest.tuned_file import text
    from gradwatch.backtest.tuning import tune
    from gradwatch.rules.files import load_rules, parse_rules

    if not arguments.healthy:
        raise GradwatchError(
            "thresholds are made of runs in which nothing went wrong: say that these are such runs, with --healthy"
        )
    if not 0 < arguments.budget < math.inf:
        raise GradwatchError(
            f"--budget {arguments.budget:g}: no number of steps can tell that there is no false alarm"
            if arguments.budget <= 0
            else f"--budget {arguments.budget:g}: no number of false alarms per 1,000 steps"
        )
    rules = load_rules(arguments.rules)
    output = Path(arguments.output)
    base = base_of(arguments.rules, output)
    with closing(Counter("{:,} steps judged")) as count:

        def judge(ruleset: RuleSet, numbers: Sequence[int]) -> list[RunBacktest]:
            chosen = [arguments.runs[number] for number in numbers]
            about = arguments.rank, arguments.jobs, arguments.backend, count
            return backtest_runs(chosen, ruleset, None, *about)

        tuned = tune(rules, len(arguments.runs), arguments.budget, judge)
    content = text(tuned, base, arguments.budget)
    written = parse_rules(content, str(output))
    assert all(written.rule(rule.id).detect == rule.detect for rule in tuned.ruleset.rules)
    save(output, content)
    ruined = unhealthy(arguments.runs)
    if arguments.json:
        print(json.dumps({**document(tuned, arguments), "unhealthy": ruined}))
    else:
        print("\n".join(shown(tuned, output, ruined)))
    return 0


def unhealthy(runs: Sequence[str]) -> list[str]:
    """The runs whose weights were not healthy at the end, as their health tags say: hardly runs to learn from."""
    from gradwatch.checkpoint import read_tag

    found = []
    for run in runs:
        with suppress(OSError, ValueError):
            if not read_tag(run).healthy:
                found.append(run)
    return found


def base_of(rules: str, output: Path) -> str:
    """Base that a file extends which is to be written: the pack, or the rule file by its path from there.

    Raises `GradwatchError`, before minutes of work, where it cannot be written, or the rules are read from it.
    """
    from gradwatch.rules.files import parse_rules
    from gradwatch.rules.packs import pack_path

    if not output.parent.is_dir():
        raise GradwatchError(
            f"cannot write {output}: there is no folder {output.parent}; name another file: -o FILE"
        )
    named = pack_path(rules) is not None and not Path(rules).exists()
    base = rules if named else os.path.relpath(rules, output.parent)
    try:
        parse_rules(f"version: 1\nextends: [{json.dumps(base)}]\n", str(output))
    except RuleFileError:
        raise GradwatchError(
            f"cannot write {output}: --rules {rules} is read from it; name another file: -o FILE"
        ) from None
    check_replaceable(output)
    return base


def document(tuned: Tuned, arguments: argparse.Namespace) -> dict[str, Any]:
    """The result, JSON-safe."""
    thresholds = [
        {
            "rule": one.rule,
            "key": one.key,
            "was": one.was,
            "now": one.now,
            "extreme_score": one.worst.event.score,
        }
        for one in tuned.thresholds
    ]
    counts = {name: asdict(tuned)[name] for name in ("before", "after", "not_judged")}
    return {
        "rules": arguments.rules,
        "output": arguments.output,
        "budget": arguments.budget,
        "steps": tuned.steps,
        "runs": tuned.runs,
        "allowed": tuned.allowed,
        "held_out": tuned.held_out,
        "thresholds": thresholds,
        **counts,
    }


def shown(tuned: Tuned, output: Path, ruined: Sequence[str] = ()) -> Iterator[str]:
    """The result for a person."""
    from gradwatch.backtest.firings import per_thousand
    from gradwatch.backtest.tuning import HALF

    def rate(count: int) -> str:
        return f"{count:,} ({per_thousand(count, tuned.steps):.2f} per 1,000 steps)"

    before, after = sum(tuned.before.values()), sum(tuned.after.values())
    yield f"{plural(tuned.runs, 'healthy run')}, {tuned.steps:,} steps"
    yield f"  false alarms before {rate(before)}, now {rate(after)}"
    if tuned.runs == 1:
        yield "  one run only: how these thresholds do on another is not known"
    elif tuned.held_out is None:
        yield f"  how these thresholds do on another run is not known: {HALF}"
    else:
        yield f"  thresholds made of one half of the runs, alarms counted on the other: {rate(tuned.held_out)}"
    rows = [
        (
            printable(one.rule),
            one.key,
            f"{one.was:g}",
            f"{one.now:g}",
            str(tuned.before.get(one.rule, 0)),
            str(tuned.after.get(one.rule, 0)),
        )
        for one in tuned.thresholds
    ]
    if rows:
        yield table(("rule", "key", "was", "now", "alarms before", "now"), rows, indent="  ")
    else:
        yield "  no rule alarms too often: no threshold was moved"
    if tuned.not_judged:
        rules = ", ".join(map(printable, tuned.not_judged))
        yield f"  not judged on all of it, and so may alarm more often: {rules}"
    for run in ruined:
        yield f"  {paint('warning', 'yellow')}: the weights of {printable(run)} are not healthy: did nothing go wrong?"
    path = printable(str(output))
    yield f"{path} (look at it, then: gradwatch run --rules {path} -- python train.py)"
