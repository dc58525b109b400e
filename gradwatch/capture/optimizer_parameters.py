"""The parameters of one optimizer: which they are, in which slots, and how long they are held.

K parameters. They are held as long as their one owner lives, so that watching keeps no model that the script drops.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.reading.layouts import parts, unsummed
from gradwatch.reading.training_threads import TrainingThreads
from gradwatch.records.snapshot import Sites
from gradwatch.runtime.weak_references import emptied_with, noted
from gradwatch.taps.clip_functions import Clip

# Python calls cost microseconds in the cold caches that a backward leaves; this is none.
grad_of: Callable[[Tensor], Tensor | None] = operator.attrgetter("grad")
_requires_grad: Callable[[Tensor], bool] = operator.attrgetter("requires_grad")


class OptimizerParameters:
    """K parameters of one optimizer, or of a loop without one, in the slots that all parameters of the models have."""

    def __init__(
        self,
        index: int,
        sites: Sites,
        slots: NDArray[np.intp] | None,
        params: Sequence[nn.Parameter],
        *,
        inside_backward: bool,
        without_optimizer: bool,
    ) -> None:
        self.index = index
        self.sites = sites
        self.slots = np.zeros(0, np.intp) if slots is None else slots
        self.position = dict(zip(self.slots.tolist(), range(len(self.slots)), strict=True))  # sync: numpy
        self._places = self.slots, self.position  # what a successor takes up
        self.inside_backward = inside_backward
        self.without_optimizer = without_optimizer
        self.on_cpu, self.distributed = _placement(params)
        self.succeeds = False  # its optimizer took the place of one that is gone, and has taken no step yet
        self.other_weights = (
            False  # so it did, over other parameters, and what became of these is not noted yet
        )
        self.threads = TrainingThreads()

    def hold(
        self, optimizer: Optimizer | None, params: list[nn.Parameter], given: Sequence[nn.Parameter]
    ) -> None:
        """Hold these parameters of an optimizer, whose every one is among the `given`, frozen ones included."""
        self.optimizer = None if optimizer is None else noted(optimizer)
        self.params = params  # empty from the moment that the optimizer dies
        self.released = False
        self.param_ids = list(map(id, params))
        self.watched_ids = list(map(id, given))
        self.thread = 0  # that used its gradients last, where several train; 0: not known
        self.frozen = [] if all(map(_requires_grad, given)) else [p for p in given if not p.requires_grad]
        self._emptied = []
        for each in (params, self.frozen):
            if each and optimizer is not None:
                self._emptied.append(emptied_with(optimizer, each))
        self.compared = -1  # registrations in the models when these were last compared with the optimizer's

    def __len__(self) -> int:
        return len(self.params)

    def grads(self) -> list[Tensor | None]:
        """The gradients as they are now; holds no reference afterwards."""
        return parts(self.params) if self.distributed else list(map(grad_of, self.params))

    def partial(self) -> list[int]:
        """Positions whose norm does not follow from the norms of the ranks' parts (DTensors not summed up yet)."""
        return unsummed(self.params) if self.distributed else []

    def is_of(self, clip: Clip) -> bool:
        """True if some of the gradients that are clipped are of these parameters, as far as this thread may look."""
        if clip.params is not None:
            return not set(self.param_ids).isdisjoint(map(id, clip.params))
        if not self.threads.may_look(self.thread):
            return False
        own = {id(grad) for grad in self.grads() if grad is not None}
        return not own.isdisjoint(map(id, clip.grads))

    def use_threads(self, threads: TrainingThreads) -> None:
        """Look at gradients only where none of these threads may be changing them."""
        self.threads = threads

    # -- other parameters, another optimizer -------------------------------------------------------------

    def exchange(self, k: int, param: nn.Parameter) -> None:
        """Put another parameter of the same shape at this position."""
        self.params[k], self.param_ids[k] = param, id(param)

    def compared_at(self, registrations: int) -> None:
        """Note that these are the optimizer's parameters, after so many registrations in the models."""
        self.compared = registrations

    def succeeded_by(
        self,
        optimizer: Optimizer,
        params: list[nn.Parameter],
        given: Sequence[nn.Parameter],
        sites: Sites,
        slots: NDArray[np.intp],
    ) -> bool:
        """Go on with an optimizer over parameters of the same layout, if that of before is gone; else False.

        What depends on the layout alone stays, and so does the count of steps.
        """
        if (
            sites is not self.sites
            or self.optimizer is None
            or self.optimizer() is not None
            or self._places[0].tobytes() != slots.tobytes()
            or _placement(params) != (self.on_cpu, self.distributed)
        ):
            return False
        self.slots, self.position = self._places
        self.hold(optimizer, params, given)
        self.succeeds = True
        return True

    def takes_over(self, other_weights: bool) -> None:
        """Note whether another optimizer moves `other_weights` from now on than the one before it did."""
        self.other_weights = other_weights

    def stands(self) -> None:
        """Note that rules are bound to the optimizer that succeeded."""
        self.succeeds = False

    # -- how long they are held --------------------------------------------------------------------------

    def release(self) -> None:
        """Release the parameters of an optimizer that is gone; the index is kept for a successor."""
        self.released, self._emptied = True, []
        self.params, self.slots, self.position, self.watched_ids = [], np.zeros(0, np.intp), {}, []
        self.frozen = []

    def hold_with(self, owners: Iterable[object]) -> None:
        """Hold the parameters as long as their one owner lives; where they have several, or none, until `release`."""
        only = set(owners)
        if len(only) == 1 and None not in only:
            self._emptied = [emptied_with(only.pop(), self.params)]

    def release_freed(self, living: Container[int]) -> None:
        """Keep, after a release, the ids of parameters that still live: they tell its successor from others."""
        self.param_ids = [identity for identity in self.param_ids if identity in living]


def _placement(params: Sequence[nn.Parameter]) -> tuple[bool, bool]:
    """(True if all lie on the host, True if any is sharded)."""
    on_cpu, distributed = True, False
    for param in params:
        distributed = distributed or (type(param) is not nn.Parameter and hasattr(param, "to_local"))
        on_cpu = on_cpu and param.is_cpu
    return on_cpu, distributed
