"""A hash of what the model was called with: the same number again is the same batch again.

On the host BLAKE2 over every byte; of a large tensor over a number for each `ROW` of its 64-bit words: their sum, each
multiplied by an odd number chosen at random, modulo 2^64 (Lemire and Kaser 2014). On a device the sum of all words
modulo 2^64, each mixed with its place by the steps of SplitMix64 (Steele, Lea and Flood 2014), so that it need not be
waited for. All keep 53 bits, which a float holds exactly: of a million different batches some two are alike with a
chance of 1 in 18,000. Equal hashes are compared within one process only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.reading.async_copy import Number, on_host, one_number
from gradwatch.reading.foreach_norms import NO_FLOAT64
from gradwatch.taps.muted_forwards import batched

AT_ONCE = 1 << 22
"""Words on a device that are mixed at a time."""
GOLDEN, FIRST, SECOND = (
    number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
ROW, FEW_ROWS = 256, 16
FACTORS = np.random.default_rng(1).integers(-(1 << 63), 1 << 63, ROW, dtype=np.int64) | 1
_LOST = 11  # of 64 bits, for 53 to be left


def batch_hash(given: Sequence[Tensor]) -> Number | None:
    """The hash of these tensors in their order: type, shape and every byte.

    None without any element, and where the memory of one cannot be read (sparse, quantized, on the meta device, or
    by a subclass of Tensor).
    """
    if not any(tensor.numel() for tensor in given) or not all(map(_readable, given)):
        return None
    digest = hashlib.blake2b(digest_size=8)
    for tensor in given:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if on_host(tensor):
            for part in _parts(_bytes(tensor).numpy()):  # sync: CPU tensor
                digest.update(part.data)
    of_host = int.from_bytes(digest.digest(), "little", signed=True)
    of_devices = [_of_device(_bytes(tensor)) for tensor in given if not on_host(tensor)]
    if not of_devices:
        return float((of_host >> _LOST) + (1 << 52))
    total = of_devices[0] ^ of_host
    for one in of_devices[1:]:
        total = total * GOLDEN + one.to(total.device, non_blocking=True)
    return one_number((total >> _LOST).double() + float(1 << 52))


def _readable(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    return plain and tensor.device.type not in {"meta", *NO_FLOAT64} and not batched(tensor)


def _bytes(tensor: Tensor) -> Tensor:
    """uint8[N]: the memory of a tensor, in the order of its elements."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return plain.view(torch.uint8)


def _parts(content: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    """Arrays that are hashed for these bytes: themselves, or a number for each row of them and what is left."""
    rows = len(content) // (8 * ROW)
    if rows < FEW_ROWS:
        return (content,)
    whole = rows * 8 * ROW
    return content[:whole].view(np.int64).reshape(rows, ROW) @ FACTORS, content[whole:]


def _of_device(content: Tensor) -> Tensor:
    """int64: the sum of 64-bit words, each mixed with its place, as a 0-dim tensor."""
    spare = -content.numel() % 8
    if spare or content.storage_offset() % 8:  # a slice may begin within a word of its memory
        content = torch.cat([content, content.new_zeros(spare)])
    words = content.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    for start in range(0, words.numel(), AT_ONCE):
        part = words[start : start + AT_ONCE]
        mixed = torch.arange(start, start + part.numel(), device=part.device).mul_(GOLDEN).add_(part)
        for shift, factor in ((30, FIRST), (27, SECOND)):
            mixed.bitwise_xor_(mixed >> shift).mul_(factor)
        total = total + mixed.bitwise_xor_(mixed >> 31).sum()
    return total
