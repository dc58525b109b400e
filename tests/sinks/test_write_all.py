"""Several Records handed over in one call against one after the other: sinks and totals come to the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.account.never_judged import StaggeredSeries
from gradwatch.account.rules_without_data import Reads
from gradwatch.account.session_counts import SessionCounts
from gradwatch.checkpoint.health_tracker import CheckpointHealthTracker
from gradwatch.engine.judged_steps.staggered_judging import Turn
from gradwatch.records.decision import Decision, Order
from gradwatch.records.record import Record
from gradwatch.records.snapshot import Column, Sites
from gradwatch.records.verdict import Verdict
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.circuit_breaker import Breaker
from gradwatch.sinks.parameter_selection import MODES, Selection, SeriesBudget
from gradwatch.sinks.prometheus.exposition import render
from gradwatch.sinks.prometheus.metric_values import families
from gradwatch.sinks.prometheus.sink import PrometheusSink
from gradwatch.sinks.registry import Sink
from tests.support.examples import examples
from tests.support.kept import Kept
from tests.support.sink_records import make_record, make_run, make_sites

SITES = make_sites(6)
CLIPPED = frozenset({Order("clip", "clip", False, "", 6, 2.0, 1.0, 0.5)})


def records_of(seed: int, count: int, sites: Sites = SITES) -> list[Record]:
    """Steps on which nothing happened: finite, some clipped by the loop, with values observed and columns at times."""
    rng = np.random.default_rng(seed)
    found = []
    for step in range(count):
        scalars = {"lr": 1e-3, **({"loss": float(rng.normal())} if rng.random() < 0.8 else {})}
        if rng.random() < 0.05:
            scalars["reward"] = float(rng.normal())
        column = Column(rng.random(6).astype(np.float32), rng.random(6) < 0.5)
        found.append(
            make_record(
                sites,
                np.exp(rng.normal(0, 2, 6)),
                step=step,
                applied=float(rng.choice([1.0, 0.5])),
                overhead=float(rng.exponential(1e-4)),
                step_seconds=None if step == 0 else float(rng.exponential(0.01)),
                firing=["spike"] if rng.random() < 0.1 else [],
                columns={"zero_fraction": column} if rng.random() < 0.2 else None,
                decision=Decision(max_norm=1.0, orders=CLIPPED) if rng.random() < 0.1 else None,
                scalars=scalars,
            )
        )
    return found


def turn_of(step: int) -> dict[str, Turn]:
    """Two of the six series are in turn at a step."""
    mask = np.arange(6) % 3 == step % 3
    positions = np.flatnonzero(mask)
    return {"dead": Turn(mask, positions, positions)}


def cuts(seed: int, records: list[Record]) -> list[list[Record]]:
    """The same in pieces."""
    rng, found, at = np.random.default_rng(seed), [], 0
    while at < len(records):
        size = int(rng.integers(1, 33))
        found.append(records[at : at + size])
        at += size
    return found


@settings(max_examples=examples(15))
@given(st.integers(0, 10**6), st.sampled_from(["worst", "all", "off"]))
def test_a_scrape_shows_the_same(seed: int, params: Any) -> None:
    """Counters, histograms, averages, the choice of parameters and their columns: to the byte."""
    told = []
    for together in (False, True):
        sink = PrometheusSink(listen=None, params=params, top_k=2, clock=lambda: 5.0)
        sink.open(make_run(Path("never")), Health())
        records = records_of(seed, 260)
        for piece in cuts(seed, records) if together else ():
            sink.write_all(piece)
        for record in () if together else records:
            sink.write(record)
        told.append(render(families(sink.view())))
    assert told[0] == told[1]


@settings(max_examples=examples(15))
@given(st.integers(0, 10**6), st.sampled_from(MODES))
def test_the_choice_of_parameters_is_the_same(seed: int, mode: Any) -> None:
    """Reviews fall on the same steps, whatever the pieces."""
    chosen = []
    for together in (False, True):
        selection = Selection(mode, 2, ("*",), SeriesBudget(50))
        records = records_of(seed, 320)
        for piece in cuts(seed, records) if together else [[record] for record in records]:
            selection.update_all(piece) if together else selection.update(piece[0])
        found = selection.chosen
        chosen.append(None if found is None else (found.indices.tolist(), found.dropped, selection.admitted))
    assert chosen[0] == chosen[1]


@settings(max_examples=examples(15))
@given(st.integers(0, 10**6))
def test_the_account_counts_the_same(seed: int) -> None:
    """Records, coverage, and which rules have had no data so far."""
    told = []
    for together in (False, True):
        counts = SessionCounts()
        counts.without_data.bind(
            0,
            {
                "dead": Reads("zero_fraction", every=3, due=lambda step: step % 3 == 0),
                "reward": Reads("observed.reward"),
                "moment": Reads("moment_norm"),
                "loss": Reads("loss"),
            },
        )
        counts.never_judged.bind(0, {"dead": StaggeredSeries("zero_fraction", 3, SITES.names, ("dead",))})
        records = records_of(seed, 90)
        turns = [turn_of(record.snapshot.step) for record in records]
        for piece in cuts(seed, records):
            in_turn = [turns[record.snapshot.step] for record in piece]
            if together:
                counts.observe_all(piece, in_turn)
            for record, turn in () if together else zip(piece, in_turn, strict=True):
                counts.observe(record, turn)
        told.append(
            (
                *(counts.records, counts.judged, counts.coverage, counts.actions),
                counts.without_data.reasons(),
                counts.never_judged.by_rule(),
            )
        )
    assert told[0] == told[1]


@pytest.mark.parametrize("jump", [1.0, 50.0, 1e4])
def test_health_is_the_same(jump: float) -> None:
    """Of each step and of what is known after them, also where the total jumps in their midst; some have a loss."""
    verdict, told = Verdict(), []
    for together in (False, True):
        tracker = CheckpointHealthTracker(frozenset())
        snapshots = [
            make_record(
                SITES, jump if step == 40 else 1.0, step=step, scalars={"loss": step % 5} if step % 3 else {}
            ).snapshot
            for step in range(70)
        ]
        healths = []
        for first in range(0, 70, 7):
            piece = snapshots[first : first + 7]
            if together:
                healths += tracker.after_all(piece, verdict)
            else:
                healths += [tracker.after(snapshot, verdict, Decision()) for snapshot in piece]
        told.append((healths, tracker.now, tracker.to_dict(), tracker.suspected))
    assert told[0] == told[1]


def test_a_sink_without_it_gets_one_after_the_other() -> None:
    """A sink of the user's need not know of `write_all`; one whose call raises is counted, and training goes on."""

    class Failing(Kept):
        def write_all(self, records: Any) -> None:
            raise OSError("disk")

    records, health = records_of(1, 5), Health()
    for sink, kept in ((Kept(), 5), (Failing(), 0)):
        breaker = Breaker(sink, health)
        breaker.open(make_run(Path("never")))
        breaker.write_all(records)
        assert len(sink.records) == kept
    assert health.errors() == {Failing.name: 1}


