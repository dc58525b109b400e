"""Identity of a batch: a hash of the tensors a model was called with, the same in every process and on every device.

The hash differs for two batches, and finds one again: run over the loader, `gradwatch.batch_hash(*args)` of each
batch, as the model gets it, until the hash is that of the incident. Where the script knows which samples it drew it
says so (`Watch.batch`), which is better: a DataLoader does not tell. Its iterator is ahead of the training by what
workers and frameworks prefetch, so that a look into it would name the wrong samples in silence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradwatch.localise.diagnosis.tensor_values import tensors
from gradwatch.reading.layouts import local
from gradwatch.records.finding import Batch

MOST_BYTES = 64 << 20
"""Of one batch are hashed; about 0.1 s."""

MOST_INDICES = 4096
"""Positions of samples kept of one batch."""

DIGEST = 16  # bytes


def batch_hash(*args: Any, **kwargs: Any) -> str:
    """The hash of the tensors among the arguments of a forward call: 32 hexadecimal digits.

    BLAKE2b (RFC 7693), 16 bytes, over each tensor in the order of the arguments, containers opened: its dtype as
    torch spells it, its shape, its elements as little-endian bytes in row-major order. Of a batch larger than 64 MiB
    the first 64 MiB are taken. Arguments that are no tensors do not count. Waits for the device.
    """
    return _hashed(tensors((args, kwargs)))[0]


def fingerprint(args: Any, kwargs: Any, indices: Any = None) -> Batch:
    """Fingerprint of the batch of one call; `indices` as given to `Watch.batch` (None = not given)."""
    found = tensors((args, kwargs))
    digest, nbytes, complete = _hashed(found)
    positions = None if indices is None else _positions(indices)
    samples = 0 if positions is None else len(positions)
    kept = None if positions is None else positions[:MOST_INDICES]
    return Batch(digest, nbytes, complete, kept, samples)


def _hashed(found: Iterable[Tensor]) -> tuple[str, int, bool]:
    """The digest, the bytes there are, and whether all of them were hashed."""
    state, total, left = hashlib.blake2b(digest_size=DIGEST), 0, MOST_BYTES
    for tensor in found:
        dtype = str(tensor.dtype).removeprefix("torch.")
        state.update(f"{dtype}[{','.join(map(str, tensor.shape))}]".encode())
        size = tensor.numel() * tensor.element_size()
        taken = min(size, left)
        if taken:
            state.update(_bytes(tensor, -(-taken // tensor.element_size()))[:taken])
        total, left = total + size, left - taken
    return state.hexdigest(), total, total <= MOST_BYTES


@torch.no_grad()
def _bytes(tensor: Tensor, elements: int) -> bytes:
    """The first elements of a tensor as bytes; every machine torch runs on is little-endian."""
    plain = local(tensor.detach())
    plain = plain if plain.layout is torch.strided else plain.to_dense()
    plain = plain.resolve_conj().resolve_neg().reshape(-1)[:elements]
    return plain.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _positions(indices: Any) -> tuple[int, ...]:
    if isinstance(indices, Tensor):
        return tuple(map(int, indices.detach().reshape(-1).tolist()))
    return tuple(map(int, indices))


def count_of(indices: Any) -> int:
    """The number of samples that `Watch.batch` was told of."""
    return indices.numel() if isinstance(indices, Tensor) else len(indices)
