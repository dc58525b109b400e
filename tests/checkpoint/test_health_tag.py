"""The file that says beside each journal how the weights are, and which of several files counts."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwatch.checkpoint import read_tag, read_tag_step
from gradwatch.checkpoint.health_tag import HealthTag, read_tags, tag_name, write_tag
from gradwatch.checkpoint.health_tracker import joined
from gradwatch.journal.health_tag_writer import HealthTagWriter, _digest
from gradwatch.records.record import CheckpointHealth
from gradwatch.records.run_info import RunInfo
from gradwatch.report.live.journal_source import JournalSource
from gradwatch.report.run_reader import checkpoint, read_run
from gradwatch.runtime.process_identity import start_ticks
from tests.support import warm
from tests.support.acting_cases import Training, run_folder, watched
from tests.support.launch_cases import GRADWATCH
from tests.support.sink_records import make_record
from tests.support.sink_records import make_sites as record_sites

SKIPS = "rules: {r: {detect: {kind: nonfinite}, severity: critical, do: [skip_step]}}"
WATCHES = "rules: {r: {detect: {kind: nonfinite}, severity: critical}}"
NAN = {"2__weight": math.nan}
RUN = RunInfo("r", "")
FIT = CheckpointHealth(True, 9, weights_step=9)
UNFIT = CheckpointHealth(False, 3, ("weights are not finite: fc",))


def test_the_tag_beside_the_run_says_what_the_watch_says(tmp_path: Path) -> None:
    """Written by the journal, readable by a saver in another process, private, and of one piece."""
    training = Training()
    with watched(training, SKIPS, **run_folder(tmp_path)) as (gw, _):
        training.step()
        assert gw.flush()
        assert read_tag(tmp_path / "r") == CheckpointHealth(True, 0)
        training.step(**NAN)
        assert gw.flush()
        found = read_tag(tmp_path / "r")
        assert (found.healthy, found.last_healthy_step) == (gw.healthy, gw.last_healthy_step) == (False, 0)
        assert "rule r is firing" in found.reasons
        training.step()
    path = tmp_path / "r" / tag_name(0, 0)
    assert read_tag(tmp_path / "r") == CheckpointHealth(True, 2)
    assert json.loads(path.read_text(encoding="utf-8"))["step"] == 2
    assert path.stat().st_mode & 0o777 == 0o600
    assert [name for name in os.listdir(tmp_path / "r") if ".new" in name] == []


def test_a_saver_can_keep_the_last_good_checkpoint(tmp_path: Path) -> None:
    """With `gw.healthy` in front of the save, the file that is left loads finite weights."""
    training = Training()
    path = tmp_path / "last-good.pt"
    with watched(training, WATCHES) as (gw, _):
        for step in range(8):
            training.step(**(NAN if step == 4 else {}))
            if gw.healthy:
                torch.save({"model": training.model.state_dict(), "gradwatch": gw.state_dict()}, path)
    saved = torch.load(path)
    assert all(torch.isfinite(value).all() for value in saved["model"].values())
    assert not all(torch.isfinite(value).all() for value in training.model.state_dict().values())
    kept = saved["gradwatch"]["lanes"]["0"]["checkpoint"]
    assert kept == {**kept, "last_healthy_step": 3, "poisoned_at": None, "ruin": []}


def test_ranks_are_as_healthy_as_the_worst(tmp_path: Path) -> None:
    """One tag a rank; together they say what the worst says, at the step that all had reached."""
    write_tag(tmp_path, HealthTag(0, 7, CheckpointHealth(True, 7)))
    write_tag(tmp_path, HealthTag(1, 6, CheckpointHealth(False, 5, ("rule r is firing",))))
    assert read_tag(tmp_path) == CheckpointHealth(False, 5, ("rule r is firing",))
    assert read_tag_step(tmp_path) == 6
    assert joined([]) == CheckpointHealth()
    assert joined([CheckpointHealth(True, 3), CheckpointHealth(True, None)]).last_healthy_step is None


def test_the_last_tag_names_the_last_step(tmp_path: Path) -> None:
    """Though weights have been unhealthy for the same reason for long."""
    bad = CheckpointHealth(False, 3, ("a non-finite gradient reached the optimizer at step 4",))
    tag, sites = HealthTagWriter(RUN), record_sites(2)
    for step in range(4, 9):
        tag.add([replace(make_record(sites, step=step), checkpoint=bad)])
        tag.write(tmp_path, 0)
    assert read_tag_step(tmp_path) == 4
    tag.write(tmp_path, 0, last=True)
    assert read_tag_step(tmp_path) == 8


def test_what_is_no_tag_is_refused(tmp_path: Path) -> None:
    """No file, no JSON, another format."""
    with pytest.raises(FileNotFoundError):
        read_tag(tmp_path)
    for text in (
        "",
        "[]",
        "{}",
        '{"format": 2, "healthy": true, "last_healthy_step": 1, "reasons": []}',
        '{"format":1}',
    ):
        (tmp_path / tag_name(0, 0)).write_text(text)
        with pytest.raises(ValueError, match="not a checkpoint health tag"):
            read_tag(tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("there", ["fifo", "link"])
def test_what_is_no_file_is_not_read(there: str, tmp_path: Path) -> None:
    """A FIFO would wait for a writer for ever, and what a link leads to may have no end."""
    place = tmp_path / tag_name(0, 0)
    if there == "fifo":
        os.mkfifo(place)
    else:
        place.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="not a checkpoint health tag"):
        read_tag(tmp_path)


def test_a_tag_is_replaced_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails half-way leaves the old tag and no other file; a link in its place is not followed."""
    write_tag(tmp_path, HealthTag(0, 1, CheckpointHealth(True, 1)))

    def full(descriptor: int) -> None:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space"):
            write_tag(tmp_path, HealthTag(0, 2, CheckpointHealth(False, 1, ("x",))))
    assert read_tag(tmp_path) == CheckpointHealth(True, 1)
    assert os.listdir(tmp_path) == [tag_name(0, 0)]
    outside = tmp_path / "outside"
    outside.write_text("kept")
    (tmp_path / tag_name(0, 0)).unlink()
    (tmp_path / tag_name(0, 0)).symlink_to(outside)
    write_tag(tmp_path, HealthTag(0, 3, CheckpointHealth(True, 3)))
    assert outside.read_text(encoding="utf-8") == "kept"
    assert read_tag(tmp_path) == CheckpointHealth(True, 3)


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], list[int]]:
    """The clock that says when a file is due, and the steps of the files that were written."""
    now, written, real = [100.0], list[int](), write_tag
    monkeypatch.setattr("gradwatch.journal.health_tag_writer.time.monotonic", lambda: now[0])
    monkeypatch.setattr(
        "gradwatch.journal.health_tag_writer.write_tag",
        lambda *args: (written.append(args[1].step), real(*args))[1],
    )
    return now, written


