"""Which rules keep a bundle of their incidents, and whether that can be done here."""

from __future__ import annotations

from gradwatch.errors import AttachError, MissingDependencyError
from gradwatch.rules import Action, RuleSet
from gradwatch.sinks.extras import require

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


def check_snapshots(ruleset: RuleSet) -> None:
    """Raise `AttachError` where a rule keeps bundles and the library that writes their tensors is not installed."""
    try:
        if snapshots(ruleset):
            require("safetensors", "bundle")
    except MissingDependencyError as error:
        rules = ", ".join(repr(rule) for rule in snapshots(ruleset))
        raise AttachError(f"rule {rules}: the action 'snapshot' cannot be carried out: {error}") from None
