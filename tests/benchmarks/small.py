"""What watching adds to steps of about a millisecond, ÷ what a clip adds: `python -m tests.benchmarks.small`.

Perceptrons of 8, 18 and 50 parameters: bare, with `clip_grad_norm_`, and under the default watch, in turns in one
process and one thread. *Firing* is the same with gradients so small that `vanishing` fires at every step from the 20th
on. *Clipping* is the whole step, clipped by a rule file instead of by torch, at a bound that about half of the steps
exceed. Calm steps are judged some at a time, so whole turns are compared, not single steps.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import gradwatch
from gradwatch.rules.files import parse_rules
from tests.benchmarks import tables
from tests.benchmarks.interleave import BOOTSTRAP, Interval

PARAMETERS = (8, 18, 50)
SETTLE, TURN, BATCHES = 200, 32, 64
FAINT = 1e-10
"""Factor of the loss by which gradients vanish."""
CLIP = """
version: 1
extends: [default]
clip: {total: {method: norm, max_norm: %r}}
"""


def task(
    parameters: int, factor: float, max_norm: float | None
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer, and one step of a training of its own."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32) for _ in range(parameters // 2)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # gradients fade over 25 layers otherwise
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    x, y = torch.randn(BATCHES, 64, 32), torch.randn(BATCHES, 64, 32)
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        (functional.mse_loss(model(x[count % BATCHES]), y[count % BATCHES]) * factor).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()

    return model, optimizer, step


def usual_norm(parameters: int) -> float:
    """The median total norm of some first steps."""
    model, _, step = task(parameters, 1.0, None)
    norms = []
    for _ in range(BATCHES):
        step()
        norms.append(float(nn.utils.get_total_norm(param.grad for param in model.parameters())))  # type: ignore[misc]
    return float(np.median(norms))


def measured(
    parameters: int,
    firing: bool,
    rounds: int,
    turn: int = TURN,
    settle: int = SETTLE,
    max_norm: float | None = None,
) -> np.ndarray:
    """float64[rounds, 3]: µs a step of a turn, bare, clipped and watched.

    `max_norm`: the bound by which torch clips, and which the watch has in its rules; None: torch's clip bounds nothing,
    and the watch does not clip. Raises RuntimeError where the rule that is to fire does not, or another does.
    """
    factor, found = FAINT if firing else 1.0, np.empty((rounds, 3))
    bare = task(parameters, factor, None)[2]
    clipped = task(parameters, factor, 1e9 if max_norm is None else max_norm)[2]
    model, optimizer, watched = task(parameters, factor, None)
    order = np.random.default_rng(0)
    rules = "default" if max_norm is None else parse_rules(CLIP % max_norm)
    with (
        tempfile.TemporaryDirectory() as folder,
        gradwatch.watch(model, optimizer, rules=rules, run_dir=folder) as gw,
    ):
        steps = bare, clipped, watched
        for _ in range(settle):
            for step in steps:
                step()
        for row in found:
            for k in order.permutation(3):
                began = time.perf_counter()
                for _ in range(turn):
                    steps[k]()
                row[k] = (time.perf_counter() - began) / turn * 1e6
        if ("vanishing" in gw.status()["firing"]) != firing:
            raise RuntimeError(f"firing: {gw.status()['firing']}")
    return found


def added(found: np.ndarray) -> tuple[float, float, Interval]:
    """Medians of what a clip and the watch add, in µs a step, and the ratio of the second to the first."""
    rng = np.random.default_rng(0)
    extra = found[:, 1:] - found[:, :1]
    picks = np.median(extra[rng.integers(len(extra), size=(BOOTSTRAP, len(extra)))], axis=1)
    low, high = np.percentile(picks[:, 1] / picks[:, 0], (2.5, 97.5))
    clip, watch = np.median(extra, axis=0)
    return float(clip), float(watch), Interval(float(watch / clip), float(low), float(high))


def whole(found: np.ndarray) -> Interval:
    """The ratio of medians of whole steps, watched ÷ clipped."""
    rng = np.random.default_rng(0)
    picks = np.median(found[rng.integers(len(found), size=(BOOTSTRAP, len(found)))], axis=1)
    low, high = np.percentile(picks[:, 2] / picks[:, 1], (2.5, 97.5))
    middle = np.median(found, axis=0)
    return Interval(float(middle[2] / middle[1]), float(low), float(high))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="turns of each (default 40)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = [["parameters", "", "bare, µs", "a clip adds, µs", "watching adds, µs", "÷ a clip"]]
    steps = [["parameters", "clipped by torch, µs", "by the watch, µs", "÷"]]
    for parameters in PARAMETERS:
        for firing in (False, True):
            found = measured(parameters, firing, rounds)
            clip, watch, ratio = added(found)
            bare = f"{np.median(found[:, 0]):.0f}"
            shown = f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"
            rows.append(
                [str(parameters), "firing" if firing else "calm", bare, f"{clip:.0f}", f"{watch:.0f}", shown]
            )
        found = measured(parameters, False, rounds, max_norm=usual_norm(parameters))
        _, by_torch, by_us = np.median(found, axis=0)
        ratio = whole(found)
        shown = f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"
        steps.append([str(parameters), f"{by_torch:.0f}", f"{by_us:.0f}", shown])
    print(f"{tables.as_markdown(rows)}\n\n{tables.as_markdown(steps)}")
    print(f"\n{tables.machine(1)}, {rounds} rounds of {TURN} steps")


if __name__ == "__main__":
    main()
