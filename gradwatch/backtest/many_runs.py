"""Many runs judged side by side: in processes of this machine, or on a cluster that joblib knows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradwatch.backtest.outcome import RunBacktest
from gradwatch.backtest.run_backtest import backtest_run
from gradwatch.errors import GradwatchError
from gradwatch.journal.rank_journals import rank_journals
from gradwatch.rules.rule_set import RuleSet
from gradwatch.runtime.optional_dependencies import require

DASK = "dask"
Run = str | os.PathLike[str]
Done = Callable[[int], None]


def backtest_runs(
    runs: Sequence[Run],
    ruleset: RuleSet,
    against: RuleSet | None = None,
    rank: int | None = None,
    jobs: int = 1,
    backend: str | None = None,
    progress: Done = lambda steps: None,
) -> list[RunBacktest]:
    """Judge runs as `backtest_run` does each, `jobs` at a time, in their order.

    `backend` is one of joblib's: "loky" (processes, where there are several jobs and none is named), "threading",
    "dask". The last takes the scheduler that DASK_SCHEDULER_ADDRESS names, whose workers need gradwatch and must see
    the same files, else it starts one on this machine. Raises `GradwatchError`, also where a run is named twice.
    """
    refuse_twice(runs, rank)
    if jobs == 1 and backend is None:
        return [backtest_run(run, ruleset, against, rank, progress) for run in runs]
    require("joblib", "parallel")
    import joblib

    with _backend(backend or "loky", jobs):
        calls = (joblib.delayed(backtest_run)(os.fspath(run), ruleset, against, rank) for run in runs)
        return list(joblib.Parallel()(calls))


def refuse_twice(runs: Sequence[Run], rank: int | None) -> None:
    """Raise `GradwatchError` where two names are of the same journals: their steps and alarms would count twice."""
    known: dict[Path, Run] = {}
    for run in runs:
        files = {file.resolve() for journal in rank_journals(run, rank).own for file in journal.files}
        for file in files & known.keys():
            raise GradwatchError(f"{known[file]} and {run} are the same run: name it once")
        known |= dict.fromkeys(files, run)


@contextmanager
def _backend(name: str, jobs: int) -> Iterator[None]:
    import joblib

    if name == DASK:
        with _client(jobs), joblib.parallel_config(backend=DASK, n_jobs=jobs):
            yield
        return
    known = sorted({*joblib.parallel.BACKENDS, *joblib.parallel.EXTERNAL_BACKENDS})
    if name not in known:
        raise GradwatchError(f"joblib has no backend {name!r}; there are: {', '.join(known)}")
    with joblib.parallel_config(backend=name, n_jobs=jobs):
        yield


@contextmanager
def _client(jobs: int) -> Iterator[Any]:
    """A client of the scheduler that dask is configured for, else of one on this machine."""
    require("distributed", "dask")
    import dask
    import distributed

    address = dask.config.get("scheduler-address", None)
    local = {"n_workers": max(jobs, 1), "threads_per_worker": 1, "dashboard_address": None}
    with distributed.Client(address) if address else distributed.Client(**local) as client:
        yield client
