"""What every experiment tracker is told, and that none can hold a training job up or grow without bound."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.errors import AttachError
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.background_worker import BackgroundWorker
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks import make_sink
from gradwatch.sinks.prometheus.run_totals import RunTotals
from gradwatch.sinks.trackers.points import MOST_OPTIMIZERS, Point, Points
from gradwatch.sinks.trackers.tracker import MAX_QUEUE, Tracker
from tests.support import warm
from tests.support.examples import examples
from tests.support.sink_records import RULES, make_event, make_record, make_run, make_sites, skip

SITES = make_sites(4)
ROOT = Path(__file__).parents[3]


class Notebook(Tracker):
    """A tracker that keeps what it is told; it waits while `held`, and fails the first `faults` times."""

    name = "notebook"

    def __init__(self, every: int = 1, faults: int = 0) -> None:
        super().__init__(every, BackgroundWorker("gradwatch-notebook"))
        self.points: list[Point] = []
        self.calls: list[str] = []
        self.held = threading.Event()
        self.held.set()
        self.faults = faults

    def load(self, run: RunInfo) -> None:
        self.calls.append("load")
        random.random()  # as imports do

    def start(self, run: RunInfo) -> None:
        self.calls.append("start")

    def send(self, points: Sequence[Point]) -> None:
        self.held.wait(60)
        if self.faults:
            self.faults -= 1
            raise ConnectionError("the server is away")
        self.points += points

    def finish(self, stopped: bool) -> None:
        self.calls.append("finish")


def steps(points: Sequence[Point]) -> list[int]:
    return [point.step for point in points]


@given(
    every=st.integers(1, 30),
    norms=st.lists(st.sampled_from([0.5, 2.0, math.nan, math.inf]), min_size=1, max_size=60),
    skipped=st.sets(st.integers(0, 59)),
    fired=st.sets(st.integers(0, 59)),
)
@settings(max_examples=examples(50), deadline=None)
def test_thinning_hides_no_step_of_note(
    every: int, norms: list[float], skipped: set[int], fired: set[int]
) -> None:
    """A step is told if and only if it is due, not finite, skipped, or one on which a rule fires."""
    maker, told = Points(RULES, every), []
    for step, norm in enumerate(norms):
        events = (make_event(step=step),) if step in fired else ()
        decision = skip() if step in skipped else None
        point = maker.observe(make_record(SITES, norm, step=step, events=events, decision=decision))
        if point is not None:
            told.append(point)
            assert bool(point.notes) == (step in fired)
    due = {step for step, norm in enumerate(norms) if step % every == 0 or not math.isfinite(norm)}
    assert set(steps(told)) == due | ((skipped | fired) & set(range(len(norms))))


def test_totals_are_those_of_the_metrics(tmp_path: Path) -> None:
    """Counters agree with the totals behind the Prometheus metrics, also over the steps between two points."""
    maker, run_totals, last = Points(RULES, every=4), RunTotals.of(RULES), None
    for step in range(41):
        events = (make_event(step=step),) if step % 7 == 0 else ()
        norm = math.nan if step % 9 == 1 else 1.0
        record = make_record(SITES, norm, step=step, applied=0.5, events=events, decision=skip())
        run_totals.observe(record, float(step))
        last = maker.observe(record)
    assert last is not None
    for name in ("nonfinite_steps", "nonfinite_elements", "clipped_steps", "skipped_steps"):
        assert last.values[f"gradwatch/{name}_total"] == getattr(run_totals, name) > 0
    assert last.values["gradwatch/rule_firings_total/non-finite"] == 6
    assert last.values["gradwatch/rule_firings_total/exploding"] == 0


def test_each_optimizer_has_names_of_its_own_and_there_are_never_many() -> None:
    """Two optimizers count their steps apart; one made anew every epoch does not make new names for ever."""
    maker = Points(RULES, every=1)
    first = maker.observe(make_record(SITES, 1.0, step=9))
    second = maker.observe(make_record(SITES, 3.0, step=4, optimizer=1))
    assert first is not None
    assert second is not None
    assert first.values["gradwatch/grad_norm"] == pytest.approx(2.0)
    assert second.values["gradwatch/optimizer_1/grad_norm"] == pytest.approx(6.0)
    assert not first.values.keys() & second.values.keys()
    for number in range(2, 1000):
        told = maker.observe(make_record(SITES, optimizer=number))
        assert (told is None) == (number >= MOST_OPTIMIZERS)


def test_names_of_strangers_are_made_printable() -> None:
    """An escape sequence in a group's name reaches no log or page."""
    point = Points(every=1).observe(make_record(make_sites(2, groups=["\x1b[31m", "\u202e"])))
    assert point is not None
    assert all(name.isprintable() for name in point.values)
    assert len([name for name in point.values if "group_grad_norm" in name]) == 2


