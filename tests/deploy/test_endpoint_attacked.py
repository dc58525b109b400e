"""The endpoint of a real training job, attacked: all but the speed, which tests/benchmarks/endpoint.py measures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.prometheus.sink import PrometheusSink
from tests.benchmarks.endpoint import KINDS, Job, attacked
from tests.support.sink_records import make_record, make_run, make_sites


@pytest.mark.parametrize(
    "kind", ["flood", *(pytest.param(each, marks=pytest.mark.soak) for each in KINDS[1:])]
)
@pytest.mark.timeout(120)
def test_training_goes_on_and_saves_its_checkpoints_under_attack(kind: str, tmp_path: Path) -> None:
    """P13, `ulimit -n 256`: steps are taken, every checkpoint is saved, an honest scrape is served, exit 0."""
    job = Job(tmp_path)
    try:
        slice_ = attacked(job, kind, job.port, 2.0)
    finally:
        status = job.end()
    assert status == 0
    assert slice_.steps_per_second > 0
    assert slice_.failed == 0
    assert slice_.saved > 0


def test_ten_thousand_parameters_are_few_series_by_default(tmp_path: Path) -> None:
    """At most 500 series whatever the size of the model; the rest is counted, not exported."""
    sink = PrometheusSink(None)
    sink.open(make_run(tmp_path), Health())
    sites = make_sites(10_000)
    for step in range(50):
        sink.write(make_record(sites, np.random.default_rng(step).lognormal(-5, 3, 10_000), step=step))
    lines = [line for line in sink.render().splitlines() if not line.startswith(b"#")]
    assert len(lines) <= 500
    assert sum(line.startswith(b"gradwatch_param_grad_norm{") for line in lines) <= 200
    assert b"gradwatch_params 10000" in lines
