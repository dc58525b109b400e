"""`python -m tests.benchmarks.cause [GROUP …]`: run the faults, print the table and the totals.

`frozen`: those written after the code was. `--only NAME` runs one fault.
"""

from __future__ import annotations

import argparse

from tests.benchmarks.cause.fault import faults
from tests.benchmarks.cause.score import run, totals


def main() -> int:
    """Print the table; 1 where a claim is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.cause")
    parser.add_argument("groups", nargs="*")
    parser.add_argument("--only", action="append", default=[])
    options = parser.parse_args()
    chosen = [one for one in faults(options.groups) if not options.only or one.name in options.only]
    print("| fault | operation | line | wrong | said |\n|---|---|---|---|---|")
    scores = []
    for fault in chosen:
        scores.append(run(fault))
        print(scores[-1].row(), flush=True)
    print()
    found = totals(scores)
    print(", ".join(f"{what}: {count} of {len(scores)}" for what, count in found.items()))
    return int(found["wrong"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
