"""`python -m tests.trainings [--processes N] [NAME ...]`: every training compared; exit 1 where one differs."""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.trainings.comparison import Compared, compare
from tests.trainings.situations import TRAININGS, Training


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--processes", type=int, default=1, help="trainings at a time (default 1: two processes)"
    )
    parser.add_argument("names", nargs="*", help="only these (default: all)")
    arguments = parser.parse_args()
    chosen = [each for each in TRAININGS if not arguments.names or each.name in arguments.names]
    differing = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.processes) as pool:

        def run(training: Training) -> Compared:
            return compare(training, Path(folder) / training.name)

        for compared in pool.map(run, chosen):
            differences = compared.differences()
            differing += bool(differences)
            said = "; ".join(differences) or f"same, {compared.taken} of {compared.taken} steps"
            print(f"{compared.training.name:24} {said}", flush=True)
            if differences:
                print(compared.watched.stderr[-2000:], file=sys.stderr, flush=True)
    print(f"{len(chosen) - differing} of {len(chosen)} trainings the same")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
