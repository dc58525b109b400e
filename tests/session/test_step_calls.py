"""What a healthy step of a small model costs in Python: calls inside gradwatch, which no other process can slow."""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import gradwatch
from tests.benchmarks.versions import small

PACKAGE = os.path.dirname(gradwatch.__file__) + os.sep
STEPS, ROUNDS = 40, 5  # five times as many as may wait to be judged together, four reads of every weight
MOST = 310  # calls in a step, of which some 60 read whole tensors: 297 when written; 279 in ade2f3f


def test_a_healthy_step_makes_few_calls(tmp_path: Path) -> None:
    """The default watch of eight parameters: the median over rounds, as looks at the weights are due by the clock."""
    task = small()
    gw = gradwatch.watch(task.model, task.optimizer, rules="default", run_dir=tmp_path, listen="127.0.0.1:0")
    calls = [0]

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[0] += 1

    def steps(number: int) -> None:
        for k in range(number):
            inputs, labels = task.batches[k % len(task.batches)]
            task.optimizer.zero_grad()
            nn.functional.cross_entropy(task.model(inputs), labels).backward()
            task.optimizer.step()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # decides by what gradients are read
    try:
        steps(200)  # past the warm-up of every rule
        gw.flush()
        found = []
        for _ in range(ROUNDS):
            before = calls[0]
            sys.setprofile(count)
            steps(STEPS)
            sys.setprofile(None)
            found.append((calls[0] - before) / STEPS)
    finally:
        sys.setprofile(None)
        torch.set_num_threads(threads)
        gw.close()
    assert 100 < statistics.median(found) <= MOST
