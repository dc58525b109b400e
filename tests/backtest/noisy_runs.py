"""Healthy runs in which norms scatter, and now and then far: recorded from synthetic Records."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gradwatch.records.record import Record
from tests.report.runs import recorded
from tests.support.sink_records import make_record, make_sites

SITES = make_sites(6)
STEPS = 1_500


def noisy(seed: int, steps: int = STEPS) -> list[Record]:
    """Steps of which one in a hundred has a gradient several times as large as usual."""
    random = np.random.default_rng(seed)
    far = np.where(random.random((steps, 6)) < 0.002, random.exponential(1.0, (steps, 6)), 0.0)
    norm = np.exp(0.2 * random.normal(size=(steps, 6)) + far).astype(np.float32)
    scalars = {"loss": 2.0, "lr": 0.1}
    return [
        make_record(SITES, norm[step], step=step, scalars=scalars, wall_time=1e9 + step)
        for step in range(steps)
    ]


def folders(root: Path, count: int = 2) -> list[Path]:
    """The folders of so many runs, called a, b, …"""
    made = []
    for seed in range(count):
        name = "abcdef"[seed]
        made.append(recorded(root / f"made-{name}", noisy(seed), run_id=name).rename(root / name))
    return made
