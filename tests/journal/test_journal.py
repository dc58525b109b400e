"""The journal's format, reader and choice of what to write; crashes and disk faults have their own files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gradwatch.capture.snapshot_assembly import with_modules
from gradwatch.journal import (
    EndEntry,
    JournalReader,
    LostEntry,
    NormsEntry,
    RunEntry,
    SavedStatesEntry,
    SitesEntry,
    StepsEntry,
    entries,
    read_journal,
)
from gradwatch.journal.columnar_steps import GroupNorms, step_row
from gradwatch.journal.crash_safe_frames import MAX_PAYLOAD, Damage, Frame, FrameScanner, encode_frame
from gradwatch.journal.entries import decode_entries
from gradwatch.journal.norms_cadence import Cadence
from gradwatch.journal.payload import decode_payload, encode_payload
from gradwatch.journal.reader import JournalName, opened
from gradwatch.journal.writer import Recorder
from gradwatch.records.decision import Decision
from gradwatch.records.histogram import BINS, Histogram
from gradwatch.records.record import CheckpointHealth, Record
from gradwatch.records.run_info import RuleInfo
from gradwatch.records.saved_optimizer_state import TakenState
from gradwatch.records.snapshot import Column, Sites
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.journal import JournalSink
from tests.support.alphabet import UNICODE
from tests.support.examples import examples
from tests.support.sink_records import make_event, make_record, make_run, make_sites, skip

AWKWARD = (float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 1e-45, 1.5)


def bits(value: float) -> bytes:
    return np.float64(value).tobytes()


def journal(directory: Path, records: list[Record], **options: Any) -> JournalReader:
    """The finished journal of these records."""
    sink = JournalSink(**options)
    sink.open(make_run(directory), health := Health())
    for at, record in enumerate(records):
        sink.write(record)
        if at % 500 == 499:
            assert sink.flush(30.0)
    sink.flush(60.0)  # to close waits for no slow disk
    sink.close()
    assert health.errors() == {}
    (reader,) = read_journal(directory / "run-1")
    return reader


def recorder(directory: Path, **options: Any) -> Recorder:
    """A Recorder without a thread, for tests that need none; any failure of it fails the test."""

    def report(error: BaseException | None) -> None:
        if error is not None:
            raise AssertionError("the recorder failed") from error

    settings = {"params": "sampled", "max_bytes": 64 << 20, "acknowledge": lambda events: None, **options}
    return Recorder(make_run(directory), report=report, **settings)


def test_a_process_that_is_killed_at_once_has_left_its_name(tmp_path: Path) -> None:
    """The first file is there without a step; the first steps are in it without an event and without a flush."""
    sink = JournalSink()
    sink.open(make_run(tmp_path), Health())

    def entries(wanted: type) -> list[Any]:
        until = time.monotonic() + 120.0
        while (
            not (found := [each for each in left() if isinstance(each, wanted)]) and time.monotonic() < until
        ):
            time.sleep(0.01)
        return found

    def left() -> list[Any]:
        heads = tmp_path.glob("run-1/*.gwj")
        return [entry for head in heads for entry in JournalReader(head).entries()]

    assert [entry.run.run_id for entry in entries(RunEntry)] == ["run-1"]
    sink.write(make_record(make_sites(1), [1.0], step=0))
    (rows,) = entries(StepsEntry)
    assert [row.step for row in rows.rows] == [0]
    sink.close()


def test_everything_comes_back(tmp_path: Path) -> None:
    """A Record written is the Record read: scalars, arrays, columns, events, decision."""
    sites = make_sites(3)
    column = Column(np.array([1, np.nan, -0.0], np.float32), np.array([True, False, True]))
    event = make_event(
        "firing", step=7, sites=("layers.1.weight",), count=1, value=float("nan"), score=float("inf")
    )
    written = make_record(
        sites,
        [1.0, float("nan"), -0.0],
        step=7,
        calls=[1, 2, 0],
        events=(event,),
        firing=("non-finite",),
        decision=skip(),
        columns={"zero_fraction": column},
        scalars={"loss": float("inf"), "lr": 1e-3},
        loss_scale=65536.0,
        micro=4,
        provisional=True,
        coverage=0.5,
    )
    (found,) = journal(tmp_path, [written]).records()
    read, snapshot = found.record, found.record.snapshot
    for name in ("norm", "calls", "coef"):
        assert getattr(snapshot, name).tobytes() == getattr(written.snapshot, name).tobytes()
        assert getattr(snapshot, name).dtype == getattr(written.snapshot, name).dtype
    for name in ("step", "optimizer", "loss_scale", "micro", "provisional", "coverage", "scalars"):
        assert getattr(snapshot, name) == getattr(written.snapshot, name)
    assert (snapshot.sites.names, snapshot.sites.groups) == (sites.names, sites.groups)
    assert snapshot.columns["zero_fraction"].values.tobytes() == column.values.tobytes()
    assert snapshot.columns["zero_fraction"].present.tolist() == [True, False, True]
    assert repr(read.verdict.events) == repr((event,))
    assert {rule: mask.tolist() for rule, mask in read.verdict.firing.items()} == {"non-finite": [False] * 3}
    assert read.decision == written.decision
    assert (read.step_seconds, read.wall_time) == (written.step_seconds, written.wall_time)


def test_histograms_come_back(tmp_path: Path) -> None:
    """Those of some sites, a module too, counts beyond float32 included, with the norms of their step; or none."""
    counts = np.zeros(BINS, np.int64)
    counts[[0, 5, BINS - 1]] = 1, 2**40 + 1, 7
    histograms = {2: Histogram(4, counts, 1), 0: Histogram(0, counts[::-1].copy(), 0)}
    sites = with_modules(make_sites(2), ("layers",))
    written = [make_record(sites, step=0, histograms=histograms), make_record(sites, step=1)]
    first, second = (found.record.snapshot.histograms for found in journal(tmp_path, written).records())
    assert list(first) == [2, 0]
    assert all(
        (first[k].zeros, first[k].nonfinite) == (one.zeros, one.nonfinite) for k, one in histograms.items()
    )
    assert all(np.array_equal(first[k].counts, one.counts) for k, one in histograms.items())
    assert second == {}


def test_a_histogram_of_no_site_is_refused() -> None:
    """Bits that say so are damage, and never an index out of range somewhere else."""
    one, none = np.ones(3, np.float32), np.zeros(3, np.int32)
    entry = NormsEntry(
        0, 0, 0, "first", 1, one, none, one, histograms={7: Histogram(0, np.zeros(BINS, np.int64), 0)}
    )
    with pytest.raises(ValueError, match="a site that is not there"):
        decode_entries(entry.encode())


@pytest.mark.parametrize("value", AWKWARD)
def test_awkward_numbers_keep_their_bits(tmp_path: Path, value: float) -> None:
    """NaN, infinities, -0.0 and subnormals survive in every place a number can stand (P23)."""
    column = Column(np.full(2, value), np.ones(2, bool))
    event = make_event(value=value, score=value, threshold=value)
    sites = make_sites(2)
    written = make_record(
        sites, value, events=(event,), step_seconds=value, loss_scale=value, columns={"x": column},
        scalars={"loss": value}, decision=Decision(max_norm=value),
    )  # fmt: skip
    reader = journal(tmp_path, [written])
    (found,) = reader.records()
    snapshot = found.record.snapshot
    assert snapshot.norm.tobytes() == np.full(2, value, np.float32).tobytes()
    assert snapshot.columns["x"].values.tobytes() == column.values.tobytes()
    (read,) = found.record.verdict.events
    places = (snapshot.loss_scale, snapshot.scalars["loss"], found.record.step_seconds,
              found.record.decision.max_norm, read.value, read.score, read.threshold)  # fmt: skip
    assert {bits(place) for place in places if place is not None} == {bits(value)}
    text = reader.path.read_bytes()
    assert (b'"value":"NaN"' in text) == np.isnan(value)
    assert (b'"value":"Infinity"' in text) == (value == np.inf)


@given(
    st.dictionaries(
        st.text(UNICODE, max_size=8),
        st.one_of(*(arrays(dtype, st.integers(0, 20)) for dtype in ("<f4", "<f8", "<i4", "<i8", "u1", "?"))),
        max_size=4,
    ),
    st.dictionaries(
        st.text(UNICODE, max_size=8).filter(lambda key: key not in ("kind", "arrays")),
        st.text(UNICODE, max_size=8),
    ),
)
@settings(max_examples=examples(30))
def test_payloads_round_trip(arrays: dict[str, Any], fields: dict[str, str]) -> None:
    """Any arrays and any fields come back bit for bit."""
    decoded = decode_payload(encode_payload("x", fields, arrays))
    assert decoded.kind == "x"
    assert decoded.fields == fields
    assert {name: (each.dtype, each.tobytes()) for name, each in decoded.arrays.items()} == {
        name: (each.dtype, each.tobytes()) for name, each in arrays.items()
    }


@given(st.binary(max_size=64), st.binary(max_size=200))
@settings(max_examples=examples(150))
def test_a_foreign_payload_is_refused_not_run(head: bytes, rest: bytes) -> None:
    """Decoding arbitrary bytes gives an entry or a ValueError, nothing else (P34)."""
    for data in (head + rest, len(head).to_bytes(4, "little") + head + rest):
        try:
            decode_entries(data)
        except ValueError:
            continue


@pytest.mark.parametrize(
    "document",
    [
        "[" * 50_000,
        '{"kind":"sites","arrays":[["lengths","i4",99999999999]]}',
        '{"kind":"sites","sites":0,"optimizer":0,"kinds":[],"groups":[],"arrays":[]}',
        '{"kind":"steps","arrays":[["step","i8",0]]}',
        '{"kind":"events","arrays":[],"number":0,"optimizer":0,"step":0,"wall_time":0,"events":[{"kind":7}]}',
        '{"kind":"end","steps":NaN,"arrays":[]}',
        '{"kind":"run","run":null,"arrays":[]}',
        '{"kind":[],"arrays":[]}',
        "7",
    ],
)
def test_a_hostile_entry_is_damage(tmp_path: Path, document: str) -> None:
    """A frame whose checksums hold but whose content makes no sense is stepped over, its neighbours read."""
    hostile = len(document).to_bytes(4, "little") + document.encode()
    frames = [EndEntry(1).encode(), hostile, EndEntry(2).encode()]
    path = tmp_path / "rank0-attempt0.gwj"
    path.write_bytes(b"".join(encode_frame(each, 1, at) for at, each in enumerate(frames)))
    reader = JournalReader(path)
    assert [entry.steps for entry in reader.entries() if isinstance(entry, EndEntry)] == [1, 2]
    assert [each.reason for each in reader.damage] == ["unreadable"]


def test_saved_states_come_back(tmp_path: Path) -> None:
    """With their health, again where a look knew more; kept where the middle is thinned; skipped by older readers."""
    writer = recorder(tmp_path, max_bytes=512 << 10, params="full")
    sites, count = make_sites(40), 6000
    for start in range(0, count, 200):
        steps = range(start, start + 200)
        health = CheckpointHealth(weights_step=start - 1 if start else None)
        made = [make_record(sites, step, step=step, firing=("non-finite",)) for step in steps]
        writer.record([replace(record, checkpoint=health) for record in made])
        writer.take_state(TakenState(start // 200, ((0, steps[-1]),), 1e9))
        assert writer.commit(durable=True)
    writer.judge_weights(CheckpointHealth(weights_step=count - 1))
    writer.close()
    assert any(segment.level for segment in writer.retention.segments)
    assert not writer.retention.rotated
    (reader,) = read_journal(tmp_path / "run-1")
    found = [entry for entry in reader.entries() if isinstance(entry, SavedStatesEntry)]
    states = {state.number: state for entry in found for state in entry.states}
    assert (found[-1].taken, found[-1].healthy) == (30, 30)
    assert [(states[at].step, states[at].looked) for at in (0, 29)] == [(199, True), (5999, True)]
    with mock.patch.dict(entries._DOCUMENTS):
        del entries._DOCUMENTS["saved"]
        assert list(reader.records())
    assert reader.unknown == len(found)
    assert reader.damage == []
    assert reader.complete


def test_a_newer_writer_can_be_read(tmp_path: Path) -> None:
    """Kinds and keys of a later version are ignored and counted."""
    newer = encode_payload("weather", {"sun": 1}, {})
    end = encode_payload("end", {"steps": 3, "mood": "fine"}, {})
    path = tmp_path / "x.gwj"
    path.write_bytes(encode_frame(newer, 1, 0) + encode_frame(end, 1, 1))
    reader = JournalReader(path)
    assert list(reader.entries()) == [EndEntry(3)]
    assert (reader.unknown, reader.damage, reader.complete) == (1, [], True)


def test_a_frame_has_a_payload_within_bounds() -> None:
    """Neither an empty payload nor one beyond the limit becomes a frame."""
    for payload in (b"", bytes(MAX_PAYLOAD + 1)):
        with pytest.raises(ValueError, match="a payload has"):
            encode_frame(payload, 1, 0)


@pytest.mark.parametrize(
    "name", ["a\udc80b", "\x1b[31m", "a\nb\x00c", "../../etc/passwd", "<script>", "x" * 100_000]
)
def test_any_parameter_name_is_harmless(tmp_path: Path, name: str) -> None:
    """Surrogates, control characters, paths and 100 kB names come back as they were (P33)."""
    sites = make_sites(names=[name, "plain"], groups=[name[:50], "g"])
    event = make_event(sites=(name,), first_cause=name)
    (found,) = journal(tmp_path, [make_record(sites, events=(event,))]).records()
    assert found.record.snapshot.sites.names == (name, "plain")
    assert found.record.snapshot.sites.groups == (name[:50], "g")
    assert found.record.verdict.events == (event,)
    assert {path.name for path in (tmp_path / "run-1").iterdir()} == {".gitignore", "rank0-attempt0.gwj"}


def test_group_norms_are_recorded_every_step(tmp_path: Path) -> None:
    """Root sum of squares per group over the parameters that had a gradient, in float64."""
    sites = make_sites(4)
    sites = Sites(
        sites.names, ("param",) * 3 + ("module",), sites.numels, sites.ndims, sites.depths, tuple("aabb")
    )
    record = make_record(sites, [3e30, 4e30, 2.0, 9.0], calls=[1, 1, 1, 1])
    (found,) = journal(tmp_path, [record]).records()
    expected = float(np.hypot(np.float64(np.float32(3e30)), np.float64(np.float32(4e30))))
    assert found.groups == {"a": expected, "b": 2.0}
    (absent,) = GroupNorms(sites)(np.full((1, 4), np.nan, np.float32), np.array([[0, 0, 1, 0]], np.int32))
    assert absent["a"] == 0.0
    assert np.isnan(absent["b"])


def test_norms_of_the_first_steps_and_around_incidents(tmp_path: Path) -> None:
    """1,000 first steps, 200 around an incident, 1 in k between, each saying why; scalars every step."""
    sites = make_sites(4096)  # 16 KiB of norms a step: k = 4
    incident = 2000
    records = [
        make_record(sites, step, step=step, events=(make_event(step=step),) if step == incident else ())
        for step in range(2500)
    ]
    reader = journal(tmp_path, records, max_bytes=0)
    steps = list(reader.records())
    assert [step.record.snapshot.step for step in steps] == list(range(2500))
    reasons = {step.record.snapshot.step: step.norms.reason for step in steps if step.norms is not None}
    assert [at for at, why in reasons.items() if why == "first"] == list(range(1000))
    assert [at for at, why in reasons.items() if why == "incident"] == [
        at for at in range(1800, 2201) if at % 4 or at >= incident
    ]
    others = [at for at in range(1000, 2500) if at % 4 == 0 and not incident <= at <= 2200]
    assert [at for at, why in reasons.items() if why == "sample"] == others
    assert {step.norms.every for step in steps if step.norms is not None} == {4}
    assert all(step.norms is None or step.norms.norm[0] == step.record.snapshot.step for step in steps)
    assert all(step.norms is not None or not step.record.snapshot.calls.any() for step in steps)


def test_full_writes_the_norms_of_every_step(tmp_path: Path) -> None:
    """`params: full` lifts the cadence."""
    sites = make_sites(4096)
    records = [make_record(sites, 1.0, step=step) for step in range(1100)]
    reasons = Counter(
        entry.reason
        for entry in journal(tmp_path, records, params="full").entries()
        if isinstance(entry, NormsEntry)
    )
    assert reasons == {"first": 1000, "full": 100}


def test_the_columns_of_a_firing_rule_are_written(tmp_path: Path) -> None:
    """While a rule over sites fires, its column is recorded at every step, and no other's."""
    sites = make_sites(4096)
    rules = (RuleInfo("dead", "dead", "warning", (), "zero_fraction"),)
    columns = {
        name: Column(np.ones(4096, np.float32), np.ones(4096, bool)) for name in ("zero_fraction", "max_abs")
    }
    writer = recorder(tmp_path, params="sampled")
    writer._columns = {rule.id: rule.of for rule in rules}
    quiet = [make_record(sites, 1.0, step=step) for step in range(1001)]
    loud = make_record(sites, 1.0, step=1001, columns=columns, firing=("dead",))
    loud.verdict.firing["dead"][3] = True
    writer.record([*quiet, loud])
    writer.close()
    (reader,) = read_journal(tmp_path / "run-1")
    *_, last = (entry for entry in reader.entries() if isinstance(entry, NormsEntry))
    assert (last.step, last.reason, list(last.columns)) == (1001, "firing", ["zero_fraction"])
    assert last.firing["dead"].tolist() == [False] * 3 + [True] + [False] * 4092


