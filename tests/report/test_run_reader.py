"""From journals to a report: what is in it, and what is said where something is missing."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gradwatch.checkpoint.health_tag import HealthTag, tag_name, write_tag
from gradwatch.errors import GradwatchError
from gradwatch.journal import JournalReader, LostEntry, NormsEntry, RunEntry, SitesEntry, StepsEntry
from gradwatch.journal.columnar_steps import step_row
from gradwatch.records.record import CheckpointHealth
from gradwatch.records.run_info import RunInfo
from gradwatch.report import chart_data, html_page, json_document, load, markdown_page, read_run, run_reader
from gradwatch.report.run_reader import RunCollector
from gradwatch.runtime.process_identity import alive
from tests.report.runs import SITES, broken, events, finished, recorded, steps
from tests.support.sink_records import make_event, make_record, make_sites


def test_a_healthy_run(tmp_path: Path) -> None:
    """Every step, every parameter in the order of depth, curves and cost; nothing to remark."""
    report = read_run(recorded(tmp_path, steps(50), account=finished(50)))
    (track,) = report.tracks
    assert report.verdict.state == "healthy"
    assert report.notes == ()
    assert (report.name, report.steps, track.steps, track.axis.width) == ("run-1", 50, 50, 1)
    assert track.parameters.names == SITES.names
    assert track.curves["loss"].high[0] == 5
    assert report.cost is not None
    assert report.cost.share == pytest.approx(0.05)
    assert [rule.state for rule in report.rules] == ["silent", "silent"]


def test_a_broken_run(tmp_path: Path) -> None:
    """What fired with its cause, the skip, the clips, and where the NaN stands."""
    report = read_run(recorded(tmp_path, broken(), account=finished(60, fired={"non-finite": 1})))
    (track,), (incident,) = report.tracks, report.incidents
    assert report.verdict.state == "critical"
    assert incident.found
    assert [one.step for one in incident.incident.around] == list(range(32, 44))
    assert {name: track.total(name) for name in ("skipped", "clipped", "clipped_by_script")} == {
        "skipped": 1,
        "clipped": 10,
        "clipped_by_script": 0,
    }
    assert np.argwhere(track.parameters.grids["norm"].bad).tolist() == [[40, 3]]
    assert track.curves["total_norm"].bad.nonzero()[0].tolist() == [40]
    assert np.isfinite(track.parameters.grids["update_ratio"].high).any(1).nonzero()[0].tolist() == list(
        range(0, 60, 4)
    )
    assert [line.action for line in report.actions] == ["clip", "skip_step"]


def test_no_spike_is_lost(tmp_path: Path) -> None:
    """One step of many, in one parameter: still there in the bucket of its step, in total and parameter."""
    records = steps(2500, make_sites(3))
    spike = records[1217].snapshot.norm.copy()
    spike[1] = 777.0
    records[1217] = make_record(records[0].snapshot.sites, spike, step=1217)
    (track,) = read_run(recorded(tmp_path, records)).tracks
    grid = track.parameters.grids["norm"]
    bucket = 1217 // track.parameters.axis.width
    assert track.parameters.axis.width > 1
    assert grid.high[bucket, 1] == 777
    assert track.parameters.largest_step[1] == 1217, "not the first step of the bucket"
    assert (grid.high > 700).sum() == 1
    assert track.curves["total_norm"].high[1217 // track.axis.width] == pytest.approx(777, 1e-3)


def test_a_norm_that_was_never_finite_has_no_largest_step(tmp_path: Path) -> None:
    """The cell is empty, as that of the norm is; in JSON it is null."""
    norm = np.array([1.0, np.nan], np.float32)
    run = recorded(tmp_path, [make_record(make_sites(2), norm, step=step) for step in range(30)])
    report = read_run(run)
    found = chart_data.table(report.tracks[0].parameters)
    assert (found["high"], found["high_step"]) == ([1.0, None], [0, None])
    (row,) = (
        line for line in markdown_page.page([report]).splitlines() if line.startswith("| `layers.1.weight`")
    )
    assert row == "| `layers.1.weight` |  |  |  |  | yes |"


def test_killed(tmp_path: Path) -> None:
    """A process that left no end: the steps are there, and that it broke off is said first."""
    report = read_run(recorded(tmp_path, steps(30), closed=False))
    assert report.verdict.sentence.startswith("Broken off: no rule fired in 30 recorded steps")
    assert "the journal has no end" in report.notes[0]
    assert {rule.state for rule in report.rules} == {"not known"}
    assert report.cost is not None
    assert report.cost.share == pytest.approx(1e-4 / 0.01)


def test_still_running(tmp_path: Path) -> None:
    """A journal that is being written is read as far as it goes."""
    since = next(at for at in (1e9, 2e9, 4e9) if alive(os.getpid(), at))
    run = recorded(tmp_path, steps(30), closed=False, pid=os.getpid(), host=platform.node(), start_time=since)
    assert read_run(run).verdict.state == "running"


def test_no_step(tmp_path: Path) -> None:
    """A run that never took a step says so."""
    report = read_run(recorded(tmp_path, [], account=finished(0)))
    assert report.verdict.state == "nothing"
    assert "no step was recorded" in report.verdict.sentence
    assert (report.tracks, report.cost) == ((), None)


def test_damage_is_never_healthy(tmp_path: Path) -> None:
    """Bytes that cannot be read: the rest is shown, and the verdict says that part is missing."""
    run = recorded(tmp_path, steps(600), account=finished(600))
    (journal,) = run.glob("*.gwj")
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 0xFF
    journal.write_bytes(data)
    report = read_run(run)
    assert report.verdict.state == "warning"
    assert "part of the journal cannot be read" in report.verdict.sentence
    assert report.tracks
    assert any("cannot be read" in note for note in report.notes)


def test_norms_that_were_thinned_are_said(tmp_path: Path) -> None:
    """Where the cap took norms away, the report says at how many steps they are there."""
    sites = make_sites(200)
    report = read_run(recorded(tmp_path, steps(1500, sites), max_bytes=1 << 19, params="sampled"))
    assert any("norms of parameters were recorded at" in note for note in report.notes)


def test_sites_that_change(tmp_path: Path) -> None:
    """Parameters that join later have rows of their own, empty before."""
    later = [make_record(make_sites(8), 1.0, step=step) for step in range(20, 40)]
    (track,) = read_run(recorded(tmp_path, [*steps(20), *later])).tracks
    grid = track.parameters.grids["norm"]
    assert len(track.parameters.names) == 8
    assert np.isnan(grid.high[:20, 7]).all()
    assert np.isfinite(grid.high[20:]).all()


def test_no_gradient_is_no_value(tmp_path: Path) -> None:
    """A parameter that got no gradient at a step has nothing there, not the zero that its norm is recorded as."""
    calls = [1, 0, 1, 1, 1, 1]
    records = [make_record(SITES, 1.0, step=step, calls=calls if step == 3 else 1) for step in range(6)]
    (track,) = read_run(recorded(tmp_path, records)).tracks
    assert np.argwhere(np.isnan(track.parameters.grids["norm"].high)).tolist() == [[3, 1]]


def test_names_of_sites_are_those_of_their_file() -> None:
    """Norms whose sites stood in another file of the journal are left out: names there may be others."""
    norms = NormsEntry(
        0, 1, 7, "full", 1, np.ones(2, np.float32), np.ones(2, np.int32), np.ones(2, np.float32)
    )
    steps_entry = StepsEntry(0, 7, [step_row(make_record(make_sites(2), step=1), {})])
    for second_file, count in (([], 2), ([RunEntry(RunInfo("", ""), 1)], 0)):
        collector = RunCollector()
        take = collector.taking(JournalReader(__file__))
        for entry in (SitesEntry(7, 0, make_sites(2)), *second_file, steps_entry, norms):
            take(entry)
        (track,) = collector.report(Path(__file__), 0, [0]).tracks
        assert len(track.parameters.names) == count


def test_several_optimizers(tmp_path: Path) -> None:
    """Each has charts of its own, the one with the most steps first."""
    other = [make_record(SITES, 2.0, step=step, optimizer=1) for step in range(5)]
    report = read_run(recorded(tmp_path, [*other, *steps(10)]))
    assert [(track.optimizer, track.steps) for track in report.tracks] == [(0, 10), (1, 5)]


def test_many_incidents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones are shown, the others counted: a page must stay readable."""
    monkeypatch.setattr(run_reader, "MOST_INCIDENTS", 5)
    records = [make_record(SITES, 1.0, step=one.step, events=(one,)) for one in events(12)]
    report = read_run(recorded(tmp_path, records))
    assert [one.incident.name for one in report.incidents] == [f"i-{step}" for step in range(5)]
    assert report.incidents_left_out == 7


