"""Columns of the moments that an optimizer keeps of its gradients, as its steps so far have left them.

Adam, AdamW, NAdam, RAdam, SparseAdam and others that use their names keep `exp_avg` and `exp_avg_sq`; Adamax keeps the
first alone. SGD with momentum, RMSprop with momentum and Muon keep `momentum_buffer`; RMSprop and Adadelta keep
`square_avg`. Others (Adagrad's sum, Adafactor's rows and columns, moments in 8 bits) have no such column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.capture.columns.moment_cosine import cosines
from gradwatch.capture.columns.pending_columns import Numbers, PendingColumns
from gradwatch.capture.columns.update_ratio import norms_by_position
from gradwatch.reading import chunked_statistics
from gradwatch.reading.async_copy import on_host
from gradwatch.reading.layouts import dense, flat

FIRST, SECOND = ("exp_avg", "momentum_buffer"), ("exp_avg_sq", "square_avg")
COSINE = "moment_cosine"
MOMENT = {
    "moment_norm": FIRST,
    "second_moment_rms": SECOND,
    "second_moment_near_zero": SECOND,
    COSINE: FIRST,
}
"""The keys of `optimizer.state[param]` at which each column finds what it is of: the first that is there."""
STATE_COLUMNS = frozenset(MOMENT)
# Its root is 1.05e-8: where a second moment is smaller, Adam divides by its eps (1e-8) and hardly by the moment.
# A power of two, so that it is the same number in every type.
NEAR_ZERO = 2.0**-53


def read_optimizer_state(
    pending: PendingColumns,
    due: Mapping[str, Sequence[int]],
    params: Sequence[Tensor],
    optimizer: Optimizer | None,
    gradients: Sequence[Tensor | None],
) -> None:
    """Put the columns of an optimizer's state that are `due` into `pending`, by name at these positions of `params[K]`.

    A parameter without such a moment has no value; where none has one there is no column.
    """
    for name, at in due.items():
        moments = {
            k: moment for k in at if (moment := _moment(optimizer, params[k], MOMENT[name])) is not None
        }
        found = cosines(moments, gradients) if name == COSINE else _READ[name](moments) if moments else {}
        if found:
            numbers = Numbers()
            for k, number in found.items():
                numbers.put(k, number)
            pending.parts[name] = numbers.send(pending)
            pending.present[name] = numbers.positions()
            if name == COSINE:
                pending.defined.add(name)


def has_moment(column: str, optimizer: Optimizer | None, param: Tensor, gradient: Tensor | None) -> bool:
    """True if the optimizer keeps what a column of a parameter is of, and there is a gradient where it takes one."""
    if column == COSINE and gradient is None:
        return False
    return _moment(optimizer, param, MOMENT[column]) is not None


def _moment(optimizer: Optimizer | None, param: Tensor, keys: Sequence[str]) -> Tensor | None:
    """A moment of one parameter, dense and real, this rank's part of it; None where the optimizer keeps none."""
    state: Any = getattr(optimizer, "state", None)
    # Never `state[param]`: in a defaultdict that would make an entry, which checkpoints would hold.
    kept: Any = state.get(param) if isinstance(state, Mapping) else None
    for key in keys if isinstance(kept, Mapping) else ():
        moment = kept.get(key)
        if isinstance(moment, Tensor) and moment.shape == param.shape and _has_values(moment):
            found = dense(moment)
            return found if found.is_floating_point() and found.numel() else None
    return None


def _has_values(moment: Tensor) -> bool:
    """True if there is a number in memory for each element."""
    return not (moment.is_sparse or moment.is_meta)


def _norms(moments: Mapping[int, Tensor]) -> Mapping[int, float | Tensor]:
    return norms_by_position(list(moments.values()), list(moments))


def _root_mean_squares(moments: Mapping[int, Tensor]) -> Mapping[int, float | Tensor]:
    return {k: norm / math.sqrt(moments[k].numel()) for k, norm in _norms(moments).items()}


def _shares_near_zero(moments: Mapping[int, Tensor]) -> Mapping[int, float | Tensor]:
    return {k: _share_near_zero(moment) for k, moment in moments.items()}


def _share_near_zero(moment: Tensor) -> float | Tensor:
    if on_host(moment):
        return chunked_statistics.count_below(moment, NEAR_ZERO) / moment.numel()
    vector = flat(moment)
    wide = vector.float() if vector.dtype is torch.float16 else vector  # which has no number so small
    return torch.count_nonzero(wide < NEAR_ZERO).float() / moment.numel()


_READ = {
    "moment_norm": _norms,
    "second_moment_rms": _root_mean_squares,
    "second_moment_near_zero": _shares_near_zero,
}
