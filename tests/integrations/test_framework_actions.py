"""Actions inside the frameworks: a poisoned batch is skipped, a stop ends the job, in every one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradwatch.errors import TrainingStopped
from gradwatch.taps import step_hooks
from tests.integrations.test_frameworks import FRAMEWORKS, WINDOWS, integrated
from tests.support import framework_jobs
from tests.support.framework_jobs import EPOCHS, JOBS, examples
from tests.support.kept import Kept

pytestmark = pytest.mark.usefixtures("framework_folder")

POISONED = 5  # of the examples: in batch 2, so in the second window of each epoch
STOP = """
version: 1
rules:
  no-nan: {detect: {kind: nonfinite}, severity: critical, do: [stop]}
"""


@pytest.fixture
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """One example has a NaN in it."""
    pairs = examples()
    pairs[POISONED][0][0] = float("nan")
    monkeypatch.setattr(framework_jobs, "examples", lambda: pairs)


def finite(model: torch.nn.Module) -> bool:
    return all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_poisoned_batch_is_skipped(framework: str) -> None:
    """With the default pack exactly its windows are skipped and the weights stay finite; without, all are lost."""
    sink = Kept()
    watched, watch = integrated(framework, rules="default", sinks=[sink], strict=True)
    assert finite(JOBS[framework](watched))
    skipped = [record.snapshot.step for record in sink.records if record.decision.skip]
    assert skipped == [1 + epoch * len(WINDOWS) for epoch in range(EPOCHS)]
    assert watch().health.errors() == {}
    assert not finite(JOBS[framework]())


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_rule_that_says_stop_ends_the_job(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`TrainingStopped` comes out of the framework's own call, before the step; the weights are as they were."""
    Path("stop.gradwatch.yaml").write_text(STOP, encoding="utf-8")
    sink = Kept()
    models: list[torch.nn.Module] = []
    build = framework_jobs.network

    def noted() -> Any:
        models.append(build())
        return models[-1]

    monkeypatch.setattr(framework_jobs, "network", noted)
    watched, watch = integrated(framework, rules="stop.gradwatch.yaml", sinks=[sink])
    with pytest.raises(TrainingStopped, match=r"step 1: rule no-nan says stop"):
        JOBS[framework](watched)
    assert len(sink.records) == 2
    assert finite(models[0])
    watch().close()  # the Trainer of transformers tells nobody that it failed
    assert step_hooks.installed() == 0
