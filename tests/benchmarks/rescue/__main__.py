"""Which guard rescues a training from which fault: `python -m tests.benchmarks.rescue --jobs 2 --markdown`.

Every cell is a real training of a few seconds, with a fault from its middle on, whose last weights are judged on
rows it never saw. A cell reads "loss (interventions)": the loss over that of the healthy run that nobody guarded
(the worst of all trainings and seeds), and how many steps the guard changed or left out (of all of them).
"lost": weights that are not finite. Exit status 1 where gradwatch breaks its claim: every transient fault rescued
(a loss at most 1.02 times the healthy one's), and no intervention where nothing is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path

from tests.benchmarks.rescue.cells import Cell, Outcome, relative, run_all
from tests.benchmarks.rescue.faults import FAULTS
from tests.benchmarks.rescue.guards import GUARDS
from tests.benchmarks.rescue.table import broken_claims, healthy, render, summary, whole
from tests.benchmarks.rescue.trainings import TRAININGS


def cells(globs: Sequence[str], guards: Sequence[str], seeds: int) -> list[Cell]:
    """The cells whose "training/fault/guard" matches one of the globs, and the healthy runs to compare with."""
    every = [
        Cell(training, fault, guard, seed)
        for seed in range(seeds)
        for training in TRAININGS
        for fault in FAULTS
        for guard in guards
    ]
    wanted = [cell for cell in every if any(fnmatchcase("/".join(cell[:3]), one) for one in globs or ["*"])]
    return list(dict.fromkeys([*map(healthy, wanted), *wanted]))


class Progress:
    """How far it is, on stderr: one line rewritten on a terminal, a line every twenty cells elsewhere."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._began = total, 0, time.monotonic()

    def tell(self, outcome: Outcome) -> None:
        """One more cell is known."""
        self._done += 1
        last = self._done == self._total
        if not (sys.stderr.isatty() or last or self._done % 20 == 0):
            return
        left = (time.monotonic() - self._began) / self._done * (self._total - self._done)
        line = f"rescue: {self._done}/{self._total} runs, about {left / 60:.0f} min left  {'/'.join(outcome.cell[:3])}"
        start, end = ("\r\033[K", "\n" if last else "") if sys.stderr.isatty() else ("", "\n")
        print(f"{start}{line}", end=end, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for and not known yet; print; 1 where the claim does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.rescue",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="GLOB", help="on training/fault/guard")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each cell")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, of one thread each")
    parser.add_argument("--results", type=Path, help="JSON lines to resume from, and to add to")
    parser.add_argument("--full", action="store_true", help="a row per training, not the worst of them")
    parser.add_argument(
        "--markdown", action="store_true", help="the table as Markdown, for gradwatch/docs/rules.md"
    )
    parser.add_argument(
        "--json", action="store_true", help="every outcome as JSON on stdout, instead of a table"
    )
    args = parser.parse_args(argv)
    absent = {name: why for name, guard in GUARDS.items() if (why := guard.missing())}
    wanted = cells(args.only, [name for name in GUARDS if name not in absent], args.seeds)
    if not wanted:
        parser.error("no run matches --only; it is matched with e.g. mlp/nan/gradwatch-skip")
    progress = Progress(len(wanted))
    found: dict[Cell, Outcome] = {}
    for outcome in run_all(wanted, args.jobs, args.results):
        found[outcome.cell] = outcome
        progress.tell(outcome)
    broken = broken_claims(found)
    if args.json:
        print(json.dumps(_payload(found, broken, absent), indent=1))
    else:
        guards = [name for name in GUARDS if any(cell.guard == name for cell in found)]
        print(render((whole if args.full else summary)(found, guards), args.markdown))
        for line in [*(f"{GUARDS[name].title}: not run, {why}" for name, why in absent.items()), *broken]:
            print(f"- {line}")
    return 1 if broken else 0


def _payload(found: dict[Cell, Outcome], broken: list[str], absent: dict[str, str]) -> dict[str, object]:
    outcomes = [
        {
            **cell._asdict(),
            **{key: value for key, value in asdict(outcome).items() if key != "cell"},
            # NaN is no JSON: weights that are lost have no loss.
            "loss": outcome.loss if outcome.loss == outcome.loss else None,
            "relative": ratio if (ratio := relative(outcome, found[healthy(cell)])) < float("inf") else None,
        }
        for cell, outcome in sorted(found.items())
    ]
    return {"outcomes": outcomes, "broken_claims": broken, "absent": absent}


if __name__ == "__main__":
    raise SystemExit(main())