def test_a_killed_process_leaves_no_step_without_its_events(tmp_path: Path) -> None:
    """Also those that are not urgent, as of a rule that is pending: else a backtest of the run finds others."""
    failures: list[BaseException | None] = []
    recorder = Recorder(make_run(tmp_path), "sampled", 0, failures.append, lambda events: None)
    recorder.begin()
    pending = make_event("pending", step=1, incident="")
    recorder.record(
        [make_record(make_sites(2), step=step, events=(pending,) * (step == 1)) for step in range(3)]
    )
    recorder.commit(durable=False)
    recorder.files.close()
    (found,) = read_journal(Path(make_run(tmp_path).directory))
    assert [one.record.snapshot.step for one in found.records()] == [0, 1, 2]
    assert [(event.kind, event.step) for event in found.events()] == [("pending", 1)]
    assert failures == []


def test_changed_sites_are_written_anew(tmp_path: Path) -> None:
    """A changed set of parameters gets its own sites entry; equal sites in a new object do not."""
    one, same, more = make_sites(2), make_sites(2), make_sites(3)
    sequence = [one, same, more, more, one]
    reader = journal(tmp_path, [make_record(sites, step, step=step) for step, sites in enumerate(sequence)])
    assert [len(entry.sites) for entry in reader.entries() if isinstance(entry, SitesEntry)] == [2, 3, 2]
    assert [len(step.record.snapshot.sites) for step in reader.records()] == [2, 2, 3, 3, 2]
    assert all(step.norms is not None for step in reader.records())


