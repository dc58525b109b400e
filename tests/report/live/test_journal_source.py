"""The live view from journals, finished ones and ones that are being written."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradwatch.cli.top.command import once
from gradwatch.cli.top.screen import lines
from gradwatch.errors import GradwatchError
from gradwatch.journal import NormsEntry, SitesEntry
from gradwatch.journal.writer import Recorder
from gradwatch.records.record import Record
from gradwatch.report.live import JournalSource, LiveView
from gradwatch.report.live.view_from_journal import LiveState
from tests.report.runs import SITES, broken, finished, recorded, steps
from tests.support.sink_records import make_event, make_record, make_run


def view_of(run: Path, rank: int | None = None) -> LiveView:
    with JournalSource(run, rank) as source:
        return source.view(60.0)


class Writing:
    """A journal of this process that grows record by record."""

    def __init__(self, root: Path, **run: Any) -> None:
        self.info = replace(make_run(root, **{"host": platform.node(), "start_time": 4e9, **run}))
        self.folder = Path(self.info.directory)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.recorder = Recorder(self.info, "full", 0, lambda error: None, lambda events: None)
        self.recorder.begin()

    def write(self, *records: Record) -> None:
        self.recorder.record(list(records))
        self.recorder.commit(durable=True)


def test_a_run_that_went_wrong(tmp_path: Path) -> None:
    """What fired and is over, the step that was skipped, the last norms, and how the process ended."""
    view = view_of(recorded(tmp_path, broken(), account=finished(60)))
    assert (view.process, view.over, view.steps) == ("finished", True, 60)
    assert (view.worst, view.worst_severity, view.worst_step) == ("non-finite", "critical", 40)
    assert view.fired == {"non-finite": 1}
    assert (view.skipped, view.clipped) == (1, 10)
    (line,) = view.optimizers
    assert (line.step, line.steps_per_second, line.lr) == (59, 1.0, 0.1)
    assert line.total_norms[40] != line.total_norms[40]  # NaN
    assert {one.name for one in view.parameters} == set(SITES.names)
    assert [one.kind for one in view.lately if one.step == 40] == ["firing", "cause"]


def test_a_run_that_goes_on_is_followed(tmp_path: Path) -> None:
    """Each look has what was written since: a rule that begins to fire, and its end."""
    writing = Writing(tmp_path)
    writing.write(*steps(5))
    with JournalSource(writing.folder) as source:
        first = source.view(60.0)
        assert (first.process, first.steps, list(first.firing)) == ("running", 5, [])
        event = make_event(step=5, sites=(SITES.names[1],), count=3, actions=("skip_step",))
        writing.write(make_record(SITES, step=5, events=(event,), wall_time=1e9 + 5))
        (firing,) = source.view(60.0).firing
        assert (firing.rule, firing.since, firing.count, firing.actions) == (
            "non-finite",
            5,
            3,
            ("skip_step",),
        )
        writing.write(make_record(SITES, step=6, events=(make_event("resolved", step=6),), wall_time=1e9 + 6))
        last = source.view(60.0)
        assert (last.steps, list(last.firing), last.fired) == (7, [], {"non-finite": 1})


def test_a_later_attempt_is_followed_after_the_one_before(tmp_path: Path) -> None:
    """What happened in the earlier part of a run counts on, also while the view is open."""
    Writing(tmp_path).write(*steps(5))
    with JournalSource(tmp_path / "run-1") as source:
        assert source.view(60.0).steps == 5
        Writing(tmp_path, attempt=1).write(*steps(2))
        source._looked = 0.0
        assert source.view(60.0).steps == 7


def test_what_fired_before_rules_were_taken_up_anew_is_not_forgotten(tmp_path: Path) -> None:
    """Of two journals of one process: firings, steps, the worst rule; what fires goes on unless its rule is gone."""
    fires = [make_event("firing", rule, 3) for rule in ("non-finite", "dropped")]
    Writing(tmp_path).write(*steps(3), make_record(SITES, step=3, events=tuple(fires), wall_time=1e9 + 3))
    later = [replace(one, snapshot=replace(one.snapshot, step=one.snapshot.step + 4)) for one in steps(2)]
    Writing(tmp_path, attempt=1).write(*later)
    view = view_of(tmp_path / "run-1")
    assert (view.steps, view.fired) == (6, {"non-finite": 1, "dropped": 1})
    assert view.worst == "non-finite"
    assert [one.rule for one in view.firing] == ["non-finite"]
    assert [one.rule for one in view.lately] == ["non-finite", "dropped"]
    (line,) = view.optimizers
    assert len(line.total_norms) == 6


def test_a_process_that_was_started_again_begins_with_nothing_firing(tmp_path: Path) -> None:
    """What fired in the process before has fired; whether it would now is not known, and its norms are not drawn on."""
    event = make_event("firing", "non-finite", 3)
    recorded(tmp_path, [*steps(3), make_record(SITES, step=3, events=(event,))], closed=False)
    Writing(tmp_path, attempt=1).write(*steps(2))
    view = view_of(tmp_path / "run-1")
    assert (list(view.firing), view.fired) == ([], {"non-finite": 1})
    (line,) = view.optimizers
    assert len(line.total_norms) == 2


def test_damage_is_stepped_over_and_said(tmp_path: Path) -> None:
    """In the middle of a journal, and at the end of one whose process is gone."""
    whole = recorded(tmp_path / "whole", steps(600), account=finished(600))
    spoilt(whole, 0.5)
    with JournalSource(whole) as source:
        view = once(source)
    assert view.process == "finished"
    assert any("bytes of the journal cannot be read" in note for note in view.notes)
    killed = recorded(tmp_path / "killed", steps(600), closed=False, host=platform.node())
    with (killed / "rank0-attempt0.gwj").open("ab") as file:
        file.write(b"\x07" * 500)
    with JournalSource(killed) as source:
        view = once(source)
    assert view.steps == 600
    assert view.notes == ["500 bytes of the journal cannot be read: steps and firings may be missing"]


def spoilt(folder: Path, share: float) -> None:
    """Write over some bytes of a journal, at this share of its length."""
    path = folder / "rank0-attempt0.gwj"
    content = bytearray(path.read_bytes())
    at = int(len(content) * share)
    content[at : at + 300] = bytes(each ^ 0x55 for each in content[at : at + 300])
    path.write_bytes(content)


@pytest.mark.parametrize("content", [b"", b"\x01\x02" * 400, b"some text\n"])
def test_what_is_no_journal_is_refused(content: bytes, tmp_path: Path) -> None:
    """An old empty file, random bytes, a file of something else: as `report` refuses them."""
    path = tmp_path / "rank0-attempt0.gwj"
    path.write_bytes(content)
    os.utime(path, (1e9, 1e9))
    with pytest.raises(GradwatchError, match="can be read as a journal"):
        JournalSource(path)


def test_a_journal_that_was_just_made_is_waited_for(tmp_path: Path) -> None:
    """Its first entry is under way: `run --live` looks that early."""
    (tmp_path / "rank0-attempt0.gwj").touch()
    assert view_of(tmp_path).process == "waiting"


def test_a_killed_process_is_said_to_be_gone(tmp_path: Path) -> None:
    """A journal without an end, of a process of this machine that is not there, was of one that was killed."""
    gone = {"pid": 2**22 - 1, "host": platform.node()}
    assert view_of(recorded(tmp_path, steps(5), closed=False, **gone)).process == "killed"
    here = {"pid": os.getpid(), "host": platform.node(), "start_time": 4e9}
    assert view_of(recorded(tmp_path / "two", steps(5), closed=False, **here)).process == "running"


def test_rules_that_fire_on_another_rank_are_shown(tmp_path: Path) -> None:
    """With the rank; what fires on the one shown is not said twice."""
    both, one = make_event("firing", "non-finite", 3), make_event("firing", "exploding", 3)
    Writing(tmp_path, world_size=2).write(make_record(SITES, step=3, events=(both,)))
    other = Writing(tmp_path, world_size=2, rank=1, local_rank=1)
    other.write(make_record(SITES, step=3, events=(both, one)))
    shown = [(each.rule, each.rank) for each in view_of(tmp_path / "run-1").firing]
    assert shown == [("non-finite", None), ("exploding", 1)]
    assert {each.rank for each in view_of(tmp_path / "run-1", 1).firing} == {None}


def test_rules_that_fire_in_another_process_of_the_rank_are_shown(tmp_path: Path) -> None:
    """A second watch that goes on; of one that has ended, and of an earlier attempt in the same place, nothing."""
    one, two = (make_event("firing", name, 3) for name in ("one", "two"))
    Writing(tmp_path).write(make_record(SITES, step=3, events=(make_event("firing", "earlier", 3),)))
    second = Writing(tmp_path, place=1)
    second.write(make_record(SITES, step=3, events=(one,)))
    third = Writing(tmp_path, place=2)
    third.write(make_record(SITES, step=3, events=(two,)))
    last = Writing(tmp_path)
    last.write(make_record(SITES, step=3))
    with JournalSource(tmp_path / "run-1") as source:
        found = [(each.rule, each.rank) for each in source.view(60.0).firing if each.rank is not None]
        assert found == [("one", 0), ("two", 0)]
        assert "one  since step 3 in another process" in "\n".join(lines(source.view(60.0), StringIO()))
        third.recorder.close()
        assert [each.rule for each in source.view(60.0).firing if each.rank is not None] == ["one"]


def test_no_step_for_long_is_a_stall(tmp_path: Path) -> None:
    """The time since the last step, against the pace of those before."""
    writing = Writing(tmp_path)
    writing.write(*steps(5))  # their clock says 2001
    assert view_of(writing.folder).stalled


def test_several_optimizers_have_a_line_each(tmp_path: Path) -> None:
    """In the order of their numbers."""
    both = [make_record(SITES, optimizer=number, step=step) for step in range(3) for number in (0, 1)]
    view = view_of(recorded(tmp_path, both))
    assert [one.optimizer for one in view.optimizers] == [0, 1]
    assert view.steps == 6


def test_no_run_is_refused(tmp_path: Path) -> None:
    """With the folder that was looked at."""
    with pytest.raises(GradwatchError, match=str(tmp_path)):
        JournalSource(tmp_path)


def test_norms_that_come_out_of_order_are_put_in_order() -> None:
    """Steps with the same columns are written together, so that a later step may stand before an earlier one."""
    state = LiveState()
    state.take(SitesEntry(0, 0, SITES))
    for step in (0, 1, 3, 2):
        norm, one = np.full(len(SITES), float(step + 1), np.float32), np.ones(len(SITES), np.int32)
        state.take(NormsEntry(0, step, 0, "full", 1, norm, one, one.astype(np.float32)))
    view = state.view("", 0.0)
    assert view.norms_step == 3
    assert list(view.parameters[0].norms) == [1.0, 2.0, 3.0, 4.0]
