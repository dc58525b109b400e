"""`python -m tests.localise`: localise faulty models and held-out trainings on one replayed step; print the tables."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tests.localise.heldout.score import CASES, run, totals
from tests.localise.suite import MODELS
from tests.localise.trial import trial

GOALS = {"module": 0.95, "operation": 0.90, "line": 0.90}


def main() -> int:
    """Print both tables; 1 when a goal is missed in either."""
    return int(_told("own", _own()) | _told("held out", _held_out()))


def _own() -> dict[str, tuple[int, int]]:
    """The models that localisation was built with."""
    print("| model | goes wrong in | module | operation | line | found |\n|---|---|---|---|---|---|")
    answers = []
    for case in MODELS:
        one = trial(case)
        answers.append((one.module, one.op, one.at_line))
        found = one.finding
        marks = " | ".join("yes" if ok else "**no**" for ok in answers[-1])
        place = f"{os.path.basename(found.where)} `{found.op}` in `{found.module}` ({found.phase})"
        print(f"| {case.__name__} | {case.phase} | {marks} | {place} |", flush=True)
    return {name: (sum(bool(one[n]) for one in answers), len(answers)) for n, name in enumerate(GOALS)}


def _held_out() -> dict[str, tuple[int, int]]:
    """The trainings that were written before localisation was looked at, watched with the default pack."""
    print("\n| held-out training | module | operation | line | found first |\n|---|---|---|---|---|")
    scores = []
    for case in CASES:
        scores.append(run(case))
        print(scores[-1].row(), flush=True)
    return dict(zip(GOALS, totals(scores).values(), strict=True))


def _told(suite: str, counts: Mapping[str, tuple[int, int]]) -> bool:
    """Print the totals of a suite; whether a goal is missed."""
    missed = False
    for name, (right, asked) in counts.items():
        missed |= right < GOALS[name] * asked
        print(f"{suite}, {name}: {right} of {asked} right ({right / asked:.0%}, goal {GOALS[name]:.0%})")
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
