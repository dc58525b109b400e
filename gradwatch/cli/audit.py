"""`gradwatch audit [RUN]`: what was watched of a training, what fired, what gradwatch did to it, how hard."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from gradwatch.cli.run_argument import add_directory, add_rank, add_run, chosen_run
from gradwatch.cli.terminal import Counter, paint, table

if TYPE_CHECKING:
    from gradwatch.account.launch_total import Part
    from gradwatch.journal import JournalReader
    from gradwatch.journal.audit import Audit, Line

DESCRIPTION = """Read the journal of a run: how many steps were watched, which rules fired, and every action, by rule:
clip, rescale, skip and stop.

RUN is a run's folder or one of its journal files; without one, the newest run of --dir. Ranks that share gradients act
alike, so one rank's journal is enough (--rank); of others that did something else a line says what. Exit 1 where an
action failed."""
_MOST_ACCOUNTS = 5
_HEADER = ("rule", "action", "times", "of steps", "first", "last", "coefficient", "hardest", "mostly at")
_LONGEST_CAUSE = 120
_SECONDS_PER_RANK = (
    2.0  # for reading the journal of another rank that has no end; of less, fewer steps are known
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch audit` to argparse."""
    parser = commands.add_parser(
        "audit",
        help="what gradwatch did to a run: which rules acted, how often, by which factor",
        description=DESCRIPTION,
    )
    add_run(parser, "run", nargs="?")
    add_directory(parser)
    add_rank(parser, "read the journal")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Print the audit; 1 where an action failed."""
    from gradwatch.journal.audit import Audit
    from gradwatch.journal.rank_journals import rank_journals, refuse_unread

    where = chosen_run(arguments)
    audit, journals = Audit(), rank_journals(where, arguments.rank)
    rank, own, other = journals
    for journal in own:
        follow(journal, audit)
    refuse_unread(where, journals)
    others = unlike(audit, other)
    if arguments.json:
        printed = {"run": str(where), "rank": rank, **audit.to_dict(), "other_ranks": others}
        print(json.dumps(printed, indent=2))
    else:
        print("\n".join([report(audit, where), *of_other_ranks(others, where)]))
    return int(bool(audit.failed))


def unlike(audit: Audit, journals: Iterable[JournalReader]) -> dict[int, dict[str, dict[str, int]]]:
    """Counts of firings and actions of each other rank that did something else than the one audited.

    On it other rules fired, or an action was done more or less often; the latter is asked of processes that have ended
    alone, since one that was killed has not recorded all of its last steps.
    """
    from gradwatch.journal.process_account import part_of

    by_rank: dict[int, list[Part]] = {}
    for journal in journals:
        part = part_of(journal, _SECONDS_PER_RANK)
        if part is not None:
            by_rank.setdefault(journal.rank, []).append(part)
    own = done_in(audit.parts)
    found = {}
    for rank, parts in sorted(by_rank.items()):
        did, ended = done_in(parts), all(part.ended for part in (*parts, *audit.parts))
        if did["fired"].keys() != own["fired"].keys() or (ended and did["actions"] != own["actions"]):
            found[rank] = did
    return found


def done_in(parts: Iterable[Part]) -> dict[str, dict[str, int]]:
    """Counts of firings by rule and of actions by name, in several processes together."""
    done: dict[str, dict[str, int]] = {"fired": {}, "actions": {}}
    for part in parts:
        for name, counts in (("fired", part.account.fired), ("actions", part.account.actions)):
            for key, count in counts.items():
                done[name][key] = done[name].get(key, 0) + count
    return done


def of_other_ranks(others: Mapping[int, Mapping[str, Mapping[str, int]]], where: Path) -> Iterable[str]:
    """A line for each rank that did something else than the one audited."""
    from gradwatch.runtime.printable import printable

    for rank, did in others.items():
        words = [
            ", ".join(f"{printable(name)} ×{count:,}" for name, count in sorted(did[what].items()))
            for what in ("fired", "actions")
        ]
        done = f"; done: {words[1]}" if words[1] else ""
        said = f"fired: {words[0]}{done}" if words[0] else "no rule fired"
        yield f"  rank {rank}: {said} (gradwatch audit {where} --rank {rank})"


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
        parts.append(
            f"  the script made gradients smaller at {audit.clipped_by_others:,} steps (a clip, or another write)"
        )
    return "\n".join(parts)


def counts(audit: Audit) -> Iterable[str]:
    """The accounts of the last few launches, and the rules that never had data in the last."""
    from gradwatch.account.account_line import PREFIX, lines, never_evaluated, not_armed

    accounts = audit.accounts()
    for account in accounts[-_MOST_ACCOUNTS:]:
        yield from (f"  {line.removeprefix(PREFIX)}" for line in lines(account))
    fired = {one.rule for one in audit.fired()}
    process = " in the last process" if len(audit.parts) > 1 else ""
    for account in accounts[-1:]:
        without_data = never_evaluated(account)
        yield from (
            f"  no data{process}: {rule}: {without_data[rule]}"
            for rule in sorted(without_data.keys() - fired)
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
            one_line(one.cause, _LONGEST_CAUSE) or "–",  # none was looked for
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
