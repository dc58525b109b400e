"""Checks of `gradwatch run` beyond the text of a rule file, reported at its place by `gradwatch rules check` too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gradwatch.errors import AttachError

if TYPE_CHECKING:
    from gradwatch.rules.rule_set import RuleSet


def load(source: str, run: str = "") -> RuleSet:
    """The rules of a file or pack. Raises `RuleFileError` with everything that `gradwatch run` refuses of it here."""
    from gradwatch.rules.files import load_rules

    return load_rules(source, run=run, refuse=refused)


def refused(ruleset: RuleSet) -> Iterator[tuple[str, str]]:
    """(place, reason) of bundles and sinks that cannot be had: libraries that are missing, options that do not fit."""
    from gradwatch.incidents.bundle.snapshot_rules import refused_snapshots
    from gradwatch.session.settings import Settings, sink_specs
    from gradwatch.sinks import make_sink

    for one in refused_snapshots(ruleset):
        yield f"{one.rule}.do", f"rule {one.rule!r}: {one.reason}"
    if ruleset.sinks is None:
        return
    for number, spec in enumerate(sink_specs(ruleset, Settings.resolve(env={}))):
        try:
            make_sink(spec.kind, spec.options)  # opens nothing
        except AttachError as error:
            yield f"sinks.{number}", str(error)
