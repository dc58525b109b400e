"""A backtest as JSON, for machines: every Event, every action, and on what each rule was judged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gradwatch.backtest.firings import alarms, by_rule, differences, per_thousand, quiet
from gradwatch.backtest.outcome import PlacedEvent, RulesOutcome, RunBacktest
from gradwatch.journal.entries import event_document
from gradwatch.runtime.json_numbers import json_ready

FORMAT = 1


def text(runs: Sequence[RunBacktest], rules: str, against: str | None, healthy: bool) -> str:
    """One JSON object; `rules` and `against` are the names of the rule files (None: what fired in the runs)."""
    steps = sum(one.steps for one in runs)
    sides = {
        "new": sum(alarms(one.outcome) for one in runs),
        "old": sum(alarms(one.compared) for one in runs),
    }
    document = {
        "format": FORMAT,
        "rules": rules,
        "against": against,
        "healthy": healthy,
        "steps": steps,
        "alarms": sides,
        "alarms_per_1000_steps": {side: per_thousand(count, steps) for side, count in sides.items()},
        "fired": [
            {"rule": one.rule, "severity": one.severity, "new": one.new, "old": one.old, "runs": one.runs}
            for one in by_rule(runs)
        ],
        "runs": [_run(one) for one in runs],
    }
    return json.dumps(json_ready(document), allow_nan=False) + "\n"


def _run(one: RunBacktest) -> dict[str, Any]:
    found = differences(one)
    return {
        "run": one.run,
        "folder": one.folder,
        "rank": one.rank,
        "ranks": list(one.ranks),
        "steps": one.steps,
        "same_events": found.same,
        "only_new": list(map(_event, found.only_new)),
        "only_old": list(map(_event, found.only_old)),
        "new": _outcome(one.outcome, one.steps),
        "old": _outcome(one.compared, one.steps),
        "notes": list(one.notes),
    }


def _outcome(outcome: RulesOutcome, steps: int) -> dict[str, Any]:
    stop = None if outcome.stop is None else dict(zip(("process", "step"), outcome.stop, strict=True))
    return {
        "alarms": alarms(outcome),
        "fired_within_incidents": dict(sorted(quiet(outcome).items())),
        "events": list(map(_event, outcome.events)),
        "actions": [line.to_dict(steps) for line in outcome.actions],
        "skipped_steps": outcome.skipped,
        "stop": stop,
        "steps_with_unknown_actions": outcome.unknown,
        "policies_on_elements": list(outcome.on_elements),
        "coverage": [asdict(one) for one in outcome.coverage],
    }


def _event(one: PlacedEvent) -> dict[str, Any]:
    return {"process": one.process, **event_document(one.event)}
