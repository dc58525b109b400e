"""What watching costs, beside what others cost: `python -m tests.benchmarks.overhead --markdown`.

Two measurements, both interleaved (interleave.py). Handover: µs added a step, precise enough for the targets.
Whole steps: the ratio to bare of everything, forward and backward included, as a check on the first, and the
only one that is fair to contenders that work inside the backward.

`--processes N` divides the rounds of the handover among N processes, one after the other: where memory happens to lie
makes a contender some per cent faster or slower in one process than in the next, which more rounds do not tell.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from tests.benchmarks import ranks
from tests.benchmarks.interleave import (
    Comparison,
    Sample,
    Seconds,
    Timings,
    Turns,
    compare,
    interleave,
    pooled,
    timed,
)
from tests.benchmarks.loops import Handover, in_turn, training_step
from tests.benchmarks.peers import CONTENDERS, Contender, present
from tests.benchmarks.tables import machine, report
from tests.benchmarks.targets import Target, parameter_targets, step_targets, targets
from tests.benchmarks.workloads import WORKLOADS, Task, Workload

Loop = Literal["handover", "steps"]

WARMUP = 100  # past learning the loop, past every warm-up, and past the steps a loop takes to be called calm
SLOW_WARMUP = 3
STEPS = 8  # of a turn: a loop steps many times in a row, and what is judged a second late is judged in one of them


@dataclass
class Result:
    """Everything measured on one workload."""

    workload: str
    handover: dict[str, Comparison] = field(default_factory=dict)
    steps: dict[str, Comparison] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    complaints: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    """Contenders that take turns with each other."""

    loop: Loop
    turns: Turns
    warmup: int
    members: Sequence[str]


def panels(found: list[Contender], rounds: int) -> list[Panel]:
    """Who is measured with whom.

    Recorders come last and apart: their own threads and processes slow the neighbours. Whole steps are compared
    for few of the others, since the handover tells more.
    """
    quick = [c.name for c in found if c.handover]
    whole = [
        name
        for name in ("bare", "bare-again", "gradwatch", "clip_grad_norm", "gradwatch-clip")
        if name in quick
    ]
    slow = ["bare", *(c.name for c in found if c.slow)]
    planned = [
        Panel("handover", Turns(rounds, settle=0, steps=STEPS), WARMUP, quick),
        Panel("steps", Turns(max(3, rounds // 4)), WARMUP, whole),
        Panel("steps", Turns(max(3, rounds // 4)), SLOW_WARMUP, slow),
    ]
    return [panel for panel in planned if len(panel.members) > 1]


def measure(
    workload: Workload, contenders: list[Contender], loop: Loop, turns: Turns, warmup: int
) -> tuple[Timings, dict[str, str]]:
    """Attach every contender to a twin of its own and let them take turns; timings, and complaints.

    All are handed gradients of the same carrier, so that none can be faster for where its gradients happen to lie.
    """
    original = workload.task()
    carrier = workload.carrier(original)
    by_name = {contender.name: contender for contender in contenders}
    with ExitStack() as attached:
        samples = {
            name: _attach(workload, original, carrier, contender, loop, attached)
            for name, contender in by_name.items()
        }
        # In turns here too: twins share weights, and one that slept while they moved would see its norms jump.
        for _ in range(0, warmup, STEPS):
            for name, sample in samples.items():
                for _ in range(min(STEPS, warmup)):
                    sample()
                by_name[name].drain()
        # The collector stays on, as in training, but need not walk our models in somebody's turn.
        gc.collect()
        gc.freeze()
        attached.callback(gc.unfreeze)
        timings = interleave(
            samples,
            turns,
            between=lambda name: by_name[name].drain(),
            progress=partial(_progress, f"{workload.title}, {loop}", turns.rounds),
        )
        complaints = {name: said for name, c in by_name.items() if (said := c.complaint())}
    return timings, complaints


def measure_apart(workload: str, panel: Panel, processes: int) -> tuple[Timings, dict[str, str]]:
    """As `measure`, of the workload of this name, the rounds of a panel divided among processes of their own."""
    rounds = -(-panel.turns.rounds // processes)
    found: list[Timings] = []
    said: dict[str, str] = {}
    for process in range(processes):
        part = replace(panel, turns=replace(panel.turns, rounds=rounds, seed=process))
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            timings, complaints = pool.apply(_measure_named, (workload, part, torch.get_num_threads()))
        found.append(timings)
        said |= complaints
    return pooled(found), said


def _measure_named(workload: str, panel: Panel, threads: int) -> tuple[Timings, dict[str, str]]:
    torch.set_num_threads(threads)
    return _measure_panel(WORKLOADS[workload], panel)


def _measure_panel(workload: Workload, panel: Panel) -> tuple[Timings, dict[str, str]]:
    contenders = [CONTENDERS[name]() for name in panel.members]
    return measure(workload, contenders, panel.loop, panel.turns, panel.warmup)


def _attach(
    workload: Workload,
    original: Task,
    carrier: Task,
    contender: Contender,
    loop: Loop,
    attached: ExitStack,
) -> Callable[[], Sample]:
    task = workload.twin(original)
    contender.attach(task)
    contender.suspend()
    attached.callback(contender.detach)
    attached.callback(contender.resume)
    if loop == "steps":
        return in_turn(contender, timed(lambda: training_step(task, contender)))
    handover = Handover(carrier, task, contender)
    attached.callback(handover.close)
    return in_turn(contender, handover)


def _progress(what: str, rounds: int, done: int) -> None:
    end = "\n" if done == rounds else ""
    if end or sys.stderr.isatty():
        print(f"\r{what}: round {done}/{rounds}", end=end, file=sys.stderr, flush=True)


def run_workload(workload: Workload, names: list[str], rounds: int, clock: str, processes: int = 1) -> Result:
    """Both measurements of one workload."""
    result = Result(workload.name)
    found, result.absent = present(names)
    handed: Mapping[str, Seconds] = {}
    for panel in panels(found, rounds):
        if processes == 1 or panel.loop == "steps":
            timings, complaints = _measure_panel(workload, panel)
        else:
            timings, complaints = measure_apart(workload.name, panel, processes)
        seconds = timings.wall if clock == "wall" else timings.cpu
        into = result.handover if panel.loop == "handover" else result.steps
        into.update({name: c for name, c in compare(seconds).items() if name not in into})
        if panel.loop == "handover":
            result.targets += targets(workload, seconds) + parameter_targets(workload, seconds)
            handed = seconds
        result.complaints |= complaints
    if "bare" in result.steps:
        result.targets += step_targets(workload, handed, result.steps["bare"].median_ms)
    return result


def main(argv: list[str] | None = None) -> int:
    """Measure, print the tables; 0 even where a target is missed, since timing never decides a test."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.overhead", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=25, help="of the handover; whole steps take a quarter")
    parser.add_argument("--processes", type=int, default=1, help="to divide the rounds of the handover among")
    parser.add_argument("--threads", type=int, default=1, help="torch's intra-op threads")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: this process's, all threads; for a busy machine",
    )
    parser.add_argument("--ranks", action="store_true", help="also under DDP, two ranks (see ranks.py)")
    parser.add_argument("--json", type=Path, help="also write everything measured to this file")
    parser.add_argument(
        "--markdown", action="store_true", help="tables as Markdown, for gradwatch/docs/cost.md"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    names = list(dict.fromkeys(["bare", *args.contenders]))
    circumstances = f"{machine(args.threads)}, {args.clock} clock, processes: {args.processes}"
    results: list[Result] = []
    for name in args.workloads:
        results.append(run_workload(WORKLOADS[name], names, args.rounds, args.clock, args.processes))
        if args.json:  # after each workload: a long run that is interrupted has something to show
            payload = {"machine": circumstances, "results": [asdict(result) for result in results]}
            args.json.write_text(json.dumps(payload, indent=1), encoding="utf-8")
    print(report(results, circumstances, args.markdown))
    if args.ranks:
        print("\n" + ranks.table(ranks.measure(ranks.ROUNDS, ranks.WIDTH, ranks.LAYERS), args.markdown))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
