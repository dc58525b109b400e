"""Parameters, modules and ranks (sites) that globs, groups and rules select.

Axes: S sites.
"""

from __future__ import annotations

import numpy as np

from gradwatch.records.columns import MODULE_COLUMNS, RANK_COLUMNS
from gradwatch.records.snapshot import BoolArray, Sites
from gradwatch.rules.rule_set import Group, Rule, RuleSet


def group_masks(groups: tuple[Group, ...], sites: Sites) -> dict[str, BoolArray]:
    """bool[S] for each group: every site that matches, whatever its label."""
    parameter = np.array([kind == "param" for kind in sites.kinds], np.bool_)
    masks = {}
    for group in groups:
        mask = matching(sites, group.params)
        if group.min_ndim is not None:
            mask &= parameter & (sites.ndims >= group.min_ndim)
        masks[group.name] = mask
    return masks


def labels(groups: tuple[Group, ...], sites: Sites) -> tuple[str, ...]:
    """The label of each of S sites: the name of the first group that matches it, "" if none does."""
    label = np.full(len(sites), "", dtype=object)
    for name, mask in reversed(group_masks(groups, sites).items()):
        label[mask] = name
    return tuple(label.tolist())


def matching(sites: Sites, globs: tuple[str, ...]) -> BoolArray:
    """bool[S]: the sites whose name matches at least one of the globs."""
    mask = np.zeros(len(sites), np.bool_)
    for glob in globs:
        mask |= sites.select(glob)
    return mask


def selected(rule: Rule, ruleset: RuleSet, sites: Sites) -> BoolArray:
    """bool[S]: the sites that a rule is about, by its `groups` and `exclude`, and by what its kind can judge."""
    column = rule.detect.columns[0]
    wanted = "module" if column in MODULE_COLUMNS else "rank" if column in RANK_COLUMNS else "param"
    mask = np.array([kind == wanted for kind in sites.kinds], np.bool_)
    if rule.groups:
        masks = group_masks(ruleset.groups, sites)
        mask &= np.logical_or.reduce([masks[name] for name in rule.groups])
    mask &= ~matching(sites, rule.exclude)
    if wanted == "param":
        mask &= sites.ndims >= getattr(rule.detect, "min_ndim", 0)
    layers, depths = getattr(rule.detect, "layers", None), getattr(rule.detect, "depths", None)
    if layers is not None:
        mask &= sites.select(layers)
    if depths is not None:
        mask &= np.isin(sites.depths, depths)
    return mask
