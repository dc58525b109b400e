"""One optimizer's gradients between two of its steps: what arrived, what was read, what changed since.

K parameters of one optimizer. A lane learns how many backwards make a step (N) so that later steps are read
once, at the end of the last backward; until N has been equal for three steps, and for a hundred after it
varied, every backward is read, because the last (partial) window of an epoch would otherwise be seen only
after the user's clipping.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.hooks import device
from gradwatch.hooks.dense import local
from gradwatch.hooks.device import DeviceReading
from gradwatch.hooks.norms import UNDERFLOW, CpuReader, Detail, inspect, sum_of_squares, suspicious
from gradwatch.snapshot import Sites

Norms = NDArray[np.float64]

LEARNED = 3  # equal counts of backwards before a loop is believed
VARIED = 100  # steps after a change of that count during which every backward is read
STEADY = 5  # identical steps before marks are thinned
BACKOFF = 200  # steps before thinning is tried again after it had to be undone


@dataclass(slots=True, eq=False)  # not frozen: that would cost microseconds, and nobody else sees one
class Window:
    """What one step boundary found; `resolve()` waits for an accelerator, all else is on the host.

    `sites` and `step` say what it belongs to; `calls[K]` arrivals; `details` the second looks by position;
    `micro` backwards; `trusted` that thinned marks told the truth; `scale` the loss scale that was still in
    the gradients when they were read.
    """

    sites: Sites
    step: int
    raw: Norms | DeviceReading
    after: Norms | DeviceReading
    calls: NDArray[np.int32]
    details: Mapping[int, Detail]
    micro: int
    provisional: bool
    trusted: bool
    scale: float

    def ready(self) -> bool:
        """Whether `resolve()` would return without waiting."""
        return all(not isinstance(part, DeviceReading) or part.ready() for part in (self.raw, self.after))

    def resolve(self) -> tuple[Norms, Norms]:
        """float64[K] norms (before anybody's clipping, as the optimizer gets them), loss scale removed."""
        raw = self._host(self.raw)
        return raw, raw if self.after is self.raw else self._host(self.after)

    def total(self) -> float:
        """The total norm before clipping, of every gradient there is."""
        raw, _ = self.resolve()
        return float(np.sqrt(np.dot(raw, raw)))

    def _host(self, part: Norms | DeviceReading) -> Norms:
        return np.sqrt(part.squares()) if isinstance(part, DeviceReading) else part


class Lane:
    """The parameters of one optimizer and everything read of them since its last step."""

    def __init__(
        self, index: int, optimizer: Optimizer | None, params: list[nn.Parameter], sites: Sites
    ) -> None:
        self.index = index
        self.optimizer = None if optimizer is None else weakref.ref(optimizer)
        self.params = params
        self.param_ids = list(map(id, params))
        self.sites = sites
        self.slots: NDArray[np.intp] = np.zeros(0, np.intp)
        self.position: dict[int, int] = {}
        self.step = 0
        self.watched_ids: list[int] = []  # every parameter of the optimizer when the lane was built
        self.frozen: list[nn.Parameter] = []  # those that wanted no gradient then
        self.distributed = any(hasattr(param, "to_local") for param in params)
        self.on_cpu = all(param.device.type == "cpu" for param in params)
        self.thinned = False
        self.tainted = False  # this window cannot be one step's alone
        self.settled = -1  # backwards when the window was closed; -1 while it is open
        self.reduced_total: float | None = (
            None  # total norm over all ranks, where this one's is not all of it
        )
        self._reader = CpuReader()
        self._floor: NDArray[np.float64] = sites.numels.astype(np.float64) * UNDERFLOW
        self._norms: Norms | DeviceReading | None = None
        self._after: Norms | DeviceReading | None = None
        self._details: dict[int, Detail] = {}
        self._scale = 1.0
        self._read_at = 0
        self._backwards = 0
        self._calls: NDArray[np.int32] | None = None  # marks heard in bulk
        self._heard = [0] * len(params)  # marks heard one by one
        self._told: tuple[list[int], int, NDArray[np.int32]] | None = None
        self._ids: list[int] = []
        self._versions: list[int] = []
        self._last: tuple[list[int], list[int], Norms | DeviceReading] | None = None
        self._expected: int | None = None
        self._equal = 0
        self._varied = -VARIED
        self._pattern: list[int] = []
        self._steady = 0
        self._blocked_until = 0
        self._ambiguous = False
        self.born = True  # made in the middle of a window, until a window has been closed

    def __len__(self) -> int:
        return len(self.params)

    @property
    def backwards(self) -> int:
        """Backwards heard since the last step."""
        return self._backwards

    def grads(self) -> list[Tensor | None]:
        """The gradients as they are now; holds no reference afterwards."""
        grads: list[Tensor | None] = [param.grad for param in self.params]
        # In place on a DTensor bumps only the version of the shard behind it.
        return [grad if grad is None else local(grad) for grad in grads] if self.distributed else grads

    # -- during backward ---------------------------------------------------------------------------------

    def arrived(self, counts: NDArray[np.int32]) -> None:
        """One backward has ended that touched this lane: `counts[K]` marks heard."""
        self._backwards += 1
        self._calls = counts if self._calls is None else self._calls + counts

    def hear(self, touched: list[int]) -> None:
        """As `arrived`, from the slots of a handful of marks; numpy would cost more than it saves."""
        position, heard = self.position, self._heard
        before = self._backwards
        for slot in touched:
            k = position.get(slot)
            if k is not None:
                heard[k] += 1
                self._backwards = before + 1

    def due(self) -> bool:
        """Whether the backward that just ended may have been the last of this step."""
        if self._expected is None or self._equal < LEARNED or self.step - self._varied < VARIED:
            return True
        return self._backwards >= self._expected

    def read(self, scale: float = 1.0) -> None:
        """Read every gradient of the lane; `scale` is the loss scale still multiplied into them."""
        grads = self.grads()
        self._ids, self._versions = signature(grads)
        self._take(grads, scale)
        self._read_at = self._backwards

    # -- at the step boundary ----------------------------------------------------------------------------

    def settle(self, scale: float = 1.0) -> Window:
        """Close the window just before `optimizer.step()`: read what is unread, notice what changed.

        `scale` is the loss scale the gradients still carry here (fused optimizers under a GradScaler).
        """
        grads = self.grads()
        ids, versions = signature(grads)
        unread = self._norms is None or self._read_at != self._backwards
        if unread:
            self._ids, self._versions = ids, versions
            self._take(grads, scale)
        raw = self._norms
        assert raw is not None
        after = raw
        # A clip of DTensors bumps no version, so theirs are always read again.
        if ids != self._ids or versions != self._versions or (self.distributed and not unread):
            after = self._changed(grads, ids, versions, raw, scale)
        calls, trusted = self._presence(grads, ids, versions, raw)
        # A loop whose marks never speak is read here by design; any other unread window ended early.
        early = unread and not (self._expected == 0 and self._backwards == 0)
        window = Window(
            self.sites,
            self.step,
            raw,
            after,
            calls,
            self._details,
            self._backwards,
            early or self.tainted or not trusted,
            trusted,
            self._scale,
        )
        self._learn(calls)
        self._last = (ids, versions, raw)
        self._after = after
        self.settled = self._backwards
        return window

    def advance(self) -> None:
        """Start the next window; called once per `optimizer.step()`."""
        self.step += 1
        self.settled = -1
        self.tainted = False
        self.reduced_total = None
        self._backwards = 0
        self._read_at = 0
        self._calls = None
        self._heard = [0] * len(self.params)
        self._norms = None
        self._details = {}

    def discard(self) -> None:
        """Forget a window that ended without a step (a GradScaler overflow); nothing is learned from it."""
        steps = self.step
        self.advance()
        self.step = steps

    def total_applied(self) -> float:
        """Root sum of squares of the gradients as they stand at the boundary, after the user's clipping."""
        if self.reduced_total is not None:
            return self.reduced_total
        assert self._after is not None
        norms = np.sqrt(self._after.squares()) if isinstance(self._after, DeviceReading) else self._after
        return float(np.sqrt(np.dot(norms, norms)))

    def multiply(self, coefficient: np.float32) -> None:
        """Multiply every gradient in place; a coefficient of 1 touches nothing."""
        present = [grad for grad in self.grads() if grad is not None]
        if coefficient != 1.0 and present:
            # As a tensor, which is how torch multiplies: the result is then bit-equal to clip_grad_norm_.
            torch._foreach_mul_(present, torch.tensor(coefficient))

    def device_total(self) -> Tensor | None:
        """0-dim total norm on the device where this window was read there, else None."""
        return self._norms.device_total() if isinstance(self._norms, DeviceReading) else None

    # -- thinning the marks ------------------------------------------------------------------------------

    def thinnable(self) -> bool:
        """Whether a few sentinels would tell the same as a mark on every parameter."""
        return not self.thinned and self._steady >= STEADY and self.step >= self._blocked_until

    def sentinels(self, count: int = 4) -> list[int]:
        """Positions of a few parameters, spread over the lane, that received a gradient in the last step."""
        present = [k for k, version in enumerate(self._pattern) if version >= 0]
        stride = max(1, len(present) // count)
        return sorted({*present[::stride], *present[-1:]})

    def block(self) -> None:
        """Thinning had to be undone: leave the marks alone for a while (for good if they cannot tell)."""
        self.thinned = False
        self._steady = 0
        self._blocked_until = sys.maxsize if self._ambiguous else self.step + BACKOFF

    def release(self) -> None:
        """The optimizer is gone: keep index and step for a successor, and let go of the parameters."""
        self.params, self.slots, self.position = [], np.zeros(0, np.intp), {}
        self._norms = self._after = self._last = None

    # -- inside ------------------------------------------------------------------------------------------

    def _take(self, grads: Sequence[Tensor | None], scale: float) -> None:
        self._scale = scale
        if not self.on_cpu:
            self._norms = device.read(grads, scale)
            return
        squares = self._reader.read(grads)
        norms: Norms = np.sqrt(squares)
        self._details = {}
        for k in map(int, suspicious(squares, self._floor)):
            grad = grads[k]
            if grad is not None:
                self._details[k] = detail = inspect(grad)
                norms[k] = detail.norm
        self._norms = norms if scale == 1.0 else norms / scale

    def _changed(
        self,
        grads: Sequence[Tensor | None],
        ids: list[int],
        versions: list[int],
        raw: Norms | DeviceReading,
        scale: float,
    ) -> Norms | DeviceReading:
        if isinstance(raw, DeviceReading):
            return device.read(grads, scale)
        pairs = zip(ids, self._ids, versions, self._versions, strict=True)
        changed = [k for k, (a, b, c, d) in enumerate(pairs) if a != b or c != d]
        if self.distributed or len(changed) * 2 > len(grads):
            return np.sqrt(self._reader.read(grads)) / scale
        after = raw.copy()
        for k in changed:
            grad = grads[k]
            after[k] = 0.0 if grad is None else math.sqrt(sum_of_squares(grad)) / scale
        return after

    def _presence(
        self, grads: Sequence[Tensor | None], ids: list[int], versions: list[int], raw: Norms | DeviceReading
    ) -> tuple[NDArray[np.int32], bool]:
        """How often each gradient arrived, and whether a thinned set of marks can still be trusted."""
        if self.thinned:
            trusted = self._backwards > 0 and self._versions == self._pattern and not self._stale(ids, raw)
            return self._calls_of(self._pattern if trusted else self._versions), trusted
        if self._calls is not None:
            self._heard = (self._calls + self._heard).tolist()  # sync: numpy
            self._calls = None
        heard = self._heard
        if 0 in heard:
            for k, count in enumerate(heard):
                if not count and grads[k] is not None and self._unmarked(k, ids, versions, raw):
                    heard[k] = 1
        return np.array(heard, np.int32), True

    def _calls_of(self, versions: list[int]) -> NDArray[np.int32]:
        """The arrivals that these versions stand for; the same array while nothing changes."""
        told = self._told
        if told is not None and told[0] is versions and told[1] == self._backwards:
            return told[2]
        here = np.array(versions) >= 0
        calls: NDArray[np.int32] = np.where(here, max(1, self._backwards), 0).astype(np.int32)
        self._told = (versions, self._backwards, calls)
        return calls

    def _stale(self, ids: list[int], raw: Norms | DeviceReading) -> bool:
        """Whether some gradient may be the last step's, not cleared and not renewed: only its mark could tell."""
        if self._last is None or isinstance(raw, DeviceReading) or isinstance(self._last[2], DeviceReading):
            return False
        equal = np.flatnonzero((raw == self._last[2]) & (raw > 0))
        self._ambiguous = any(ids[k] == self._last[0][k] for k in equal)
        return self._ambiguous

    def _unmarked(self, k: int, ids: list[int], versions: list[int], raw: Norms | DeviceReading) -> bool:
        """Whether a gradient no mark announced is new: not the last step's, and not all zero."""
        if self._last is None:
            return True
        if not isinstance(raw, DeviceReading) and raw[k] == 0:
            return False
        last_ids, last_versions, last = self._last
        if ids[k] == last_ids[k] and versions[k] == last_versions[k]:
            return False
        # The optimizer itself may bump a version; an equal norm says that nothing arrived.
        on_host = not isinstance(raw, DeviceReading) and not isinstance(last, DeviceReading)
        return not (on_host and raw[k] == last[k])  # type: ignore[index]

    def _learn(self, calls: NDArray[np.int32]) -> None:
        if self.born:  # made in the middle of this window: what it heard is not the whole of it
            self.born = False
            return
        if self._backwards == self._expected:
            self._equal += 1
        else:
            if self._expected is not None:
                self._varied = self.step
            self._expected, self._equal = self._backwards, 1
        if self.thinned:
            return
        # Equal versions step after step mean that every gradient starts fresh (set_to_none), so that "there
        # is a gradient" tells the same as a mark.
        complete = all(
            count == self._backwards if version >= 0 else count == 0
            for count, version in zip(calls.tolist(), self._versions, strict=True)  # sync: numpy
        )
        steady = complete and self._backwards > 0 and self._versions == self._pattern
        self._steady = self._steady + 1 if steady else 0
        self._pattern = self._versions


def signature(grads: Sequence[Tensor | None]) -> tuple[list[int], list[int]]:
    """(ids, versions) of gradients, -1 where there is none: equal signatures mean that nobody wrote to them.

    A hint, not a proof: writes through `.data` or numpy do not bump the version.
    """
    try:
        versions = [grad._version for grad in grads]  # type: ignore[union-attr]
    except AttributeError:
        versions = [-1 if grad is None else grad._version for grad in grads]
    return list(map(id, grads)), versions
