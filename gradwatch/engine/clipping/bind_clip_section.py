"""The policies of `clip:` bound to the sites of one optimizer, and those that do not fit these sites.

Axes: S sites, I sites of one policy, K its series (a site each, or a group of them).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradwatch.engine.clipping.bound_policy import BoundPolicy, Index
from gradwatch.engine.clipping.clip_section_factors import NO_CLIPPING, Clipping
from gradwatch.engine.selected_parameters import group_masks
from gradwatch.errors import GradwatchError
from gradwatch.policies import AnyPolicy, ElementwisePolicy, Policy, find_policy
from gradwatch.records.snapshot import BoolArray, Sites
from gradwatch.rules.impossible_actions import TOTAL
from gradwatch.rules.rule_set import Clip, ClipPolicy, RuleSet


def bind_clipping(ruleset: RuleSet, sites: Sites) -> Clipping:
    """The policies of a rule file on these sites; a policy that covers none of them is left out."""
    clip = ruleset.clip
    if clip is None:
        return NO_CLIPPING
    max_norm = None
    found: list[BoundPolicy] = []
    elementwise: list[tuple[ElementwisePolicy, BoolArray]] = []
    for place, said, mask in _covered(clip, ruleset, sites):
        if find_policy(said.method) is None:
            continue  # reported by `rules_fit`, before anything is trained
        policy = make_policy(said)
        if place == TOTAL and said.method == "norm" and said.params.get("scope", "total") == "total":
            max_norm = float(said.params["max_norm"])
        elif isinstance(policy, ElementwisePolicy):
            mask = policy.covered(mask, sites)
            if mask.any():
                elementwise.append((policy, mask))
        elif isinstance(policy, Policy) and (mask := policy.covered(mask, sites)).any():
            found.append(_bound(place, policy, _scope(policy, said, place), mask, sites))
    return Clipping(max_norm, tuple(found), tuple(elementwise), clip.at, clip.from_step)


def needs_host(clip: Clip | None) -> bool:
    """True if a policy needs its norms on the host before the step; clips by norm and by element do not."""
    if clip is None or clip.at == "backward":
        return False
    said = (*clip.groups.values(), *(() if clip.total is None else (clip.total,)))
    classes = [find_policy(one.method) for one in said]
    return any(cls is not None and issubclass(cls, Policy) and not cls.works_on_device() for cls in classes)


def clips_only_total(clip: Clip | None) -> bool:
    """True if a file clips nothing, or only the total norm at the step, by a bound that is always the same."""
    if clip is None:
        return True
    total = clip.total
    bounded = total is None or (total.method == "norm" and total.params.get("scope", "total") == "total")
    return bounded and not clip.groups and clip.at == "step"


def make_policy(said: ClipPolicy) -> AnyPolicy:
    """The policy that a rule file names. Raises GradwatchError if there is no such method."""
    cls = find_policy(said.method)
    if cls is None:
        raise GradwatchError(f"no clip method {said.method!r} is registered")
    return cls(**{name: value for name, value in said.params.items() if name != "scope"})


def misfits(ruleset: RuleSet, sites: Sites) -> Iterator[tuple[str, str, str]]:
    """(place, reason, advice) for each part of `clip:` that does not fit these sites, which must carry labels."""
    for place, said, mask in _covered(ruleset.clip or Clip(), ruleset, sites):
        if find_policy(said.method) is None:
            continue
        policy = make_policy(said)
        if not mask.any():
            continue
        covered = policy.covered(mask, sites)
        series = int(covered.sum())
        if isinstance(policy, Policy):
            series = len(_bound(place, policy, _scope(policy, said, place), covered, sites).names)
        misfit = policy.misfit(int(covered.sum()), series)
        if misfit is not None:
            yield place, *misfit


def clip_groups_without_any(ruleset: RuleSet, sites: Sites) -> list[str]:
    """Groups that `clip:` names and of whose parameters it clips none: groups before them have them all."""
    clip = ruleset.clip
    if clip is None or len(clip.groups) < 2:
        return []
    places = [(place, mask) for place, _, mask in _covered(clip, ruleset, sites) if place != TOTAL]
    return [place.removeprefix("groups.") for place, mask in places if not mask.any()]


def _covered(clip: Clip, ruleset: RuleSet, sites: Sites) -> Iterator[tuple[str, ClipPolicy, BoolArray]]:
    """(place, what the file says there, bool[S] the parameters it covers).

    Of the groups named here a parameter is in one: the first of the file that matches it.
    """
    params = np.array([kind == "param" for kind in sites.kinds], np.bool_)
    if clip.total is not None:
        yield TOTAL, clip.total, params
    if clip.groups:
        left = params
        for name, mask in group_masks(ruleset.groups, sites).items():
            if name in clip.groups:
                yield f"groups.{name}", clip.groups[name], mask & left
                left = left & ~mask


def _scope(policy: Policy, said: ClipPolicy, place: str) -> str:
    if not policy.scoped:
        return "param"
    return str(said.params.get("scope") or ("total" if place == TOTAL else "group"))


def _bound(place: str, policy: Policy, scope: str, mask: BoolArray, sites: Sites) -> BoundPolicy:
    index = np.flatnonzero(mask)
    names: tuple[str, ...]
    owners: Index | None = None
    numels = sites.numels[index].astype(np.float64)
    if scope == "param":
        names = tuple(sites.names[k] for k in index)
    else:
        # Under `total`, scope group means each label group by itself.
        labels = [sites.groups[k] if place == TOTAL and scope == "group" else "" for k in index]
        names = tuple(dict.fromkeys(labels))
        place_of = {name: k for k, name in enumerate(names)}
        owners = np.array([place_of[label] for label in labels], np.intp)
        numels = np.bincount(owners, weights=numels, minlength=len(names)).astype(np.float64, copy=False)
    key = f"{place}|{scope}|" + ",".join(map(str, policy.state_key()))
    return BoundPolicy(place, key, policy, names, index, owners, np.sqrt(np.maximum(numels, 1.0)))
