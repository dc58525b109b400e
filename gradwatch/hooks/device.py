"""Reading numbers off an accelerator without making the host wait.

One `_foreach_norm` per (device, dtype), one stack, one asynchronous copy into pinned memory and an event: the
numbers are looked at when the event has passed (one step later), or waited for where a rule must act in this
very step. Nothing here has run on a GPU yet; the op list is tested on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.hooks.dense import REDUCED, dense
from gradwatch.hooks.norms import Detail


class Arriving:
    """Per-position numbers on their way to the host, from one or several devices.

    `parts` are 1-d tensors whose concatenation belongs to `positions` of an array of `count`; `factor[count]`
    multiplies the result. Copies are asynchronous into pinned memory where the source is a CUDA device.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        positions: NDArray[np.intp],
        count: int,
        factor: NDArray[np.float32] | None = None,
    ) -> None:
        self._positions = positions
        self._count = count
        self._factor = factor
        self._arrivals = [_send(part) for part in parts]

    def ready(self) -> bool:
        """Whether `values()` would return at once."""
        return all(event is None or bool(event.query()) for _, event in self._arrivals)

    def values(self) -> NDArray[np.float32]:
        """float32[count], 0 where nothing was sent; waits for what has not arrived."""
        out = np.zeros(self._count, np.float32)
        arrived = []
        for host, event in self._arrivals:
            if event is not None:
                event.synchronize()
            arrived.append(host.numpy())  # sync: waited for by the event above, already on the host
        if arrived:
            out[self._positions] = np.concatenate(arrived)
        return out if self._factor is None else out * self._factor


def _send(part: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    part = part.detach()
    if not part.is_cuda:
        return part.to("cpu"), None
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)  # torch caches pinned blocks
    host.copy_(part, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(part.device))
    return host, event


class DeviceReading:
    """Norms of K gradients on their way to the host; `norms()` waits for them if they have not arrived."""

    def __init__(self, norms: Sequence[Tensor], arriving: Arriving, scale: float = 1.0) -> None:
        self._norms = norms
        self._arriving = arriving
        self._scale = scale

    def ready(self) -> bool:
        """Whether `norms()` would return at once."""
        return self._arriving.ready()

    def device_total(self) -> Tensor | None:
        """0-dim float32 total norm on the device, for a verdict that never leaves it; None without any."""
        if not self._norms:
            return None
        first = self._norms[0]
        totals = [torch.linalg.vector_norm(norms).to(first.device) for norms in self._norms]
        total: Tensor = torch.linalg.vector_norm(torch.stack(totals))
        return total

    @property
    def details(self) -> Mapping[int, Detail]:
        """No second looks: they would make the host wait."""
        return {}

    def doubtful(self) -> None:
        """Nothing was put off."""

    def norms(self) -> NDArray[np.float64]:
        """float64[K] norms without the loss scale, 0 where there was no gradient."""
        return self._arriving.values().astype(np.float64) / self._scale


def read(grads: Sequence[Tensor | None], scale: float = 1.0) -> DeviceReading:
    """Start reading the norms of K gradients on accelerators, `scale` the loss scale in them; returns at once."""
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for k, grad in enumerate(grads):
        if grad is not None:
            tensor = dense(grad)
            by_device.setdefault(tensor.device, []).append((k, tensor))
    norms = [torch.stack(_norms([tensor for _, tensor in group])) for group in by_device.values()]
    positions = np.array([k for group in by_device.values() for k, _ in group], np.intp)
    return DeviceReading(norms, Arriving(norms, positions, len(grads)), scale)


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """0-dim float32 norms in order; one launch per dtype (and per 110 tensors, inside torch)."""
    norms: list[Tensor | None] = [None] * len(tensors)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    for dtype, indices in by_dtype.items():
        group = [tensors[index] for index in indices]
        found = torch._foreach_norm(group, 2, dtype=torch.float32 if dtype in REDUCED else None)
        for index, norm in zip(indices, found, strict=True):
            norms[index] = norm.to(torch.float32)
    return [norm for norm in norms if norm is not None]


def capturing() -> bool:
    """Whether a CUDA graph is being captured: then nothing of ours may be enqueued."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
