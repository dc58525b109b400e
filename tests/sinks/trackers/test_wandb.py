"""The W&B sink, offline: what would be uploaded is read back from W&B's own files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradwatch.sinks.trackers.incident_list import COLUMNS
from tests.sinks.trackers.wandb_file import OfflineRun, offline_runs
from tests.sinks.trackers.wandb_job import STEPS
from tests.support import warm

ROOT = Path(__file__).parents[3]
RULES = """
version: 1
extends: [observe-only]
sinks:
  - log
  - wandb: {every: 10}
"""


def run_script(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The job in a process of its own: W&B keeps one of its own beside it until the interpreter exits.

    A variable of `env` that is empty is taken out.
    """
    surroundings = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DIR": str(folder),
        "HOME": str(folder),
        "NETRC": str(folder / "netrc"),
        **env,
    }
    given = {name: value for name, value in surroundings.items() if value}
    return warm.run([sys.executable, *args], folder, given)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, OfflineRun]]:
    """What the watched script printed, and the runs it made by job type."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "rules.gradwatch.yaml").write_text(RULES)
    done = run_script(folder, "-m", "tests.sinks.trackers.wandb_job", "rules.gradwatch.yaml", "watch")
    assert done.returncode == 0, done.stderr
    return done.stdout, {run.job_type: run for run in offline_runs(folder)}


def test_a_run_of_its_own_beside_the_scripts(watched: tuple[str, dict[str, OfflineRun]]) -> None:
    """Same project and group as the script's own run; ended with the watch; the x axis is the step."""
    _, runs = watched
    ours = runs["gradwatch"]
    assert (ours.project, ours.group, ours.exit_code) == ("vision", "sweep-7", 0)
    assert ours.step_metrics["gradwatch/*"] == "gradwatch/step"
    steps = [row["gradwatch/step"] for row in ours.rows]
    assert {0, 10, 20, 25, 30} <= set(steps)
    assert steps == sorted(steps)
    assert all(row["gradwatch/grad_norm"] > 0 for row in ours.rows if row["gradwatch/step"] < 25)


def test_a_nan_is_logged_told_and_alerted(watched: tuple[str, dict[str, OfflineRun]]) -> None:
    """The step whose gradients are NaN has a row, NaN in it, the text of the rule, and an alert."""
    ours = watched[1]["gradwatch"]
    (row,) = [row for row in ours.rows if row["gradwatch/step"] == 25]
    assert math.isnan(row["gradwatch/grad_norm"])
    assert row["gradwatch/nonfinite_steps_total"] == 1
    assert row["gradwatch/rule_active/non-finite"] == 1
    assert "non-finite (critical) firing at step 25" in row["gradwatch/event"]
    titles = {title: level for title, _, level in ours.alerts}
    assert titles["gradwatch: non-finite"] == "ERROR"


def test_groups_and_incidents_are_there(watched: tuple[str, dict[str, OfflineRun]]) -> None:
    """A series for each group of the rule file; at the end a table of what happened, which W&B's own file holds."""
    ours = watched[1]["gradwatch"]
    norms = {
        key.rpartition("/")[2]: [row[key] for row in ours.rows if row["gradwatch/step"] < 25 and key in row]
        for key in ("gradwatch/group_grad_norm/matrices", "gradwatch/group_grad_norm/rest")
    }
    assert all(len(values) >= 3 and min(values) > 0 for values in norms.values())
    (row,) = [row for row in ours.rows if row.get("gradwatch/incidents/_type") == "table-file"]
    table = json.loads((ours.folder / row["gradwatch/incidents/path"]).read_text(encoding="utf-8"))
    assert table["columns"] == list(COLUMNS)
    first = table["data"][0]
    assert first[:6] == [25, "0", first[2], "critical", "firing", f"{first[2]}-0-25"]


def test_the_scripts_own_run_and_training_are_as_without_us(
    watched: tuple[str, dict[str, OfflineRun]], tmp_path: Path
) -> None:
    """Every row of the script is there at its step, and weights and generators end bit for bit the same."""
    printed, runs = watched
    done = run_script(tmp_path, "-m", "tests.sinks.trackers.wandb_job", "-", "plain")
    assert done.returncode == 0, done.stderr
    assert printed == done.stdout
    (plain,) = offline_runs(tmp_path)
    for own in (plain, runs[""]):
        assert [row["_step"] for row in own.rows] == list(range(STEPS))
        assert not [key for row in own.rows for key in row if key.startswith("gradwatch/")]


NO_KEY = """
from pathlib import Path
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.trackers.wandb import WandbSink
from tests.support.sink_records import make_record, make_run, make_sites
health = Health(lambda component, error: print(component, error))
sink = WandbSink()
sink.open(make_run(Path()), health)
sink.write(make_record(make_sites(4)))
print(sink.flush(60))
sink.close()
"""


def test_offline_as_w_and_b_was_told_in_its_settings(tmp_path: Path) -> None:
    """`wandb offline` in the working folder is as good as WANDB_MODE: no key is needed, and the run is there."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    done = run_script(tmp_path, "-c", NO_KEY, WANDB_MODE="")
    assert done.stdout.splitlines()[-1] == "True", done.stdout + done.stderr
    (run,) = offline_runs(tmp_path)
    assert (run.project, run.rows[0]["gradwatch/grad_norm"]) == ("gradwatch", 2)


def test_nobody_is_asked_for_a_key(tmp_path: Path) -> None:
    """Without an API key the sink is down and says what to set; the terminal of the job is left alone."""
    done = run_script(tmp_path, "-c", NO_KEY, WANDB_MODE="online", WANDB_BASE_URL="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert "wandb W&B has no API key; set WANDB_API_KEY, or WANDB_MODE=offline" in done.stdout
    assert "False" in done.stdout