def test_several_optimizers_share_a_journal(tmp_path: Path) -> None:
    """Steps are told apart by optimizer, and batched although they alternate."""
    sites = [make_sites(2), make_sites(3)]
    records = [
        make_record(sites[which], which + 1, step=step, optimizer=which)
        for step in range(300)
        for which in (0, 1)
    ]
    reader = journal(tmp_path, records)
    for which in (0, 1):
        ours = [step for step in reader.records() if step.record.snapshot.optimizer == which]
        assert [step.record.snapshot.step for step in ours] == list(range(300))
        assert all(step.norms is not None and set(step.norms.norm) == {which + 1} for step in ours)
    assert sum(isinstance(entry, StepsEntry) for entry in reader.entries()) < 60


@given(st.integers(0, 200_000))
def test_the_first_cadence_keeps_the_rate_of_writing(sites: int) -> None:
    """The cadence is a power of two giving at most twice 4 KiB of norms a step."""
    every = Cadence.base(sites)
    assert every & (every - 1) == 0
    assert 4 * sites / every < 2 * 4096 or every == 1


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [6_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_a_cap_thins_the_middle_and_keeps_first_and_last(tmp_path: Path, count: int) -> None:
    """However many incidents (P22), the cap holds; the first and the last are there, nothing is damaged."""
    sites, cap = make_sites(8), max(512 << 10, 64 * count)
    writer = recorder(tmp_path, max_bytes=cap)
    for start in range(0, count, 256):
        steps = range(start, min(start + 256, count))
        writer.record(
            [make_record(sites, step, step=step, events=(make_event(step=step),)) for step in steps]
        )
        assert writer.commit(durable=False)
    writer.close()
    files = list((tmp_path / "run-1").glob("*.gwj"))
    assert sum(path.stat().st_size for path in files) <= cap
    assert len(files) <= 66
    (reader,) = read_journal(tmp_path / "run-1")
    steps = [event.step for event in reader.events()]
    assert reader.damage == []
    assert reader.complete
    assert steps[0] == 0
    assert steps[-1] == count - 1
    assert steps == sorted(set(steps))
    recorded = [step.record.snapshot.step for step in reader.records()]
    assert recorded[0] == 0
    assert recorded[-1] == count - 1
    assert sum(entry.rotated for entry in reader.entries() if isinstance(entry, LostEntry)) > 0


def test_thinning_halves_the_samples_and_says_so(tmp_path: Path) -> None:
    """Over the cap, samples off a doubled cadence go first; what is left states the cadence it has."""
    sites, count, cap = make_sites(256), 4000, 2 << 20
    writer = recorder(tmp_path, max_bytes=cap)
    for start in range(0, count, 50):
        writer.record([make_record(sites, step, step=step) for step in range(start, start + 50)])
        writer.commit(durable=False)
    writer.close()
    (reader,) = read_journal(tmp_path / "run-1")
    assert sum(path.stat().st_size for path in reader.files) <= cap
    assert [step.record.snapshot.step for step in reader.records()] == list(range(count))
    samples = [each for each in reader.entries() if isinstance(each, NormsEntry) and each.reason == "sample"]
    assert writer.retention.every(0) > 1
    assert all(each.step % each.every == 0 for each in samples)
    assert all(each.norm[0] == each.step for each in samples)


def test_reading_a_directory_of_ranks_and_attempts(tmp_path: Path) -> None:
    """One reader per rank and attempt, in order, each knowing who wrote it."""
    for rank, attempt in ((1, 0), (0, 0), (0, 1), (10, 0)):
        sink = JournalSink()
        sink.open(make_run(tmp_path, rank=rank, attempt=attempt), Health())
        sink.write(make_record(make_sites(), rank, step=rank))
        sink.close()
    readers = read_journal(tmp_path / "run-1")
    assert [(reader.rank, reader.attempt) for reader in readers] == [(0, 0), (0, 1), (1, 0), (10, 0)]
    for reader in readers:
        run = reader.run()
        assert run is not None
        assert (run.run.rank, run.run.attempt) == (reader.rank, reader.attempt)
        assert run.run.rules == make_run(tmp_path).rules
    with pytest.raises(FileNotFoundError, match="no journal"):
        read_journal(tmp_path)
    with pytest.raises(FileNotFoundError, match="no journal"):
        read_journal(tmp_path / "run-1" / "rank7-attempt0.gwj")


def test_links_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    """Whatever pretends to be a journal cannot block or mislead the reader."""
    (tmp_path / "elsewhere").write_bytes(b"secret")
    (tmp_path / "rank0-attempt0.gwj").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "rank1-attempt0.gwj").mkdir()
    os.mkfifo(tmp_path / "rank2-attempt0.gwj")
    with pytest.raises(FileNotFoundError, match="no journal"):
        read_journal(tmp_path)