def follow(folder: Path, now: list[float], health: Callable[[int], CheckpointHealth]) -> None:
    """A thousand steps of 2 ms each."""
    writer, sites = HealthTagWriter(RUN), record_sites()
    for step in range(1000):
        now[0] += 0.002
        writer.add([replace(make_record(sites, step=step), checkpoint=health(step))])
        writer.write(folder, 0)
    writer.write(folder, 0, last=True)


def test_the_tag_follows_a_change_at_once_and_mere_steps_now_and_then(
    tmp_path: Path, clocked: tuple[list[float], list[int]]
) -> None:
    """A thousand healthy steps are a write or two; a change for the worse is one at once."""
    now, written = clocked
    bad = CheckpointHealth(False, 499, ("bad",))
    follow(tmp_path, now, lambda step: bad if step == 500 else CheckpointHealth(True, step))
    assert {0, 500, 501, 999} <= set(written)
    assert len(written) <= 7


def test_a_streak_of_bad_steps_is_no_stream_of_files(
    tmp_path: Path, clocked: tuple[list[float], list[int]]
) -> None:
    """While a checkpoint stays unhealthy, reasons that name another step each time wait for their second, too."""
    now, written = clocked
    reason = "a gradient was not finite at step {}".format
    follow(tmp_path, now, lambda step: CheckpointHealth(False, None, (reason(step),)))
    assert written[0] == 0
    assert len(written) <= 4
    assert read_tag(tmp_path).reasons == (reason(999),)


# -- which of several tags counts --------------------------------------------------------------------------


def tag(health: CheckpointHealth = FIT, **fields: Any) -> HealthTag:
    """The last words of one watch of a launch, unless `fields` say otherwise."""
    usual = {"ended": True, "launch": "job", "program": "p", "weights": frozenset({"fc"}), "step": 9}
    return HealthTag(health=health, **{"rank": 0, **usual, **fields})


