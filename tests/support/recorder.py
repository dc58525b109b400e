"""Real hooks without rules: everything a session would see, collected as Snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.snapshot_assembly import Extras, assemble
from gradwatch.reading.async_copy import host_value
from gradwatch.records.decision import Decision
from gradwatch.records.snapshot import Snapshot
from gradwatch.rules.rule_set import RuleSet
from gradwatch.session.optimizer_context import OptimizerContext
from gradwatch.session.pipeline.extra_columns import Measurement
from gradwatch.session.pipeline.record_publishing import Judged
from gradwatch.session.pipeline.step_pipeline import StepPipeline
from gradwatch.session.session import Session
from gradwatch.session.settings import Settings


def as_on_device(captured: OptimizerCapture) -> None:
    """Have the gradients of a capture read as those of a device are."""
    captured.on_cpu = captured._reader._on_cpu = False


class Recorder:
    """A session whose pipeline only notes what it is given; `decide` may be set to act."""

    def __init__(self, models: nn.Module | Iterable[nn.Module], *, on_device: bool = False) -> None:
        self.snapshots: list[Snapshot] = []
        self.errors: list[tuple[str, BaseException]] = []
        self.decide: Callable[[Snapshot], Decision] = lambda snapshot: Decision()
        self.wait = True
        self.gate = False
        self.clip: float | None = None
        self.on_device = on_device
        listed = [models] if isinstance(models, nn.Module) else list(models)
        self.session = session = Session(listed, [], RuleSet(), Settings.resolve(), (), "script")
        session.health.report = lambda component, error: self.errors.append((component, error))  # type: ignore[method-assign]
        self.capture, self.boundary = session.attached.capture, session.attached.boundary
        session.attached.before_clip.close()
        self._bind, session.attached.binder.bind = session.attached.binder.bind, self.bound  # type: ignore[method-assign]
        noting = Noting.of(session.attached.pipeline, self)
        parts = (self.boundary._in_backward, self.boundary._without_optimizer, self.boundary._closures)
        for one in (self.boundary, *parts):
            one._pipeline = noting  # type: ignore[attr-defined]

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove every hook; an internal error fails the test."""
        self.session.close()
        assert self.errors == []

    def bound(self, captured: OptimizerCapture) -> OptimizerContext:
        """Bind it, as on a device and with the clip of the total where the test asks for them."""
        ctx = self._bind(captured)
        if self.on_device:
            as_on_device(captured)
        ctx.rules.bound.max_norm = self.clip
        return ctx


class Noting(StepPipeline):
    """Notes every step's Snapshot, and decides as its Recorder says."""

    recorder: Recorder

    @classmethod
    def of(cls, real: StepPipeline, recorder: Recorder) -> Noting:
        noting = cls.__new__(cls)
        noting.__dict__.update(real.__dict__)
        noting.recorder = recorder
        return noting

    def needs_host(self, ctx: OptimizerContext) -> bool:
        return self.recorder.wait

    @property
    def skips_nonfinite(self) -> bool:
        return self.recorder.gate

    def skips_nonfinite_at(self, step: int) -> bool:
        return self.recorder.gate

    def clips_again(self, ctx: OptimizerContext, norms: NDArray[np.float64]) -> Decision:
        return Decision(max_norm=self.recorder.clip)

    def judge(self, ctx: OptimizerContext, measurement: Measurement, grads_present: bool = False) -> Judged:
        captured, window = measurement.captured, measurement.window
        scalars = {} if window.skipped is None else {"scaler_skip": host_value(window.skipped)}
        snapshot = assemble(captured.index, captured.sites, window, Extras(), scalars, 1.0)
        self.recorder.snapshots.append(snapshot)
        return Judged(self.recorder.decide(snapshot))


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
