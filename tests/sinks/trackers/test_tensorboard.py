"""The TensorBoard sink, read back with TensorBoard's own EventAccumulator."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.trackers.incident_list import NAME
from gradwatch.sinks.trackers.tensorboard import EVENTS, TensorBoardSink
from tests.support.sink_records import make_event, make_record, make_run, make_sites, skip

SITES = make_sites(4)


def read(directory: Path) -> EventAccumulator:
    found = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def scalars(found: EventAccumulator, tag: str) -> dict[int, float]:
    return {each.step: each.value for each in found.Scalars(tag)}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """Norms, groups and counters every 5 steps, and the step on which a rule fires, with its text."""
    sink = TensorBoardSink(str(tmp_path / "tb"), every=5)
    sink.open(make_run(tmp_path), Health())
    for step in range(20):
        sink.write(make_record(SITES, 1.0 + step, step=step, applied=0.5, loss_scale=1024.0))
    event = make_event(step=23, sites=("layers.3.weight",), count=2, value=9.0, summary="Not finite.")
    record = make_record(SITES, math.nan, step=23, events=(event,), firing=["non-finite"], decision=skip())
    sink.write(record)
    assert sink.flush(10)
    found = read(tmp_path / "tb")
    assert list(scalars(found, "gradwatch/grad_norm")) == [0, 5, 10, 15, 23]
    assert scalars(found, "gradwatch/grad_norm")[10] == pytest.approx(11 * 2)  # of four equal norms
    assert scalars(found, "gradwatch/grad_norm_applied")[10] == pytest.approx(11)
    assert scalars(found, "gradwatch/group_grad_norm/embed")[5] == pytest.approx(6 * math.sqrt(2))
    assert scalars(found, "gradwatch/loss_scale") == {0: 1024, 5: 1024, 10: 1024, 15: 1024}
    assert scalars(found, "gradwatch/clipped_steps_total")[15] == 16
    assert scalars(found, "gradwatch/skipped_steps_total")[23] == 1
    assert scalars(found, "gradwatch/rule_firings_total/non-finite") == {0: 0, 5: 0, 10: 0, 15: 0, 23: 1}
    assert scalars(found, "gradwatch/rule_active/non-finite")[23] == 1
    (text,) = found.Tensors(EVENTS)
    said = text.tensor_proto.string_val[0].decode()
    assert text.step == 23
    for part in ("non-finite (critical) firing at step 23", "layers.3.weight = 9 and 1 more", "Not finite."):
        assert part in said
    assert found.SummaryMetadata(EVENTS).plugin_data.plugin_name == "text"
    sink.close()


def test_all_incidents_are_shown_where_tensorboard_samples_texts(tmp_path: Path) -> None:
    """Of a name it keeps ten or a hundred texts, the newest among them: that one is a table of all."""
    sink = TensorBoardSink(str(tmp_path / "tb"), every=100)
    sink.open(make_run(tmp_path), Health())
    for step in range(30):
        event = make_event(step=step, incident=f"non-finite-0-{step}")
        sink.write(make_record(SITES, 1.0, step=step, events=(event,)))
        assert sink.flush(10)
    sink.close()
    found = EventAccumulator(str(tmp_path / "tb"), size_guidance={"tensors": 10})
    found.Reload()
    assert len(found.Tensors(EVENTS)) == 10
    newest = found.Tensors(NAME)[-1]
    table = newest.tensor_proto.string_val[0].decode()
    assert newest.step == 29
    assert all(
        f"| {step} | 0 | non-finite | critical | firing | non-finite-0-{step} |" in table
        for step in range(30)
    )
    assert found.SummaryMetadata(NAME).plugin_data.plugin_name == "text"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(value: float, tmp_path: Path) -> None:
    """NaN and Inf are read back as NaN and Inf, on the very step, however seldom points are written."""
    sink = TensorBoardSink(str(tmp_path / "tb"), every=1000)
    sink.open(make_run(tmp_path), Health())
    for step in range(10):
        sink.write(make_record(SITES, value if step == 7 else 1.0, step=step))
    sink.close()
    found = read(tmp_path / "tb")
    assert scalars(found, "gradwatch/grad_norm")[7] == pytest.approx(value, nan_ok=True)
    assert scalars(found, "gradwatch/nonfinite_steps_total") == {0: 0, 7: 1}


def test_a_disk_that_fails_loses_no_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder cannot be made for a while: counted, tried again, and then everything is there."""
    place = tmp_path / "tb"
    place.write_text("a file where the folder should be")
    health = Health()
    sink = TensorBoardSink(str(place), every=1)
    sink.open(make_run(tmp_path), health)
    for step in range(5):
        sink.write(make_record(SITES, 1.0, step=step))
    assert not sink.flush(10)
    assert health.errors()["tensorboard"] >= 1
    place.unlink()
    assert sink.flush(10)
    sink.close()
    assert list(scalars(read(place), "gradwatch/grad_norm")) == [0, 1, 2, 3, 4]


def test_after_a_failed_write_a_new_file_is_begun(tmp_path: Path) -> None:
    """A record cut short ends the file for every reader, so the points go to another one."""
    health = Health()
    sink = TensorBoardSink(str(tmp_path / "tb"), every=1)
    sink.open(make_run(tmp_path), health)
    sink.write(make_record(SITES, 1.0, step=0))
    assert sink.flush(10)
    writer: Any = sink._writer
    writer._writer.close()  # the next write raises ValueError, as a file that is gone may
    sink.write(make_record(SITES, 1.0, step=1))
    sink.flush(10)
    assert sink.flush(10)
    sink.close()
    assert health.errors() == {"tensorboard": 1}
    assert len(list((tmp_path / "tb").iterdir())) == 2
    assert list(scalars(read(tmp_path / "tb"), "gradwatch/grad_norm")) == [0, 1]


def test_only_rank_0_writes(tmp_path: Path) -> None:
    """The total norm is that of the job: other ranks make no folder."""
    sink = TensorBoardSink(str(tmp_path / "tb"))
    sink.open(make_run(tmp_path, rank=1, world_size=2), Health())
    sink.write(make_record(SITES))
    assert sink.flush(1)
    sink.close()
    assert not (tmp_path / "tb").exists()


def test_the_default_folder_is_that_of_the_run(tmp_path: Path) -> None:
    """`tensorboard --logdir` on the folder of all runs finds each by its name."""
    sink = TensorBoardSink()
    run = make_run(tmp_path)
    sink.open(run, Health())
    sink.write(make_record(SITES))
    sink.close()
    assert len(list(Path(run.directory, "tensorboard").glob("events.out.tfevents.*.gradwatch"))) == 1
