"""Conditions bound to the rules that judge some sites, and the conditions that can never be known there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from gradwatch.engine.conditions.bound_condition import BoundCondition
from gradwatch.rules.condition import When, in_order, rules_below

NOT_BOUND = "its condition can never be known to hold: no data here for {}"


def conditions_of(rules: Mapping[str, When], numbers: Mapping[str, int]) -> Iterator[BoundCondition]:
    """The conditions of `rules`, each after those that it names; `numbers` gives the number of each rule bound here."""
    conditions = {rule: when.condition for rule, when in rules.items()}
    for rule in in_order(conditions):
        named = {one: numbers[one] for one in conditions[rule].rules() if one in numbers}
        below = frozenset(numbers[one] for one in rules_below(conditions, rule) if one in numbers)
        yield BoundCondition(numbers[rule], conditions[rule], named, below)


def never_known(conditions: Mapping[str, When], bound: AbstractSet[str]) -> dict[str, str]:
    """By rule id, the reason why its condition can never be known if only the rules in `bound` judge anything.

    `bound` may hold ids of `conditions`: one that can never be known makes those that need it unknown too.
    """
    found: dict[str, str] = {}
    for rule in in_order({rule: when.condition for rule, when in conditions.items()}):
        condition = conditions[rule].condition
        if not condition.possible((bound - found.keys()).__contains__):
            missing = [repr(one) for one in condition.rules() if one not in bound or one in found]
            found[rule] = NOT_BOUND.format(" and ".join(missing))
    return found
