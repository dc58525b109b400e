"""One step as all ranks agree on it, so that every one of them decides and acts alike.

It is what each rank measured of itself, joined with the facts that they have exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradwatch.capture.columns.pending_columns import ArrivedColumns
from gradwatch.capture.snapshot_assembly import Extras
from gradwatch.capture.window.window_norms import WindowNorms
from gradwatch.distributed import replica_divergence, sharded_norms
from gradwatch.distributed.all_reduce_layout import ReducedFacts
from gradwatch.distributed.noise_scale import noise_scale
from gradwatch.distributed.rank_membership import RankMembership
from gradwatch.records.columns import NOISE_SCALE


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """One step as every rank sees it; `own` where this rank's parameters stand in it.

    `may_act`: every rank decides the same from these numbers. `total_applied`: the norm of everything the
    optimizers of all ranks are about to use; None where this rank's own is that. `blind`: some rank took part
    without facts, so it learns nothing of this step, and neither may the others.
    """

    window: WindowNorms
    extras: Extras
    values: Mapping[str, float]
    own: Any
    may_act: bool
    total_applied: float | None = None
    blind: bool = False


def seen_by_all(
    reduced: ReducedFacts,
    membership: RankMembership,
    window: WindowNorms,
    extras: Extras,
    values: Mapping[str, float],
) -> Shared:
    """The step with the norms, columns and values of all ranks."""
    membership.learn_replicas(reduced)
    if reduced.layout.pooled:
        # Positions are among all ranks' parameters there, and parts of a gradient have no histogram of the whole.
        extras = replace(
            extras, params=(ArrivedColumns(sharded_norms.pooled_columns(reduced)),), histograms=None
        )
    extras, values = of_ranks(reduced, membership, window, extras, values)
    return replace(norms_seen_by_all(reduced, window, values), extras=extras)


def of_ranks(
    reduced: ReducedFacts,
    membership: RankMembership,
    window: WindowNorms,
    extras: Extras,
    values: Mapping[str, float],
) -> tuple[Extras, Mapping[str, float]]:
    """The columns and values of a step with those that are about ranks."""
    ranked = (
        (ArrivedColumns(replica_divergence.rank_columns(reduced, membership.replicas)),)
        if membership.ranked
        else ()
    )
    noise = _noise_scale(reduced, membership, window)
    return replace(extras, ranks=ranked), values if noise is None else {**values, NOISE_SCALE: noise}


def _noise_scale(reduced: ReducedFacts, membership: RankMembership, window: WindowNorms) -> float | None:
    """Gradient noise scale; None unless all ranks are replicas with a local norm of one backward each."""
    here = reduced.by_rank("site") > 0
    # One backward, and none left of an earlier one.
    norms = window.wait()[0]
    once = bool(((window.calls == 1) | ((window.calls == 0) & (norms == 0))).all() and window.calls.any())
    if not (membership.ranked and membership.replicas and once and here.all()) or reduced.layout.pooled:
        return None
    return noise_scale(reduced.by_rank("norm_local"), window.total())


def norms_seen_by_all(reduced: ReducedFacts, window: WindowNorms, values: Mapping[str, float]) -> Shared:
    """The step with the norms of all ranks, and without columns."""
    values = {**values, **reduced.averages}
    if reduced.head("rejected"):
        values["scaler_skip"] = 1.0
    if not reduced.layout.pooled:
        whole_window = replace(window, provisional=reduced.head("provisional") > 0)
        return Shared(whole_window, Extras(), values, slice(0, len(window.sites)), may_act=True)
    total = float(np.sqrt(reduced.column("applied").sum()))
    return Shared(
        sharded_norms.pooled_window(reduced, window), Extras(), values, reduced.layout.own, True, total
    )
