"""The rows of a batch that carry a gradient which is finite but large, of all micro-batches of a step.

A gradient is linear in what came back to the model's outputs. So what some rows of the outputs make of it is known
exactly: the backward of the call that was run again, once more, with zeros for all other rows. Each part is measured
along the gradient that the optimizer is about to use, so that parts add up: those of rows, of calls, of ranks.
Halving finds the rows in few backwards where they are few; where they are many, none is named.

A row of the outputs is a sample of the batch only if nothing but that row of the inputs led to it. That is looked
at, too: of time that comes first, rows that were shuffled or that attend to each other none is named.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from gradwatch.localise.diagnosis.tensor_values import finite, tensors
from gradwatch.localise.held_calls.recorded_call import Call
from gradwatch.localise.replay.first_nonfinite_in_forward import key_of
from gradwatch.localise.replay.step_replay import CallListener, Replayed, seeded
from gradwatch.taps import nested_containers
from gradwatch.taps.hook_ids import own_ids
from gradwatch.taps.process_totals import uncounted

CARRIED = 0.9
"""The part of the gradient that rows must carry to be named, and the least cosine between theirs and the whole."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
FEW = 8  # at most one row in so many is named, or a single one
STANDS_OUT = 10
"""How many times the part of a row that is named must be that of any other row, half or call that is not."""

OF_FEW = 400  # divided by the rows of a step: among few, one of a healthy step may be that many times larger
SMALL = 0.02  # part of the gradient below which rows are not divided further
MIXED = 0.25
"""Of the gradient of a named row, how much any other may have in a model with BatchNorm, which mixes all of them."""


