"""Blocks of norms: what is written of many steps in one frame is what would have been written of each."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.journal import JournalReader, LostEntry, NormsEntry, RecordedStep, read_journal, writer
from gradwatch.journal.entries import decode_entries
from gradwatch.journal.norms_block import KIND, NormsBlock, decode_block
from gradwatch.journal.payload import decode_payload, encode_payload
from gradwatch.journal.reader import opened
from gradwatch.journal.writer import Recorder
from gradwatch.records.histogram import BINS, Histogram
from gradwatch.records.record import Record
from gradwatch.records.snapshot import Column
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.journal import JournalSink
from tests.support.examples import examples
from tests.support.sink_records import make_event, make_record, make_run, make_sites

VALUES = st.sampled_from((float("nan"), float("inf"), -0.0, 0.0, 1e-45, 0.5, 3.0))
SITES = [
    make_sites(0),
    make_sites(1),
    make_sites(3),
    make_sites(names=["a", "b", "c"], groups=["x", "", "x"]),
]
"""Equal sites in other objects count as the same; the last differ from the others by name and group."""
COLUMNS = ("max_abs", "zero_fraction")


@st.composite
def one_record(draw: st.DrawFn, step: int) -> Record:
    """A step of one of two optimizers, calm in most cases."""
    optimizer = draw(st.integers(0, 1))
    sites = draw(st.sampled_from(SITES))
    size = len(sites)
    some = st.lists(VALUES, min_size=size, max_size=size)
    columns = {
        name: Column(
            np.array(draw(some), draw(st.sampled_from(("f2", "f4", "f8")))),
            np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool),
        )
        for name in draw(st.sampled_from(((), (), (), COLUMNS[:1], COLUMNS)))
    }
    record = make_record(
        sites,
        draw(some),
        step=step,
        optimizer=optimizer,
        calls=draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)),
        applied=draw(st.sampled_from((1.0, 1.0, 0.25, float("nan")))),
        events=(make_event(step=step),) if draw(st.integers(0, 9)) == 0 else (),
        firing=draw(st.sampled_from(((), (), ("exploding",), ("non-finite", "exploding")))),
        columns=columns,
        histograms={0: Histogram(1, np.arange(BINS), 2)} if size and draw(st.integers(0, 9)) == 0 else {},
        scalars={"loss": draw(VALUES)} if draw(st.booleans()) else {},
        wall_time=float(step),
    )
    for mask in record.verdict.firing.values():
        mask[:] = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return record


@st.composite
def batches(draw: st.DrawFn) -> list[list[Record]]:
    """Records of consecutive steps, cut into batches."""
    count = draw(st.integers(1, 30))
    records = [draw(one_record(step)) for step in range(count)]
    cuts = sorted(draw(st.sets(st.integers(1, count))) | {0, count})
    return [records[since:to] for since, to in pairwise(cuts)]


def recorded(
    given_batches: list[list[Record]], params: str = "sampled", rarer: int = 1, first: int = 1000
) -> tuple[list[str], list[str]]:
    """What a journal of these batches gives back, and the kinds of its frames."""

    def report(error: BaseException | None) -> None:
        if error is not None:
            raise AssertionError("the recorder failed") from error

    with TemporaryDirectory() as directory, mock.patch.object(writer, "FIRST", first):
        recorder = Recorder(make_run(Path(directory)), params, 64 << 20, report, lambda events: None)
        recorder.retention.factor = rarer
        for batch in given_batches:
            recorder.record(batch)
        recorder.close()
        (reader,) = read_journal(Path(directory) / "run-1")
        steps = [said(step) for step in reader.records()]
        assert (reader.damage, reader.missing, reader.unknown, reader.complete) == ([], 0, 0, True)
        return steps, list(kinds(reader.path))


def kinds(path: Path) -> Iterator[str]:
    """The kind of each frame of a file."""
    with opened(path) as scanner:
        while (found := scanner.read()) is not None:
            yield decode_payload(found.payload).kind  # type: ignore[union-attr]


def said(step: RecordedStep) -> str:
    """All that is known of a step read back, bit by bit."""
    record, norms = step.record, step.norms
    snapshot = record.snapshot
    arrays = {"norm": snapshot.norm, "calls": snapshot.calls, "coef": snapshot.coef}
    for name, column in snapshot.columns.items():
        arrays |= {f"values {name}": column.values, f"present {name}": column.present}
    arrays |= record.verdict.firing
    histograms = {site: one.counts for site, one in snapshot.histograms.items()}
    bits = {name: (array.dtype.str, array.tobytes().hex()) for name, array in arrays.items()}
    why = norms and (norms.reason, norms.every, norms.sites_id, norms.optimizer, norms.step)
    seen = snapshot.optimizer, snapshot.step, snapshot.sites.names, snapshot.sites.groups, snapshot.scalars
    return repr((seen, bits, histograms, why, step.groups, record.verdict.events, record.wall_time))


@given(batches(), st.sampled_from(("sampled", "full")), st.sampled_from((1, 2)))
@settings(max_examples=examples(60))
def test_steps_written_together_read_back_as_one_by_one(
    some: list[list[Record]], params: str, rarer: int
) -> None:
    """Whatever the cuts, sites, absent gradients, columns, firing rules and reasons (law of blocks)."""
    one_by_one = [[record] for batch in some for record in batch]
    together, _ = recorded(some, params, rarer, first=3)
    singly, frames = recorded(one_by_one, params, rarer, first=3)
    assert together == singly
    assert len(together) == len(one_by_one)
    incidents = any(record.verdict.events for (record,) in one_by_one)
    assert incidents or KIND not in frames  # the steps before an incident come together, however they came


def test_calm_steps_take_one_frame_and_half_the_bytes(tmp_path: Path) -> None:
    """64 steps of 8 parameters: one frame of norms; a tenth of them with columns: two frames."""
    sites = make_sites(8)
    column = {"max_abs": Column(np.ones(8, np.float32), np.ones(8, bool))}
    calm = [make_record(sites, np.arange(8) + step, step=step) for step in range(64)]
    mixed = [make_record(sites, 1.0, step=step, columns={} if step % 10 else column) for step in range(64)]
    counts = [recorded([records])[1].count(KIND) for records in (calm, mixed)]
    assert counts == [1, 2]
    sizes = []
    for cut in ([calm], [[record] for record in calm]):
        place = tmp_path / str(len(cut))
        recorder = Recorder(make_run(place), "sampled", 0, lambda error: None, lambda events: None)
        for batch in cut:
            recorder.record(batch)
        recorder.close()
        sizes.append(next(place.glob("run-1/*.gwj")).stat().st_size)
    assert sizes[0] < sizes[1] / 2


def test_a_large_model_is_written_step_by_step() -> None:
    """Arrays of many steps are put together only up to 128 KiB: no longer is the interpreter held."""
    sites = make_sites(20_000)
    _, frames = recorded([[make_record(sites, step, step=step) for step in range(3)]], "full", 1)
    assert (frames.count("norms"), frames.count(KIND)) == (3, 0)


@pytest.mark.parametrize(
    ("field", "value", "lost"),
    [
        ("coef", np.array(["large", "larger"], object), LostEntry(norms=1, first_step=1, last_step=1)),
        ("scalars", {"loss": "large"}, LostEntry(scalars=1, first_step=1, last_step=1)),
    ],
)
def test_one_step_that_cannot_be_encoded_costs_no_other(
    tmp_path: Path, field: str, value: Any, lost: LostEntry
) -> None:
    """Its neighbours in the same entry are written one by one; it is counted."""
    sink = JournalSink()
    sink.open(make_run(tmp_path), health := Health())
    good = [make_record(make_sites(2), step, step=step) for step in range(4)]
    bad = replace(good[1], snapshot=replace(good[1].snapshot, **{field: value}))
    sink.write_all([good[0], bad, *good[2:]])
    sink.flush(60.0)  # to close waits for no slow disk
    sink.close()
    (reader,) = read_journal(tmp_path / "run-1")
    steps = list(reader.records())
    rows = [step.record.snapshot.step for step in steps]
    norms = [step.record.snapshot.step for step in steps if step.norms is not None]
    assert rows == [0, *([1] if lost.norms else []), 2, 3]
    assert norms == [0, 2, 3]
    assert [entry for entry in reader.entries() if isinstance(entry, LostEntry)] == [lost]
    assert health.errors() == {"journal": 1}


def block(count: int = 6) -> NormsBlock:
    """A block of steps 4, 5, 6 …"""
    entries = [
        NormsEntry(0, step, 3, "sample", 1, np.full(2, step, "f4"), np.ones(2, "i4"), np.ones(2, "f4"))
        for step in range(4, 4 + count)
    ]
    arrays = {name: np.array([getattr(each, name) for each in entries]) for name in ("norm", "calls", "coef")}
    return NormsBlock(0, 3, "sample", 1, (), (), np.array([each.step for each in entries]), arrays)


def test_a_block_is_thinned_by_its_steps() -> None:
    """Of a rarer cadence the steps that are multiples of it are left, and say so; of none nothing is left."""
    kept = block().at_cadence(4)
    assert kept is not None
    entries = decode_entries(kept.encode())
    assert all(isinstance(each, NormsEntry) for each in entries)
    assert [(each.step, each.every, each.norm.tolist()) for each in entries] == [  # type: ignore[union-attr]
        (4, 4, [4.0, 4.0]),
        (8, 4, [8.0, 8.0]),
    ]
    assert block().at_cadence(100) is None


@pytest.mark.parametrize("axis", [0, 1])
def test_zeros_of_either_sign_are_not_the_same(axis: int) -> None:
    """What a block writes once is equal bit by bit, NaN too: -0.0 is not 0.0, though the numbers compare equal."""
    mixed = np.where(np.indices((6, 2))[axis] == 1, -0.0, 0.0).astype("f4")
    unknown = np.full((6, 2), np.nan, "f4")
    for coef in (mixed, unknown):
        given_block = replace(block(), arrays={**block().arrays, "coef": coef})
        found = decode_block(decode_payload(given_block.encode()))
        assert found.arrays["coef"].tobytes() == coef.tobytes()
    assert decode_payload(given_block.encode()).arrays["coef"].size == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"reason": "whim"},
        {"columns": ["absent"]},
        {"firing": "x"},
        {"shapes": {}},
        {"shapes": {"calls": [1, 1, 1], "coef": [1, 1]}},
        {"shapes": {"calls": [1, 7], "coef": [1, 1]}},
        {"shapes": {"calls": [10**12, 0], "coef": [1, 1]}},
        {"shapes": {"calls": ["1", None], "coef": [1, 1]}},
        {"shapes": 7},
        {"every": None},
    ],
)
def test_a_hostile_block_is_refused(wrong: dict[str, Any]) -> None:
    """A head that does not fit its arrays is a ValueError: damage to a reader, nothing worse."""
    payload = decode_payload(block().encode())
    with pytest.raises(ValueError, match=r"."):
        decode_entries(encode_payload(KIND, {**payload.fields, **wrong}, payload.arrays))


@pytest.mark.parametrize(
    ("name", "size"), [("steps", 0), ("steps", 5), ("norm", 5), ("norm", 13), ("calls", 0), ("calls", 5)]
)
def test_a_block_with_an_array_of_a_wrong_length_is_refused(name: str, size: int) -> None:
    """Neither too few nor too many elements are taken for something else."""
    payload = decode_payload(block().encode())
    arrays = {**payload.arrays, name: np.ones(size, payload.arrays[name].dtype)}
    with pytest.raises(ValueError, match=r"."):
        decode_block(decode_payload(encode_payload(KIND, payload.fields, arrays))).entries()


def test_norms_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """A payload as version 0.1 wrote it before there were blocks, byte by byte."""
    head = {
        "kind": "norms",
        "optimizer": 0, "step": 7, "sites": 0, "reason": "sample", "every": 2,
        "columns": ["max_abs"], "firing": ["dead"],
        "arrays": [
            ["norm", "f4", 2], ["calls", "i4", 1], ["coef", "f4", 1],
            ["values:max_abs", "f4", 2], ["present:max_abs", "b", 2], ["firing:dead", "b", 2],
        ],
    }  # fmt: skip
    text = json.dumps(head, separators=(",", ":")).encode()
    arrays = struct.pack("<2fif2fBB", 1.5, 2.5, 1, 1.0, 3.0, 4.0, 0b11000000, 0b01000000)
    (entry,) = decode_entries(struct.pack("<I", len(text)) + text + arrays)
    assert isinstance(entry, NormsEntry)
    assert (entry.step, entry.reason, entry.every) == (7, "sample", 2)
    assert (entry.norm.tolist(), entry.calls.tolist(), entry.coef.tolist()) == (
        [1.5, 2.5],
        [1, 1],
        [1.0, 1.0],
    )
    assert entry.columns["max_abs"].values.tolist() == [3.0, 4.0]
    assert entry.firing["dead"].tolist() == [False, True]
    assert entry.encode() == struct.pack("<I", len(text)) + text + arrays  # a step alone is still written so


def test_a_follower_sees_the_steps_of_a_block(tmp_path: Path) -> None:
    """`follow` gives one entry for each step of a block, as `entries` does."""
    sink = JournalSink()
    sink.open(make_run(tmp_path), Health())
    sink.write_all([make_record(make_sites(2), step, step=step) for step in range(40)])
    sink.flush(60.0)  # to close waits for no slow disk
    sink.close()
    (reader,) = read_journal(tmp_path / "run-1")
    assert KIND in list(kinds(reader.path))
    for entries in (JournalReader(reader.path).follow(0.001), reader.entries()):
        assert [each.step for each in entries if isinstance(each, NormsEntry)] == list(range(40))
