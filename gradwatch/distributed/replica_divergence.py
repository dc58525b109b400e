"""Replicas that no longer agree: hashes of their norms compared over ranks, and ranks that failed to act as decided.

Axes: K parameters of this rank's capture, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gradwatch.capture.window.window_norms import Norms
from gradwatch.distributed.all_reduce_layout import Layout, ReducedFacts, Vector
from gradwatch.errors import GradwatchError
from gradwatch.records.snapshot import Column

RANK_NORM, RANK_MISMATCH, RANK_SITE = "rank_norm", "rank_mismatch", "rank_site"


class DivergedError(GradwatchError):
    """Ranks that should hold the same parameters no longer do; the message says which, since when, and what helps."""


def by(reduced: ReducedFacts) -> DivergedError:
    """The error every rank reports when it has learned of it: with the first exchange after that step."""
    ranks = ", ".join(map(str, np.flatnonzero(reduced.diverged)))
    step = int(reduced.by_rank("parted").max()) - 1
    return DivergedError(
        f"rank {ranks} failed to carry out the action of step {step}, while the other ranks did: the replicas "
        "diverge from this step on; restore a checkpoint on all ranks, or broadcast another rank's parameters"
    )


def unjudged(reduced: ReducedFacts) -> DivergedError:
    """The error every rank reports where one of them has missed steps on which the others may have acted."""
    ranks = [f"rank {rank} ({int(reduced.missed[rank])})" for rank in np.flatnonzero(reduced.missed)]
    return DivergedError(
        f"{', '.join(ranks)} did not judge some steps since the ranks last exchanged data: if another rank clipped or "
        "skipped one of them, the replicas diverge from there on; with `every: 1` at `rank-mismatch` the ranks "
        "exchange at each step, and no rank acts on a step that another one has not measured"
    )


def unsent(rank: int, step: int) -> DivergedError:
    """Said by the rank itself, where the ranks exchange nothing."""
    return DivergedError(
        f"rank {rank} failed to carry out the action of step {step}, and the other ranks cannot be notified, "
        "because no rule exchanges data between ranks (`rank_mismatch` would); its parameters may differ from "
        "the other ranks' from this step on: restore a checkpoint on all ranks"
    )


def compare(layout: Layout, vector: Vector, raw: Sequence[Norms]) -> None:
    """Write a hash of the norms of each parameter at these T steps, and one of all, into this rank's vector."""
    whole, short = hashes(raw)
    layout.part(vector, "compared")[layout.rank] = len(raw)
    layout.part(vector, "checksum")[layout.rank] = whole
    layout.part(vector, "hash")[layout.own] = short
    layout.part(vector, "hash_squared")[layout.own] = np.square(short)


def hashes(raw: Sequence[Norms]) -> tuple[float, Vector]:
    """(52 bits of all norms, 16 bits of those of each parameter at all T steps), exact as float64.

    Equal for equal bits, any NaN being equal.
    """
    norms = np.stack(raw)
    clean = np.where(np.isnan(norms), np.nan, norms)
    by_step = _mixed(clean.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    times = np.arange(1, 2 * len(raw), 2, dtype=np.uint64)
    mixed = by_step[0] if len(raw) == 1 else _mixed((by_step * times[:, None]).sum(axis=0, dtype=np.uint64))
    places = np.arange(1, 2 * len(mixed), 2, dtype=np.uint64)
    whole = int((mixed * places).sum(dtype=np.uint64)) >> 12
    return float(whole), (mixed >> np.uint64(48)).astype(np.float64)


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed: NDArray[np.uint64] = (bits ^ (bits >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return mixed


def rank_columns(reduced: ReducedFacts, replicas: bool) -> dict[str, Column]:
    """Columns by rank, float[W]; `replicas`: their reduced norms are meant to be the same bits.

    Norms are not compared where one rank has more of them than another, which has missed steps, or others had run out
    of batches.
    """
    norm, place = reduced.by_rank("norm_local"), reduced.by_rank("site")
    columns = {}
    if (place > 0).any():
        columns[RANK_NORM] = Column(norm, place > 0)
        columns[RANK_SITE] = Column(place - 1, place > 0)
    if replicas and reduced.comparable:
        # A rank that did not clip or skip with the others holds other weights, whatever its reduced gradients say.
        odd, differing = deviating(reduced) | reduced.diverged, differing_sites(reduced)
        counted = max(1, len(differing)) if odd.any() else 0
        columns[RANK_MISMATCH] = Column(np.where(odd, float(counted), 0.0), np.ones(len(odd), bool))
        if len(differing):
            named = np.where(odd, float(differing[-1]), place - 1)
            columns[RANK_SITE] = Column(named, (place > 0) | odd)
    return columns


def agreeing(reduced: ReducedFacts) -> bool:
    """True if all ranks have the same norms, and some: then they are replicas."""
    return reduced.comparable and not deviating(reduced).any()


def deviating(reduced: ReducedFacts) -> NDArray[np.bool_]:
    """bool[W]: the ranks whose norms are not those of the majority; all of them where there is none."""
    checksums = reduced.by_rank("checksum")
    kinds, counts = np.unique(checksums, return_counts=True)
    if len(kinds) == 1:
        return np.zeros(len(checksums), bool)
    if 2 * counts.max() <= len(checksums):
        return np.ones(len(checksums), bool)
    odd: NDArray[np.bool_] = checksums != kinds[counts.argmax()]
    return odd


def differing_sites(reduced: ReducedFacts) -> NDArray[np.intp]:
    """The sites whose hashes are not equal on all ranks: by Cauchy-Schwarz, W·Σh² = (Σh)² only if they are."""
    total = reduced.column("hash").astype(np.int64)
    return np.flatnonzero(
        reduced.layout.world * reduced.column("hash_squared").astype(np.int64) != total * total
    )
