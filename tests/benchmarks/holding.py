"""What it costs to hold a step so that it can be run again: `python -m tests.benchmarks.holding [WORKLOAD …]`.

Whole training steps of a small MLP, or of these workloads, watched by the default pack with `localise` and without,
without once more (the error of the measurement), and without but with the same references held by two hooks, in turns
in one process. Nothing goes wrong in them, so all there is is the holding: of the arguments, of the generators, of the
gradient at the outputs. `--memory` tells the bytes of tensors at the peak of a step instead, by torch's own profiler.
`--own` times what holds a step where it runs, by the clock around each of its calls in watched steps: what it costs
beyond that (caches that it leaves colder) is not in it, but a busy machine hides it less.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from gradwatch.localise.held_calls import model_recorder
from gradwatch.localise.held_calls.model_recorder import ModelRecorder
from gradwatch.localise.held_calls.step_recorder import StepRecorder
from gradwatch.rules.files import parse_rules
from tests.benchmarks.interleave import Comparison, Sample, Turns, compare, interleave, timed
from tests.benchmarks.loops import in_turn, training_step
from tests.benchmarks.peers import Gradwatch
from tests.benchmarks.tables import machine
from tests.benchmarks.workloads import WORKLOADS, Task, Workload

WITHOUT = """
version: 1
extends: [default]
rules:
  non-finite: {do: [skip_step: {max_consecutive: 10, then: continue}]}
"""
MIB = 1 << 20
SETTLED = 25  # steps before one whose memory is looked at
WARMUP = 100  # steps: past every warm-up, and past those that a loop takes to be called calm
SETTLE, STEPS = 2, 12  # of a turn


class Off(Gradwatch):
    """The default pack, and no rule asks for a cause."""

    name = "off"
    title = "without localise"

    def __init__(self) -> None:
        self.rules = parse_rules(WITHOUT)


class OffAgain(Off):
    """The same once more."""

    name = "off-again"
    title = "without localise, again"


class ByHand(Off):
    """No rule asks for a cause; two hooks of the loop's own hold the same references until the step."""

    name = "by-hand"
    title = "without localise, the references held by hand"

    def attach(self, task: Task) -> None:
        super().attach(task)
        self._held: list[object] = []

        def hold(module: nn.Module, args: tuple[object, ...], output: torch.Tensor) -> None:
            self._held.append(args)
            output.register_hook(self._held.append)

        self._handle = task.model.register_forward_hook(hold)

    def after_step(self, task: Task) -> None:
        super().after_step(task)
        self._held.clear()

    def detach(self) -> None:
        self._handle.remove()
        super().detach()


class On(Gradwatch):
    """The default pack."""

    name = "on"
    title = "with localise"


def mlp(dropout: float = 0.0) -> Workload:
    """Four layers of 256, batches of 256: about 3 ms a step on one core."""

    def model() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(64, 256)]
        for _ in range(3):
            layers += [nn.ReLU(), *([nn.Dropout(dropout)] if dropout else []), nn.Linear(256, 256)]
        return nn.Sequential(*layers, nn.Linear(256, 10))

    def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, 64), torch.randint(10, (rows,))

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, 1e-3)

    return Workload("holding", "MLP 4 x 256", False, model, optimizer, batch, rows=256, few=8)


def measure(workload: Workload, rounds: int, clock: str) -> dict[str, Comparison]:
    """Each against `off`, whole steps."""
    contenders = (Off(), OffAgain(), ByHand(), On())
    original = workload.task()
    with ExitStack() as attached:
        samples: dict[str, Callable[[], Sample]] = {}
        for contender in contenders:
            task = workload.twin(original)
            contender.attach(task)
            contender.suspend()
            attached.callback(contender.detach)
            attached.callback(contender.resume)
            samples[contender.name] = in_turn(
                contender, timed(lambda t=task, c=contender: training_step(t, c))
            )
        for _ in range(0, WARMUP, STEPS):
            for sample in samples.values():
                for _ in range(STEPS):
                    sample()
        gc.collect()
        gc.freeze()
        attached.callback(gc.unfreeze)
        by_name = {contender.name: contender for contender in contenders}
        timings = interleave(
            samples,
            Turns(rounds, SETTLE, STEPS),
            between=lambda name: by_name[name].drain(),
            progress=lambda done: _progress(workload.title, done, rounds),
        )
        for contender in contenders:
            if said := contender.complaint():
                raise RuntimeError(f"{contender.title}: {said}")
    return compare(timings.wall if clock == "wall" else timings.cpu, baseline="off")


