"""Notes of `gradwatch rules check`: what is right in a rule file, and may surprise."""

from __future__ import annotations

from collections.abc import Iterator

from gradwatch.cli.rules.listing import placed
from gradwatch.records.columns import RANK_COLUMNS
from gradwatch.rules.clip_order import never_reached
from gradwatch.rules.rule_set import Rule, RuleSet

STAGGERED_RULES = (
    "each parameter or module is judged every {} steps, in turns (`every: 1`: all at each step): {}"
)
SAMPLES = "`for` counts samples, of which there is one in {every} steps{of_each}: {rules}; `every: 1` for as many steps"
NEVER_REACHED = (
    "clip group {name!r} ({place}) clips nothing: {first!r} stands before it under `groups:` and takes all its "
    "parameters; write {name!r} first"
)
MISSING_SINKS = (
    "no {}: `sinks:` takes the place of the default list, prometheus (/metrics), journal (all that report, explain "
    "and audit read) and log; name what is to stay"
)


def notes_on(ruleset: RuleSet) -> list[str]:
    """Everything that a reader of the file should know of its rules, its clip groups and its sinks."""
    return [*_staggered(ruleset), *_samples(ruleset), *_clip_groups(ruleset), *_sinks(ruleset)]


def _by_every(rules: list[Rule]) -> Iterator[tuple[int, list[Rule]]]:
    for every in sorted({rule.every for rule in rules}):
        yield every, [rule for rule in rules if rule.every == every]


def _staggered(ruleset: RuleSet) -> Iterator[str]:
    for every, rules in _by_every([rule for rule in ruleset.rules if rule.enabled and rule.staggered]):
        yield STAGGERED_RULES.format(every, ", ".join(rule.id for rule in rules))


def _samples(ruleset: RuleSet) -> Iterator[str]:
    """Rules whose `for` is so many times as many steps."""
    counting = [
        rule
        for rule in ruleset.rules
        if rule.enabled and rule.every > 1 and rule.for_ > 1 and rule.detect.columns[0] not in RANK_COLUMNS
    ]
    for every, rules in _by_every(counting):
        said = [f"{rule.id} `for: {rule.for_}` = {rule.for_ * every} steps" for rule in rules]
        of_each = " of each parameter or module" if any(rule.staggered for rule in rules) else ""
        yield SAMPLES.format(every=every, of_each=of_each, rules=", ".join(said))


def _clip_groups(ruleset: RuleSet) -> Iterator[str]:
    for group, first in never_reached(ruleset):
        place = placed(ruleset.origins.get(f"group:{group.name}", "default"))
        yield NEVER_REACHED.format(name=group.name, place=place, first=first.name)


def _sinks(ruleset: RuleSet) -> Iterator[str]:
    from gradwatch.session.settings import DEFAULT_SINKS

    if ruleset.sinks is not None:
        listed = {spec.kind for spec in ruleset.sinks}
        missing = [name for name in DEFAULT_SINKS if name not in listed]
        if missing:
            yield MISSING_SINKS.format(", no ".join(missing))
