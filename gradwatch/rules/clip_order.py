"""The groups of `clip:` in the order in which a parameter is tried on them, and those that no parameter can reach."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from gradwatch.rules.rule_set import Clip, Group, RuleSet


def clip_groups(ruleset: RuleSet) -> tuple[Group, ...]:
    """The groups that `clip:` names, in the order of `groups:`: a parameter has the policy of the first it matches."""
    clip = ruleset.clip or Clip()
    return tuple(group for group in ruleset.groups if group.name in clip.groups)


def never_reached(ruleset: RuleSet) -> Iterator[tuple[Group, Group]]:
    """Groups of `clip:` that clip nothing whatever the model, each with one before it that takes its parameters."""
    before: list[Group] = []
    for group in clip_groups(ruleset):
        taken = [next((one for one in before if _takes(one, glob, group)), None) for glob in group.params]
        if taken and None not in taken:
            assert taken[0] is not None
            yield group, taken[0]
        before.append(group)


def _takes(first: Group, glob: str, group: Group) -> bool:
    """True if `first` surely matches every parameter that matches this glob of `group`."""
    if (first.min_ndim or 0) > (group.min_ndim or 0):
        return False
    # A glob without ? and [] that matches the text of another one matches all that this one matches.
    return any(not set("?[]") & set(wider) and fnmatchcase(glob, wider) for wider in first.params)