def test_a_tracker_that_hangs_costs_points_and_nothing_else(tmp_path: Path) -> None:
    """The queue is bounded, what is lost is counted and told, and the newest points are the ones kept."""
    notebook, health, written = Notebook(), Health(), 3 * MAX_QUEUE
    notebook.held.clear()
    notebook.open(make_run(tmp_path), health)
    for step in range(written):
        notebook.write(make_record(SITES, 1.0, step=step))
        assert len(notebook._queue) <= MAX_QUEUE
    notebook.held.set()
    assert notebook.flush(60)
    notebook.close()
    lost = health.errors()["notebook-queue"]
    assert lost >= written - MAX_QUEUE
    assert notebook.points[-1].values["gradwatch/dropped_points_total"] == lost
    assert steps(notebook.points)[-MAX_QUEUE:] == list(range(written - MAX_QUEUE, written))
    assert steps(notebook.points) == sorted(set(steps(notebook.points)))


def test_what_failed_is_sent_again(tmp_path: Path) -> None:
    """Two failures are counted, and no point is missing afterwards."""
    notebook, health = Notebook(faults=2), Health()
    notebook.open(make_run(tmp_path), health)
    for step in range(200):
        notebook.write(make_record(SITES, 1.0, step=step))
    while notebook.faults:
        notebook.flush(60)
    assert notebook.flush(60)
    notebook.close()
    assert health.errors() == {"notebook": 2}
    assert health.up() == {"notebook": True}
    assert steps(notebook.points) == list(range(200))
    assert notebook.calls == ["load", "start", "finish"]


def test_closing_gives_up_on_a_tracker_that_hangs(tmp_path: Path) -> None:
    """`close` returns though nothing is answered, twice if need be, and says so in Health."""
    notebook, health = Notebook(), Health()
    notebook.close_seconds = 0.1
    notebook.held.clear()
    notebook.open(make_run(tmp_path), health)
    notebook.write(make_record(SITES))
    notebook.close()
    notebook.close()
    notebook.held.set()
    assert health.errors() == {"notebook": 1}


def test_a_run_of_no_steps_leaves_nothing_behind(tmp_path: Path) -> None:
    """Nothing is begun with a tracker before there is something to tell."""
    notebook = Notebook()
    notebook.open(make_run(tmp_path), Health())
    notebook.close()
    assert notebook.calls == ["load"]


def test_only_rank_0_tells(tmp_path: Path) -> None:
    """One run per job: other ranks do not even import the library."""
    notebook = Notebook()
    notebook.open(make_run(tmp_path, rank=1, world_size=2), Health())
    notebook.write(make_record(SITES))
    assert notebook.flush(1)
    notebook.close()
    assert notebook.calls == notebook.points == []


def test_opening_leaves_the_generator_where_it_was(tmp_path: Path) -> None:
    """Imports may draw from it; training's next number is the same all the same."""
    random.seed(3)
    before = random.getstate()
    notebook = Notebook()
    notebook.open(make_run(tmp_path), Health())
    notebook.close()
    assert notebook.calls == ["load"]
    assert random.getstate() == before


def test_a_forked_child_tells_nothing(tmp_path: Path) -> None:
    """A data loader's worker inherits the sink, and neither writes, waits nor ends the run."""
    notebook = Notebook()
    notebook.open(make_run(tmp_path), Health())
    with notebook._lock:  # held over the fork, as another thread might: the child must not want it
        child = os.fork()
        if child == 0:
            notebook.write(make_record(SITES))
            quiet = notebook.flush(60)
            notebook.close()
            os._exit(0 if quiet and not notebook._queue else 1)
    _, status = os.waitpid(child, 0)
    notebook.write(make_record(SITES))
    notebook.close()
    assert os.waitstatus_to_exitcode(status) == 0
    assert len(notebook.points) == 1
    assert notebook.calls == ["load", "start", "finish"]


