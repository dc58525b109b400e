"""One forward call as it is held: its arguments, the state before it, the gradients that reached its outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from gradwatch.localise.diagnosis.tensor_values import tensors
from gradwatch.localise.held_calls.kept_row_sums import RowSums
from gradwatch.localise.held_calls.random_generators import Generators
from gradwatch.taps.nested_containers import tensors_replaced

CPU_ONLY, CPU_AND_CUDA = ("cpu",), ("cpu", "cuda")


# Without slots: what has a plain default need not be set where one is made at each forward.
@dataclass(eq=False)
class Call:
    """One forward call: how it was made, and `gradients` that reached its outputs (by position; summed).

    `order` grows from call to call, over all models; `step` counts the optimizer steps before it. `versions` are those
    of the tensors among the arguments; `seeds` the bytes of the gradients, `tasks` the graph tasks that brought them;
    `returned` are copies of small outputs by position, and sums of large ones; `reason` says why it cannot be run again
    ("" = it can); `caller` is the line that made the call; `computed` are the `id`s of those tensors that autograd
    computed; `looked`: all generators were read before it; `indices` are the samples it was told to be of
    (`Watch.batch`); `twice`: a gradient that reached it was kept with its graph, to be differentiated again;
    `parameters` are the `id`s of those that the model had while it was called, where they may be others than its own.
    """

    order: int
    step: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[int]
    generators: Generators
    buffers: dict[str, Tensor]
    autocast: dict[str, tuple[bool, torch.dtype]]
    training: bool
    caller: tuple[CodeType, int] | None
    indices: Any = None
    seeds: int = 0
    outputs: int = 0
    computed: frozenset[int] = frozenset()
    gradients: dict[int, Tensor] = field(default_factory=dict)
    tasks: set[int] = field(default_factory=set)
    returned: dict[int, Tensor | RowSums] | None = None
    looked: bool = False
    twice: bool = False
    parameters: frozenset[int] | None = None
    reason: str = ""
    _given: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are held of it."""
        if self.reason:
            return 0
        if self._given is None:
            self._given = sum(map(size_of, tensors((self.args, self.kwargs))))
        kept = sum(one.nbytes for one in (self.returned or {}).values())
        return self._given + self.seeds + kept

    def belongs_to_step(self, step: int) -> None:
        """Count the step that it belongs to as another recorder does."""
        self.step = step

    def differentiated_again(self) -> None:
        """Note that a gradient reached it in a backward with `create_graph=True`."""
        self.twice = True

    def ends_in_loss(self, seed: Tensor) -> None:
        """Make it the call of a module that holds the `model` and its loss, whose one gradient is this `seed`."""
        self.outputs, self.gradients = 1, {0: seed}
        self.buffers = {f"model.{name}": buffer for name, buffer in self.buffers.items()}

    def release(self, reason: str) -> None:
        """Release every tensor; the call can no longer be run again."""
        self.args, self.kwargs, self.versions = (), {}, []
        self.buffers, self.gradients, self.returned, self.reason = {}, {}, None, reason

    @contextlib.contextmanager
    def recorded_modes(self) -> Iterator[None]:
        """Autocast and grad mode as they were."""
        with contextlib.ExitStack() as stack:
            for device in CPU_AND_CUDA if torch.cuda.is_initialized() else CPU_ONLY:
                enabled, dtype = self.autocast.get(device, (False, None))
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
            stack.enter_context(torch.enable_grad())
            yield


def held_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], list[Tensor]]:
    """The arguments and the tensors in them; what is computed from others is held without the graph behind it."""
    given: list[Tensor] = []
    for value in args:
        if not isinstance(value, Tensor):
            break
        given.append(value if value.grad_fn is None else _alias(value))
    if not kwargs and len(given) == len(args):  # a walk through containers takes 10 us
        return (tuple(given), {}), given
    held = tensors_replaced(_alias, (args, kwargs))
    return held, tensors(held)


def computed_among(given: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
    """The `id`s of those `given` that are held without the graph behind them; leaves are held as they are."""
    return frozenset(map(id, given)).difference(map(id, tensors((args, kwargs))))


def _alias(tensor: Tensor) -> Tensor:
    if tensor.grad_fn is None:
        return tensor
    return tensor.detach().requires_grad_()


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


def autocasts() -> dict[str, tuple[bool, torch.dtype]]:
    """Autocast of every device that may compute here."""
    return {
        device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in (CPU_AND_CUDA if torch.cuda.is_initialized() else CPU_ONLY)
    }
