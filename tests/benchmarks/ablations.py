"""What each fast path saves: `python -m tests.benchmarks.ablations [NAME ...] [--workloads mlp small] [--starts 8]`.

Each row is one fast path switched off, beside the same checkout with all of them, in processes that step in turns
(`versions`). What a row shows to save nothing on any workload has no reason to exist. Of what is no fast path but a
check (`probes`, `loss`, `weights`), the row shows the price, as a negative saving.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.benchmarks import tables
from tests.benchmarks.interleave import Interval
from tests.benchmarks.versions import CLIPPED, NAMES, ROOT, Side, interval, measure, percent, relative


class Ablation(NamedTuple):
    """A fast path: what it is, and how a process does without it from its start on."""

    title: str
    switch_off: Callable[[], None]
    workloads: tuple[str, ...] = NAMES


class Row(NamedTuple):
    """(without − with) / with of a workload's step, by wall and CPU time, and microseconds of CPU time of a step."""

    ablation: str
    workload: str
    wall: Interval
    cpu: Interval
    microseconds: float


def _replace(owner: Any, name: str, value: object) -> None:
    getattr(owner, name)  # raises AttributeError where a fast path has been renamed
    setattr(owner, name, value)


def _nothing(*_: object) -> None:
    return None


def _keep_all_hooks() -> None:
    from gradwatch.capture.read_after_backward import Capture

    _replace(Capture, "prune", _nothing)


def _judge_at_once() -> None:
    from gradwatch.session.pipeline import extra_columns

    _replace(extra_columns, "ORDINARY", sys.maxsize)


def _judge_in_full() -> None:
    from gradwatch.engine.fast_path.one_step import FastPath
    from gradwatch.session.pipeline.many_deferred_steps import OrdinarySteps

    _replace(FastPath, "learn", _nothing)
    _replace(OrdinarySteps, "conclude", _nothing)


def _read_clipped_again() -> None:
    from gradwatch.capture.window import gradient_reader

    _replace(gradient_reader, "factor_since", _nothing)


def _read_with_torch() -> None:
    from gradwatch.reading import batched_norms, row_sums_by_torch

    _replace(batched_norms, "fastest", lambda: row_sums_by_torch.NormRows)
    _replace(batched_norms.CpuReader.__init__, "__defaults__", (batched_norms.fastest,))


def _probe_nothing() -> None:
    from gradwatch.reading.gradient_writes import WriteProbes

    _replace(WriteProbes, "agree", lambda *_: True)


def _observe_no_loss() -> None:
    from gradwatch.capture.columns.loss import Losses

    for name in ("_begins", "reached"):
        _replace(Losses, name, _nothing)


def _look_at_no_weights() -> None:
    from gradwatch.session.checkpoint_health import Checkpoints

    _replace(Checkpoints, "check_if_due", _nothing)


def _judge_one_by_one() -> None:
    from gradwatch.session.pipeline.many_deferred_steps import OrdinarySteps

    _replace(OrdinarySteps, "conclude", _nothing)


ABLATIONS = {
    "hooks": Ablation("most hooks removed once the loop is learned", _keep_all_hooks),
    "deferral": Ablation("calm steps judged some at a time", _judge_at_once),
    "together": Ablation("calm steps judged in one call", _judge_one_by_one),
    "quiet": Ablation("a calm step judged by bounds", _judge_in_full),
    "factors": Ablation("a clip's factor known, no second read", _read_clipped_again, (CLIPPED,)),
    "squares": Ablation("sums of squares in the machine's own instructions", _read_with_torch),
    "probes": Ablation("(check) writes that move no version", _probe_nothing),
    "loss": Ablation("(check) the loss of each backward", _observe_no_loss),
    "weights": Ablation("(check) a look at the weights now and then", _look_at_no_weights),
}


def compared(name: str, workload: str, starts: int, rounds: int) -> Row:
    """One fast path off, on one workload."""
    sides = {"with": Side(str(ROOT)), "without": Side(str(ROOT), name)}
    found = [measure(workload, sides, rounds) for _ in range(starts)]
    walls, cpus = ([(one["without"][clock], one["with"][clock]) for one in found] for clock in range(2))
    added = [float(np.median(np.median(off, 1) - np.median(on, 1))) for off, on in cpus]
    wall, cpu = (interval([relative(*pair) for pair in pairs]) for pairs in (walls, cpus))
    return Row(name, workload, wall, cpu, float(np.median(added)) * 1e6)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=tuple(ABLATIONS), help=f"of {', '.join(ABLATIONS)}")
    parser.add_argument(
        "--workloads", nargs="+", help=f"of {', '.join((*NAMES, CLIPPED))}; default: all meant"
    )
    parser.add_argument("--starts", type=int, default=8, help="how often all are started anew (default 8)")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each after one start (default 40)")
    arguments = parser.parse_args()
    rows = [["fast path", "workload", "a step without it", "the same of CPU time", "µs of CPU time"]]
    for name in arguments.names:
        for workload in arguments.workloads or ABLATIONS[name].workloads:
            row = compared(name, workload, arguments.starts, arguments.rounds)
            found = (percent(row.wall), percent(row.cpu), f"{row.microseconds:+.0f}")
            rows.append([ABLATIONS[name].title, workload, *found])
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    print(
        f"{tables.as_markdown(rows)}\n\n{tables.machine(1)}, {arguments.starts} × {arguments.rounds} rounds"
    )


if __name__ == "__main__":
    main()
