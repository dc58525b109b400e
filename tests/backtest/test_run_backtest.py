"""A backtest by the rules of a run gives what fired in it, byte for byte; what cannot be known of others is said."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from gradwatch.backtest.run_backtest import backtest_run
from gradwatch.journal import EventsEntry
from gradwatch.records.event import Event
from tests.backtest.trainings import KINDS, Recorded


def in_bytes(events: Iterable[Event]) -> list[bytes]:
    """Each Event as a journal has it: NaN is NaN there."""
    return [EventsEntry(0, one.optimizer, one.step, 0.0, (one,)).encode() for one in events]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_rules_of_the_run_give_its_events(kind: Callable[[Path], Recorded], tmp_path: Path) -> None:
    """Every field of every Event, in the order of their steps, as the sinks were given them."""
    recorded = kind(tmp_path)
    records = sorted(recorded.kept.records, key=lambda record: record.wall_time)
    live = [event for record in records for event in record.verdict.events]
    found = backtest_run(recorded.folder, recorded.rules)
    assert len(live) > 1
    assert in_bytes(one.event for one in found.outcome.events) == in_bytes(live)
    assert in_bytes(one.event for one in found.live.events) == in_bytes(live)
    assert found.notes == ()
