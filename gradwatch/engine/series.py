"""Series that a rule judges: one per site, one per group, or one for a total or a scalar.

Axes: S sites, I selected sites, K series.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors import Detector
from gradwatch.engine.judged_steps.staggered_reads import Staggering
from gradwatch.engine.selected_parameters import group_masks, selected
from gradwatch.records.columns import (
    COUNT_COLUMNS,
    RANK_COLUMNS,
    is_free,
    is_scalar,
)
from gradwatch.records.snapshot import BoolArray, Sites
from gradwatch.rules.rule_set import Rule, RuleSet

SeriesScope = Literal["param", "group", "total", "scalar"]
Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """K series that a rule judges. Two rules with equal `key` are about the same ones.

    `index[I]` the selected sites (None = all, in order); `owners[I]` the series each belongs to (None for
    one series per site); `names[K]` site or group names ("" for a total or a scalar); `depths[K]` the depth
    of the deepest site in each. `every` > 1: each of them is judged every so many steps, at its own of `phases[K]`
    (`gradwatch.engine.judged_steps.staggered_judging`), or all of them at step % every == 0 (None).
    """

    key: str
    column: str
    scope: SeriesScope
    names: tuple[str, ...]
    depths: NDArray[np.int64]
    index: Index | None = None
    owners: Index | None = None
    every: int = 1
    phases: Index | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def always(self) -> bool:
        """True if it has values even on steps on which only norms (and columns by rank) were measured."""
        return is_free(self.column) or self.column in COUNT_COLUMNS or self.column in RANK_COLUMNS

    def touched(self, sites: Sites, mask_S: BoolArray) -> BoolArray:
        """bool[K]: the series that contain a site of `mask_S` bool[S]; a scalar counts as made of all sites."""
        if self.scope == "scalar":
            return np.full(len(self), bool(mask_S.any()))
        chosen = mask_S if self.index is None else mask_S[self.index]
        if self.owners is None:
            return chosen
        return np.bincount(self.owners, weights=chosen, minlength=len(self)) > 0

    def members(self, sites: Sites) -> list[frozenset[str]]:
        """The names of the sites that each series is made of; those of a scalar are all parameters."""
        names = np.array(sites.names, object)
        if self.scope == "scalar":
            return [frozenset(names[np.array([kind == "param" for kind in sites.kinds], np.bool_)])]
        index = np.arange(len(names)) if self.index is None else self.index
        if self.owners is None:
            return [frozenset((name,)) for name in names[index]]
        return [frozenset(names[index[self.owners == k]]) for k in range(len(self))]

    def spread(self, mask_K: BoolArray, size: int) -> BoolArray:
        """bool[S]: the sites behind the series in `mask_K`; none for a total or a scalar."""
        sites = np.zeros(size, np.bool_)
        if self.scope == "param":
            sites[slice(None) if self.index is None else self.index] = mask_K
        elif self.scope == "group" and self.index is not None and self.owners is not None:
            sites[self.index[mask_K[self.owners]]] = True
        return sites


def series_of(rule: Rule, ruleset: RuleSet, sites: Sites, staggering: Staggering) -> Series:
    """The series that a rule judges among these sites, which carry labels; `staggering` has their phases."""
    detector: Detector = rule.detect
    column = detector.columns[0]
    if is_scalar(column):
        return Series(column, column, "scalar", ("",), np.zeros(1, np.int64))
    key = f"{column}/{rule.scope}" + "".join(
        f"/{name}={value}"
        for name, value in (
            ("groups", ",".join(rule.groups)),
            ("exclude", ",".join(rule.exclude)),
            ("min_ndim", getattr(detector, "min_ndim", "")),
            ("layers", getattr(detector, "layers", None)),
            ("depths", getattr(detector, "depths", None)),
            ("staggered", rule.every if rule.staggered else None),
            ("every", rule.every if column in RANK_COLUMNS and rule.every > 1 else None),
        )
        if value not in ("", None)
    )
    mask = selected(rule, ruleset, sites)
    if detector.in_depth_order:
        found = np.flatnonzero(mask)
        series = _per_site(key, column, found[np.argsort(sites.depths[found], kind="stable")], sites)
    elif rule.scope == "param":
        series = _per_site(key, column, np.flatnonzero(mask), sites)
    elif rule.scope == "total":
        series = _aggregate(key, column, "total", {"": mask} if mask.any() else {}, sites)
    else:
        series = _aggregate(key, column, "group", _by_group(rule, ruleset, sites, mask), sites)
    if column in RANK_COLUMNS:
        return replace(series, every=rule.every)
    if not rule.staggered:
        return series
    phases = staggering.phases(rule.every)
    at = phases if series.index is None else phases[series.index]
    return replace(series, every=rule.every, phases=at)


def _by_group(rule: Rule, ruleset: RuleSet, sites: Sites, mask: BoolArray) -> dict[str, BoolArray]:
    if rule.groups:
        masks = group_masks(ruleset.groups, sites)
        parts = {name: masks[name] & mask for name in rule.groups}
    else:
        label = np.array(sites.groups, dtype=object)
        parts = {name: (label == name) & mask for name in dict.fromkeys(sites.groups)}
    return {name: part for name, part in parts.items() if part.any()}


def _per_site(key: str, column: str, index: Index, sites: Sites) -> Series:
    names = tuple(sites.names[i] for i in index)
    everything = len(index) == len(sites) and bool((index == np.arange(len(sites))).all())
    return Series(key, column, "param", names, sites.depths[index], None if everything else index)


def _aggregate(
    key: str, column: str, scope: SeriesScope, parts: Mapping[str, BoolArray], sites: Sites
) -> Series:
    index = [np.flatnonzero(part) for part in parts.values()]
    return Series(
        key,
        column,
        scope,
        tuple(parts),
        np.array([sites.depths[part].max() for part in index], np.int64),
        np.concatenate(index) if index else np.zeros(0, np.intp),
        np.repeat(np.arange(len(index)), [len(part) for part in index]).astype(np.intp),
    )


def roots_of(sites: Sites) -> NDArray[np.float32]:
    """float32[S]: square roots of the numbers of elements; a norm divided by it is a root mean square."""
    return np.sqrt(np.maximum(sites.numels, 1)).astype(np.float32)
