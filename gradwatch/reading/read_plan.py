"""Plan to read a list of gradients: small ones laid end to end first, large ones as matrices, the rest one by one.

Made once, for gradients as they come step after step. A gradient that is otherwise this time (absent, of another size,
layout or dtype) is found out when it is read, and read by itself.

Axes: K gradients, of which None are not there; R rows, as in `rows`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.reading.row_sums import HERE, UNDERFLOW, RowBuffer, Shape, SingleTensor, divided
from gradwatch.runtime.interruption import not_ours

SMALL = 2048  # elements; above this a copy costs more than the dispatch it saves
FEWEST = 4  # gradients that can be laid end to end before that pays
_numel: Callable[[Tensor], int] = Tensor.numel


class PackedGroup(NamedTuple):
    """Small gradients alike but perhaps for their first dimension, end to end; those of equal size make a matrix.

    `parts` are those of a row buffer that they are read into, one for each of `matrices`; `sizes` are their elements,
    None where all are of one shape. `copies` are the gradients as they are in `laid_out`, each flat.
    """

    parts: range
    indices: list[int]
    pick: Callable[[Sequence[Tensor | None]], tuple[Any, ...]]
    first_shape: torch.Size
    sizes: list[int] | None
    laid_out: Tensor
    matrices: list[Any]
    copies: list[NDArray[np.float32]]


class Plan:
    """Packed groups and singles of K gradients, for row buffers of one `kind`; `others` are read one by one.

    `copies` are those of the gradients in packed groups, by position, as the last of `reads` has laid them out.
    """

    def __init__(self, grads: Sequence[Tensor | None], kind: type[RowBuffer], varying: bool = False) -> None:
        """Plan the read. With `varying` gradients a missing one costs its group: then each group has one shape."""
        self.kind = kind
        self.count = len(grads)
        self.packed_groups, self.shapes = _packed_groups(grads, kind, varying)
        self.first_single = len(self.shapes)  # the part of the row buffer
        strung = [k for packed_group in self.packed_groups for k in packed_group.indices]
        copies = [copy for packed_group in self.packed_groups for copy in packed_group.copies]
        self.copies, self.reads = dict(zip(strung, copies, strict=True)), 0
        alone = sorted(set(range(self.count)).difference(strung))
        self.singles = [one for k in alone if (one := _single(k, grads[k])) is not None]
        self.shapes += [single.shape for single in self.singles]
        planned = [single.place for single in self.singles]
        self.others = sorted(set(alone).difference(planned))
        self.absent = [k for k in self.others if grads[k] is None]  # nothing could be planned for them
        # A sum below its floor (numel * UNDERFLOW) has a row below its own; squares may have been flushed there.
        self.may_underflow = max((columns for _, columns in self.shapes), default=0) * UNDERFLOW * (1 + 1e-5)
        lengths = [1] * len(strung) + [single.shape[0] for single in self.singles]
        ends = np.cumsum([0, *lengths], dtype=np.intp)
        # Where the rows of each gradient begin, in the order of the rows.
        self.order, self.starts = np.array(strung + planned, np.intp), ends[:-1]
        # Where the only row of a gradient lies that has no more than one.
        found = zip(strung + planned, self.starts, lengths, strict=True)
        self.row = {k: int(start) for k, start, length in found if length == 1}
        self.row_buffer = kind(self.shapes)
        self.chosen: Sequence[int] = ()
        self.kept: list[tuple[int, int]] = []

    def keep(self, chosen: Sequence[int]) -> None:
        """Have every read keep what is in these few gradients, as far as they are small and without gaps.

        Those in packed groups are kept as it is; of the others `kept` are place and matrix.
        """
        self.chosen = chosen
        singles = enumerate(self.singles, self.first_single)
        self.kept = [
            (one.place, part)
            for part, one in singles
            if one.place in chosen and one.shape[0] == 1 and one.order is None
        ]

    def matrices(self, grads: Sequence[Tensor | None]) -> tuple[list[Any], list[int]]:
        """Matrices to be read, of all parts of the row buffer, and places of those planned for that are not so.

        Where some are not, the matrices are those of the other `parts` only.
        """
        made: list[Any] = []
        missed: list[int] = []
        self.reads += 1
        for group in self.packed_groups:
            members = group.pick(grads)
            try:
                # Both refuse what does not fit together, but would resize `out`, and leave the matrices without their
                # memory, if all had changed alike: so what they would make is known before they are called.
                if members[0].shape == group.first_shape:
                    if group.sizes is None:
                        torch.stack(members, out=group.laid_out)
                        made += group.matrices
                        continue
                    if list(map(_numel, members)) == group.sizes:  # `len` would take seven times as long
                        torch.cat(members, out=group.laid_out)
                        made += group.matrices
                        continue
            except (AttributeError, TypeError, RuntimeError) as error:
                if not_ours(error):
                    raise
                # some are missing, sparse or of another shape this time
            missed += group.indices
        if self.singles:
            matrices, absent = self.kind.matrices(self.singles, grads)
            made += matrices
            missed += absent
        return made, missed

    def parts(self, missed: Sequence[int]) -> list[int] | None:
        """The parts of the row buffer that `matrices` were made for; None for all of them."""
        if not missed:
            return None
        absent = set(missed)
        groups = [group.parts for group in self.packed_groups if absent.isdisjoint(group.indices)]
        singles = enumerate(self.singles, self.first_single)
        return [*itertools.chain(*groups), *(part for part, one in singles if one.place not in absent)]


def _packed_groups(
    grads: Sequence[Tensor | None], kind: type[RowBuffer], varying: bool
) -> tuple[list[PackedGroup], list[Shape]]:
    """The packed groups worth making, and the shapes of all their matrices."""
    alike: dict[Any, list[tuple[torch.Size, int]]] = {}
    for k, grad in enumerate(grads):
        if grad is not None and _plain(grad) and grad.numel() <= SMALL:
            joined = grad.dim() and not varying
            alike.setdefault((joined, grad.shape[1:] if joined else grad.shape), []).append((grad.shape, k))
    packed_groups: list[PackedGroup] = []
    shapes: list[Shape] = []
    for members in alike.values():
        if len(members) >= FEWEST:
            packed_group, made = _packed_group(sorted(members), len(shapes), kind)
            packed_groups.append(packed_group)
            shapes += made
    return packed_groups, shapes


def _packed_group(
    members: list[tuple[torch.Size, int]], part: int, kind: type[RowBuffer]
) -> tuple[PackedGroup, list[Shape]]:
    """A packed group of gradients, given as (shape, position) in order, and its matrices' shapes, from `part` on."""
    first, indices = members[0][0], [k for _, k in members]
    sizes = [shape.numel() for shape, _ in members]
    shapes = [(len(list(equal)), size) for size, equal in itertools.groupby(sizes)]
    equal = len(shapes) == 1
    whole = (len(members), *first) if equal else (sum(shape[0] for shape, _ in members), *first[1:])
    laid_out = torch.empty(whole, **HERE)
    pieces = laid_out.view(-1).split([rows * columns for rows, columns in shapes])
    matrices = [kind.matrix(piece, shape, None) for piece, shape in zip(pieces, shapes, strict=True)]
    copies = [copy.numpy() for copy in laid_out.view(-1).split(sizes)]  # sync: CPU tensors
    parts, pick = range(part, part + len(shapes)), operator.itemgetter(*indices)
    joined = None if equal else sizes
    return PackedGroup(parts, indices, pick, first, joined, laid_out, matrices, copies), shapes


def _plain(grad: Tensor) -> bool:
    usual = grad.layout is torch.strided and grad.dtype is torch.float32 and type(grad) is Tensor
    return usual and grad.numel() > 0 and grad.device.type == "cpu"


def _single(index: int, grad: Tensor | None) -> SingleTensor | None:
    """Plan of one gradient as a matrix; None when it has to be read by itself."""
    if grad is None or not _plain(grad):
        return None
    shape = divided(grad.numel())
    if shape is None:
        return None
    if grad.is_contiguous():
        return SingleTensor(index, shape, None)
    order = tuple(sorted(range(grad.dim()), key=grad.stride, reverse=True))  # channels_last
    return SingleTensor(index, shape, order) if grad.permute(order).is_contiguous() else None
