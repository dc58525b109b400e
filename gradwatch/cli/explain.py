"""`gradwatch explain [INCIDENT]`: what made the gradients of an incident non-finite, and how to mend it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gradwatch.cli.runs import journals, newest
from gradwatch.cli.terminal import paint
from gradwatch.errors import GradwatchError

if TYPE_CHECKING:
    from gradwatch.finding import Finding

DESCRIPTION = """The cause of an incident as its journal tells it: operation, module, line, evidence, likely remedy.

INCIDENT is the name that the log gives it ("non-finite-0-40"); without one, every incident of the run. The journals of
all ranks are read, for only the rank on which a NaN was born can say where. Exit 1 where no cause is known."""

LONGEST_LINE = 2000


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch explain` to argparse."""
    parser = commands.add_parser(
        "explain",
        help="which operation, on which line, made an incident, and how to mend it",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("incident", nargs="?", metavar="INCIDENT", help="as the log names it (default: all)")
    parser.add_argument(
        "--run", metavar="RUN", help="folder of a run, or a journal file (default: the newest of --dir)"
    )
    parser.add_argument(
        "--dir", default="gradwatch-runs", metavar="DIR", help="where runs are (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="for a machine")
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Print one page per incident; 1 where no cause is known."""
    where = Path(arguments.run) if arguments.run else newest(Path(arguments.dir))
    findings = list(found(where, arguments.incident))
    if arguments.incident and not findings:
        raise GradwatchError(f"nothing is known of {arguments.incident} in {where}{_known(where)}")
    best = chosen(findings)
    if arguments.json:
        documents = [document(finding) for finding in best]
        print(json.dumps({"run": str(where), "findings": documents}, indent=2, allow_nan=False))
    elif best:
        print("\n\n".join(page(finding) for finding in best))
    else:
        print(f"{where}: no incident was localised", file=sys.stderr)
    return int(not any(finding.found for finding in best))


def found(where: Path, incident: str | None) -> Iterable[Finding]:
    """What the journals of every rank say of an incident, or of all."""
    for journal in journals(where):
        for finding in journal.findings():
            if incident is None or finding.incident == incident:
                yield finding


def chosen(findings: Iterable[Finding]) -> list[Finding]:
    """One finding per incident: a cause before the loss side, that before none, the first of equals."""
    rank = {"unknown": 2, "loss": 1}
    best: dict[str, Finding] = {}
    for finding in findings:
        held = best.get(finding.incident)
        if held is None or rank.get(finding.phase, 0) < rank.get(held.phase, 0):
            best[finding.incident] = finding
    return list(best.values())


def document(finding: Finding) -> dict[str, object]:
    """The finding with its remedy, JSON-safe."""
    from gradwatch.explanation import sentence
    from gradwatch.remedies import remedy_for

    remedy = remedy_for(finding)
    told = None if remedy is None else {"id": remedy.id, "why": remedy.why, "mend": remedy.mend}
    return {**finding.to_dict(), "where": finding.where, "cause": sentence(finding), "remedy": told}


def page(finding: Finding) -> str:
    """The page, painted for a terminal; any name in it is harmless there."""
    from gradwatch import explanation
    from gradwatch.sinks.printable import one_line

    lines = []
    for line in explanation.page(finding):
        text = one_line(line, LONGEST_LINE)
        lines.append(paint(text, "bold") if line.startswith("#") else text)
    return "\n".join(lines)


def _known(where: Path) -> str:
    names = list(dict.fromkeys(finding.incident for finding in found(where, None)))
    return f"; there are: {', '.join(names[-5:])}" if names else "; no incident of it was localised"
