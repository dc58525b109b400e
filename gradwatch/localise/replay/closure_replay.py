"""The exact path: a closure that computes loss and gradients, run again as a whole, loss function and all.

What a replay of the model must infer is simply there: the batch the closure uses, the loss it computes, several
models at once. The price is that the closure runs twice at an incident, whatever else it does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwatch.localise.held_calls.inner_model import shared
from gradwatch.localise.held_calls.model_recorder import MAX_BYTES
from gradwatch.localise.held_calls.module_attributes import Refused, written_in_place
from gradwatch.localise.held_calls.random_generators import Generators
from gradwatch.localise.replay.operation_recorder import Recorder
from gradwatch.localise.replay.state_restored import aliases, state_restored
from gradwatch.localise.replay.step_replay import Trace, blame_backward, eager, unchecked
from gradwatch.localise.replay.tensor_sources import sources
from gradwatch.localise.sharded.whole_parameters import is_spread
from gradwatch.taps.graph import around_backward
from gradwatch.taps.process_totals import uncounted


@dataclass(slots=True, eq=False)
class ReplayableClosure:
    """A closure, and the generators and buffers before it ran."""

    run: Callable[[], Any]
    models: Sequence[nn.Module]
    generators: Generators = field(init=False)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generators = Generators.now(self.models)
        for model in self.models:
            named = model.named_buffers(remove_duplicate=False)
            self.buffers.append({name: buffer.detach().clone() for name, buffer in named})


class _Models(nn.Module):
    """The models of a closure, so that all their parameters can be stood in for at once."""

    def __init__(self, models: Sequence[nn.Module], run: Callable[[], Any]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.run = run

    def forward(self) -> None:
        """Run the closure."""
        self.run()


def run_again(
    kept: ReplayableClosure, failed: Callable[[BaseException], None], max_bytes: int = MAX_BYTES
) -> Trace:
    """Run a closure again under the recorder, without a trace on models, `.grad` or generators.

    `max_bytes` caps the copies of tensors in module attributes. Raises `Refused` beyond it, and under DDP, whose
    reducer would wait for gradients that stand-ins never give it; what the closure itself raises passes.
    """
    for model in kept.models:
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise Refused("DistributedDataParallel would take the closure's second run for another step")
        if is_spread(model) or shared(model):
            raise Refused("the closure communicates with other ranks")
    given: dict[str, Tensor] = {}
    for number, (model, buffers) in enumerate(zip(kept.models, kept.buffers, strict=True)):
        found = aliases(model, buffers)
        given |= {f"models.{number}.{name}": tensor for name, tensor in found.items()}
    recorder = Recorder(kept.models, failed)
    recorder.expect(tensor for model in kept.models for tensor in written_in_place(model)[0])
    recorder.expect(given.values())
    named = {name.split(".", 2)[2]: tensor for name, tensor in given.items()}
    trace = Trace(sources=sources(kept.models, named))

    def backward(roots: Sequence[Tensor]) -> Callable[[], None]:
        return blame_backward(trace, recorder, roots)

    def closure() -> None:
        kept.generators.restore()
        with torch.enable_grad(), recorder.forward(), around_backward.watched(backward):
            kept.run()

    everything = _Models(kept.models, closure)
    with state_restored(everything, max_bytes), _grads_aside(kept.models), eager(), unchecked(), uncounted():
        torch.func.functional_call(everything, given, ())
    trace.wrote_to(recorder.stray)
    return trace


@contextlib.contextmanager
def _grads_aside(models: Sequence[nn.Module]) -> Iterator[None]:
    """`.grad` of every parameter out of the closure's reach: it begins with `zero_grad()`."""
    kept = [(param, param.grad) for model in models for param in model.parameters()]
    for param, _ in kept:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in kept:
            param.grad = grad
