"""`gradwatch explain [INCIDENT]`: what made the gradients of an incident non-finite, and how to fix it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwatch.cli.run_argument import add_directory, chosen_run
from gradwatch.cli.terminal import paint
from gradwatch.errors import GradwatchError

if TYPE_CHECKING:
    from gradwatch.incidents.incident import Incident
    from gradwatch.journal.audit import Audit

DESCRIPTION = """The cause of an incident, from the journal: operation, module, line, evidence, likely fix;
what was done about it, the norms around it, and, where the action `snapshot` kept a bundle, how to run the step again.

INCIDENT is its name in the log (`incident=non-finite-0-40`); without one, every incident whose cause was looked for,
and a list of all rules that fired. The journals of all ranks are read, because only the rank on which a NaN appeared
first knows where. Exit 1 where no cause is known."""

LONGEST_LINE = 2000


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch explain` to argparse."""
    parser = commands.add_parser(
        "explain",
        help="which operation, on which line, caused an incident, and how to fix it",
        description=DESCRIPTION,
    )
    parser.add_argument("incident", nargs="?", metavar="INCIDENT", help="its name in the log (default: all)")
    parser.add_argument(
        "--run", metavar="RUN", help="folder of a run, or a journal file (default: the newest of --dir)"
    )
    add_directory(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="for an issue or a wiki: no colours, no HTML")
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Print one page per incident; 1 where no cause is known. Raises GradwatchError for an unknown incident."""
    from gradwatch.report.explained import document, explained, page

    where = chosen_run(arguments)
    best = [explained(where, incident) for incident in chosen(where, arguments.incident)]
    if arguments.incident and not best:
        raise GradwatchError(f"no incident {arguments.incident} in {where}{_known(where)}")
    audit = None if arguments.incident else audited(where)
    if arguments.json:
        documents = [document(one) for one in best]
        fired: dict[str, Any] = (
            {}
            if audit is None
            else {
                "fired": [asdict(one) for one in audit.fired()],
                "unfinished": audit.unfinished,
                "damage": [asdict(one) for one in audit.damage],
                "unread": audit.unread,
                "missing_steps": audit.missing,
            }
        )
        print(json.dumps({"run": str(where), "findings": documents, **fired}, indent=2, allow_nan=False))
    elif arguments.markdown:
        from gradwatch.incidents.incident_page import markdown

        print("\n".join([*(markdown(page(one)) for one in best), *listed(audit)]), end="")
    else:
        pages = [shown(page(one)) for one in best]
        print("\n\n".join([*pages, *([] if audit is None else [summary(audit, where)])]))
    return int(not any(one.found for one in best))


def audited(where: Path) -> Audit:
    """Firings from the journals of all ranks; of one rule the rank on which it fired most often."""
    from gradwatch.cli.audit import follow
    from gradwatch.journal.audit import Audit
    from gradwatch.journal.rank_journals import rank_journals

    everything, found_of = Audit(), rank_journals(where)
    for journal in (*found_of.own, *found_of.others):
        found = Audit()
        follow(journal, found)
        everything.add_rank(found)
    return everything


def listed(audit: Audit | None) -> Iterable[str]:
    """As `summary`, in Markdown."""
    from gradwatch.cli.audit import not_read
    from gradwatch.incidents.incident_page import markdown

    if audit is not None:
        rules = (
            f"- `{one.rule}` ({one.severity}) ×{one.times:,}, steps {one.first_step} to {one.last_step}: "
            f"{one.cause or '–'}"
            for one in audit.fired()
        )
        ends = (f"- {line.strip()}" for line in not_read(audit))
        yield markdown(["## What fired", "", *rules, *ends])


def summary(audit: Audit, where: Path) -> str:
    """Every rule that fired, with the cause where one is known."""
    from gradwatch.cli.audit import fired, not_read

    return "\n".join([f"{where}: what fired", *fired(audit), *not_read(audit)])


def chosen(where: Path, name: str | None) -> list[Incident]:
    """Incidents from the journals of all ranks, one per name: of the rank that knows most, the first of equals."""
    from gradwatch.journal.incidents import better, incidents
    from gradwatch.journal.rank_journals import rank_journals, refuse_unread

    best: dict[str, Incident] = {}
    found = rank_journals(where)
    for journal in (*found.own, *found.others):
        for incident in incidents(journal, name):
            held = best.get(incident.name)
            if held is None or better(incident.finding, held.finding):
                best[incident.name] = incident
    refuse_unread(where, found._replace(own=(*found.own, *found.others), others=()))
    return list(best.values())


def shown(lines: Iterable[str]) -> str:
    """Lines painted for a terminal; any name in them is harmless there."""
    from gradwatch.runtime.printable import one_line

    shown = ((line, one_line(line, LONGEST_LINE)) for line in lines)
    return "\n".join(paint(text, "bold") if line.startswith("#") else text for line, text in shown).rstrip()


def _known(where: Path) -> str:
    names: Sequence[str] = [incident.name for incident in chosen(where, None)]
    return f"; there are: {', '.join(names[-5:])}" if names else "; no incident of this run was localised"
