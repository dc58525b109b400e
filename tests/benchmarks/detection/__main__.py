"""How well are faults of a training detected? `python -m tests.benchmarks.detection --half tuning --jobs 2`.

Trains what is not recorded yet, in `--dir`, healthy and with faults, and has every judge look at the recordings: rule
files (`--rules`, a pack or a path; several to compare them) with the engine, other tools' checks by their formulas.
`--judge-only` trains nothing. Rules are tuned on `tuning` and `extra`; of the others only the total is shown.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from tests.benchmarks.detection.faults import live_keys
from tests.benchmarks.detection.recording import Key
from tests.benchmarks.detection.rivals import RIVALS
from tests.benchmarks.detection.runs import judge_all, make_all
from tests.benchmarks.detection.split import PARTS, names_of
from tests.benchmarks.detection.tables import markdown, payload

SEEDS, WIDTH = 3, 8


def parser() -> argparse.ArgumentParser:
    """What can be asked for."""
    found = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.detection",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    folder = Path(tempfile.gettempdir()) / "gradwatch-detection"
    found.add_argument("--half", choices=PARTS, default="tuning", help="which trainings (split.py)")
    found.add_argument("--dir", type=Path, default=folder, help=f"recordings (default: {folder})")
    found.add_argument("--jobs", type=int, default=1, help="processes at a time, of one thread each")
    found.add_argument("--judge-only", action="store_true", help="train nothing")
    found.add_argument("--rules", action="append", default=[], metavar="PACK|FILE", help="default: default")
    found.add_argument("--only", action="append", default=[], metavar="GLOB", help="trainings by name")
    found.add_argument("--seeds", type=int, default=SEEDS, help="of every healthy training")
    found.add_argument(
        "--width", type=int, default=WIDTH, help="trainings in which each live fault is made; 0 = none"
    )
    found.add_argument("--no-rivals", action="store_true", help="the rule files alone")
    found.add_argument("--no-replay", action="store_true", help="no faults replayed on healthy recordings")
    found.add_argument("--json", action="store_true", help="JSON on stdout, instead of Markdown")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Record, judge, print; 1 where something could not be recorded."""
    options = parser().parse_args(argv)
    names = [
        name
        for name in names_of(options.half)
        if any(fnmatchcase(name, glob) for glob in options.only or ["*"])
    ]
    trainings = [(name, seed) for seed in range(options.seeds) for name in names]
    folder = options.dir / options.half
    failed: list[str] = []
    if not options.judge_only:
        faults = [key for key in live_keys(options.half, options.width) if key[:2] in trainings]
        failed = make_all([*(Key(*one) for one in trainings), *faults], folder, options.jobs)
    ours = options.rules or ["default"]
    judges = [*ours, *(() if options.no_rivals else RIVALS)]
    scores = judge_all(trainings, folder, judges, options.jobs, not options.no_replay)
    tuning = options.half in ("tuning", "extra")
    print(json.dumps(payload(scores, tuning), indent=1) if options.json else markdown(scores, ours, tuning))
    print(*failed, sep="\n", end="\n" if failed else "", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
