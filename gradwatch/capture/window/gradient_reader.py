"""Reading the gradients of one capture, and what other code has changed of them since they were read.

A second read is made only of what changed: versions and identities tell of most writes, write probes of the others,
and a clip by a known factor needs no read at all.

Axes: K parameters of the capture.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.capture.window.norm_after_user_clip import KnownScaling, factor_since
from gradwatch.capture.window.window_norms import root_of_squares
from gradwatch.reading import foreach_norms
from gradwatch.reading.async_copy import Number, host_value
from gradwatch.reading.batched_norms import NEAR, CpuReader
from gradwatch.reading.cpu_norms import CpuNorms
from gradwatch.reading.foreach_norms import DeviceNorms
from gradwatch.reading.gradient_writes import Reading, WriteProbes, versions_of
from gradwatch.reading.row_sums import UNDERFLOW
from gradwatch.reading.single_norm import norm_of
from gradwatch.records.snapshot import Sites

Grads = Sequence[Tensor | None]
Seen = tuple[list[int], list[int]]
"""Of K gradients: identities and versions."""
NOTHING: Mapping[int, float] = {}


class GradientReader:
    """Norms of gradients of these sizes, whichever parameters they are of, and of what became of them since a read."""

    def __init__(self, sites: Sites, on_cpu: bool, distributed: bool) -> None:
        self.elements = int(sites.numels.sum())
        self._floor: NDArray[np.float64] = sites.numels.astype(np.float64) * UNDERFLOW
        self._reader = CpuReader()
        self.write_probes = WriteProbes(sites.numels)
        self._on_cpu, self._distributed = on_cpu, distributed
        # Other code than torch's may average over ranks: read again at the step.
        self.manual_allreduce = False
        # Total norm of a loop so regular that the exact read may wait.
        self.recent_total_norm: float | None = None

    def expect_manual_allreduce(self, expected: bool) -> None:
        """Read gradients again at the step, where the loop's own code averages them over ranks."""
        self.manual_allreduce = expected

    def know_total(self, total: float, ordinary: bool) -> None:
        """Know the total of a step that was judged; while steps are `ordinary` a quick look at the total is enough.

        It is the mean (of logarithms) of the last two: of steps that differ in turns, none makes the next one unusual.
        """
        before = self.recent_total_norm or total
        self.recent_total_norm = math.sqrt(before * total) if ordinary else None

    def as_usual(self, reading: Reading) -> bool:
        """True if no norm is zero and their total near the recent one, as `is_ordinary` has it; waits for a device."""
        norms, usual = reading.norms(), self.recent_total_norm
        if usual is None or not norms.all():
            return False
        return usual / NEAR <= root_of_squares(norms) <= usual * NEAR

    def read(
        self,
        grads: Grads,
        scale: Number,
        known: Mapping[int, float] = NOTHING,
        loss: float | Tensor | None = None,
    ) -> Reading:
        """Read these gradients but for norms that are known; on the host, look twice unless they are as usual.

        From a device the `loss` is sent together with them.
        """
        if not self._on_cpu:
            return foreach_norms.read(grads, scale, loss)
        rest = [None if k in known else grad for k, grad in enumerate(grads)] if known else grads
        left = scale if type(scale) is float else host_value(scale)
        rows, usual = self._reader.read(rest), self.recent_total_norm
        reading = CpuNorms(rows, self._floor, left)
        # A norm may be asked for after its gradient is gone: so whether it needs a second look is decided here.
        if known or usual is None or not rows.is_ordinary(usual * (left or math.nan), rest, self._floor):
            reading.refine(rest)
        return reading.completed(known) if known else reading

    def untouched(
        self, grads: Grads, raw: Reading, scale: Number, factor: float = 1.0, but: Container[int] = ()
    ) -> bool:
        """True if gradients whose version is not counted are as they were read, times `factor`; `but` are left out."""
        if self._distributed or self.manual_allreduce:  # a clip of DTensors bumps no version
            return False
        if not isinstance(raw, CpuNorms):
            return True
        left = scale if type(scale) is float else host_value(scale)
        return self.write_probes.agree(grads, raw, factor * left, but)

    def clipped(
        self,
        grads: Grads,
        now: Seen,
        at_read: Seen,
        raw: Reading,
        scale: Number,
        scalings: list[KnownScaling],
    ) -> Reading | None:
        """Norms after clips by known factors, computed without a read; None where more than that happened."""
        if not scalings or not isinstance(raw, CpuNorms) or raw.details:
            return None
        factor = factor_since(scalings, now, at_read)
        if factor is None or not self.untouched(grads, raw, scale, factor):
            return None
        return raw if factor == 1.0 else raw.divided(1.0 / factor)

    def changed(self, grads: Grads, now: Seen, at_read: Seen, raw: Reading, scale: Number) -> Reading:
        """Norms of gradients that were written to since the read; the few that differ are read one by one."""
        if isinstance(raw, DeviceNorms):
            return foreach_norms.read(grads, scale)
        pairs = zip(now[0], at_read[0], now[1], at_read[1], strict=True)
        changed = [k for k, (a, b, c, d) in enumerate(pairs) if a != b or c != d]
        left = host_value(scale)
        most = not changed or len(changed) * 2 > len(grads)
        if most or not self.untouched(grads, raw, scale, but=changed):
            after = CpuNorms(self._reader.read(grads), self._floor, left)
            if raw.looked or not after.finite():  # is it an element, or only the sum of squares?
                after.refine(grads)
            return after
        return raw.with_norms({k: norm_of(grads[k]) / (left or math.nan) for k in changed})

    def left(self, grads: Grads, versions: list[int], raw: Reading) -> Reading | None:
        """Norms after clipping of gradients that were read, and may be cleared; None where they are gone or zeroed."""
        if [grad is not None for grad in grads] != [version >= 0 for version in versions]:
            return None
        if versions_of(grads) == versions and self.untouched(grads, raw, 1.0):
            return raw
        if not self._on_cpu:  # whether they are zeros cannot be told without waiting
            return None
        now = CpuNorms(self._reader.read(grads), self._floor, 1.0)
        now.refine(grads)
        return None if ((now.norms() == 0) & (raw.norms() > 0)).any() else now