def test_following_a_live_journal(tmp_path: Path) -> None:
    """`follow` gives entries as they are written, over a rotation, and ends with the journal."""
    sink = JournalSink(max_bytes=512 << 10)
    sink.open(make_run(tmp_path), Health())
    sink.write(make_record(make_sites(64), 1.0, step=0))
    assert sink.flush(10.0)
    (reader,) = read_journal(tmp_path / "run-1")
    seen: list[int] = []
    first = threading.Event()

    def watch() -> None:
        for entry in reader.follow(poll_seconds=0.005):
            if isinstance(entry, StepsEntry):
                seen.extend(row.step for row in entry.rows)
                first.set()

    thread = threading.Thread(target=watch)
    thread.start()
    assert first.wait(60.0)
    for step in range(1, 1200):
        sink.write(make_record(make_sites(64), 1.0, step=step))
        if step % 200 == 0:
            assert sink.flush(10.0)
    sink.flush(60.0)  # to close waits for no slow disk
    sink.close()
    thread.join(120.0)
    assert not thread.is_alive()
    assert seen == list(range(1200))
    assert len(reader.files) > 1
    assert (reader.damage, reader.complete) == ([], True)


def test_following_ends_when_asked(tmp_path: Path) -> None:
    """A journal whose writer died has no end; `stop` gives one."""
    path = tmp_path / "rank0-attempt0.gwj"
    path.write_bytes(encode_frame(LostEntry(queue=1).encode(), 1, 0))
    assert list(JournalReader(path).follow(0.001, stop=lambda: True)) == [LostEntry(queue=1)]