class Directions:
    """The gradients that the optimizer is about to use, as directions along which parts of them are measured."""

    def __init__(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
        """`gradients`: (parameter, its gradient) of all that the optimizer is about to use, both whole."""
        self._grads = {_place(param): grad for param, grad in gradients}
        grads = list(self._grads.values())
        self.usable = bool(grads) and finite(grads)
        self.length = _length(self._grads.values()) if self.usable else 0.0

    def of(self, replayed: Replayed) -> list[tuple[Tensor, Tensor]]:
        """(stand-in, gradient) of each parameter of a model that is run again."""
        leaves = {id(one): one for one in replayed.given.values() if one.requires_grad}
        found = ((leaf, self._grads.get(_place(leaf))) for leaf in leaves.values())
        return [(leaf, grad) for leaf, grad in found if grad is not None]


def _place(param: Tensor) -> tuple[int, Any, torch.Size]:
    """The memory of a parameter, which its stand-in shares."""
    return key_of(param), param.storage_offset(), param.shape


class PartsOfCalls(CallListener):
    """The part of the gradient that each call of a step made; `whole` is that of all of them."""

    def __init__(self, directions: Directions) -> None:
        self.directions = directions
        self._parts: dict[int, float] = {}
        self._lengths: dict[int, float] = {}

    def of(self, call: Call) -> float:
        """The part of one call."""
        return self._parts.get(id(call), 0.0)

    @property
    def whole(self) -> float:
        """Sum of all parts."""
        return sum(self._parts.values())

    def carriers(self, calls: Sequence[Call]) -> list[Call]:
        """The fewest calls that carry the gradient, in their order."""
        found: list[Call] = []
        for call in sorted(calls, key=self.of, reverse=True):
            if sum(map(self.of, found)) < CARRIED * self.whole:
                found.append(call)
        return [call for call in calls if call in found]

    def are_whole(self, calls: Sequence[Call]) -> bool:
        """True if the gradient that these made points where that of the optimizer does.

        Not where something else made most of that: a penalty on weights, calls that are not held.
        """
        length = math.hypot(*(self._lengths[id(call)] for call in calls))  # each of parameters of its own
        return sum(map(self.of, calls)) >= CARRIED * length * self.directions.length

    def largest_but(self, calls: Sequence[Call]) -> float:
        """The size of the largest part of any other call."""
        kept = set(map(id, calls))
        return max((abs(part) for key, part in self._parts.items() if key not in kept), default=0.0)

    def ended(self, replayed: Replayed, gradients: Mapping[int, Tensor]) -> None:
        """Take in the gradients that the backward of a call has given, by the id of the stand-in."""
        pairs = self.directions.of(replayed) if self.directions.usable else []
        own = [(gradients[id(leaf)], grad) for leaf, grad in pairs if id(leaf) in gradients]
        self._parts[id(replayed.call)] = sum(_dot(one, grad) for one, grad in own)
        self._lengths[id(replayed.call)] = _length(one for one, _ in own)


class _RowsTraced(CallListener):
    """One call run again so that it is known which rows of its inputs led to which rows of its outputs."""

    alone = True

    def __init__(self, call: Call, size: int) -> None:
        self._call = call
        self._size = size
        self._inputs: list[Tensor] = []
        self._made: list[Tensor] = []  # by modules, of these
        self._looked_up: list[bool] = []  # what was, in the order of what was given

    @contextmanager
    def forward(self, call: Call, inputs: Any) -> Iterator[Any]:
        """Inputs of which a gradient is known, and an eye on what modules make of them."""
        if call is not self._call:
            yield inputs
            return
        given, thread = set(map(key_of, tensors(inputs))), threading.get_ident()
        traced = nested_containers.replaced(self._traced, inputs)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() != thread:  # torch calls a global hook in all of them
                return
            self._made += (one for one in tensors(output) if one.grad_fn is not None and self._has_rows(one))
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                rows = (one for one in tensors(args) if self._has_rows(one))
                self._looked_up += (key_of(one) in given for one in rows)

        with own_ids:
            handle = register_module_forward_hook(after)
        try:
            yield traced
        finally:
            handle.remove()

    def _traced(self, leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.is_floating_point() and self._has_rows(leaf)):
            return leaf
        traced = self._numbers(leaf.detach()).requires_grad_()
        self._inputs.append(traced)
        with torch.enable_grad():
            return traced.clone()  # may be written into

    def _numbers(self, given: Tensor) -> Tensor:
        """The numbers of an input."""
        return given

    def _has_rows(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0 and tensor.shape[0] == self._size

    def _mixed(
        self,
        replayed: Replayed,
        gradients: Iterable[Tensor | None],
        rows: Sequence[int],
        unknown: Sequence[int] = (),
    ) -> bool:
        """True if other rows led to these rows of the outputs, beyond what BatchNorm mixes.

        `gradients` are those of inputs and of what modules made of them; those of `unknown` rows are not looked at.
        """
        if not all(self._looked_up):
            return True
        norms = any(isinstance(one, BATCH_NORMS) and one.training for one in replayed.base.modules())
        others = torch.ones(self._size, dtype=torch.bool, device="cpu")
        others[[*rows, *unknown]] = False
        for gradient in gradients:
            if gradient is None:
                continue
            lengths = row_lengths(gradient)
            allowed = MIXED * float(lengths[list(rows)].min()) if norms else 0.0
            if not bool((lengths[others] <= allowed).all()):
                return True
        return False


class RowsMixed(_RowsTraced):
    """A look at whether the rows of a call's outputs come of other rows than their own: `found`, as far as is seen.

    Looked at from the first row and the last, and not at `unknown` ones, which are not finite.
    """

    def __init__(self, call: Call, size: int, unknown: Sequence[int]) -> None:
        super().__init__(call, size)
        self._unknown = list(unknown)
        self.found = False

    def _numbers(self, given: Tensor) -> Tensor:
        sound = given.clone()
        sound[self._unknown] = torch.nan_to_num(given[self._unknown], 0.0, 0.0, 0.0)
        return sound

    def begins(self, replayed: Replayed) -> None:
        """Look at a call that has been run again."""
        finite_rows = [row for row in range(self._size) if row not in self._unknown]
        if (
            replayed.call is not self._call or len(finite_rows) < 3
        ):  # first, last, and one that may have led to them
            return
        rows = [finite_rows[0], finite_rows[-1]]
        roots = [root for root in replayed.roots if self._has_rows(root)]
        seeds = [torch.zeros_like(root) for root in roots]
        for seed in seeds:
            waves = torch.arange(
                seed[rows].numel(), device=seed.device
            ).cos()  # the same would cancel in a softmax
            seed[rows] = waves.reshape(seed[rows].shape).to(seed.dtype)
        traced = [*self._inputs, *self._made]
        if roots and traced:
            with uncounted():
                gradients = torch.autograd.grad(roots, traced, seeds, allow_unused=True)
            self.found = self._mixed(replayed, gradients, rows, self._unknown)


class RowsOfCall(_RowsTraced):
    """The `rows` of one call that carry its gradient, the `part` of it that is theirs, and the `length` of their own.

    () where they are many, do not stand out, or are no samples. `size` is the number of rows, `whole` the part of the
    gradient that they are to carry most of; each has to be so many times as large as any other, and as `others`.
    """

    def __init__(
        self, directions: Directions, call: Call, size: int, whole: float, others: float, times: float
    ) -> None:
        super().__init__(call, size)
        self._directions = directions
        self._whole = whole
        self._most = max(1, size // FEW)
        self._others = others
        self._times = times
        self._budget = 4 * math.ceil(math.log2(max(size, 2))) + 8  # backwards
        self.rows: tuple[int, ...] = ()
        self.part = self.length = 0.0

    def begins(self, replayed: Replayed) -> None:
        """Divide the gradient of the call among its rows, before its backward takes the graph away."""
        if replayed.call is not self._call:
            return
        pairs = self._directions.of(replayed)
        rows = self._largest(replayed, pairs)
        if rows:
            self.part, self.length, samples = self._checked(replayed, pairs, rows)
            self.rows = rows if samples else ()

    def _largest(self, replayed: Replayed, pairs: list[tuple[Tensor, Tensor]]) -> tuple[int, ...]:
        """The fewest rows that carry it, found by dividing the largest part in halves; () where they are many."""

        def part(rows: range) -> float:
            gradients = self._backward(replayed, rows, [leaf for leaf, _ in pairs])
            return sum(
                _dot(one, grad) for one, (_, grad) in zip(gradients, pairs, strict=True) if one is not None
            )

        whole = part(range(self._size))
        parts = [(-abs(whole), 0, self._size, whole)]
        found: dict[int, float] = {}
        while parts and sum(found.values()) < CARRIED * self._whole:
            _, low, high, whole = heapq.heappop(parts)
            if abs(whole) < SMALL * self._whole or not self._budget or len(found) == self._most:
                return ()
            if high - low == 1:
                found[low] = whole
                continue
            self._budget -= 1
            middle = (low + high) // 2
            left = part(range(low, middle))
            heapq.heappush(parts, (-abs(left), low, middle, left))
            heapq.heappush(parts, (-abs(whole - left), middle, high, whole - left))
        others = max([self._others, *(abs(one) for *_, one in parts)])
        stand_out = min(map(abs, found.values()), default=0.0) >= self._times * others
        return tuple(sorted(found)) if stand_out else ()

    def _checked(
        self, replayed: Replayed, pairs: list[tuple[Tensor, Tensor]], rows: Sequence[int]
    ) -> tuple[float, float, bool]:
        """Part of these rows, the length of their gradient, and whether they are samples of the batch."""
        gradients = self._backward(replayed, rows, [*(leaf for leaf, _ in pairs), *self._inputs, *self._made])
        of_leaves, of_rows = gradients[: len(pairs)], gradients[len(pairs) :]
        own = [(one, grad) for one, (_, grad) in zip(of_leaves, pairs, strict=True) if one is not None]
        part, length = sum(_dot(one, grad) for one, grad in own), _length(one for one, _ in own)
        from_inputs = any(one is not None and bool(one.any()) for one in of_rows[: len(self._inputs)])
        samples = (from_inputs or bool(self._looked_up)) and not self._mixed(replayed, of_rows, rows)
        return part, length, samples

    def _backward(
        self, replayed: Replayed, rows: Iterable[int], leaves: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """The gradients that only these rows of the outputs make."""
        kept, seeds = list(rows), []
        for seed in replayed.seeds:
            seeds.append(torch.zeros_like(seed))
            if self._has_rows(seed):
                seeds[-1][kept] = seed[kept]
        with seeded(replayed.roots, seeds), uncounted():
            return torch.autograd.grad(replayed.roots, leaves, seeds, retain_graph=True, allow_unused=True)


@torch.no_grad()
def row_lengths(tensor: Tensor) -> Tensor:
    """The L2 norm of each row, on the host."""
    rows = _plain(tensor).reshape(tensor.shape[0], -1).double()
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1).cpu()
    return lengths


@torch.no_grad()
def _dot(one: Tensor, other: Tensor) -> float:
    return float(torch.dot(_plain(one).reshape(-1).double(), _plain(other).reshape(-1).double()))


def _length(tensors: Iterable[Tensor]) -> float:
    """The L2 norm of all their numbers."""
    return math.sqrt(sum(_dot(one, one) for one in tensors))


def _plain(tensor: Tensor) -> Tensor:
    found = tensor.detach()
    found = found if found.layout is torch.strided else found.to_dense()
    return torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