def _overriding() -> Sink:
    """Derived from a shipped sink: its own `write` is the newer one."""

    class Overriding(PrometheusSink):
        def write(self, record: Record) -> None:
            seen.append(record)
            super().write(record)

    seen: list[Record] = []
    sink = Overriding(listen=None)
    sink.seen = seen  # type: ignore[attr-defined]
    return sink


def _replaced() -> Sink:
    """A shipped sink of which a script has replaced `write`."""
    sink, seen = PrometheusSink(listen=None), list[Record]()
    sink.write, sink.seen = seen.append, seen  # type: ignore[method-assign, attr-defined, assignment]
    return sink


def _wrapping() -> Sink:
    """Around another sink, to which it leaves all that it does not do itself."""

    class Wrapping:
        def __init__(self, inner: Sink) -> None:
            self.inner, self.seen = inner, list[Record]()

        def write(self, record: Record) -> None:
            self.seen.append(record)
            self.inner.write(record)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    return cast(Sink, Wrapping(PrometheusSink(listen=None)))


@pytest.mark.parametrize("made", [_overriding, _replaced, _wrapping])
def test_a_write_of_ones_own_sees_every_step(made: Callable[[], Sink]) -> None:
    """`write_all` of the sink that it is made of does not stand in for it."""
    sink, records = made(), records_of(1, 5)
    breaker = Breaker(sink, Health())
    breaker.open(make_run(Path("never")))
    breaker.write_all(records)
    assert sink.seen == records  # type: ignore[attr-defined]