@pytest.mark.parametrize("reserve", [0, 4096])
def test_what_was_written_before_the_next_file_is_read(tmp_path: Path, reserve: int) -> None:
    """A frame that comes after a look at the end, and before the file is known to be whole, is not passed over."""
    path = tmp_path / "rank0-attempt0.gwj"
    frames = [encode_frame(EndEntry(at).encode(), 1, at) for at in range(2)]
    path.write_bytes(frames[0] + bytes(reserve))
    with opened(path) as scanner:
        assert isinstance(scanner.read(live=True), Frame)
        assert scanner.read(live=True) is None
        path.write_bytes(b"".join(frames))
        assert isinstance(scanner.read(live=False), Frame)
        assert scanner.read(live=False) is None


def test_a_live_reader_waits_for_what_is_being_written(tmp_path: Path) -> None:
    """Half a frame, then all of it: no damage; garbage with good frames behind it: damage, once confirmed."""
    frames = [encode_frame(EndEntry(at).encode(), 1, at) for at in range(3)]
    path = tmp_path / "x"
    path.write_bytes(frames[0] + frames[1][:30])
    fd = os.open(path, os.O_RDONLY)
    try:
        scanner = FrameScanner(fd)
        assert isinstance(scanner.read(live=True), Frame)
        assert scanner.read(live=True) is None
        path.write_bytes(frames[0] + b"x" * len(frames[1]) + frames[2])
        assert scanner.read(live=True) is None
        assert isinstance(scanner.read(live=True), Damage)
        found = scanner.read(live=True)
        assert isinstance(found, Frame)
        assert found.sequence == 2
        assert scanner.missing == 1
    finally:
        os.close(fd)


