"""Series of single parameters for trackers: what was measured, at its step, no more often than asked, and bounded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.capture.snapshot_assembly import with_modules
from gradwatch.engine.judged_steps import staggered_reads
from gradwatch.errors import AttachError
from gradwatch.records.histogram import BINS, LOWEST, Histogram
from gradwatch.records.record import Record
from gradwatch.rules.files import parse_rules
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks import make_sink
from gradwatch.sinks.parameter_selection import ParameterChoice
from gradwatch.sinks.prometheus.run_totals import MOST_OBSERVED
from gradwatch.sinks.trackers.parameter_series import LEFT_OUT
from gradwatch.sinks.trackers.points import MOST_HISTOGRAMS, Point, Points
from gradwatch.sinks.trackers.wandb import _histogram
from tests.sinks.trackers.test_tensorboard import read, scalars
from tests.support.kept import Kept
from tests.support.sink_records import RULES, make_record, make_run, make_sites

TURNS = """version: 1
rules:
  turns: {detect: {kind: dead, min_ndim: 0}, every: 3}
  always: {detect: {kind: above, of: max_abs, threshold: 1e9}, every: 1}
"""


def trained(tmp_path: Path, steps: int, sinks: Iterable[Any]) -> list[Record]:
    """The Records of a small training whose parameters take turns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer, kept = torch.optim.SGD(model.parameters(), 0.05), Kept()
    with gradwatch.watch(model, optimizer, rules=parse_rules(TURNS), run_dir=tmp_path, sinks=[kept, *sinks]):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().sum().backward()
            optimizer.step()
    return kept.records


def pointed(records: Iterable[Record], every: int, **choice: Any) -> list[Point]:
    """The Points made of Records."""
    maker = Points(RULES, every, ParameterChoice(**choice))
    return [point for record in records if (point := maker.observe(record)) is not None]


