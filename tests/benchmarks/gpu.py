"""What watching costs a training on a GPU: `python -m tests.benchmarks.gpu` (`--only small,gpt`, `--rounds 20`).

Whole turns of steps, the device waited for at the end of each, in shuffled order: bare, with `clip_grad_norm_`, with
one `.item()` a parameter (as hook tutorials have it), watched by `observe-only` and by `default`, and clipped by a rule
file instead of by torch. Each contender has a process and a model of its own, and the device to itself in its turn.
Memory is the highest that torch's allocator had out there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import gradwatch
from gradwatch.rules.files import parse_rules
from tests.benchmarks import tables
from tests.benchmarks.interleave import BOOTSTRAP, Interval
from tests.benchmarks.workloads import GPT, WORKLOADS, Batch

CLIP = "version: 1\nextends: [default]\nclip: {total: {method: norm, max_norm: 1e9}}"
WATCHED = {
    "observe-only": "observe-only",
    "default": "default",
    "default + clip: total": CLIP,
}
SETTLE = 24
"""Untimed steps at least: states and buffers are made, and columns that come at every tenth step were read."""
CONTENDERS = ("bare", "bare again", "clip_grad_norm_", ".item() a parameter", *WATCHED)


@dataclass(frozen=True)
class Load:
    """A training: `batch(rows)` in turns of `turn` steps; `autocast` in bfloat16."""

    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    turn: int
    autocast: bool = False
    fused: bool = True


def _vectors(rows: int, width: int, classes: int) -> Callable[[], Batch]:
    return lambda: (
        torch.randn(rows, width, device="cuda"),
        torch.randint(0, classes, (rows,), device="cuda"),
    )


def _images(rows: int) -> Callable[[], Batch]:
    def batch() -> Batch:
        pictures = torch.randn(rows, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
        return pictures, torch.randint(0, 10, (rows,), device="cuda")

    return batch


def _text(rows: int, length: int) -> Callable[[], Batch]:
    def batch() -> Batch:
        tokens = torch.randint(0, 50_304, (rows, length + 1), device="cuda")
        return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()

    return batch


def _small() -> nn.Module:
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(32, 32), nn.ReLU())))


def _resnet() -> nn.Module:
    return WORKLOADS["resnet"].model().to(memory_format=torch.channels_last)


LOADS = {
    "small": Load("perceptron, 8 parameters", _small, _vectors(64, 32, 32), 100),
    "tiny": Load("2,000 tiny parameters", WORKLOADS["tiny"].model, _vectors(16, 16, 4), 4),
    "mlp": Load("wide MLP, 11 M", WORKLOADS["mlp"].model, _vectors(1024, 1024, 100), 50),
    "resnet": Load("ResNet, 6 M, bf16", _resnet, _images(512), 20, autocast=True),
    "gpt": Load(
        "GPT-2 small, 124 M, bf16",
        lambda: GPT(50_304, 768, 12, 12, 1024),
        _text(8, 1024),
        5,
        autocast=True,
    ),
    "gpt-foreach": Load(
        "GPT-2 small, bf16, AdamW not fused",
        lambda: GPT(50_304, 768, 12, 12, 1024),
        _text(8, 1024),
        5,
        autocast=True,
        fused=False,
    ),
}


def steps_of(load: Load, name: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer, and one step of a training of its own as this contender has it."""
    torch.manual_seed(0)
    model = load.model().cuda()
    options = {"fused": True} if load.fused else {}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, **options)  # type: ignore[arg-type]
    batches = [load.batch() for _ in range(4)]
    params = list(model.parameters())
    taken = 0

    def step() -> None:
        nonlocal taken
        x, y = batches[taken % len(batches)]
        taken += 1
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=load.autocast):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        if name == "clip_grad_norm_":
            nn.utils.clip_grad_norm_(params, 1e9)
        elif name == ".item() a parameter":
            for param in params:
                assert param.grad is not None
                param.grad.norm().item()
        optimizer.step()

    return model, optimizer, step


@contextmanager
def contender(load: Load, name: str) -> Iterator[Callable[[], None]]:
    """One step of a contender, attached until the context ends; RuntimeError where anything of ours failed."""
    model, optimizer, step = steps_of(load, name)
    if name not in WATCHED:
        yield step
        return
    text = WATCHED[name]
    rules = parse_rules(text) if "\n" in text else text
    with (
        tempfile.TemporaryDirectory() as folder,
        gradwatch.watch(model, optimizer, rules=rules, run_dir=Path(folder), listen="127.0.0.1:0") as gw,
    ):
        yield step
        if gw.health.errors():
            raise RuntimeError(f"{name}: {gw.health.errors()}")


def turn(step: Callable[[], None], steps: int) -> float:
    """Milliseconds a step, the device's part included."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps * 1e3


def serve(pipe: Connection, name: str, contestant: str) -> None:
    """The process of one contender: a turn for every True that comes; (ms a step, peak MiB) of each."""
    load = LOADS[name]
    with contender(load, contestant) as step:
        turn(step, max(load.turn, SETTLE))
        torch.cuda.reset_peak_memory_stats()
        while pipe.recv():
            turn(step, 2)  # another process has just had the device
            pipe.send((turn(step, load.turn), torch.cuda.max_memory_allocated() / 2**20))
    pipe.send(None)


def measured(name: str, rounds: int) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """(float64[rounds] milliseconds a step, peak MiB) by contender."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for each in CONTENDERS:
        pipes[each], theirs = spawn.Pipe()
        processes.append(spawn.Process(target=serve, args=(theirs, name, each), daemon=True))
        processes[-1].start()
        theirs.close()  # so that a process which fails is an end of file here
    found, memory = {each: np.empty(rounds) for each in CONTENDERS}, {}
    order = np.random.default_rng(0)
    for k in range(rounds):
        for each in order.permutation(np.array(CONTENDERS)).tolist():
            pipes[each].send(True)
            found[each][k], memory[each] = pipes[each].recv()
    for each, process in zip(CONTENDERS, processes, strict=True):
        pipes[each].send(False)
        pipes[each].recv()
        process.join()
    return found, memory


def ratio(above: np.ndarray, below: np.ndarray) -> Interval:
    """The ratio of medians with its interval, rounds resampled jointly."""
    picks = np.random.default_rng(0).integers(len(above), size=(BOOTSTRAP, len(above)))
    ratios = np.median(above[picks], 1) / np.median(below[picks], 1)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return Interval(float(np.median(above) / np.median(below)), float(low), float(high))


def main() -> None:
    """Print a table for each load, as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="turns of each contender (default 20)")
    parser.add_argument("--only", default=",".join(LOADS), help=f"of {', '.join(LOADS)}")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, {tables.machine(torch.get_num_threads())}\n")
    for load in options.only.split(","):
        found, memory = measured(load, options.rounds)
        rows = [[LOADS[load].title, "ms a step", "÷ bare", "÷ clip_grad_norm_", "peak memory, MiB"]]
        for name, each in found.items():
            against = [ratio(each, found[other]) for other in ("bare", "clip_grad_norm_")]
            shown = [f"{one.value:.3f} ({one.low:.3f}–{one.high:.3f})" for one in against]
            rows.append([name, f"{np.median(each):.3f}", *shown, f"{memory[name]:,.0f}"])
        print(tables.as_markdown(rows), flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
