"""`python -m tests.localise`: localise every faulty model on one replayed step and print the table."""

from __future__ import annotations

import os

from tests.localise.suite import MODELS
from tests.localise.trial import trial

GOALS = (("module", 0.95), ("op", 0.90), ("at_line", 0.90))


def main() -> int:
    """Print the table; 1 when a goal is missed."""
    trials = []
    print("| model | goes wrong in | module | operation | line | found |\n|---|---|---|---|---|---|")
    for case in MODELS:
        one = trial(case)
        trials.append(one)
        found = one.finding
        marks = " | ".join("yes" if ok else "**no**" for ok in (one.module, one.op, one.at_line))
        place = f"{os.path.basename(found.where)} `{found.op}` in `{found.module}` ({found.phase})"
        print(f"| {case.__name__} | {case.phase} | {marks} | {place} |", flush=True)
    missed = False
    for name, goal in GOALS:
        right = sum(bool(getattr(one, name)) for one in trials)
        missed |= right < goal * len(trials)
        print(
            f"{name.removeprefix('at_')}: {right} of {len(trials)} right ({right / len(trials):.0%}, goal {goal:.0%})"
        )
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