def by_series(points: Iterable[Point]) -> dict[str, dict[int, float]]:
    """Values by step, of each series of a parameter."""
    found: dict[str, dict[int, float]] = {}
    for point in points:
        for name, value in point.values.items():
            if name.startswith("gradwatch/param_") and not name.endswith(LEFT_OUT):
                found.setdefault(name.removeprefix("gradwatch/param_"), {})[point.step] = value
    return found


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_values_are_those_measured_and_as_often_as_asked(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each value equals that of its step's Snapshot; a column that is read in turns comes of every parameter."""
    monkeypatch.setattr(staggered_reads, "SMALLEST_PART", 1)
    records = trained(tmp_path, 24, [])
    assert len({record.snapshot.columns["zero_fraction"].present.tobytes() for record in records}) > 1
    expected: dict[str, dict[int, float]] = {}
    for record in records:
        snapshot = record.snapshot
        columns = {name: (one.values, one.present) for name, one in snapshot.columns.items()}
        columns["norm"] = (snapshot.norm, np.full(len(snapshot.sites), snapshot.step % every == 0))
        for column, (values, present) in columns.items():
            for k in np.flatnonzero(present):
                series = expected.setdefault(f"{column}/{snapshot.sites.names[k]}", {})
                if not series or snapshot.step - max(series) >= every:
                    series[snapshot.step] = float(values[k])
    assert by_series(pointed(records, every, params="all")) == expected
    assert len(expected) == 3 * 4


def test_there_are_never_more_than_asked_and_what_is_left_out_is_told(tmp_path: Path) -> None:
    """Of 12 series 5 are sent, always the same; the others are counted in a series, and said once."""
    points = pointed(trained(tmp_path, 12, []), 2, params="all", max_series=5)
    assert len(by_series(points)) == 5
    assert points[-1].values[f"gradwatch/{LEFT_OUT}"] == 7
    health, said = Health(), list[tuple[str, str]]()
    health.on_first = lambda component, error: said.append((component, str(error)))
    sink = make_sink("tensorboard", {"params": "all", "max_series": 5})
    sink.open(make_run(tmp_path), health)
    for step in range(4):
        sink.write(make_record(make_sites(9), step=step))
    sink.close()
    ((component, told),) = said
    assert component == "tensorboard"
    assert "`max_series` of them are (5)" in told


def test_by_default_nothing_of_single_parameters_is_sent(tmp_path: Path) -> None:
    """A model of ten thousand parameters makes no ten thousand charts unless that is asked for."""
    points = pointed(trained(tmp_path, 4, []), 1)
    assert by_series(points) == {}
    assert all(LEFT_OUT not in name for point in points for name in point.values)


def test_chosen_by_name_or_as_the_worst() -> None:
    """`match` takes globs; `worst` the seats of largest and smallest norms."""
    sites = make_sites(9)
    records = [make_record(sites, np.arange(1, 10), step=step) for step in range(3)]
    named = by_series(pointed(records, 1, params="match", match=("layers.3.*", "layers.5.*")))
    assert set(named) == {"norm/layers.3.weight", "norm/layers.5.weight"}
    worst = by_series(pointed(records, 1, params="worst", top_k=2))
    assert set(worst) == {"norm/layers.0.weight", "norm/layers.8.weight"}


def test_two_optimizers_share_the_bound() -> None:
    """Each has names of its own, and together they have no more than `max_series`."""
    records = [make_record(make_sites(3), step=step, optimizer=k) for step in range(3) for k in range(2)]
    points = pointed(records, 1, params="all", max_series=4)
    names = {name for point in points for name in point.values if "param_norm/" in name}
    assert sorted(names) == [
        "gradwatch/optimizer_1/param_norm/layers.0.weight",
        *(f"gradwatch/param_norm/layers.{k}.weight" for k in range(3)),
    ]
    assert points[-1].values[f"gradwatch/optimizer_1/{LEFT_OUT}"] == 2


@pytest.mark.parametrize(("room", "left_out"), [(0, [3, 3]), (3, [0, 3])])
def test_an_optimizer_without_any_room_is_counted(room: int, left_out: list[int]) -> None:
    """Nothing of it is sent, and the count of what is left out says so."""
    records = [make_record(make_sites(3), step=step, optimizer=k) for step in range(3) for k in range(2)]
    points = pointed(records, 1, params="all", max_series=room)
    assert sum("param_norm/" in name for name in points[-1].values) == 0
    assert points[-1].values[f"gradwatch/optimizer_1/{LEFT_OUT}"] == sum(left_out)


def test_tensorboard_has_each_value_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a training measured in turns is read back from the event file, with the steps it was measured at."""
    monkeypatch.setattr(staggered_reads, "SMALLEST_PART", 1)
    sink = make_sink("tensorboard", {"dir": str(tmp_path / "tb"), "every": 3, "params": "all"})
    records = trained(tmp_path, 12, [sink])
    found = read(tmp_path / "tb")
    for k, name in enumerate(records[0].snapshot.sites.names):
        wanted = {
            record.snapshot.step: float(record.snapshot.columns["zero_fraction"].values[k])
            for record in records
            if record.snapshot.columns["zero_fraction"].present[k]
        }
        assert len(wanted) >= 3
        assert scalars(found, f"gradwatch/param_zero_fraction/{name}") == pytest.approx(wanted)


def test_observed_values_loss_and_learning_rate_stand_beside() -> None:
    """A value that the script gives now and then is sent at its own step; one of every step as often as asked."""
    sites, maker = make_sites(2), Points(RULES, 10)
    found: dict[str, list[int]] = {}
    for step in range(40):
        given = {"loss": 1.0, "lr": 0.1, "often": 1.0} | ({"accuracy": 0.5} if step % 15 == 7 else {})
        point = maker.observe(make_record(sites, step=step, scalars=given))
        for name in () if point is None else point.values:
            found.setdefault(name.removeprefix("gradwatch/"), []).append(step)
    assert found["observed/accuracy"] == [7, 22, 37]
    assert found["observed/often"] == found["loss"] == found["learning_rate"] == [0, 10, 20, 30]
    broken = maker.observe(make_record(sites, math.nan, step=43, scalars={"loss": 1.0, "often": 2.0}))
    assert broken is not None
    assert broken.values["gradwatch/observed/often"] == 2.0  # at a step of note, whatever its own pace
    many = Points(RULES, 1)
    for step in range(500):
        many.observe(make_record(sites, step=step, scalars={f"v{step}": 1.0}))
    assert len(many._observed_at) == MOST_OBSERVED
    assert many.names_left_out


def histogram(zeros: int, **counts: int) -> Histogram:
    """A histogram with some counts by octave, such as `_3=7` for 7 elements from 2^-3 to 2^-2."""
    bins = np.zeros(BINS, np.int64)
    for octave, count in counts.items():
        bins[-int(octave.removeprefix("_")) - LOWEST] = count
    return Histogram(zeros, bins, 1)


def test_tensorboard_and_wandb_have_the_histograms(tmp_path: Path) -> None:
    """Over log2 of the magnitude, exact zeros in a bucket of their own, at the step of the gradient."""
    import wandb

    found = histogram(4, _3=7, _10=2)
    sink = make_sink("tensorboard", {"dir": str(tmp_path / "tb")})
    sink.open(make_run(tmp_path), Health())
    for step in (0, 13):
        sink.write(make_record(make_sites(2), step=step, histograms={1: found} if step == 13 else {}))
    sink.close()
    (event,) = read(tmp_path / "tb").Histograms("gradwatch/grad_log2/layers.1.weight")
    value = event.histogram_value
    counts = {limit: count for limit, count in zip(value.bucket_limit, value.bucket, strict=True) if count}
    assert event.step == 13
    assert counts == {-48.0: 4.0, -9.0: 2.0, -2.0: 7.0}
    assert (value.min, value.max, value.num) == (-49.0, -2.0, 13.0)
    shown = _histogram(found)
    assert isinstance(shown, wandb.Histogram)
    assert dict(zip(shown.bins[:-1], shown.histogram, strict=True)) == {
        edge: {-49: 4, -10: 2, -3: 7}.get(edge, 0) for edge in range(-49, 16)
    }


def test_histograms_of_activations_stand_beside_those_of_gradients(tmp_path: Path) -> None:
    """Under a name of their own, and with room of their own: as many modules as parameters have some."""
    count = MOST_HISTOGRAMS + 5
    sites = with_modules(make_sites(count), tuple(f"layers.{k}" for k in range(count)))
    found = {k: histogram(k) for k in range(len(sites))}
    point = Points(RULES, 1).observe(make_record(sites, histograms=found))
    assert point is not None
    kinds = Counter(name.split("/")[1] for name in point.histograms)
    assert kinds == {"grad_log2": MOST_HISTOGRAMS, "activation_log2": MOST_HISTOGRAMS}
    assert point.histograms["gradwatch/activation_log2/layers.3"].zeros == count + 3
    sink = make_sink("tensorboard", {"dir": str(tmp_path / "tb")})
    sink.open(make_run(tmp_path), Health())
    sink.write(make_record(sites, step=4, histograms={count + 1: histogram(4, _3=7)}))
    sink.close()
    (event,) = read(tmp_path / "tb").Histograms("gradwatch/activation_log2/layers.1")
    assert (event.step, event.histogram_value.num) == (4, 11.0)


def test_histograms_are_bounded_and_mlflow_says_that_it_has_none(tmp_path: Path) -> None:
    """More parameters than there is room for, and a tracker without histograms: each is said once."""
    sites, found = make_sites(MOST_HISTOGRAMS + 5), histogram(1, _3=7)
    points = Points(RULES, 1)
    for step in range(2):
        point = points.observe(
            make_record(sites, step=step, histograms=dict.fromkeys(range(len(sites)), found))
        )
        assert point is not None
        assert len(point.histograms) == MOST_HISTOGRAMS
    assert points.without_histogram == 5
    said: list[str] = []
    health = Health(on_first=lambda component, error: said.append(str(error)))
    sink = make_sink("mlflow", {"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"})
    sink.open(make_run(tmp_path), health)
    for step in range(3):
        sink.write(make_record(make_sites(2), step=step, histograms={0: found}))
    assert [text for text in said if "histograms" in text] == [
        "mlflow keeps no histograms: those that `histograms:` asks for are not sent there"
    ]
    sink.close()


@pytest.mark.parametrize("kind", ["wandb", "tensorboard", "mlflow"])
def test_a_choice_that_is_none_is_refused(kind: str) -> None:
    """By the sink itself, as by the rule file."""
    for options in ({"params": "some"}, {"params": "match"}, {"max_series": -1}):
        with pytest.raises(AttachError):
            make_sink(kind, options)