HERE = {"host": platform.node(), "pid": os.getpid(), "started": start_ticks(os.getpid())}


@pytest.mark.parametrize(
    ("earlier", "later", "healthy"),
    [
        # Watches in turn: of the same weights the later one speaks, of others both do.
        ({}, {}, True),
        ({}, {"weights": frozenset({"fc", "conv"})}, True),
        ({"weights": frozenset({"fc", "conv"})}, {}, False),
        ({}, {"weights": frozenset({"conv"})}, False),
        # Side by side, or perhaps so: both do.
        ({"written": 25.0}, {}, False),
        ({"ended": False}, {}, False),
        # A worker that was killed and started again, by the same launcher or by another one.
        ({"ended": False}, {"program": "q"}, True),
        ({"ended": False, "launch": "before"}, {"program": "q", "weights": frozenset({"conv"})}, True),
        ({"launch": "before", "written": 25.0}, {"program": "q"}, False),
        # One of another launch that is still there, between two steps or in an evaluation.
        ({"ended": False, "launch": "before", **HERE}, {"program": "q"}, False),
        ({"ended": False, **HERE}, {"program": "q"}, False),
        # Clocks that differ: the numbers of attempts do not.
        ({"attempt": 2}, {}, False),
        # Another rank, and one that the resumed job is too small to have.
        ({"rank": 1, "launch": "before"}, {"world_size": 2}, False),
        ({"rank": 2, "launch": "before"}, {"world_size": 2}, True),
        # Of an earlier version.
        ({"attempt": None, "began": 0.0, "launch": "", "program": "", "weights": frozenset()}, {}, True),
    ],
)
def test_a_later_tag_takes_the_place_of_an_earlier_one(
    earlier: dict[str, Any], later: dict[str, Any], healthy: bool, tmp_path: Path
) -> None:
    """Only where it speaks for the same weights, or for a launch that comes after; else both count."""
    write_tag(tmp_path, tag(UNFIT, **{"attempt": 0, "began": 10.0, "written": 19.0, **earlier}))
    write_tag(tmp_path, tag(FIT, **{"attempt": 1, "began": 20.0, "written": 29.0, **later}))
    assert read_tag(tmp_path).healthy is healthy
    assert read_tag(tmp_path).reasons == (() if healthy else UNFIT.reasons)


@pytest.mark.parametrize("looked", [9, None])
def test_the_report_knows_the_last_healthy_step_of_the_attempt_before(
    tmp_path: Path, looked: int | None
) -> None:
    """Weights are ruined before the first step of a resumed run: a look has vouched for those of before, or none."""
    unknown = CheckpointHealth(False, None, ("weights are not finite: fc",))
    before = CheckpointHealth(True, 9, weights_step=looked)
    write_tag(tmp_path, tag(before, attempt=0, began=10.0, written=19.0, launch="before", program="o"))
    write_tag(tmp_path, tag(unknown, attempt=1, began=20.0, written=29.0))
    now = checkpoint(tmp_path).now
    assert now is not None
    assert (now.healthy, now.last_healthy_step) == (False, looked)


def test_a_clock_that_was_ahead_hides_no_later_attempt(tmp_path: Path) -> None:
    """The first attempt, whose machine was an hour ahead, was healthy; the second, which resumed it, is not."""
    write_tag(tmp_path, tag(FIT, attempt=0, began=3610.0, written=3619.0, launch="before", program="o"))
    write_tag(tmp_path, tag(UNFIT, attempt=1, began=20.0, written=29.0))
    assert not read_tag(tmp_path).healthy


def test_weights_are_known_by_names_and_sizes() -> None:
    """A layer of the same name and another width is another model."""
    sites = record_sites(2)
    assert _digest(sites) == _digest(replace(sites, depths=sites.depths[::-1]))
    assert _digest(sites) != _digest(replace(sites, numels=sites.numels + 1))


def test_a_folder_with_the_name_of_a_tag_is_none(tmp_path: Path) -> None:
    """Whoever made it."""
    (tmp_path / tag_name(7, 0)).mkdir()
    with pytest.raises(FileNotFoundError):
        read_tag(tmp_path)


