"""Notes of `gradwatch rules check`: what is right in a rule file, and may surprise."""

from __future__ import annotations

import os
from collections.abc import Iterator

from gradwatch.cli.rules.listing import placed
from gradwatch.records.columns import MODULE_COLUMNS, RANK_COLUMNS
from gradwatch.rules.clip_order import never_reached
from gradwatch.rules.rule_set import Rule, RuleSet

STAGGERED_RULES = (
    "each parameter or module is judged every {} steps, in turns (`every: 1`: all at each step): {}"
)
SAMPLES = "`for` counts samples, of which there is one in {every} steps{of_each}: {rules}; `every: 1` for as many steps"
WITHOUT_TAPS = "no data for {}: such columns are of tapped modules, and the file has no section `modules:`"
NEVER_REACHED = (
    "clip group {name!r} ({place}) clips nothing: {first!r} stands before it under `groups:` and takes all its "
    "parameters; write {name!r} first"
)
MISSING_SINKS = (
    "no {}: `sinks:` takes the place of the default list, prometheus (/metrics), journal (all that report, explain "
    "and audit read) and log; name what is to stay"
)


def notes_on(ruleset: RuleSet, path: str) -> list[str]:
    """Everything that a reader of the file should know of the rules written there, its clip groups and its sinks.

    Of what it only takes over from a pack nothing is said; where `path` is a pack, of all its rules.
    """
    rules = [rule for rule in ruleset.rules if rule.enabled and _is_written_in(path, rule, ruleset)]
    return [
        *_staggered(rules),
        *_samples(rules),
        *_without_taps(rules, ruleset),
        *_clip_groups(ruleset),
        *_sinks(ruleset),
    ]


def _is_written_in(path: str, rule: Rule, ruleset: RuleSet) -> bool:
    if not os.path.isfile(path):
        return True
    here = os.path.realpath(path)
    origin = ruleset.origins.get(rule.id, "").rpartition(":")[0]
    return os.path.realpath(origin) == here if origin else False


def _by_every(rules: list[Rule]) -> Iterator[tuple[int, list[Rule]]]:
    for every in sorted({rule.every for rule in rules}):
        yield every, [rule for rule in rules if rule.every == every]


def _staggered(written: list[Rule]) -> Iterator[str]:
    for every, rules in _by_every([rule for rule in written if rule.staggered]):
        yield STAGGERED_RULES.format(every, ", ".join(rule.id for rule in rules))


def _samples(written: list[Rule]) -> Iterator[str]:
    """Rules whose `for` is so many times as many steps."""
    counting = [
        rule
        for rule in written
        if rule.every > 1 and rule.for_ > 1 and rule.detect.columns[0] not in RANK_COLUMNS
    ]
    for every, rules in _by_every(counting):
        said = [f"{rule.id} `for: {rule.for_}` = {rule.for_ * every} steps" for rule in rules]
        of_each = " of each parameter or module" if any(rule.staggered for rule in rules) else ""
        yield SAMPLES.format(every=every, of_each=of_each, rules=", ".join(said))


def _without_taps(written: list[Rule], ruleset: RuleSet) -> Iterator[str]:
    """Rules on columns of modules, in a file that taps none."""
    idle = [rule.id for rule in written if not MODULE_COLUMNS.isdisjoint(rule.detect.columns)]
    if idle and ruleset.modules is None:
        yield WITHOUT_TAPS.format(", ".join(idle))


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
