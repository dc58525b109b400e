"""`gradwatch audit [RUN]`: what was watched of a training, what fired, what gradwatch did to it, how hard."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from gradwatch.cli.run_argument import add_directory, chosen_run, journals
from gradwatch.cli.terminal import Counter, paint, table

if TYPE_CHECKING:
    from gradwatch.journal import JournalReader
    from gradwatch.journal.audit import Audit, Line

DESCRIPTION = """Read the journal of a run: how many steps were watched, which rules fired, and every action, by rule:
clip, rescale, skip and stop.

RUN is a run's folder or one of its journal files; without one, the newest run of --dir. Ranks act alike, so one rank's
journal is enough (--rank). Exit 1 where an action failed."""
_MOST_ACCOUNTS = 5
_HEADER = ("rule", "action", "times", "of steps", "first", "last", "coefficient", "hardest", "mostly at")
_LONGEST_CAUSE = 120


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch audit` to argparse."""
    parser = commands.add_parser(
        "audit",
        help="what gradwatch did to a run: which rules acted, how often, by which factor",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="folder of a run, or a journal file")
    add_directory(parser)
    parser.add_argument(
        "--rank", type=int, default=0, metavar="N", help="read the journal of this rank (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Print the audit; 1 where an action failed."""
    from gradwatch.journal.audit import Audit

    where = chosen_run(arguments)
    audit = Audit()
    for journal in journals(where, arguments.rank):
        follow(journal, audit)
    if arguments.json:
        print(json.dumps({"run": str(where), "rank": arguments.rank, **audit.to_dict()}, indent=2))
    else:
        print(report(audit, where))
    return int(bool(audit.failed))


def follow(journal: JournalReader, audit: Audit) -> None:
    """Read a journal, with progress on a terminal."""
    from gradwatch.journal.audit import read

    with closing(Counter("{:,} steps read")) as count:
        for steps in read(journal, audit):
            count(steps)


def report(audit: Audit, where: Path) -> str:
    """The audit for a person."""
    bound = " (thinned to stay within its cap: counts are lower bounds)" if audit.pruned else ""
    parts = [f"{where}: {audit.steps:,} steps recorded{bound}", *counts(audit), *fired(audit)]
    lines = audit.sorted()
    if lines:
        parts.append(actions_table(lines, audit.steps))
    elif not audit.unrecorded:
        parts.append("  nothing was done to the gradients, and no step was skipped")
    parts += [
        f"  {paint('unrecorded', 'yellow')}: {count} incidents of rule {rule} ({action}) after the last step recorded"
        for (rule, action), count in sorted(audit.unrecorded.items())
    ]
    parts += not_read(audit)
    parts += [
        f"  {paint('failed', 'red')}: the actions of rule {rule} could not be carried out {count} times"
        for rule, count in sorted(audit.failed.items())
    ]
    parts += [
        f"  {paint('escalated', 'yellow')}: rule {rule} climbed its ladder {count} times"
        for rule, count in sorted(audit.escalated.items())
    ]
    if audit.clipped_by_others:
        parts.append(f"  the script's own clipping: {audit.clipped_by_others:,} steps")
    return "\n".join(parts)


def counts(audit: Audit) -> Iterable[str]:
    """The accounts of the last few launches, and the rules that never had data in the last."""
    from gradwatch.account.account_line import PREFIX, lines, never_evaluated, not_armed

    accounts = audit.accounts()
    for account in accounts[-_MOST_ACCOUNTS:]:
        yield from (f"  {line.removeprefix(PREFIX)}" for line in lines(account))
    for account in accounts[-1:]:
        yield from (
            f"  no data: {rule}: {reason}" for rule, reason in sorted(never_evaluated(account).items())
        )
        yield from (f"  not armed: {rule}: {why}" for rule, why in sorted(not_armed(account).items()))


def not_read(audit: Audit) -> Iterable[str]:
    """Lines on what is missing: where a process ended without its account, or has not ended; what is damaged."""
    for word, text in audit.not_read():
        yield f"  {paint(word, 'red')}: {text}" if word else f"  {text}"


def fired(audit: Audit) -> Iterable[str]:
    """The rules that fired, with the cause where one was found."""
    from gradwatch.runtime.printable import one_line, printable

    found = audit.fired()
    if not found:
        yield "  no rule fired"
        return
    header = ("fired", "severity", "times", "first", "last", "cause")
    rows = [
        (
            printable(one.rule),
            printable(one.severity),
            f"{one.times:,}",
            str(one.first_step),
            str(one.last_step),
            one_line(one.cause, _LONGEST_CAUSE) or "not known",
        )
        for one in found
    ]
    yield table(header, rows, indent="  ")


def actions_table(lines: Iterable[Line], steps: int) -> str:
    """One row for each rule and action."""
    return table(_HEADER, [row(line, steps) for line in lines], indent="  ")


def row(line: Line, steps: int) -> tuple[str, ...]:
    """One rule and action as cells."""
    from gradwatch.runtime.printable import printable

    found = line.to_dict(steps)
    name = f"{line.action} (shadow)" if line.shadow else line.action
    hardest = ""
    if line.hardest is not None:
        step, before, after = line.hardest
        hardest = f"{shown(before)} → {shown(after)} at {step}"
    sites: Iterable[str] = found["worst_sites"]  # type: ignore[assignment]
    return (
        line.rule,
        name,
        f"{line.times:,}",
        f"{line.times / steps:.2%}" if steps else "",
        str(line.first_step),
        str(line.last_step),
        coefficients(found["coefficient_min"], found["coefficient_median"]),
        hardest,
        printable(next(iter(sites), "the total")),
    )


def coefficients(least: object, middle: object) -> str:
    """The smallest and the median multiplier."""
    return "" if least is None else f"min {least:.3g}, median {middle:.3g}"


def shown(value: float | None) -> str:
    """A norm, or that there is none."""
    return "not finite" if value is None else f"{value:.4g}"
