"""Parameters of each rank: every rank publishes its table, and ranks with equal tables are replicas."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradwatch.capture.parameter_shards import ShardPlacement
from gradwatch.records.snapshot import Sites


def table(sites: Sites) -> list[list[Any]]:
    """Names, sizes, dimensions and depths of a rank's parameters, whole, for the others to read."""
    return [
        list(sites.names),
        sites.numels.tolist(),  # sync: numpy
        sites.ndims.tolist(),  # sync: numpy
        sites.depths.tolist(),  # sync: numpy
    ]


def identity(sites: Sites, held: Sequence[ShardPlacement], stages: tuple[int, ...]) -> str:
    """A digest that ranks have in common which hold the same parameters, whole or in parts.

    Equal names and sizes are not enough: two stages of a pipeline may call their layers alike. Ranks that shard their
    parameters over different ranks hold different ones, and so do those that take different `stages`. `held` is empty
    where DDP averages over ranks what each of them may have cut up further.
    """
    places = [None if one.ranks is None else sorted(one.ranks) for one in held]
    manifest = [*table(sites)[:3], places, stages]
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()[:32]


def joined(tables: Sequence[Sequence[Sequence[Any]]]) -> Sites:
    """The parameters of all tables; a name that several of them use is told apart by a number."""
    names: dict[str, None] = {}
    for number, table in enumerate(tables):
        for name in table[0]:
            names[name if name not in names else f"{name}@{number}"] = None
    numels, ndims, depths = (np.array([x for t in tables for x in t[k]], np.int64) for k in (1, 2, 3))
    return Sites(tuple(names), ("param",) * len(names), numels, ndims, depths)
