"""Optimizers that step inside backward, as soon as a gradient is there: one Snapshot per backward, observed only.

One optimizer per parameter (or per layer), called from a gradient hook, saves the memory of all gradients
(https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html). No moment exists at
which all gradients do, so each is read just before its own step and all of them are judged at the end of the
backward, when the weights have moved: nothing is skipped, clipped or stopped. Clipping inside the gradient
hook comes before the read: `norm` is then what the optimizer got.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.read_after_backward import Capture
from gradwatch.capture.window.window_norms import WindowNorms
from gradwatch.reading.async_copy import AsyncCopy, host_value
from gradwatch.reading.batched_norms import Detail
from gradwatch.reading.cpu_norms import CpuNorms
from gradwatch.reading.foreach_norms import DeviceNorms
from gradwatch.reading.gradient_writes import Reading
from gradwatch.reading.layouts import dense
from gradwatch.reading.single_norm import exact_norm
from gradwatch.session.binding.bind_optimizer import Binder
from gradwatch.session.pipeline.step_pipeline import StepPipeline
from gradwatch.taps import grad_scaler
from gradwatch.taps.optimizers.param_groups import params_of


class InBackward:
    """Collects the steps that optimizers take during one backward; `finish` judges them as one."""

    def __init__(
        self,
        capture: Capture,
        binder: Binder,
        pipeline: StepPipeline,
        failed: Callable[[Exception], None],
    ) -> None:
        self._capture = capture
        self._binder = binder
        self._pipeline = pipeline
        self._failed = failed
        self._captured: OptimizerCapture | None = None
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._norms: dict[int, float | Tensor] = {}  # by id of the parameter; a tensor on a device
        self._details: dict[int, Detail] = {}
        self._calls: dict[int, int] = {}
        self._stepped: set[int] = set()

    def step(self, optimizer: Optimizer) -> None:
        """Read the gradients of an optimizer that is about to step, inside a running backward."""
        if id(optimizer) in self._stepped:
            self.finish()  # the backward before this one ended where gradwatch could not see it
        if weakref.ref(optimizer) not in self._capture.stepped_inside:
            self._join(optimizer)
        self._stepped.add(id(optimizer))
        self._capture.arm()
        scale = host_value(grad_scaler.divisors(optimizer).left)
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._read(param, param.grad, scale)

    def finish(self) -> None:
        """Judge what was read in the backward that has ended."""
        if self._stepped:
            self._stepped.clear()
            with torch.no_grad():
                self._judge_all()

    def _judge_all(self) -> None:
        captured = self._current()
        window = self._window(captured)
        self._norms, self._details, self._calls = {}, {}, {}
        self._capture.maintain_hooks(captured, window)
        self._pipeline.observe(captured, window, self._failed)
        captured.advance()

    def _join(self, optimizer: Optimizer) -> None:
        """Add this optimizer to those that step inside the backward."""
        self._capture.stepped_inside.drop_dead()
        self._capture.stepped_inside.add(weakref.ref(optimizer))
        self._capture.call_after_backward(self.finish)
        self._optimizers.append(weakref.ref(optimizer))
        own = self._capture.capture_of(optimizer)
        if own is not None:  # adopted when it was named at attach
            own.release()

    def _read(self, param: nn.Parameter, grad: Tensor, scale: float) -> None:
        key = id(param)
        self._calls[key] = self._calls.get(key, 0) + 1
        if grad.device.type != "cpu":
            self._norms[key] = torch.linalg.vector_norm(dense(grad), dtype=torch.float32) / scale
            return
        norm, detail = exact_norm(grad)
        if detail is not None:
            self._details[key] = detail
        self._norms[key] = norm / scale

    def _current(self) -> OptimizerCapture:
        """The capture of all these optimizers, made anew when one has joined, left or changed its parameters."""
        optimizers = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        params = params_of(*optimizers)
        if self._captured is None or self._captured.watched_ids != list(map(id, params)):
            self._captured = self._capture.adopt_inside(params, self._captured)
            self._binder.bind(self._captured)
        return self._captured

    def _window(self, captured: OptimizerCapture) -> WindowNorms:
        """Gradients that the steps of this backward got; K positions of the capture."""
        found = [self._norms.get(key, 0.0) for key in captured.param_ids]
        details = {k: self._details[key] for k, key in enumerate(captured.param_ids) if key in self._details}
        norms: Reading
        norms = CpuNorms.of(np.array(found, np.float64), details) if captured.on_cpu else _on_device(found)
        calls = np.array([self._calls.get(key, 0) for key in captured.param_ids], np.int32)
        captured.losses.add(self._capture.losses.latest())
        return WindowNorms(
            sites=captured.sites,
            step=captured.step,
            raw=norms,
            after=norms,
            calls=calls,
            micro=1,
            provisional=False,
            loss=captured.losses.total(),
        )


def _on_device(found: list[float | Tensor]) -> DeviceNorms:
    """Norms that are 0-dim tensors on accelerators (and floats where a parameter is on the CPU)."""
    groups: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for k, norm in enumerate(found):
        tensor = norm if isinstance(norm, Tensor) else torch.tensor(norm, dtype=torch.float32, device="cpu")
        groups.setdefault(tensor.device, []).append((k, tensor))
    stacks = [torch.stack([tensor for _, tensor in group]) for group in groups.values()]
    positions = np.array([k for group in groups.values() for k, _ in group], np.intp)
    return DeviceNorms(stacks, AsyncCopy(stacks, positions, len(found)))
