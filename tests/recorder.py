"""Real hooks without rules: everything a Watch would see, collected as Snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from gradwatch.capture.assemble import Extras, assemble
from gradwatch.capture.optimizer import Lane
from gradwatch.capture.parameters import Capture
from gradwatch.capture.window import Window
from gradwatch.reading.device import arrived
from gradwatch.records.snapshot import Decision, Snapshot
from gradwatch.session.boundary import Boundary
from gradwatch.session.deferred import Measured


class Recorder:
    """Capture and Boundary with a judge that only notes; `decide` may be set to act."""

    def __init__(self, models: nn.Module | Iterable[nn.Module], *, on_device: bool = False) -> None:
        self.snapshots: list[Snapshot] = []
        self.errors: list[tuple[str, BaseException]] = []
        self.decide: Callable[[Snapshot], Decision] = lambda snapshot: Decision()
        self.wait = True
        self.gate = False
        self.clip: float | None = None
        self.on_device = on_device
        listed = [models] if isinstance(models, nn.Module) else list(models)
        self.capture = Capture(listed, self._backward_ended, self.failed)
        self.boundary = Boundary(self.capture, self)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove every hook; a fault inside gradwatch fails the test."""
        self.boundary.close()
        self.capture.close()
        assert self.errors == []

    def resting(self) -> bool:
        return False

    def owns(self, optimizer: Optimizer) -> bool:
        return self.capture.lane_of(optimizer) is not None or self.capture.holds(optimizer)

    def bound(self, lane: Lane) -> None:
        lane.on_cpu = lane.on_cpu and not self.on_device

    def needs_host(self, lane: Lane) -> bool:
        return self.wait

    def pooled(self, lane: Lane) -> bool:
        return False

    def clips_again(self, lane: Lane, norms: NDArray[np.float64]) -> Decision:
        return Decision(max_norm=self.clip)

    def skips_nonfinite(self, lane: Lane) -> bool:
        return self.gate

    def arrive(self, lane: Lane | None) -> None: ...

    def enter(self, lane: Lane) -> None: ...

    def depart(self, lane: Lane | None) -> None: ...

    def max_norm(self, lane: Lane) -> float | None:
        return self.clip

    def captured(self) -> None:
        raise AssertionError("no test captures a graph")

    def measure(self, lane: Lane, window: Window) -> Measured:
        def judge() -> Decision:
            scalars = {} if window.skipped is None else {"scaler_skip": arrived(window.skipped)}
            snapshot = assemble(lane.index, lane.sites, window, Extras(), scalars, 1.0)
            self.snapshots.append(snapshot)
            return self.decide(snapshot)

        return Measured(window.ready, judge)

    def acted(self, lane: Lane, decision: Decision, error: Exception | None) -> None: ...

    def forget(self, lane: Lane) -> None:
        pass

    def failed(self, component: str, error: BaseException) -> None:
        self.errors.append((component, error))

    def _backward_ended(self, told: list[Lane]) -> None:
        with torch.no_grad():
            for lane in told:
                if lane.due():
                    lane.read()


def norms_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, float]:
    """The L2 norm of every present gradient, computed independently in float64."""
    found = {}
    for name, parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            grad = grad.coalesce().values() if grad.is_sparse else grad.detach()
            wide = torch.complex128 if grad.is_complex() else torch.float64
            found[name] = float(torch.linalg.vector_norm(grad.to(wide)))
    return found


def seen(snapshot: Snapshot) -> dict[str, float]:
    """The norms a Snapshot reports, of the parameters that got a gradient."""
    pairs = zip(snapshot.sites.names, snapshot.norm.tolist(), snapshot.calls.tolist(), strict=True)
    return {name: norm for name, norm, calls in pairs if calls > 0}
