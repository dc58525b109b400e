"""Gradients that a step has used and that are still there when the next backward adds to them: no `zero_grad()`.

Found in two stages, so that a loop that sets gradients to None pays one comparison of lists a step. Where some gradient
is the tensor of the step before, written to since, the end of the step is noted (which tensors, which versions, and the
largest element of a few), and compared when a backward begins, before it adds anything. `p.grad.data.zero_()` bumps no
version, hence the elements. A loop that was seen to clear them is looked at less and less often.

Nothing is said of what cannot be known: gradients written to between step and backward, sharded or sparse ones, and
backwards that torch starts from C++.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.capture.window.arrival_counts import ArrivalCounts
from gradwatch.reading.async_copy import Number, host_value, is_ready, on_host, one_number
from gradwatch.reading.gradient_writes import versions_of

SAMPLED = 3  # gradients of which an element is compared
MOST = 1 << 16  # elements of a gradient of which the largest is looked for
LONGEST_PAUSE = 63  # steps between looks at a loop that clears its gradients in place
NAMED_FROM = 3  # steps in a row after which the parameters are named


class Element(NamedTuple):
    """The value, of shape [1], of the gradient at a position, at the index `at` of its elements in a row."""

    position: int
    at: Tensor
    value: Tensor


class Used(NamedTuple):
    """The gradients at the end of a step: `ids[K]`, `versions[K]` (-1 = none), and the elements that are compared."""

    ids: list[int]
    versions: list[int]
    elements: list[Element]


class Still(NamedTuple):
    """Positions of those that are there as the step has left them; `equal`, of shape [1]: their elements say so too."""

    positions: list[int]
    equal: Tensor


class UnclearedGradients:
    """Parameters, of K of one optimizer, to whose gradients of the last step the next backward adds.

    `params` and `arrivals` are those of its capture. `awaiting`, shared by all of a watch, holds it while a backward is
    to be compared.
    """

    def __init__(
        self, params: Sequence[Tensor], arrivals: ArrivalCounts, awaiting: list[UnclearedGradients]
    ) -> None:
        self.suspected = False  # the end of this step is to be noted: `step_taken`
        self.names_due: Sequence[int] = ()  # positions of those to be named now
        self.thread = 0  # that has taken the step
        self._awaiting = awaiting
        self._params = params
        self._arrivals = arrivals
        self._used: Used | None = None  # at the end of the last step
        self._still: Still | None = None  # at the beginning of the backward
        self._pause = self._paused = 0
        self._last: Number | None = None  # what was found last; None until any was
        self._positions: Sequence[int] = ()  # of those
        self._in_a_row = 0

    @property
    def under_way(self) -> bool:
        """True if the end of the last step was noted, or anything was found before."""
        return self._used is not None or self._last is not None

    def compare(self, now: Sequence[list[int]], before: Sequence[list[int]] | None) -> None:
        """Suspect gradients that were written to and not made anew, by (ids[K], versions[K]) at this step and the last.

        `before` is None where the versions are equal, or the last step's are not known: then none are.
        """
        self.suspected = before is not None and any(
            version > version_before >= 0 and identity == identity_before
            for identity, version, identity_before, version_before in zip(*now, *before, strict=True)
        )

    def step_taken(self) -> None:
        """Note the gradients that a step leaves when it returns."""
        if self._paused:
            self._paused -= 1
            return
        grads = [param.grad for param in self._params]
        elements = _elements(grads)
        if elements:
            self.thread = get_ident()
            self._used = Used(list(map(id, grads)), versions_of(grads), elements)
            self._awaiting.append(self)

    def look(self) -> None:
        """Note, before a backward, which of these gradients are still there as the step has left them."""
        used = self._used
        if used is None or self._arrivals.count or not self._params:  # none: the optimizer has died
            return
        grads = [param.grad for param in self._params]
        now = zip(map(id, grads), versions_of(grads), used.ids, used.versions, strict=True)
        same = [
            k
            for k, (identity, version, before, left) in enumerate(now)
            if version == left >= 0 and identity == before
        ]
        elements = [element for element in used.elements if element.position in same]
        self._still = Still(same, _equal(grads, elements)) if elements else None

    def cleared(self) -> None:
        """Note that the gradients of the last step, and what has arrived since, were cleared."""
        self._still = None

    def discard(self) -> None:
        """Compare nothing with the end of the last step."""
        self._used = self._still = None
        if self in self._awaiting:
            self._awaiting.remove(self)

    def release(self) -> None:
        """Hold none of the parameters any more."""
        self.discard()
        self._params = ()

    def found(self, calls: NDArray[Any], versions: list[int]) -> Number | None:
        """Number of gradients that were added to, at a step that is about to be taken; None where that is not known.

        `calls[K]` arrived; `versions[K]` of the gradients as they were read. It is never 0 before any was found.
        """
        self._count_last()
        used, still = self._used, self._still
        self.discard()
        if used is None and (self.suspected or self._last is None):
            return None  # not looked at
        self._positions = []
        if used is not None and still is not None:
            # A device does not say that its gradients were cleared between two backwards: their versions do.
            exact = not on_host(still.equal)
            self._positions = [
                k
                for k in still.positions
                if calls[k] and not (exact and versions[k] != used.versions[k] + calls[k])
            ]
        there = still is not None and not (on_host(still.equal) and not still.equal)
        self._pause = 0 if there else min(2 * self._pause + 1, LONGEST_PAUSE)
        self._paused = self._pause
        if still is None or not (there and self._positions):
            self._last = None if self._last is None else 0.0
        elif on_host(still.equal):
            self._last = float(len(self._positions))
        else:
            self._last = one_number(still.equal, 1.0 / len(self._positions))
        return self._last

    def _count_last(self) -> None:
        """Count the steps in a row at which some were found, and have them named after some."""
        last, self.names_due = self._last, ()
        if last is not None and is_ready(last):
            self._in_a_row = self._in_a_row + 1 if host_value(last) > 0 else 0
            if self._in_a_row == NAMED_FROM:
                self.names_due = self._positions


def _elements(grads: Sequence[Tensor | None]) -> list[Element]:
    """The largest element of a few of these gradients, all on the device of the first."""
    plain = [
        (k, grad)
        for k, grad in enumerate(grads)
        if type(grad) is Tensor
        and grad.layout is torch.strided
        and grad.is_floating_point()
        and grad.is_contiguous()
        and grad.numel()
    ]
    found = []
    for k, grad in plain[:: max(1, len(plain) // SAMPLED)]:
        if grad.device == plain[0][1].device:
            flat = grad.detach().view(-1)[:MOST]
            at = flat.abs().argmax().reshape(1)
            found.append(Element(k, at, flat.index_select(0, at)))
    return found


def _equal(grads: Sequence[Tensor | None], elements: Sequence[Element]) -> Tensor:
    """float32[1]: 1 if these elements are what they were, and not all of them zero."""
    equal, zero = [], []
    for position, at, value in elements:
        grad = grads[position]
        assert grad is not None
        equal.append(grad.detach().view(-1).index_select(0, at) == value)
        zero.append(value == 0)
    found = torch.stack(equal).all() & ~torch.stack(zero).all()
    return found.to(torch.float32).reshape(1)
