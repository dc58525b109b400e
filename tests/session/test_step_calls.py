"""What a calm step of a small model costs in Python: calls inside gradwatch, which no other process can slow."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.capture.weights.weight_health import Weights
from gradwatch.session.pipeline import deferred_steps
from tests.benchmarks.versions import small
from tests.support.on_device import gradients_on_device

PACKAGE = os.path.dirname(gradwatch.__file__) + os.sep
STEPS = (
    4 * deferred_steps.MOST
)  # whole blocks of steps that are judged together, and one look at the generators
PHASES = {  # by the file and the function that torch calls
    ("taps/module_calls.py", "__get__"): "forward",
    ("taps/module_calls.py", "_after"): "forward",
    ("taps/backward_entry.py", "run_backward"): "entry of the backward",
    ("taps/grad_ready.py", "arrived"): "in the backward",
    ("localise/held_calls/model_recorder.py", "_gradient"): "in the backward",
    ("taps/backward_end.py", "_end"): "end of the backward",
    ("taps/step_hooks.py", "_before"): "before the step",
    ("taps/step_hooks.py", "_after"): "after the step",
}
MOST = {
    "forward": 5.5,  # where generators are looked at, in one call of 128, some more
    "entry of the backward": 2,
    "in the backward": 13.5,  # of which one for each of the eight gradients
    "end of the backward": 25,
    "before the step": 92.5,  # of which one for the batch that is hashed at every fiftieth step
    "after the step": 11,
}
"""Calls in a step when this was written: whoever needs fewer lowers it. The goal: 25, and one for each gradient."""
MOST_ON_DEVICE = {
    "forward": 5.5,
    "entry of the backward": 9,
    "in the backward": 13.5,
    "end of the backward": 40,
    "before the step": 144,
    "after the step": 15,
}
"""The same where gradients and the loss lie on a device, and the optimizer is fused."""


class Calls:
    """Counts the Python calls of gradwatch, by the phase of the step: what it is that torch has called."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._phase, self._outermost = "", None

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            if self._outermost is None:
                self._outermost = frame
                place = frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_name
                self._phase = PHASES.get(place, f"{place}")
            self.found[self._phase] += 1
        elif event == "return" and frame is self._outermost:
            self._outermost = None


@pytest.mark.parametrize("on_device", [False, True])
def test_a_calm_step_makes_few_calls(
    on_device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default watch of eight parameters: no phase of a step makes more calls than when this was written."""
    monkeypatch.setattr(
        deferred_steps, "LONGEST", float("inf")
    )  # no clock decides how many are judged together
    monkeypatch.setattr(Weights, "check_if_due", lambda *_: None)  # nor when weights are looked at
    task, most = small(), MOST
    if on_device:
        gradients_on_device(monkeypatch)
        most = MOST_ON_DEVICE
        task.optimizer = torch.optim.AdamW(task.model.parameters(), 1e-4, fused=True)
    gw = gradwatch.watch(task.model, task.optimizer, rules="default", run_dir=tmp_path, listen="127.0.0.1:0")

    def steps(number: int) -> None:
        for k in range(number):
            inputs, labels = task.batches[k % len(task.batches)]
            task.optimizer.zero_grad()
            nn.functional.cross_entropy(task.model(inputs), labels).backward()
            task.optimizer.step()

    calls, threads = Calls(), torch.get_num_threads()
    torch.set_num_threads(1)  # decides by what gradients are read
    try:
        steps(2 * STEPS)  # past the warm-up of every rule
        gw.flush()
        sys.setprofile(calls)
        steps(STEPS)
    finally:
        sys.setprofile(None)
        torch.set_num_threads(threads)
        gw.close()
    found = {phase: number / STEPS for phase, number in calls.found.items()}
    assert found.keys() == most.keys()
    assert {phase: number for phase, number in found.items() if number > most[phase]} == {}
