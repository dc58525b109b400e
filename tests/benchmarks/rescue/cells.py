"""One cell of the table: a training, a fault, a guard; and many of them, several at a time."""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from gradwatch.errors import TrainingStopped
from tests.benchmarks.rescue.faults import FAULTS, Struck
from tests.benchmarks.rescue.guards import GUARDS, Guard
from tests.benchmarks.rescue.trainings import TRAININGS, Training, loss_of


class Cell(NamedTuple):
    """What is run; `steps` 0 = as many as the training has."""

    training: str
    fault: str
    guard: str
    seed: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Outcome:
    """How it ended: the held-out loss (nats; NaN where weights are not finite), and how often the guard acted.

    `stopped`: the guard ended the run on purpose, before its last step.
    """

    cell: Cell
    loss: float
    interventions: int
    seconds: float
    stopped: bool = False


def run(cell: Cell) -> Outcome:
    """Train, with the fault from the middle on, under guard. One thread, and the same numbers every time."""
    started = time.perf_counter()
    training, guard = TRAININGS[cell.training], GUARDS[cell.guard]()
    training = replace(training, steps=cell.steps or training.steps)
    torch.manual_seed(cell.seed)
    model = training.model()
    optimizer = training.optimizer(model)
    guard.attach(model, optimizer)
    stopped = False
    try:
        _train(training, model, optimizer, guard, cell)
    except TrainingStopped:
        stopped = True
    guard.close()
    with torch.no_grad():
        final = float(loss_of(model, training.held_out()))
    return Outcome(cell, final, guard.interventions, time.perf_counter() - started, stopped)


def _train(training: Training, model: nn.Module, optimizer: Optimizer, guard: Guard, cell: Cell) -> None:
    struck = Struck(FAULTS[cell.fault], model, onset=training.steps // 2)
    for step in range(training.steps):
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate(step) * struck.rate(step)
        optimizer.zero_grad(set_to_none=True)
        struck.backward(step, training.batch(cell.seed, step))
        guard.after_backward(step)
        optimizer.step()


def run_all(cells: Iterable[Cell], jobs: int, store: Path | None = None) -> Iterator[Outcome]:
    """Outcomes in the order they are ready; those in `store` are not run again, the others are added to it."""
    known = _stored(store)
    wanted = list(dict.fromkeys(cells))
    yield from (known[cell] for cell in wanted if cell in known)
    for outcome in _fresh([cell for cell in wanted if cell not in known], jobs):
        if store is not None:
            with store.open("a", encoding="utf-8") as file:
                # On a line of its own even after one that a kill tore; NaN as Python's json writes and reads it.
                file.write(f"\n{json.dumps(asdict(outcome))}")
        yield outcome


def _fresh(cells: list[Cell], jobs: int) -> Iterator[Outcome]:
    if jobs <= 1 or len(cells) <= 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield from map(run, cells)
        finally:
            torch.set_num_threads(threads)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork would inherit torch's thread pools half alive
    with ProcessPoolExecutor(min(jobs, len(cells)), spawn, torch.set_num_threads, (1,)) as pool:
        try:
            yield from (future.result() for future in as_completed([pool.submit(run, c) for c in cells]))
        except BaseException:
            pool.shutdown(
                wait=False, cancel_futures=True
            )  # interrupted: what is stored is kept, no more is begun
            raise


def _stored(store: Path | None) -> dict[Cell, Outcome]:
    if store is None or not store.exists():
        return {}
    found = {}
    for line in store.read_text(encoding="utf-8").splitlines():
        if line.endswith("}"):  # empty, or torn where a run was killed
            fields = json.loads(line)
            cell = Cell(*fields.pop("cell"))
            found[cell] = Outcome(cell, **fields)
    return found


def relative(outcome: Outcome, healthy: Outcome) -> float:
    """The loss over that of the healthy run that nobody guarded; inf where the weights are lost."""
    return outcome.loss / healthy.loss if math.isfinite(outcome.loss) else math.inf