def peak_bytes(workload: Workload, contender: Gradwatch) -> int:
    """Bytes of tensors alive at the peak of a step: parameters, optimizer state, and what the step allocates."""
    task = workload.task()
    contender.attach(task)
    try:
        for _ in range(SETTLED):
            training_step(task, contender)
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            for _ in range(2):
                training_step(task, contender)
    finally:
        contender.detach()
    events = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]
    at_once = itertools.accumulate(one.nbytes() for one in sorted(events, key=lambda one: one.start_ns()))
    state = [one for of in task.optimizer.state.values() for one in of.values() if torch.is_tensor(one)]
    return max(at_once) + sum(one.nbytes for one in (*task.parameters, *state))


OWN = (
    (ModelRecorder, "begins"),
    (ModelRecorder, "_ends"),
    (model_recorder, "_gradient"),
    (StepRecorder, "step_taken"),
)
"""The calls by which a step is held: before and after a forward, at the gradient of an output, after the step."""


def own_share(workload: Workload, steps: int) -> tuple[float, float]:
    """(µs a step spent in `OWN`, µs of the step): medians over steps."""
    task, contender, spent = workload.task(), On(), [0.0]

    def timing(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - begun

        return timed_call

    with ExitStack() as undone:
        for owner, name in OWN:
            undone.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, timing(getattr(owner, name)))
        contender.attach(task)
        undone.callback(contender.detach)
        found = []
        for _ in range(SETTLED + steps):
            spent[0], begun = 0.0, time.perf_counter()
            training_step(task, contender)
            found.append((spent[0], time.perf_counter() - begun))
    own, whole = np.median(np.array(found[SETTLED:]), 0) * 1e6
    return float(own), float(whole)


def _own(workload: Workload, steps: int) -> str:
    own, whole = own_share(workload, steps)
    return f"| {workload.title} | {own:.0f} | {whole / 1e3:.1f} | {100 * own / whole:.2f} % |"


def _memory(workload: Workload) -> str:
    without, held = peak_bytes(workload, Off()), peak_bytes(workload, On())
    added = held - without
    return f"| {workload.title} | {without / MIB:.1f} | {added / MIB:.2f} | {100 * added / without:.2f} % |"


def _progress(what: str, done: int, rounds: int) -> None:
    if sys.stderr.isatty() or done == rounds:
        end = "\n" if done == rounds else ""
        print(f"\r{what}: round {done}/{rounds}", end=end, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table; 0 whatever comes out, since timing never decides."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.holding", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--dropout", type=float, default=0.0, help="the forward draws from torch's generator")
    parser.add_argument("--threads", type=int, default=1, help="torch's intra-op threads")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a busy machine")
    parser.add_argument("workloads", nargs="*", choices=[[], *WORKLOADS], help="default: a small MLP")
    parser.add_argument("--memory", action="store_true", help="bytes at the peak of a step")
    parser.add_argument("--own", action="store_true", help="time in the calls that hold a step")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    chosen = [WORKLOADS[name] for name in args.workloads] or [mlp(args.dropout)]
    if args.own:
        print("| | µs a step to hold it | step, ms | of it |\n|---|---|---|---|")
        for workload in chosen:
            print(_own(workload, args.rounds), flush=True)
        return 0
    if args.memory:
        print("| | MiB at the peak, without localise | added | of it |\n|---|---|---|---|")
        for workload in chosen:
            print(_memory(workload), flush=True)
        return 0
    for workload in chosen:
        _print(workload, measure(workload, args.rounds, args.clock), args)
    return 0


def _print(workload: Workload, found: dict[str, Comparison], args: argparse.Namespace) -> None:
    step = f"a step without localise: {found['off'].median_ms:.2f} ms"
    print(f"{workload.title}, {machine(args.threads)}, {args.clock} clock; {step}")
    print("| | added µs, median (95 %) | added µs, mean (95 %) | of a step |\n|---|---|---|---|")
    for contender in (OffAgain, ByHand, On):
        one = found[contender.name]
        median, mean = one.added, one.added_mean
        share = median.value / found["off"].median_ms / 10
        print(
            f"| {contender.title} | {median.value:.1f} ({median.low:.1f} to {median.high:.1f}) "
            f"| {mean.value:.1f} ({mean.low:.1f} to {mean.high:.1f}) | {share:.2f} % |",
            flush=True,
        )


if __name__ == "__main__":
    raise SystemExit(main())
