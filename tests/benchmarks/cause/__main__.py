"""`python -m tests.benchmarks.cause [GROUP …]`: run the faults, print the table and the totals.

`frozen`: the faults written after the code was. `samples`: bad samples instead, and which rows of the batch are named.
`--only NAME` runs one; `--digests` trains each with and without `localise`, and compares what comes of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tests.benchmarks.cause import bad_samples
from tests.benchmarks.cause.digests import digests
from tests.benchmarks.cause.fault import Fault, faults
from tests.benchmarks.cause.score import run, totals


def main() -> int:
    """Print the table; 1 where a claim is wrong, or a digest another one."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.cause")
    parser.add_argument("groups", nargs="*")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--digests", action="store_true")
    options = parser.parse_args()
    if options.groups == ["samples"]:
        return (bad_samples.compared if options.digests else bad_samples.score)(options.only)
    chosen = [one for one in faults(options.groups) if not options.only or one.name in options.only]
    return _compared(chosen) if options.digests else _scored(chosen)


def _scored(chosen: Sequence[Fault]) -> int:
    print("| fault | operation | line | wrong | said |\n|---|---|---|---|---|")
    scores = []
    for fault in chosen:
        scores.append(run(fault))
        print(scores[-1].row(), flush=True)
    found = totals(scores)
    print("\n" + ", ".join(f"{what}: {count} of {len(scores)}" for what, count in found.items()))
    return int(found["wrong"] > 0)


def _compared(chosen: Sequence[Fault]) -> int:
    other = []
    for fault in chosen:
        without, with_cause = digests(fault)
        if without != with_cause:
            other.append(fault.name)
    print(f"equal with and without localise: {len(chosen) - len(other)} of {len(chosen)}", *other)
    return int(bool(other))


if __name__ == "__main__":
    raise SystemExit(main())