ABSENT = """
import importlib.machinery, sys
package, place = sys.argv[1], sys.argv[3]
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == package:
            found = importlib.machinery.PathFinder.find_spec(name, [place])  # what a folder of that name makes of it
            if found is None:
                raise ModuleNotFoundError(name, name=name)
            return found
sys.meta_path.insert(0, Absent())
from gradwatch.errors import AttachError
from gradwatch.sinks import make_sink
try:
    make_sink(sys.argv[2])
except AttachError as error:
    print(error)
"""


@pytest.mark.parametrize("folder", [False, True], ids=["nothing", "a folder of that name"])
@pytest.mark.parametrize(
    ("kind", "package"),
    [("wandb", "wandb"), ("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("otlp", "opentelemetry")],
)
def test_a_library_that_is_absent_is_named_with_its_extra(
    kind: str, package: str, folder: bool, tmp_path: Path
) -> None:
    """Before training starts, and also where ./wandb lies about: an offline run leaves such a folder behind."""
    if folder:
        (tmp_path / package).mkdir()
    command = [sys.executable, "-c", ABSENT, package, kind, str(tmp_path)]
    done = warm.run(command, tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)})
    assert f"sink {kind!r}: " in done.stdout, done.stderr
    assert f"is not installed; install gradwatch with it: pip install 'gradwatch[{kind}]'" in done.stdout


def test_gradwatch_run_refuses_before_the_script_is_started(tmp_path: Path) -> None:
    """A job of many hours does not begin unwatched for a library that is not there: exit status 2, and what to do."""
    rules = tmp_path / "absent.gradwatch.yaml"
    rules.write_text("version: 1\nextends: [default]\nsinks: [wandb]\n")
    hidden = (
        ABSENT.split("from gradwatch.errors")[0]
        + "from gradwatch.cli import main; sys.exit(main(sys.argv[4:]))"
    )
    command = ["run", "--rules", str(rules), "--", sys.executable, "-c", "print('started')"]
    done = subprocess.run(
        [sys.executable, "-c", hidden, "wandb", "-", str(tmp_path), *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "pip install 'gradwatch[wandb]'" in done.stderr
    assert "started" not in done.stdout


@pytest.mark.parametrize("kind", ["wandb", "tensorboard", "mlflow"])
def test_a_pace_that_is_none_is_refused(kind: str) -> None:
    """`every: 0` would be a division by zero at the first step."""
    with pytest.raises(AttachError, match=f"sink {kind!r}: every: 0 is not 1 or more steps"):
        make_sink(kind, {"every": 0})


JOB = """
import logging, random, signal, sys, warnings
import torch
from torch import nn
import gradwatch
torch.manual_seed(0); random.seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
watch = gradwatch.watch(model, optimizer, rules=sys.argv[1], run_dir="runs") if len(sys.argv) > 1 else None
for step in range(60):
    loss = model(torch.randn(16, 4) * (1 + random.random())).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if watch is not None:
    watch.close()
    assert not watch.health.errors(), watch.health.errors()
print([value.hex() for param in model.parameters() for value in param.double().flatten().tolist()])
print(random.random(), torch.rand(1).item())
print(warnings.filters, [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)], sys.excepthook,
      logging.getLogger().handlers, logging.getLogger().level)
"""
FILE = """
version: 1
extends: [observe-only]
sinks:
  - tensorboard: {dir: "boards", every: 1}
  - mlflow: {tracking_uri: "URI", every: 1}
  - otlp: {url: "COLLECTOR", every_seconds: 1}
  - textfile: {dir: "."}
"""


def run_job(folder: Path, *args: str) -> str:
    surroundings: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = warm.run([sys.executable, "-c", JOB, *args], folder, surroundings)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.filterwarnings("ignore::FutureWarning:mlflow")
def test_training_under_all_of_them_is_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule file names the sinks; every one has the 60 steps, and the weights are those of the plain script."""
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from tests.sinks.otlp_collector import collecting

    with collecting() as collector:
        rules = tmp_path / "ways.gradwatch.yaml"
        rules.write_text(
            FILE.replace("URI", (tmp_path / "mlruns").as_uri()).replace("COLLECTOR", collector.url)
        )
        watched = run_job(tmp_path, str(rules))
        (point,) = collector.metrics()["gradwatch_steps_total"].sum.data_points
        assert point.as_double == 60
    assert watched == run_job(tmp_path)
    board = EventAccumulator(str(tmp_path / "boards"), size_guidance={"scalars": 0})
    board.Reload()
    assert [each.step for each in board.Scalars("gradwatch/grad_norm")] == list(range(60))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("gradwatch")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "gradwatch/grad_norm")
    assert sorted(each.step for each in history) == list(range(60))
