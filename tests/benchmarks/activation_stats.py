"""Cost of `ActivationStats` beside hooks as fastai writes them: `python -m tests.benchmarks.activation_stats`.

The ResNet of `workloads`, every module with parameters, forwards in training mode, in turns in one process. The hooks
written for comparison call `.item()` on mean, standard deviation and share near zero of each output, and (`histogram`)
`histc` of its magnitudes, which is what fastai's `ActivationStats` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradwatch.inspect import ActivationStats
from tests.benchmarks.interleave import Sample, Timings, Turns, added_ratio, compare, interleave, timed
from tests.benchmarks.tables import as_markdown, machine
from tests.benchmarks.workloads import WORKLOADS

Attach = Callable[[dict[str, nn.Module]], Callable[[], Any]]


def by_item(histogram: bool) -> Attach:
    """Hooks of torch that read every number when it is made."""

    def attach(modules: dict[str, nn.Module]) -> Callable[[], Any]:
        found: list[tuple[Any, ...]] = []

        def look(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            values = output.detach()
            mean, std = values.mean().item(), values.std().item()
            near = (values.abs() <= 0.05).long().sum().item() / values.numel()
            found.append((mean, std, near, values.abs().histc(40, 0, 10) if histogram else None))

        handles = [module.register_forward_hook(look) for module in modules.values()]
        return lambda: [handle.remove() for handle in handles]

    return attach


def ours(histogram: bool) -> Attach:
    """`ActivationStats` on the same modules."""
    return lambda modules: ActivationStats(modules, with_hist=histogram).remove


CONTENDERS: dict[str, Attach] = {
    "bare": lambda modules: lambda: None,
    "gradwatch": ours(False),
    "item": by_item(False),
    "gradwatch, histogram": ours(True),
    "item, histogram": by_item(True),
}


def measure(name: str, rounds: int) -> Timings:
    """Seconds of forwards of one workload, under each contender."""
    task = WORKLOADS[name].task()
    modules = {
        path: module
        for path, module in task.model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }

    attached: list[Callable[[], Any]] = []
    forward = timed(task.forward)

    def sampled(attach: Attach) -> Callable[[], Sample]:
        def sample() -> Sample:
            if not attached:  # the first of a turn
                attached.append(attach(modules))
            return forward()

        return sample

    contenders = {title: sampled(attach) for title, attach in CONTENDERS.items()}
    return interleave(contenders, Turns(rounds=rounds), between=lambda name: attached.pop()())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="resnet", choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    timings = measure(arguments.workload, arguments.rounds)
    rows = [["", "CPU time added to a forward, ms", "÷ hooks with .item()"]]
    compared = compare(timings.cpu)
    for title, other in (("gradwatch", "item"), ("gradwatch, histogram", "item, histogram")):
        for name in (other, title):
            added = compared[name].added
            ratio = added_ratio(timings.cpu, title, other)
            rows.append(
                [
                    name,
                    f"{added.value / 1e3:.1f} ({added.low / 1e3:.1f} to {added.high / 1e3:.1f})",
                    f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f})" if name == title else "1",
                ]
            )
    bare = compared["bare"].median_ms
    print(f"{as_markdown(rows)}\n\nbare forward {bare:.0f} ms, {machine(1)}, {arguments.rounds} rounds")


if __name__ == "__main__":
    main()
