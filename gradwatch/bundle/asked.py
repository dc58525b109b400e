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


def unavailable(ruleset: RuleSet) -> list[str]:
    """Why bundles cannot be kept here, one sentence for each of `snapshots`; torch is not needed to tell."""
    asked = snapshots(ruleset)
    try:
        if asked:
            require("safetensors", "bundle")
    except MissingDependencyError as error:
        return [f"rule {rule!r}: action 'snapshot' cannot be carried out: {error}" for rule in asked]
    return []


def check_snapshots(ruleset: RuleSet) -> None:
    """Raise `AttachError` where a rule keeps bundles and the library that writes their tensors is not installed."""
    problems = unavailable(ruleset)
    if problems:
        raise AttachError("\n".join(problems))
