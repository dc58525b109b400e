"""`python -m tests.benchmarks.checkpoints [--half tuning]`: what `gw.healthy` says of checkpoints, and what is true."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Iterator

import torch

from tests.benchmarks.checkpoints.faults import Fault
from tests.benchmarks.checkpoints.runs import Checkpoint, checkpoints
from tests.benchmarks.checkpoints.sets import HEALTHY, RUINED
from tests.benchmarks.checkpoints.trainings import Training


def cases(half: str) -> Iterator[tuple[Training, Fault | None]]:
    """Those with a fault, then those without."""
    yield from RUINED[half]
    for training in HEALTHY[half]:
        yield training, None


def line(training: Training, fault: Fault | None, found: list[Checkpoint]) -> str:
    """`+` = healthy and worth keeping, `-` = unhealthy and lost, `L` = healthy but lost, `x` = unhealthy but good."""
    marks = "".join(
        ("L" if each.lost else "+") if each.healthy else ("-" if each.lost else "x") for each in found
    )
    return f"{training.name:18} {fault.name if fault else 'healthy':32} {marks}"


def main() -> None:
    """Print a line a training, then the four counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", choices=list(RUINED), default="reporting")
    parser.add_argument("--rules", default="default")
    parser.add_argument("--why", action="store_true", help="the reasons, and what each checkpoint comes to")
    parser.add_argument("names", nargs="*", help="only these trainings")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    counts: dict[tuple[bool, str], int] = {}
    for training, fault in cases(arguments.half):
        if arguments.names and training.name not in arguments.names:
            continue
        found = checkpoints(training, fault, arguments.rules)
        told = line(training, fault, found)
        print(told, flush=True)
        for mark in told.rsplit(maxsplit=1)[-1]:
            counts[fault is None, mark] = counts.get((fault is None, mark), 0) + 1
        if arguments.why:
            for each in found:
                print(
                    f"    {each.step:4} {each.score:10.4g} -> {each.reached:10.4g} {each.because[:150]} {each.firing}"
                )
    for healthy in (False, True):
        shown = ", ".join(f"{counts.get((healthy, mark), 0)} {mark}" for mark in "+-Lx")
        print("trainings without a fault:" if healthy else "trainings with a fault:", shown)


if __name__ == "__main__":
    main()