def test_a_tag_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """It named neither its attempt nor when it was written: the file's own time says that."""
    path = tmp_path / "checkpoint-health-rank0.json"
    old = {"format": 1, "rank": 0, "step": 7, "healthy": False, "last_healthy_step": 3, "reasons": ["bad"]}
    path.write_text(json.dumps(old))
    assert (read_tag(tmp_path).reasons, read_tag_step(tmp_path)) == (("bad",), 7)
    write_tag(tmp_path, tag(began=path.stat().st_mtime - 1))
    assert not read_tag(tmp_path).healthy
    write_tag(tmp_path, tag(began=path.stat().st_mtime + 1))
    assert read_tag(tmp_path) == FIT


def test_of_two_open_watches_none_hides_the_other(tmp_path: Path) -> None:
    """The weights of one are ruined; the other, which is written later, goes on in good health, also when both end."""
    ruined, fine = Training(), Training()
    with (
        watched(ruined, WATCHES, **run_folder(tmp_path)) as (gw, _),
        watched(fine, WATCHES, **run_folder(tmp_path)) as (other, _),
    ):
        ruined.step(**NAN)
        assert gw.flush()
        for _ in range(3):
            fine.step()
        assert other.flush()
        assert (gw.healthy, other.healthy) == (False, True)
        assert not read_tag(tmp_path / "r").healthy
    assert not read_tag(tmp_path / "r").healthy
    assert len(read_tags(tmp_path / "r")) == 2


def test_a_watch_in_turn_speaks_for_the_same_weights(tmp_path: Path) -> None:
    """A script that starts its training anew after a NaN saves again; the report still tells of the first one."""
    for ruin in (NAN, {}):
        training = Training()
        with watched(training, "rules: {}", **run_folder(tmp_path)):
            training.step(**ruin)
        assert read_tag(tmp_path / "r").healthy is not bool(ruin)
    report = read_run(tmp_path / "r")
    assert report.verdict.state == "warning"
    assert "; those of an earlier watch were not healthy when it ended (" in report.verdict.sentence
    assert report.checkpoint is not None
    assert report.checkpoint.healthy
    with JournalSource(tmp_path / "r") as source:
        view = source.view(1.0)
    assert (view.weights_healthy, view.unfit[:32]) == (False, "of an earlier watch: a gradient ")


FORKS = """
import os, sys
import torch
from torch import nn
def train(steps, rate):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        if step == steps - 1:
            optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return model, optimizer
ruined = sys.argv[1]
if ruined == "parent":
    kept = train(5, float("nan"))
child = os.fork()
if not child:
    kept = train(9, float("nan") if ruined == "child" else 0.01)
    sys.exit()
os.waitpid(child, 0)
if ruined != "parent":
    kept = train(30, 0.01)
"""


@pytest.mark.parametrize("ruined", ["parent", "child", "none"])
def test_a_forked_child_and_its_parent_hide_nothing_of_each_other(ruined: str, tmp_path: Path) -> None:
    """Both train, one after the other; whichever is ruined, and writes first or last, is heard in tag and report."""
    (tmp_path / "x.py").write_text(FORKS)
    done = warm.run([*GRADWATCH, "run", "--", sys.executable, "x.py", ruined], tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (path for path in (tmp_path / "gradwatch-runs").iterdir() if path.is_dir())
    assert len(read_tags(run)) == 2
    sentence = read_run(run).verdict.sentence
    if ruined == "none":
        assert read_tag(run).healthy
        assert "are healthy" in sentence
    else:
        assert "not healthy" in sentence
        assert "weights are not finite" in sentence


def test_a_resumed_run_is_as_healthy_as_its_last_attempt(tmp_path: Path) -> None:
    """The first ends with ruined weights; the second, another launch, is heard alone, whatever its model is called."""
    command = [*GRADWATCH, "run", "--dir", "runs", "--run-id", "r", "--", sys.executable, "x.py"]
    (tmp_path / "x.py").write_text(FORKS)
    for ruined in ("parent", "none"):
        done = warm.run([*command, ruined], tmp_path)
        assert done.returncode == 0, done.stderr
        assert read_tag(tmp_path / "runs" / "r").healthy is (ruined == "none")
    assert len(read_tags(tmp_path / "runs" / "r")) == 4
    report = read_run(tmp_path / "runs" / "r")
    assert "earlier watch" not in report.verdict.sentence
    assert "when attempt 0 of rank 0 ended, its weights were not healthy: weights are not finite: " in str(
        report.notes
    )
