"""Rules that keep a bundle of their incidents, and the check that this can be done here."""

from __future__ import annotations

from gradwatch.engine.unsupported_rules import Refusal
from gradwatch.errors import MissingDependencyError
from gradwatch.rules.rule_set import Action, RuleSet
from gradwatch.runtime.optional_dependencies import require

SNAPSHOT = "snapshot"


def snapshots(ruleset: RuleSet) -> dict[str, Action]:
    """The `snapshot` of every rule that may order it, by rule id."""
    return {
        rule.id: action
        for rule in ruleset.rules
        if rule.enabled and rule.mode == "act"
        for action in rule.do
        if action.name == SNAPSHOT
    }


def refused_snapshots(ruleset: RuleSet) -> list[Refusal]:
    """The reason why bundles cannot be kept here, for each of `snapshots`; torch is not needed to tell."""
    asked = snapshots(ruleset)
    try:
        if asked:
            require("safetensors", "bundle")
    except MissingDependencyError as error:
        reason = f"action 'snapshot' cannot be carried out: {error}"
        return [Refusal(reason, rule=rule, actions=frozenset({SNAPSHOT})) for rule in asked]
    return []
