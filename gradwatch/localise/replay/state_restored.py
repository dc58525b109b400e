"""A model run once more without a trace: what the run changes is restored, also when it raises.

The run works on stand-ins: parameters that share the memory of the real ones but have no hooks and no `.grad`
of their own, and copies of the buffers. So DDP's reducer, the user's tensor hooks and gradwatch's hooks see
nothing, and `.grad` and the buffers need no putting back. What does: the generators, the anomaly flags, and
what the forward sets on its modules (`self.calls += 1`) or writes in place into what their attributes hold
(`self.ema.mul_(0.9)`, `torch.randn(…, generator=self.generator)`).

What remains: state that is in none of these, such as global Python variables, files, and objects of the user's own
classes. Tensors there that a forward writes into are noticed (`ForwardTracer.stray`), and told; of the rest what a
forward changes is noticed where outputs do not come again (`gradwatch.localise.replay.hidden_state`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.localise.held_calls.module_attributes import Refused, attributes
from gradwatch.localise.held_calls.random_generators import Generators
from gradwatch.reading.training_threads import several_at_work
from gradwatch.taps.muted_forwards import muted

OTHER_THREADS = (
    "several threads train, and a step that is run again would draw from the random generator that they draw from, and "
    "use the models that they use"
)


@contextlib.contextmanager
def state_restored(model: nn.Module, max_bytes: int) -> Iterator[None]:
    """Run what is inside, then restore generators, anomaly flags, grad mode and module attributes.

    Raises `Refused`, before anything is run, where the tensors among those attributes take more than `max_bytes`, and
    where several threads train: the generators and the modules are theirs as well.
    """
    if several_at_work():
        raise Refused(OTHER_THREADS)
    restores: list[Callable[[], None]] = [
        Generators.now((model,)).restore,
        _anomaly(),
        _grad_mode(),
        *attributes(model, max_bytes),
        _parameters_and_buffers(model),
    ]
    with contextlib.ExitStack() as stack:
        for restore in restores:  # every one of them runs, whatever another raises
            stack.callback(restore)
        stack.enter_context(muted())
        yield


def aliases(
    model: nn.Module, buffers: Mapping[str, Tensor], whole: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Parameters and buffers by name, for `torch.func.functional_call`; tied parameters stay tied.

    `whole`: the parameters as `gather` gave them, where each rank holds only a part.
    """
    made: dict[int, Tensor] = {}
    found: dict[str, Tensor] = dict(whole or {})
    for name, param in () if whole else model.named_parameters(remove_duplicate=False):
        if id(param) not in made:
            made[id(param)] = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
        found[name] = made[id(param)]
    copies: dict[int, Tensor] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if id(buffer) not in copies:
            copies[id(buffer)] = buffers.get(name, buffer).detach().clone()
        found[name] = copies[id(buffer)]
    return found


def _parameters_and_buffers(model: nn.Module) -> Callable[[], None]:
    """Function that puts parameters and buffers back in their places, where Ctrl-C may leave stand-ins."""
    places: list[tuple[dict[str, Any], str, Tensor | None]] = []
    for module in model.modules():
        for place in (module._parameters, module._buffers):
            places += ((place, name, tensor) for name, tensor in place.items())

    def restore() -> None:
        for place, name, tensor in places:
            if place.get(name, None) is not tensor:
                place[name] = tensor

    return restore


def _anomaly() -> Callable[[], None]:
    enabled, checks = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    return lambda: torch.set_anomaly_enabled(enabled, checks)


def _grad_mode() -> Callable[[], None]:
    graded = torch.is_grad_enabled()

    def restore() -> None:
        torch.set_grad_enabled(graded)

    return restore
