"""The MLflow sink, on a real file store in the test's own folder, read back with MLflow's client."""

from __future__ import annotations

import math
import os
import random
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwatch.records.decision import Decision
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.trackers import mlflow as sink_module
from gradwatch.sinks.trackers.mlflow import MLflowSink
from tests.support import warm
from tests.support.sink_records import make_event, make_record, make_run, make_sites, skip

SITES = make_sites(4)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:mlflow")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URI of an empty store of files, which is also what `mlflow` itself is set to."""
    import mlflow  # here and below: a second, which not all who collect the tests are to pay

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    uri, before = (tmp_path / "mlruns").as_uri(), mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    yield uri
    mlflow.set_tracking_uri(before)


def client_of(uri: str) -> Any:
    """MLflow's own client of a store."""
    from mlflow import MlflowClient

    return MlflowClient(uri)


def runs(uri: str) -> list[Any]:
    client = client_of(uri)
    everywhere = [found.experiment_id for found in client.search_experiments()]
    return list(client.search_runs(everywhere))


def history(uri: str, run: Any, key: str) -> dict[int, float]:
    return {each.step: each.value for each in client_of(uri).get_metric_history(run.info.run_id, key)}


def test_a_new_experiment_leaves_the_generator_alone(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow draws digits for the id of an experiment in files where it would begin with zeros: one in ten does."""
    from mlflow.utils.name_utils import _generate_unique_integer_id

    drawn = uuid.UUID(int=10**30 + 7)
    monkeypatch.setattr("mlflow.utils.name_utils.uuid.uuid4", lambda: drawn)
    before, health = random.getstate(), Health()
    _generate_unique_integer_id()
    assert random.getstate() != before  # else there is nothing to see to
    before = random.getstate()
    sink = MLflowSink(store, experiment="new")
    sink.open(make_run(tmp_path), health)
    sink.write(make_record(SITES, 1.0))
    sink.close()
    assert random.getstate() == before
    assert health.errors() == {}
    assert len(runs(store)) == 1


TELEMETRY = """
import os, sys
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks import make_sink
from gradwatch.records.run_info import RunInfo
before = os.environ.get("MLFLOW_DISABLE_TELEMETRY")
if "ours" in sys.argv:
    sink = make_sink("mlflow", {"tracking_uri": sys.argv[-1]})
    sink.open(RunInfo("run-1", "."), Health())
import mlflow.telemetry
print(mlflow.telemetry.get_telemetry_client() is not None, os.environ.get("MLFLOW_DISABLE_TELEMETRY") == before)
if "ours" in sys.argv:
    sink.close()
"""


@pytest.mark.parametrize(
    ("who", "said", "sends"),
    [("script", None, True), ("ours", None, False), ("ours", "false", True)],
)
def test_mlflow_imported_for_us_alone_tells_nobody(
    tmp_path: Path, who: str, said: str | None, sends: bool
) -> None:
    """MLflow's telemetry draws from Python's generator: off where only the sink wants MLflow, and nothing was said."""
    testing = ("CI", "PYTEST_CURRENT_TEST", "GITHUB_ACTIONS", "DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY")
    surroundings = {key: value for key, value in os.environ.items() if key not in testing}
    if said is not None:
        surroundings["MLFLOW_DISABLE_TELEMETRY"] = said
    # A database, of which nothing is asked before there is a point: telemetry that nobody answers ends itself.
    command = [sys.executable, "-c", TELEMETRY, who, f"sqlite:///{tmp_path / 'runs.db'}"]
    done = warm.run(command, tmp_path, surroundings)
    assert done.stdout.split() == [str(sends), "True"], done.stderr


def test_a_run_of_our_own_is_read_back(store: str, tmp_path: Path) -> None:
    """Points every 5 steps and on the step of an event; the rule's latest transition is a tag; the run is ended."""
    health = Health()
    sink = MLflowSink(store, experiment="vision", every=5)
    sink.open(make_run(tmp_path), health)
    for step in range(12):
        sink.write(make_record(SITES, 1.0 + step, step=step, applied=0.5, loss_scale=64.0))
    sink.write(make_record(SITES, 1.0, step=13, events=(make_event(step=13),), decision=skip()))
    sink.close()
    assert health.errors() == {}
    (run,) = runs(store)
    assert client_of(store).get_experiment(run.info.experiment_id).name == "vision"
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "gradwatch-run-1"
    norms = history(store, run, "gradwatch/grad_norm")
    assert norms == pytest.approx({0: 2.0, 5: 12.0, 10: 22.0, 13: 2.0})
    assert history(store, run, "gradwatch/grad_norm_applied")[5] == pytest.approx(6.0)
    assert history(store, run, "gradwatch/group_grad_norm/rest")[5] == pytest.approx(6 * math.sqrt(2))
    assert history(store, run, "gradwatch/loss_scale")[0] == 64
    assert history(store, run, "gradwatch/skipped_steps_total")[13] == 1
    assert run.data.tags["gradwatch.rule.non-finite"].startswith("non-finite (critical) firing at step 13")
    assert run.data.tags["gradwatch.run_id"] == "run-1"


def test_all_incidents_are_an_artifact(store: str, tmp_path: Path) -> None:
    """A tag holds the latest transition of a rule alone; the table has each with its step and the name to explain."""
    from mlflow.artifacts import load_text

    health = Health()
    sink = MLflowSink(store, every=100)
    sink.open(make_run(tmp_path), health)
    for step in (3, 8):
        for kind, at in (("firing", step), ("resolved", step + 1)):
            event = make_event(kind, step=at, incident=f"non-finite-0-{step}")
            sink.write(make_record(SITES, 1.0, step=at, events=(event,)))
        assert sink.flush(30)
    sink.close()
    assert health.errors() == {}
    (run,) = runs(store)
    table = load_text(f"{run.info.artifact_uri}/gradwatch/incidents.md")
    for step in (3, 8):
        assert f"| {step} | 0 | non-finite | critical | firing | non-finite-0-{step} |" in table
        assert f"| {step + 1} | 0 | non-finite | critical | resolved | non-finite-0-{step} |" in table


def test_artifacts_that_are_refused_cost_no_metric(store: str, tmp_path: Path) -> None:
    """They may lie elsewhere, and need other rights: it is said once, and the run goes on to its end."""
    (tmp_path / "taken").write_text("no folder")
    client_of(store).create_experiment("apart", artifact_location=(tmp_path / "taken").as_uri())
    said: list[str] = []
    health = Health(lambda component, error: said.append(str(error)))
    sink = MLflowSink(store, experiment="apart", every=1)
    sink.open(make_run(tmp_path), health)
    for step in range(3):
        sink.write(make_record(SITES, 1.0, step=step, events=(make_event(step=step),)))
        assert sink.flush(30)
    sink.close()
    (run,) = runs(store)
    assert list(history(store, run, "gradwatch/grad_norm")) == [0, 1, 2]
    assert run.info.status == "FINISHED"
    assert health.errors() == {}
    assert len(said) == 1
    assert "gradwatch/incidents.md cannot be written" in said[0]


def test_what_is_not_finite_is_logged_and_flagged(store: str, tmp_path: Path) -> None:
    """NaN and Inf as they are, and beside them a metric that no store changes and every chart draws."""
    sink = MLflowSink(store, every=100)
    sink.open(make_run(tmp_path), Health())
    for step, norm in enumerate([1.0, 1.0, math.nan, 1.0, math.inf]):
        sink.write(make_record(SITES, norm, step=step))
    sink.write(make_record(SITES, 1.0, step=100))
    sink.close()
    (run,) = runs(store)
    norms = history(store, run, "gradwatch/grad_norm")
    assert norms == pytest.approx({0: 2.0, 2: math.nan, 4: math.inf, 100: 2.0}, nan_ok=True)
    assert history(store, run, "gradwatch/nonfinite/grad_norm") == {2: 1, 4: 1, 100: 0}
    assert history(store, run, "gradwatch/nonfinite_steps_total") == {0: 0, 2: 1, 4: 2, 100: 2}


def test_the_scripts_own_run_is_used_and_left_running(store: str, tmp_path: Path) -> None:
    """Where the script has begun a run, ours are metrics beside its own, and ending it is its business."""
    import mlflow

    with mlflow.start_run() as own:
        mlflow.log_metric("loss", 0.5, step=3)
        sink = MLflowSink(every=1)
        sink.open(make_run(tmp_path), Health())
        sink.write(make_record(SITES, 1.0, step=3))
        sink.close()
        active = mlflow.active_run()
        assert active is not None
        assert active.info.run_id == own.info.run_id
        (run,) = runs(store)
        assert run.info.status == "RUNNING"
        assert run.data.metrics["loss"] == 0.5
        assert run.data.metrics["gradwatch/grad_norm"] == 2.0


def test_a_run_that_a_rule_stopped_has_failed(store: str, tmp_path: Path) -> None:
    """The list of runs says so without a look at the charts."""
    sink = MLflowSink(store)
    sink.open(make_run(tmp_path), Health())
    sink.write(make_record(SITES, 1.0, events=(make_event(),), decision=Decision(stop=True)))
    sink.close()
    assert [run.info.status for run in runs(store)] == ["FAILED"]


def test_names_that_mlflow_refuses_are_changed(store: str, tmp_path: Path) -> None:
    """A group may be called anything: no point is lost for it."""
    sites = make_sites(2, groups=["a:b", "größe\N{BULLET}"])
    sink = MLflowSink(store)
    health = Health()
    sink.open(make_run(tmp_path), health)
    sink.write(make_record(sites, 1.0))
    sink.close()
    assert health.errors() == {}
    (run,) = runs(store)
    groups = {key for key in run.data.metrics if "group_grad_norm" in key}
    assert groups == {"gradwatch/group_grad_norm/a_b-efee36a4", "gradwatch/group_grad_norm/gr__e_-c9aa2d18"}


def test_a_server_that_is_away_costs_a_counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens there: steps go on, closing ends, and Health has the error."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    health = Health()
    sink = MLflowSink("http://127.0.0.1:9")
    sink.open(make_run(tmp_path), health)
    for step in range(50):
        sink.write(make_record(SITES, 1.0, step=step))
    assert not sink.flush(30)
    sink.close()
    assert health.errors()["mlflow"] >= 1
    assert health.up()["mlflow"] is False


@pytest.mark.parametrize(
    "name", ["", "a//b", "a/", "///", "./b", "a/../b", "..", "a/...", "x" * 249 + "/y", "é%\n"]
)
def test_no_name_of_the_scripts_costs_the_batch(name: str) -> None:
    """MLflow refuses a whole request where one name in it is no path in normal form."""
    from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_metric_name

    key = sink_module._accepted(f"gradwatch/observed/{name}")
    _validate_metric_name(key, "metric")
    assert len(key) <= MAX_ENTITY_KEY_LENGTH


def test_names_that_differ_only_in_what_mlflow_forbids_have_series_of_their_own(
    store: str, tmp_path: Path
) -> None:
    """Both would be `_`, or the same 250 characters: each has a hash of its name behind it, in any order."""
    names, health = ["é", "ü", "x" * 300 + "a", "x" * 300 + "b"], Health()
    sink = MLflowSink(store)
    sink.open(make_run(tmp_path), health)
    for step in range(2):
        for number, name in enumerate(names):
            scalars = {name: math.nan if step else float(number)}
            sink.write(make_record(SITES, 1.0, step=100 * step + number, scalars=scalars))
    assert sink.flush(30)
    sink.close()
    assert not health.errors()
    metrics = runs(store)[0].data.metrics
    for group in ("gradwatch/observed/", "gradwatch/nonfinite/observed/"):
        assert len([key for key in metrics if key.startswith(group)]) == len(names)
    for given in (names[:2], names[1::-1]):
        another = MLflowSink(store)
        assert {another._key(f"gradwatch/observed/{name}") for name in given} <= metrics.keys()
    assert another._key("gradwatch/observed/plain.name/0") == "gradwatch/observed/plain.name/0"