def test_files_are_private_and_ignored_by_git(tmp_path: Path) -> None:
    """0600 and 0700, a `.gitignore` of `*` in what we made, none in a folder that was there (P36)."""
    (tmp_path / "mine").mkdir()
    for parent in (tmp_path / "mine", tmp_path / "new"):
        reader = journal(parent, [make_record(make_sites())])
        assert stat.S_IMODE(reader.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(reader.path.parent.stat().st_mode) == 0o700
        assert (reader.path.parent / ".gitignore").read_text(encoding="utf-8") == "*\n"
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert (tmp_path / "new" / ".gitignore").read_text(encoding="utf-8") == "*\n"
    assert not (tmp_path / "mine" / ".gitignore").exists()


@pytest.mark.parametrize("options", [{"params": "all"}, {"max_bytes": 1000}, {"max_bytes": -1}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    """A wrong option raises where the sink is made, before training."""
    with pytest.raises(ValueError, match="is"):
        JournalSink(**options)


def test_a_record_that_cannot_be_encoded_is_counted(tmp_path: Path) -> None:
    """What makes no entry costs itself, not its neighbours."""
    sink = JournalSink()
    sink.open(make_run(tmp_path), health := Health())
    good = make_record(make_sites(), events=(make_event(),))
    wrong: Any = make_event(step=1, value="large")
    for record in (
        good,
        make_record(make_sites(), step=1, events=(wrong,)),
        make_record(make_sites(), step=2),
    ):
        sink.write(record)
    sink.flush(60.0)  # to close waits for no slow disk
    sink.close()
    (reader,) = read_journal(tmp_path / "run-1")
    assert [event.step for event in reader.events()] == [0]
    assert [step.record.snapshot.step for step in reader.records()] == [0, 1, 2]
    assert sum(entry.events for entry in reader.entries() if isinstance(entry, LostEntry)) == 1
    assert health.errors() == {"journal": 1}


def test_names_of_files() -> None:
    """A name says rank, attempt and number, and nothing else passes for one."""
    for name in (JournalName(0, 0), JournalName(12, 3, 7), JournalName(1, 1, 123_456)):
        assert JournalName.parse(str(name)) == name
    for name in (
        "rank0-attempt0.gwj.part",
        "rank-1-attempt0.gwj",
        "xrank0-attempt0.gwj",
        "rank0-attempt0.gwj\n",
    ):
        assert JournalName.parse(name) is None


def test_a_row_is_what_the_record_says() -> None:
    """The scalars of a row are the Record's own."""
    record = make_record(make_sites(), 2.0, step=9)
    row = step_row(record, {"rest": 1.0})
    assert (row.step, row.total_norm, row.groups) == (9, record.snapshot.total_norm, {"rest": 1.0})


def test_reading_needs_no_torch() -> None:
    """`gradwatch.journal` and the sink import where torch cannot be imported."""
    code = "import sys; sys.modules['torch'] = None; import gradwatch.journal, gradwatch.sinks.journal"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=250)
