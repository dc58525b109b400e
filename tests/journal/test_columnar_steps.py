"""The scalars of many steps, encoded and decoded."""

from __future__ import annotations

import pytest

from gradwatch.journal.columnar_steps import StepsEntry, decode_steps, step_row
from gradwatch.journal.payload import decode_payload
from gradwatch.records.decision import Decision, Order
from tests.support.sink_records import make_record, make_sites

DECISIONS = [
    Decision(),
    Decision(skip=True),
    Decision(stop=True),
    Decision(max_norm=1.5),
    Decision(orders=frozenset({Order("r", "clip", False, "s", 1, 2.0, 1.0, 0.5)})),
]


@pytest.mark.parametrize("provisional", [False, True])
def test_every_decision_comes_back(provisional: bool) -> None:
    """Each by itself, between steps at which nothing was decided."""
    records = [
        make_record(make_sites(2), step=step, decision=decision, provisional=provisional)
        for step, decision in enumerate(each for one in DECISIONS for each in (one, Decision()))
    ]
    entry = StepsEntry(0, 0, [step_row(record, {}) for record in records])
    found = decode_steps(decode_payload(entry.encode())).rows
    for row, record in zip(found, records, strict=True):
        for name in ("skip", "stop", "max_norm", "orders"):
            assert getattr(row.decision, name) == getattr(record.decision, name)
        assert row.provisional == provisional
        assert row._replace(decision=record.decision) == step_row(record, {})
