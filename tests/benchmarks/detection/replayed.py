"""Faults that are a function of what was recorded: applied to Snapshots of a healthy training, without training again.

What the optimizer would have made of such gradients (updates, moments, later losses) stays as it was recorded.

Axes: S sites.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from gradwatch.records.snapshot import BoolArray, Column, Snapshot

FIRST = 150
"""Places from here on: past every warm-up."""
_SCALED = ("max_abs", "min", "max", "mean", "std")
Change = Callable[[Snapshot, BoolArray, int, float | None], Snapshot]
"""Changes the Snapshot of the k-th step of a fault at the sites bool[S]; the last is the loop's own clip, if any."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A fault of `steps` steps; `of_layer`: the parameters of one module have it, and they are the culprits."""

    name: str
    change: Change
    steps: int = 1
    of_layer: bool = False


def scaled(factor_at: Callable[[int], float]) -> Change:
    """Gradients times a factor that depends on how long it has lasted."""

    def change(snapshot: Snapshot, sites: BoolArray, k: int, clip: float | None) -> Snapshot:
        factor = np.where(sites, factor_at(k), 1.0)
        with np.errstate(invalid="ignore"):
            norm = (snapshot.norm * factor).astype(np.float32)
        columns = dict(snapshot.columns)
        for name in _SCALED:
            if name in columns:
                with np.errstate(invalid="ignore"):
                    columns[name] = Column(columns[name].values * factor, columns[name].present)
        if factor_at(k) == 0 and "zero_fraction" in columns:
            zeros = np.where(sites, np.float32(1), columns["zero_fraction"].values)
            columns["zero_fraction"] = Column(zeros, columns["zero_fraction"].present)
        return _with_norms(replace(snapshot, columns=columns), norm, clip)

    return change


def _with_norms(snapshot: Snapshot, norm: NDArray[np.float32], clip: float | None) -> Snapshot:
    """The Snapshot with other norms, their total, and what the loop's own clip makes of it."""
    here = norm[snapshot.calls > 0].astype(np.float64)
    total = math.sqrt(float(np.dot(here, here)))
    share = 1.0 if clip is None or not total > clip else clip / (total + 1e-6)
    coef = snapshot.coef if clip is None else np.full_like(snapshot.coef, share)
    applied = total * (share if clip is not None else _share(snapshot))
    return replace(snapshot, norm=norm, total_norm=total, total_norm_applied=applied, coef=coef)


def _share(snapshot: Snapshot) -> float:
    return snapshot.total_norm_applied / snapshot.total_norm if snapshot.total_norm > 0 else 1.0


def of_scalar(name: str, factor: float) -> Change:
    """The loss or the learning rate times a factor."""

    def change(snapshot: Snapshot, sites: BoolArray, k: int, clip: float | None) -> Snapshot:
        value = snapshot.scalars.get(name, math.nan)
        return replace(snapshot, scalars={**snapshot.scalars, name: value * factor})

    return change


def _spikes(of_layer: bool) -> list[Replayed]:
    part = "layer" if of_layer else "total"
    return [
        Replayed(f"{part} spike × {factor}", scaled(lambda k, by=factor: by), 1, of_layer)  # type: ignore[misc]
        for factor in (3, 10, 30, 100)
    ]


def _falls(of_layer: bool) -> list[Replayed]:
    part = "layer" if of_layer else "total"
    return [
        Replayed(f"{part} falls × {factor:g}", scaled(lambda k, by=factor: by), 200, of_layer)  # type: ignore[misc]
        for factor in (1e-1, 1e-2, 1e-3, 1e-4, 0.0)
    ]


UNTIL = math.ceil(math.log(30) / math.log(1.01))
"""Steps of 1 % until a factor of 30."""
REPLAYED: Mapping[str, Replayed] = {
    one.name: one
    for one in (
        *_spikes(of_layer=True),
        *_spikes(of_layer=False),
        *_falls(of_layer=True),
        *_falls(of_layer=False),
        Replayed("layer drifts up 1 %/step", scaled(lambda k: 1.01**k), UNTIL, True),
        Replayed("layer drifts down 1 %/step", scaled(lambda k: 0.99**k), UNTIL, True),
        Replayed("total drifts up 1 %/step", scaled(lambda k: 1.01**k), UNTIL),
        Replayed("total drifts down 1 %/step", scaled(lambda k: 0.99**k), UNTIL),
        Replayed("NaN in a layer", scaled(lambda k: math.nan), 1, True),
        Replayed("Inf in a layer", scaled(lambda k: math.inf), 1, True),
        Replayed("loss spike × 10", of_scalar("loss", 10)),
        Replayed("loss spike × 100", of_scalar("loss", 100)),
        Replayed("loss rises × 2", of_scalar("loss", 2), 60),
        Replayed("loss rises × 3", of_scalar("loss", 3), 60),
        Replayed("learning rate × 10", of_scalar("lr", 10), 20),
        Replayed("learning rate × 100", of_scalar("lr", 100), 20),
        Replayed("learning rate 0", of_scalar("lr", 0), 20),
    )
}


@dataclass(frozen=True, slots=True)
class Placed:
    """A fault at a place of a recording: from that Snapshot on, in those of the same optimizer."""

    fault: Replayed
    place: int
    culprits: frozenset[str]

    def snapshots(self, recorded: Sequence[Snapshot]) -> list[Snapshot]:
        """The Snapshots from the place to the end of the fault, of all optimizers."""
        first = recorded[self.place]
        clip = own_clip(recorded)
        found = []
        for one in recorded[self.place :]:
            k = one.step - first.step
            if k >= self.fault.steps:
                break
            if one.optimizer == first.optimizer:
                names = one.sites.names
                sites = np.array([not self.culprits or name in self.culprits for name in names])
                one = self.fault.change(one, sites, k, clip)
            found.append(one)
        return found


def own_clip(recorded: Sequence[Snapshot]) -> float | None:
    """The norm to which the loop itself clips, as far as it has ever been seen to; None where it does not."""
    applied = [one.total_norm_applied for one in recorded if len(one.coef) and one.coef.min() < 0.999]
    return float(np.median(applied)) if applied else None


def layers(snapshot: Snapshot) -> dict[str, list[str]]:
    """The parameters of every module whose weight has a gradient now."""
    sites = snapshot.sites
    found: dict[str, list[str]] = {}
    for name in sites.names:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    weights = (snapshot.norm > 1e-12) & np.isfinite(snapshot.norm) & (snapshot.calls > 0) & (sites.ndims > 1)
    alive = {sites.names[k].rpartition(".")[0] for k in np.flatnonzero(weights)}
    return {module: names for module, names in found.items() if module in alive}


def placed(fault: Replayed, recorded: Sequence[Snapshot], random: Random) -> Placed | None:
    """The fault at a random place that leaves room for it; None where no place does."""
    last = recorded[-1].step
    for _ in range(20):
        place = random.randrange(len(recorded))
        one = recorded[place]
        if not FIRST <= one.step <= last - fault.steps or one.scalars.get("scaler_skip"):
            continue
        if not math.isfinite(one.total_norm) or one.total_norm < 1e-12:  # times a factor it would be the same
            continue
        found = layers(one) if fault.of_layer else {"": []}
        if found:
            return Placed(fault, place, frozenset(found[random.choice(sorted(found))]))
    return None
