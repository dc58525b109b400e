"""Selection of the parameters that get a series of their own.

A top-K that follows the norms makes new series for ever, and every series costs the Prometheus server memory
for hours. So the choice is sticky: who is in stays in, and `max_series` bounds how many there can ever be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from gradwatch.records.columns import CATALOGUE, COUNT_COLUMNS
from gradwatch.records.record import Record
from gradwatch.records.snapshot import Sites, Snapshot

ParamsMode = Literal["off", "worst", "match", "all"]
MODES: tuple[ParamsMode, ...] = get_args(ParamsMode)

OF_PARAMETERS = tuple(
    one.name for one in CATALOGUE if one.of == "parameter" and one.name not in COUNT_COLUMNS
)
"""Columns that a series may be of; `norm` is there at every step, the others where a Snapshot has them."""

REVIEW_STEPS = 100
"""Steps between two looks at whether a series is much worse than those that have a seat."""
_MUCH_WORSE = math.log(2.0)
_NEWCOMERS = 5
"""Parameters one step may bring in because their gradient is not finite: the deepest, the first causes."""


@dataclass(frozen=True, slots=True)
class ParameterChoice:
    """Options of a sink with series of single parameters; ValueError where they are no choice. See `Selection`."""

    params: ParamsMode = "off"
    top_k: int = 20
    max_series: int = 200
    match: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.params not in MODES:
            raise ValueError(f"params: {self.params!r} is not one of {', '.join(MODES)}")
        if self.top_k < 0 or self.max_series < 0:
            raise ValueError("top_k and max_series cannot be negative")
        if self.params == "match" and not self.match:
            raise ValueError("params: match needs globs in `match`")


class Chosen(NamedTuple):
    """The parameters exported at present: `indices` into `sites`, and how many found no room."""

    sites: Sites
    indices: NDArray[np.intp]
    dropped: int


class SeriesBudget:
    """Budget of per-parameter series that one sink may still create, over all optimizers and for its whole life."""

    def __init__(self, max_series: int) -> None:
        self.left = max_series

    def take(self) -> bool:
        """Use up one series; False when there is none left."""
        if self.left <= 0:
            return False
        self.left -= 1
        return True

    def give(self, count: int) -> None:
        """Free so many series again: those of an optimizer that is shown no more."""
        self.left += count


class Selection:
    """The choice for one optimizer, by mode:

    `off` none · `all` every series · `match` those whose name matches a glob · `worst` `top_k` seats, half of
    them for the largest norms and half for the smallest rms among weight matrices (biases before a
    normalisation are rightly near zero), and beside them whoever a firing rule names or has a non-finite
    gradient. One seat a side may change hands per 100 steps, for a series at least twice as far out.
    """

    def __init__(self, mode: ParamsMode, top_k: int, match: Sequence[str], budget: SeriesBudget) -> None:
        self.chosen: Chosen | None = None
        self._mode, self._top_k, self._match, self._budget = mode, top_k, tuple(match), budget
        self._sites: Sites | None = None
        self._index: dict[str, int] = {}
        self._admitted: set[str] = set()
        self._refused: set[str] = set()
        self._named: dict[str, None] = {}
        self._seats: dict[str, list[str]] = {"largest": [], "smallest": []}
        self._steps = 0

    @property
    def admitted(self) -> int:
        """Number of series that this choice has taken from the budget so far."""
        return len(self._admitted)

    def update(self, record: Record) -> None:
        """Take one step into account; costs next to nothing unless something happened or a review is due."""
        snapshot, changed = record.snapshot, False
        if snapshot.sites is not self._sites:
            self._adopt(snapshot.sites)
            changed = True
        if self._mode == "worst":
            changed |= self._admit_named(record)
            # Once more soon after the start, in case the very first steps had few gradients or none.
            if self._steps % REVIEW_STEPS == 0 or self._steps == REVIEW_STEPS // 10:
                changed |= self._review(snapshot)
            self._steps += 1
        if changed:
            self._publish(snapshot.sites)

    def update_all(self, records: Sequence[Record]) -> None:
        """Update by steps of one optimizer with finite norms and without events, as `update` of each would."""
        ahead = self._steps % REVIEW_STEPS
        reviewed = ahead == 0 or ahead + len(records) > REVIEW_STEPS or self._steps <= REVIEW_STEPS // 10
        if reviewed or any(record.snapshot.sites is not self._sites for record in records):
            for record in records:
                self.update(record)
        else:
            self._steps += len(records) if self._mode == "worst" else 0

    def _adopt(self, sites: Sites) -> None:
        self._sites = sites
        self._index = {name: i for i, name in enumerate(sites.names) if sites.kinds[i] == "param"}
        self._refused.clear()
        self._named = {name: None for name in self._named if name in self._index}
        for side, names in self._seats.items():
            self._seats[side] = [name for name in names if name in self._index]
        if self._mode in ("match", "all"):
            wanted = np.ones(len(sites), bool) if self._mode == "all" else _matching(sites, self._match)
            self._named = {}
            for name, i in self._index.items():
                if wanted[i] and self._admit(name):
                    self._named[name] = None

    def _admit(self, name: str) -> bool:
        if name in self._admitted:
            return True
        if self._budget.take():
            self._admitted.add(name)
            return True
        self._refused.add(name)
        return False

    def _admit_named(self, record: Record) -> bool:
        if not record.verdict.events and math.isfinite(record.snapshot.total_norm):
            return False
        wanted = [
            name
            for event in record.verdict.events
            if event.kind in ("firing", "repeat")
            for name in (*event.sites, event.first_cause)
        ]
        if not math.isfinite(record.snapshot.total_norm):
            wanted += _deepest_nonfinite(record.snapshot)
        refused = len(self._refused)
        fresh = [name for name in wanted if name in self._index and name not in self._named]
        admitted = [name for name in fresh if self._admit(name)]
        self._named.update(dict.fromkeys(admitted))
        return bool(admitted) or len(self._refused) != refused

    def _review(self, snapshot: Snapshot) -> bool:
        """Fill free seats, then let the furthest out take the seat of the least far out."""
        return any(
            [
                self._reseat("largest", self._top_k - self._top_k // 2, _largeness(snapshot)),
                self._reseat("smallest", self._top_k // 2, -_smallness(snapshot)),
            ]
        )

    def _reseat(self, side: str, seats: int, badness: NDArray[np.float64]) -> bool:
        """`badness[S]`: larger is further out, −inf is never selected."""
        seated, changed = self._seats[side], False
        held = {self._index[name] for name in seated}
        furthest = np.argsort(badness, kind="stable")[::-1][: seats + len(held)]
        queue = [int(i) for i in furthest if badness[i] > -np.inf and int(i) not in held]
        names = self._sites.names if self._sites is not None else ()
        while queue and len(seated) < seats and self._admit(names[queue[0]]):
            seated.append(names[queue.pop(0)])
            changed = True
        if changed or not queue or not seated:
            return changed
        least = min(seated, key=lambda name: badness[self._index[name]])
        if badness[queue[0]] < badness[self._index[least]] + _MUCH_WORSE or not self._admit(names[queue[0]]):
            return False
        seated[seated.index(least)] = names[queue[0]]
        return True

    def _publish(self, sites: Sites) -> None:
        exported = {*self._named, *self._seats["largest"], *self._seats["smallest"]}
        indices = sorted(self._index[name] for name in exported)
        self.chosen = Chosen(sites, np.array(indices, np.intp), len(self._refused - exported))


def _matching(sites: Sites, globs: Iterable[str]) -> NDArray[np.bool_]:
    wanted = np.zeros(len(sites), bool)
    for glob in globs:
        wanted |= sites.select(glob)
    return wanted


def _measured(snapshot: Snapshot) -> NDArray[np.bool_]:
    """bool[S]: parameters with a finite gradient this step."""
    is_param = np.fromiter((kind == "param" for kind in snapshot.sites.kinds), bool, len(snapshot.sites))
    return is_param & (snapshot.calls > 0) & np.isfinite(snapshot.norm)


def _log(values: NDArray[np.floating]) -> NDArray[np.float64]:
    return np.log(np.maximum(values.astype(np.float64), 1e-45))


def _largeness(snapshot: Snapshot) -> NDArray[np.float64]:
    """float64[S]: ln norm, −inf where there is none."""
    with np.errstate(invalid="ignore"):
        return np.where(_measured(snapshot), _log(snapshot.norm), -np.inf)


def _smallness(snapshot: Snapshot) -> NDArray[np.float64]:
    """float64[S]: ln rms of weight matrices, +inf elsewhere."""
    rms = snapshot.norm / np.sqrt(np.maximum(snapshot.sites.numels, 1))
    with np.errstate(invalid="ignore"):
        return np.where(_measured(snapshot) & (snapshot.sites.ndims >= 2), _log(rms), np.inf)


def _deepest_nonfinite(snapshot: Snapshot) -> list[str]:
    broken = np.flatnonzero((snapshot.calls > 0) & ~np.isfinite(snapshot.norm))
    deepest = broken[np.argsort(snapshot.sites.depths[broken], kind="stable")[::-1]][:_NEWCOMERS]
    return [snapshot.sites.names[i] for i in deepest]
