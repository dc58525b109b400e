"""The histogram of one tensor: how many of its elements have a magnitude in each octave."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LOWEST, BINS = -48, 64
"""Bin k counts the elements with 2^(LOWEST + k) <= magnitude < 2^(LOWEST + k + 1): the octaves from 2^-48 to 2^16."""


class Histogram(NamedTuple):
    """Elements of one tensor: exact zeros, by octave, NaN and Inf. Together they are all of its elements.

    `counts[BINS]`: the first bin holds smaller magnitudes too, the last one larger ones.
    """

    zeros: int
    counts: NDArray[np.int64]
    nonfinite: int


def by_exponent(exponents: NDArray[np.int64], zeros: int, shift: int = 0) -> Histogram:
    """The histogram of elements of which `exponents` counts the exponent fields of their IEEE 754 bits.

    `exponents` has 256 fields for float32 and 2,048 for float64. `zeros` are among those of field 0. Magnitudes
    are divided by 2^shift.
    """
    counts = np.zeros(BINS, np.int64)
    octaves = np.arange(len(exponents) - 1) - (len(exponents) // 2 - 1) - shift
    np.add.at(counts, np.clip(octaves - LOWEST, 0, BINS - 1), exponents[:-1])
    counts[np.clip(octaves[0] - LOWEST, 0, BINS - 1)] -= zeros
    return Histogram(zeros, counts, int(exponents[-1]))


def with_zeros(found: Histogram) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(counts[BINS + 1], edges[BINS + 2]) over log2 of the magnitude; exact zeros stand in the first bin."""
    return np.concatenate([[found.zeros], found.counts]), np.arange(LOWEST - 1, LOWEST + BINS + 1)
