"""Real hooks without rules: everything a Watch would see, collected as Snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from gradwatch.hooks.assemble import Extras, assemble
from gradwatch.hooks.boundary import Boundary
from gradwatch.hooks.capture import Capture
from gradwatch.hooks.lane import Lane, Window
from gradwatch.hooks.precision import LossScale
from gradwatch.snapshot import Decision, Snapshot


class Recorder:
    """Capture and Boundary with a judge that only notes; `decide` may be set to act."""

    def __init__(self, models: nn.Module | Iterable[nn.Module], *, on_device: bool = False) -> None:
        self.snapshots: list[Snapshot] = []
        self.errors: list[tuple[str, BaseException]] = []
        self.decide: Callable[[Snapshot], Decision] = lambda snapshot: Decision()
        self.wait = True
        self.gate = False
        self.on_device = on_device
        listed = [models] if isinstance(models, nn.Module) else list(models)
        self.capture = Capture(listed, self._backward_ended, self.failed)
        self.scale = LossScale(self._scaler_stepped, self.failed)
        self.boundary = Boundary(self.capture, self)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove every hook; a fault inside gradwatch fails the test."""
        self.boundary.close()
        self.scale.close()
        self.capture.close()
        assert self.errors == []

    def owns(self, optimizer: Optimizer) -> bool:
        return any(self.capture.knows(p) for group in optimizer.param_groups for p in group["params"])

    def bound(self, lane: Lane) -> None:
        lane.on_cpu = lane.on_cpu and not self.on_device

    def needs_host(self, lane: Lane) -> bool:
        return self.wait

    def skips_nonfinite(self, lane: Lane) -> bool:
        return self.gate

    def arrive(self, optimizer: Optimizer) -> None: ...

    def depart(self, optimizer: Optimizer) -> None: ...

    def measure(self, lane: Lane, window: Window) -> Callable[[], Decision]:
        def judge() -> Decision:
            scale = self.scale.current()
            snapshot = assemble(lane.index, lane.sites, window, Extras(), {}, scale, 1.0)
            self.snapshots.append(snapshot)
            return self.decide(snapshot)

        return judge

    def failed(self, component: str, error: BaseException) -> None:
        self.errors.append((component, error))

    def _backward_ended(self) -> None:
        with torch.no_grad():
            for lane in self.capture.lanes:
                if lane.backwards and lane.due():
                    lane.read(self.scale.in_backward())

    def _scaler_stepped(self, optimizers: frozenset[int]) -> None:
        for lane in self.capture.lanes:
            optimizer = lane.optimizer() if lane.optimizer is not None else None
            if optimizer is not None and id(optimizer) in optimizers and lane.backwards:
                lane.discard()


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
