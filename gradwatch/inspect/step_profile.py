"""One training step under torch's profiler, with the model's modules and gradwatch's own phases labelled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from gradwatch.runtime.overhead_timer import labelled
from gradwatch.taps import module_calls

PHASES = {
    "_backward_end": "gradwatch: end of the backward",
    "_guarded": "gradwatch: before the step",
    "after_step": "gradwatch: after the step",
}
"""The label of each measured part of a watch, by the name of its function."""
WARMUP = 3


class Phase(NamedTuple):
    """Time under one label in the profiled steps: microseconds of CPU, children included, and of the device."""

    label: str
    calls: int
    cpu_us: float
    device_us: float


class StepProfile:
    """The result of the profiler: text by `print`, `phases` to read, `trace` for chrome://tracing and Perfetto."""

    def __init__(self, profiler: Any, steps: int) -> None:
        self.profiler, self.steps = profiler, steps

    @property
    def phases(self) -> list[Phase]:
        """Each labelled phase, the longest first: modules by name, and `gradwatch: …` for what a watch does."""
        found = [
            Phase(event.key, event.count, event.cpu_time_total, getattr(event, "device_time_total", 0.0))
            for event in self.profiler.key_averages()
            if event.is_user_annotation or event.key.startswith(("forward ", "gradwatch: "))
        ]
        return sorted(found, key=lambda phase: -phase.cpu_us)

    @property
    def own_share(self) -> float:
        """The share of the steps' CPU time that is gradwatch's."""
        times = {phase.label: phase.cpu_us for phase in self.phases}
        own = sum(us for label, us in times.items() if label.startswith("gradwatch: "))
        return own / times["step"] if times.get("step") else 0.0

    def table(self, rows: int = 20, sort_by: str = "self_cpu_time_total") -> str:
        """torch's own table of operations and phases."""
        return str(self.profiler.key_averages().table(sort_by=sort_by, row_limit=rows))

    def trace(self, path: str | Path) -> Path:
        """Write the Chrome trace; the path."""
        self.profiler.export_chrome_trace(str(path))
        return Path(path)

    def __str__(self) -> str:
        lines = [f"{'phase':<44} {'calls':>6} {'CPU ms':>10} {'device ms':>10}"]
        for one in self.phases:
            lines.append(
                f"{one.label:<44} {one.calls:>6} {one.cpu_us / 1e3:>10.3f} {one.device_us / 1e3:>10.3f}"
            )
        return "\n".join(lines)


def profile_step(
    model: nn.Module, step: Callable[[], Any], *, steps: int = 1, warmup: int = WARMUP
) -> StepProfile:
    """Call `step()`, which takes one step of a training of `model`, under torch's profiler.

    The steps are real: `warmup` of them before the profiled ones, which are `steps`. Each module's forward is labelled
    `forward NAME`, the whole `step`; what a gradwatch session of this process does in it, `gradwatch: …`.
    """
    for _ in range(warmup):
        step()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with (
        profile(activities=activities, acc_events=True) as profiler,
        _modules_labelled(model),
        _own_phases_labelled(),
    ):
        for _ in range(steps):
            with record_function("step"):
                step()
    return StepProfile(profiler, steps)


@contextmanager
def _modules_labelled(model: nn.Module) -> Iterator[None]:
    running: list[tuple[str, record_function]] = []
    with ExitStack() as stack:
        stack.callback(_end, running, "")
        for name, module in model.named_modules():
            label = f"forward {name or type(model).__name__}"
            stack.callback(module_calls.listen(module, *_around(label, running)))
        yield


def _around(
    label: str, running: list[tuple[str, record_function]]
) -> tuple[module_calls.Before, module_calls.After]:
    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append((label, record_function(label)))
        running[-1][1].__enter__()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        _end(running, label)

    return before, after


def _end(running: list[tuple[str, record_function]], label: str) -> None:
    """End the innermost phase of that label, and those in it, which were ended by an exception; all for ""."""
    while running:
        ended, phase = running.pop()
        phase.__exit__(None, None, None)
        if ended == label:
            return


@contextmanager
def _own_phases_labelled() -> Iterator[None]:
    running: list[record_function] = []

    def begins(function: str) -> None:
        running.append(record_function(PHASES.get(function, f"gradwatch: {function}")))
        running[-1].__enter__()

    def ends() -> None:
        if running:
            running.pop().__exit__(None, None, None)

    with labelled(begins, ends):
        yield
    while running:  # of a call that raised
        ends()
