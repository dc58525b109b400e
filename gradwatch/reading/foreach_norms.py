"""Norms of many gradients on an accelerator by a few foreach operations, without making the host wait.

One `_foreach_norm` per (device, dtype), one stack, one asynchronous copy (`async_copy`): the numbers are looked at once
it has arrived (most often one step later), or waited for where a rule must act in this very step. Norms are accumulated
in float64, because a second look would have to wait: so an infinite norm is an Inf element, and overflow and underflow
of float32 are told apart from Inf and zero.

What ran where: the op list, the numbers and the queue are tested on CPU tensors and on the `meta` device in CI, and
by `tests/gpu` where there is one (an H200 so far). Consumer GPUs are slow in float64, which was not measured. Not
free of waiting: sparse gradients, which must be coalesced, and accelerators other than CUDA, whose copies to the
host wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.reading import foreach_functions
from gradwatch.reading.async_copy import AsyncCopy, CopiedNumber, Number, host_value, is_ready
from gradwatch.reading.batched_norms import Detail
from gradwatch.reading.layouts import dense, is_plain

NO_FLOAT64 = frozenset({"mps"})
"""Devices without float64: there a float32 overflow of the norm still looks like an Inf element."""

CHECKED_IN_ONE_LAUNCH = frozenset({"cpu", "cuda"})
"""Devices that surely have the check by which a GradScaler finds infinite gradients."""


class DeviceNorms:
    """Norms of K gradients on their way to the host; `norms()` waits for them if they have not arrived.

    `loss` is the number that was sent together with them, behind the last norm.
    """

    looked = True  # they are exact as they are

    def __init__(
        self,
        norms: Sequence[Tensor],
        pending: AsyncCopy,
        scales: tuple[Number, ...] = (),
        loss: CopiedNumber | None = None,
    ) -> None:
        self._norms = norms
        self._copy = pending
        self._scales = scales
        self.loss = loss
        self._found: NDArray[np.float64] | None = None

    def ready(self) -> bool:
        """True if `norms()` would return at once."""
        return self._copy.ready() and all(map(is_ready, self._scales))

    @property
    def details(self) -> Mapping[int, Detail]:
        """Empty: second looks would make the host wait."""
        return {}

    def divided(self, scale: Number) -> DeviceNorms:
        """The same reading without a factor that was in the gradients when they were read."""
        return DeviceNorms(self._norms, self._copy, (*self._scales, scale), self.loss)

    def device_total(self) -> Tensor | None:
        """0-dim total norm on the device, scale included, for a verdict that never leaves it; None without any."""
        if not self._norms:
            return None
        first = self._norms[0]
        if len(self._norms) == 1:
            return torch.linalg.vector_norm(first)  # type: ignore[no-any-return]
        totals = [
            torch.linalg.vector_norm(norms).to(first.device, non_blocking=True) for norms in self._norms
        ]
        total: Tensor = torch.linalg.vector_norm(torch.stack(totals))
        return total

    def nonfinite(self) -> Tensor | None:
        """float32 0-dim on the device: 1 if some norm is not finite, else 0, as `found_inf` is; None without norms."""
        if not self._norms:
            return None
        if len(self._norms) > 1 or self._norms[0].device.type not in CHECKED_IN_ONE_LAUNCH:
            total = self.device_total()
            return None if total is None else (total * 0 != 0).to(torch.float32)
        norms = self._norms[0]
        found, one = _zero_and_one(norms.device)
        # What GradScaler checks gradients with, in one launch; multiplied by 1 they stay as they are.
        torch._amp_foreach_non_finite_check_and_unscale_([norms], found, one)
        return found

    def each(self) -> dict[int, Tensor]:
        """0-dim norms on their devices by position, scale included; of the gradients that were there."""
        each = [norm for norms in self._norms for norm in norms.unbind()]
        positions = self._copy.positions[: len(each)]  # without the loss, which is sent with them
        return dict(zip(map(int, positions), each, strict=True))

    def norms(self) -> NDArray[np.float64]:
        """float64[K] norms without the loss scale, 0 where there was no gradient; the same array every time."""
        if self._found is None:
            found = self._copy.values().astype(np.float64)
            found = found if self.loss is None else found[:-1]
            with np.errstate(divide="ignore", invalid="ignore"):  # a collapsed scale may reach 0
                for scale in self._scales:
                    found /= host_value(scale)
            self._found = found
        return self._found


def read(
    grads: Sequence[Tensor | None], scale: Number = 1.0, loss: float | Tensor | None = None
) -> DeviceNorms:
    """Start reading the norms of K gradients on accelerators, `scale` the loss scale in them; returns at once.

    `loss`, a 0-dim tensor that `widest` gives its type, is sent together with them where all are on one device.
    """
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for k, grad in enumerate(grads):
        if grad is not None:
            tensor = grad if is_plain(grad) else dense(grad)
            by_device.setdefault(tensor.device, []).append((k, tensor))
    scales = () if isinstance(scale, float) and scale == 1.0 else (scale,)
    positions = [k for group in by_device.values() for k, _ in group]
    each = [_norms([tensor for _, tensor in group]) for group in by_device.values()]
    if isinstance(loss, Tensor) and [loss.device] == list(by_device) and loss.dtype is each[0][0].dtype:
        whole = torch.stack([*each[0], loss])
        pending = AsyncCopy([whole], np.array([*positions, len(grads)], np.intp), len(grads) + 1)
        return DeviceNorms([whole[:-1]], pending, scales, CopiedNumber(pending, len(grads)))
    norms = list(map(torch.stack, each))
    return DeviceNorms(norms, AsyncCopy(norms, np.array(positions, np.intp), len(grads)), scales)


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """0-dim norms of tensors of one device, in order; one launch per dtype (and per 110 tensors, inside torch)."""
    wide = widest(tensors[0].device)
    norms: list[Tensor | None] = [None] * len(tensors)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    for indices in by_dtype.values():
        group = [tensors[index] for index in indices]
        for index, norm in zip(indices, foreach_functions.norms(group, 2, dtype=wide), strict=True):
            norms[index] = norm
    return [norm for norm in norms if norm is not None]


_ONES: dict[torch.device, Tensor] = {}


def _zero_and_one(where: torch.device) -> tuple[Tensor, Tensor]:
    """float32 0-dim on a device: a 0 of its own, and a 1 that is shared."""
    one = _ONES.get(where)
    if one is None:
        one = _ONES[where] = torch.ones((), dtype=torch.float32, device=where)
        if where.type == "cuda":  # once: no other stream may find it unwritten
            torch.cuda.current_stream(where).synchronize()
    return torch.zeros_like(one), one


def device_mean_and_std(vector: Tensor) -> tuple[Tensor, Tensor]:
    """0-dim mean and standard deviation (division by n) of a vector on an accelerator, in float32 at least."""
    wide = vector.to(torch.promote_types(vector.dtype, torch.float32))
    std, mean = torch.std_mean(wide, correction=0)
    return mean, std


def widest(where: torch.device) -> torch.dtype:
    """The float type in which norms are summed on a device."""
    return torch.float32 if where.type in NO_FLOAT64 else torch.float64


def clip(grads: Sequence[Tensor | None], total: Tensor, max_norm: float) -> None:
    """Multiply gradients by `clip_factor` of their 0-dim `total`, which is on any of the devices."""
    factor = clip_factor(total, max_norm)
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        if grad is not None:
            by_device.setdefault(grad.device, []).append(grad)
    for where, group in by_device.items():
        foreach_functions.multiply(group, factor.to(where, non_blocking=True))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """float32 min(1, max_norm / (norm + 1e-6)) of one norm or of many, without the host knowing any.

    The arithmetic of `gradwatch.policies.norm.clip_coefficient`, and 1 for a non-finite norm, so that a bad
    element is never spread.
    """
    narrow = norm.to(torch.float32)
    factor = torch.reciprocal(narrow + 1e-6) * max_norm
    beyond = (max_norm / norm).to(torch.float32)  # of a float64 norm that float32 cannot hold
    factor = torch.where(torch.isfinite(narrow), factor, beyond).clamp(max=1.0)
    return torch.where(torch.isfinite(norm), factor, torch.ones_like(factor))
