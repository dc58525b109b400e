"""A backtest of a long run takes less than a minute of one core."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gradwatch.backtest.run_backtest import backtest_run
from gradwatch.rules.files import load_rules
from tests.report.runs import recorded, steps
from tests.support.sink_records import make_sites

STEPS, PARAMETERS, SECONDS = 100_000, 200, 60


@pytest.mark.soak
def test_a_long_run_against_another_rule_file(tmp_path: Path) -> None:
    """100,000 steps of 200 parameters, by two packs."""
    folder = recorded(tmp_path, steps(STEPS, make_sites(PARAMETERS)))
    began = time.process_time()
    found = backtest_run(folder, load_rules("default"), load_rules("diverging"))
    assert time.process_time() - began < SECONDS
    assert found.steps == STEPS
