"""Many runs judged at a time give what each gives alone, in their order, on any of joblib's backends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gradwatch.backtest.json_document import text
from gradwatch.backtest.many_runs import backtest_runs
from gradwatch.errors import GradwatchError
from gradwatch.rules.files import load_rules
from tests.report.runs import broken, recorded, steps


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """A broken run, and two healthy ones."""
    folder = tmp_path_factory.mktemp("runs")
    made = {"broken": broken(), "short": steps(30), "long": steps(50)}
    return [recorded(folder / name, records, run_id=name) for name, records in made.items()]


@pytest.mark.parametrize(("backend", "jobs"), [("threading", 2), ("loky", 2), ("dask", 1)])
def test_as_one_after_the_other(runs: Sequence[Path], backend: str, jobs: int) -> None:
    """On threads, on processes, and on the cluster that Dask starts on this machine."""
    if backend == "dask":
        pytest.importorskip("distributed", reason="dask is not installed")
    rules = load_rules("default")
    found = backtest_runs(runs, rules, jobs=jobs, backend=backend)
    assert [one.run for one in found] == ["broken", "short", "long"]
    assert text(found, "default", None, True) == text(backtest_runs(runs, rules), "default", None, True)


def test_a_backend_that_joblib_does_not_know(runs: Sequence[Path]) -> None:
    """It is named, and so are those that there are."""
    with pytest.raises(GradwatchError, match=r"no backend 'lokki'; there are: .*dask.*loky"):
        backtest_runs(runs, load_rules("default"), backend="lokki")
