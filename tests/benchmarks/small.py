"""What watching adds to steps of about a millisecond, ÷ what a clip adds: `python -m tests.benchmarks.small`.

Perceptrons of 8, 18 and 50 parameters: bare, with `clip_grad_norm_`, and under the default watch, in turns in one
process and one thread. *Firing* is the same with gradients so small that `vanishing` fires at every step from the 20th
on. Calm steps are judged some at a time, so whole turns are compared, not single steps.
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
from tests.benchmarks import tables
from tests.benchmarks.interleave import BOOTSTRAP, Interval

PARAMETERS = (8, 18, 50)
SETTLE, TURN, BATCHES = 200, 24, 64
FAINT = 1e-10
"""Factor of the loss by which gradients vanish."""
BARE, CLIPPED, WATCHED = "bare", "clipped", "watched"


def task(
    parameters: int, factor: float, clip: bool
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
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()

    return model, optimizer, step


def measured(
    parameters: int, firing: bool, rounds: int, turn: int = TURN, settle: int = SETTLE
) -> np.ndarray:
    """float64[rounds, 3]: µs a step of a turn, bare, clipped and watched.

    Raises RuntimeError where the rule that is to fire does not, or another does.
    """
    factor, found = FAINT if firing else 1.0, np.empty((rounds, 3))
    (_, _, bare), (_, _, clipped) = task(parameters, factor, False), task(parameters, factor, True)
    model, optimizer, watched = task(parameters, factor, False)
    order = np.random.default_rng(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        gradwatch.watch(model, optimizer, run_dir=folder) as gw,
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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="turns of each (default 40)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = [["parameters", "", "bare, µs", "a clip adds, µs", "watching adds, µs", "÷ a clip"]]
    for parameters in PARAMETERS:
        for firing in (False, True):
            found = measured(parameters, firing, rounds)
            clip, watch, ratio = added(found)
            bare = f"{np.median(found[:, 0]):.0f}"
            shown = f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"
            rows.append(
                [str(parameters), "firing" if firing else "calm", bare, f"{clip:.0f}", f"{watch:.0f}", shown]
            )
    print(f"{tables.as_markdown(rows)}\n\n{tables.machine(1)}, {rounds} rounds of {TURN} steps")


if __name__ == "__main__":
    main()