def test_the_incident_of_the_verdict_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After more warnings than are shown comes a critical one; what two ranks leave out is counted once."""
    monkeypatch.setattr(run_reader, "MOST_INCIDENTS", 5)
    many = [replace(one, severity="warning", rule="exploding") for one in events(9)]
    many.append(make_event(step=9))
    records = [make_record(SITES, 1.0, step=one.step, events=(one,)) for one in many]
    run = recorded(tmp_path, records, world_size=2)
    beside(run, recorded(tmp_path / "other", broken(), rank=1, world_size=2))
    beside(run, recorded(tmp_path / "third", records, rank=2, world_size=3))
    report = read_run(run)
    assert [one.incident.name for one in report.incidents] == ["i-1", "i-2", "i-3", "i-4", "incident-1"]
    assert report.incidents_left_out == 5


def test_pending_is_no_incident(tmp_path: Path) -> None:
    """A rule whose condition did not last never fired."""
    records = [make_record(SITES, 1.0, step=0, events=(make_event("pending"),)), *steps(5)[1:]]
    assert read_run(recorded(tmp_path, records)).incidents == ()


def test_the_weights_of_the_tag_are_in_the_sentence_of_every_form(tmp_path: Path) -> None:
    """Where the rule was over, and how the weights are after the step that the tag names: once, in each form."""
    records = broken()
    records[41] = make_record(SITES, 1.0, step=41, events=(make_event("resolved", step=41),))
    run = recorded(tmp_path, records, account=finished(60, fired={"non-finite": 1}))
    write_tag(run, HealthTag(0, 59, CheckpointHealth(True, 59, weights_step=59)))
    report = read_run(run)
    said = "the training finished, and its weights after step 59 are healthy."
    assert " and was over at step 41; gradwatch skipped 1 " in report.verdict.sentence
    assert report.verdict.sentence.endswith(said)
    for form in (html_page.page([report]), markdown_page.page([report]), json_document.text([report])):
        assert form.count(said) == 1
        assert "checkpoint saved after" not in form
    (found,) = json.loads(json_document.text([report]))["runs"]
    assert found["checkpoint"]["step"] == 59


def test_a_tag_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """Whether the weights are healthy is not known then, which is another thing than that no tag was written."""
    run = recorded(tmp_path, steps(30), account=finished(30))
    assert "weights" not in str(read_run(run).notes)
    (run / tag_name(0, 0)).write_text("{")
    (note,) = (one for one in read_run(run).notes if "weights" in one)
    assert note.startswith("whether the weights are healthy is not known: ")


def test_a_rule_of_the_account_alone_has_fired(tmp_path: Path) -> None:
    """The disk refused its event, so that the journal holds none: the account has counted it all the same."""
    report = read_run(recorded(tmp_path, steps(30), account=finished(30, fired={"non-finite": 1})))
    assert report.verdict.state == "critical"
    assert (
        "rule non-finite (critical) fired 1 time, which the journal does not hold;" in report.verdict.sentence
    )
    assert (report.rules[0].rule, report.rules[0].state) == ("non-finite", "fired")
    assert "not in the journal" in markdown_page.page([report])
    assert "not in the journal" in html_page.page([report])


@pytest.mark.parametrize("counted", [False, True])
def test_a_rule_that_fired_on_another_rank(tmp_path: Path, counted: bool) -> None:
    """Rank 0 saw nothing, rank 1 did, or has only counted it: the sentence names the rank."""
    run = recorded(tmp_path, steps(60), account=finished(60), world_size=2)
    account = finished(60, fired={"non-finite": 1})
    records = steps(60) if counted else broken()
    beside(run, recorded(tmp_path / "other", records, account=account, rank=1, world_size=2))
    report = read_run(run)
    assert report.verdict.state == "critical"
    assert "rule non-finite (critical) fired on rank 1 " in report.verdict.sentence
    assert "`non-finite` (rank 1)" in markdown_page.page([report])
    assert "non-finite (rank 1)" in html_page.page([report])


def test_damage_of_another_rank_is_never_healthy(tmp_path: Path) -> None:
    """What fired there may stand in the bytes that cannot be read."""
    run = recorded(tmp_path, steps(60), account=finished(60), world_size=2)
    other = recorded(tmp_path / "other", steps(600), account=finished(600), rank=1, world_size=2)
    (journal,) = other.glob("*.gwj")
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 0xFF
    journal.write_bytes(data)
    beside(run, other)
    assert read_run(run).verdict.state == "warning"


@pytest.mark.parametrize("lost", [LostEntry(events=1), LostEntry(queue=1), LostEntry(scalars=1)])
def test_what_was_not_written_is_never_healthy(lost: LostEntry) -> None:
    """Steps or transitions of rules that the disk refused may be those that matter."""
    for entry, said in ((lost, True), (LostEntry(norms=1, rotated=1), False)):
        collector = RunCollector()
        take = collector.taking(JournalReader(__file__))
        take(StepsEntry(0, 7, [step_row(make_record(make_sites(2), step=1), {})]))
        take(entry)
        report = collector.report(Path(__file__), 0, [0])
        assert ("part of the journal could not be written (see below)" in report.verdict.sentence) == said
        assert report.notes


def test_an_incident_of_each_process(tmp_path: Path) -> None:
    """One that was started again meets the same NaN at the same step: two incidents, though their name is one."""
    run = recorded(tmp_path, broken(), closed=False)
    (journal,) = recorded(tmp_path / "again", broken(), account=finished(60)).glob("*.gwj")
    journal.rename(run / "rank0-attempt1.gwj")
    report = read_run(run)
    assert [(one.incident.name, one.process) for one in report.incidents] == [
        ("incident-1", 0),
        ("incident-1", 1),
    ]
    assert [(one.first, one.last, one.process) for one in report.periods] == [(40, None, 0), (40, None, 1)]


def beside(run: Path, other: Path) -> None:
    """Move the journals of another rank to those of a run."""
    for journal in other.glob("*.gwj"):
        journal.rename(run / journal.name)


def test_causes_of_other_ranks(tmp_path: Path) -> None:
    """The rank on which a NaN appeared first knows where; rank 0's report has its cause."""
    mine = [make_record(SITES, 1.0, step=40, events=(make_event(step=40),))]
    run = recorded(tmp_path, mine, world_size=2)
    other = recorded(tmp_path / "other", broken(), rank=1, world_size=2)
    beside(run, other)
    (incident,) = read_run(run).incidents
    assert incident.incident.rank == 1
    assert "sqrt" in incident.incident.title


def test_a_rank_that_is_not_there(tmp_path: Path) -> None:
    """An error names the ranks that are; so does one for a folder without journals."""
    with pytest.raises(GradwatchError, match=r"no journal of rank 3 in .*; there are: 0"):
        load(recorded(tmp_path, steps(2)), rank=3)
    with pytest.raises(GradwatchError, match="no journal in"):
        load(tmp_path / "run-1" / "..")


def test_a_file_is_of_its_own_rank(tmp_path: Path) -> None:
    """A journal that is named itself is shown as the rank that wrote it, whatever rank was asked for."""
    run = recorded(tmp_path, steps(5), rank=3, world_size=8)
    (journal,) = run.glob("*.gwj")
    for rank in (0, 5):
        report = read_run(journal, rank)
        assert (report.rank, chart_data.facts(report)["rank"]) == (3, "3 of 8")


def test_a_file_that_is_no_journal() -> None:
    """An error says so: a page about nothing would look like a run without steps."""
    with pytest.raises(GradwatchError, match=r"nothing in .* can be read as a journal"):
        load(__file__)
