"""Columns of the running mean and variance of normalisation layers, as the forwards of a step have left them.

Evaluation divides by them and training does not read them, so that no gradient shows that they have run away.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradwatch.capture.columns.pending_columns import NO_SITES_OVERDUE, Numbers, OverdueSites, PendingColumns
from gradwatch.engine.columns_needed import Needs
from gradwatch.engine.judged_steps.staggered_reads import Staggering
from gradwatch.reading import chunked_statistics, foreach_functions
from gradwatch.reading.async_copy import on_host
from gradwatch.reading.foreach_norms import widest
from gradwatch.reading.layouts import dense, flat
from gradwatch.taps.module_tree import WITH_RUNNING_STATISTICS

BUFFER = {
    "running_mean_norm": "running_mean",
    "running_var_min": "running_var",
    "running_var_max": "running_var",
}
"""The buffer that each column is of."""
RUNNING_COLUMNS = frozenset(BUFFER)


class RunningStatisticsReader:
    """Reads what `needs` says of the running statistics of M modules, which take turns by `staggering`."""

    def __init__(self, modules: Sequence[nn.Module], needs: Needs, staggering: Staggering) -> None:
        self._layers = {
            m: weakref.ref(module)
            for m, module in enumerate(modules)
            if isinstance(module, WITH_RUNNING_STATISTICS)
        }
        self._wanted = sorted(RUNNING_COLUMNS & needs.columns) if self._layers else []
        self._needs, self._staggering = needs, staggering

    def read(self, pending: PendingColumns, step: int, overdue: OverdueSites = NO_SITES_OVERDUE) -> None:
        """Put the columns due, or `overdue` (bool[M]), into `pending`; what keeps no such statistics has no value."""
        for name in self._wanted:
            asked = [mask for columns, mask in overdue.items() if name in columns]
            at_turn = self._needs.due(name, step, self._staggering)
            asked += [] if at_turn is None else [at_turn]
            if not asked:
                continue
            due = np.logical_or.reduce(asked)
            numbers = Numbers()
            for m, layer in self._layers.items():
                module = layer() if due[m] else None
                buffer = None if module is None else module._buffers.get(BUFFER[name])
                if buffer is not None and not is_lazy(buffer) and buffer.numel():
                    numbers.put(m, _read(name, dense(buffer)))
            if present := numbers.positions():
                pending.parts[name], pending.present[name] = numbers.send(pending), present


def _read(name: str, buffer: Tensor) -> float | Tensor:
    return _of_host(name, buffer) if on_host(buffer) else _of_device(name, flat(buffer))


def _of_host(name: str, buffer: Tensor) -> float:
    if name == "running_mean_norm":
        return chunked_statistics.norm(buffer)
    _, low, high = chunked_statistics.zeros_and_extremes(buffer)
    return low if name == "running_var_min" else high


def _of_device(name: str, vector: Tensor) -> Tensor:
    if name == "running_mean_norm":
        return foreach_functions.norms([vector], 2, dtype=widest(vector.device))[0]
    low, high = torch.aminmax(vector)
    return (low if name == "running_var_min" else high).to(torch.promote_types(vector.dtype, torch.float32))
