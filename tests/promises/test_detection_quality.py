"""The default pack on synthetic runs: silent on healthy ones, and each fault found, in time, by the right
rule.

The traces have the shapes that real runs have (falling norms, a climb during warm-up, heavy tails, restarts
of the learning rate); real training is judged in `tests/benchmarks` and on real models elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradwatch.engine import Engine
from gradwatch.rules.files import load_rules
from tests.engine.cases import OptimizerRules, everywhere, make_sites

SIZE = 24
STEPS = 400
ONSET = 200

Shape = Callable[[int, np.random.Generator], float]
Fault = Callable[[int, np.ndarray, dict[str, Any]], Any]

HEALTHY: dict[str, Shape] = {
    "level": lambda step, rng: 0.0,
    "converging": lambda step, rng: -step / 100,
    "warming up": lambda step, rng: math.log(5) * min(step, 50) / 50,
    "heavy tails": lambda step, rng: 0.15 * float(np.clip(rng.standard_t(4), -6, 6)),
    "two tasks by turns": lambda step, rng: 0.8 * (step % 2),
    "restarts": lambda step, rng: 0.7 * math.cos(math.pi * (step % 100) / 100),
}


def run(shape: Shape, seed: int, fault: Fault | None = None) -> OptimizerRules:
    """A run of the default pack over 24 parameters, with every column that it reads."""
    bound_rules = OptimizerRules(Engine(load_rules("default")).bind(make_sites(SIZE)))
    rng = np.random.default_rng(seed)
    level = rng.normal(0, 1, SIZE)
    for step in range(STEPS):
        norms = np.exp(level + shape(step, rng) + rng.normal(0, 0.15, SIZE))
        known: dict[str, Any] = {"scalars": {"lr": 1e-3, "loss": 2.0 + 0.1 * float(rng.normal())}}
        if shape is HEALTHY["converging"]:  # what takes the gradients down
            known["scalars"]["loss"] *= math.exp(shape(step, rng))
        known["columns"] = {
            "update_ratio": everywhere(1e-3 * np.exp(rng.normal(0, 0.3, SIZE))),
            "weight_norm": everywhere(np.ones(SIZE)),
            "zero_fraction": everywhere(np.full(SIZE, 0.4)),
        }
        row = norms.tolist()
        if fault is not None and step >= ONSET:
            row = fault(step, norms, known)
        bound_rules.step(step, row, **known)
    return bound_rules


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_silent(name: str) -> None:
    """No event at all, not even a pending one that fires, in 800 steps of each shape."""
    for seed in range(2):
        found = [kind for kind in run(HEALTHY[name], seed).kinds if kind[1] != "pending"]
        assert found == []


def spiked(step: int, norms: np.ndarray, known: dict[str, Any]) -> Any:
    """Parameter 6 is 300 times too large, once."""
    return (norms * np.where(np.arange(SIZE) == 6, 300.0 if step == ONSET else 1.0, 1.0)).tolist()


def poisoned(step: int, norms: np.ndarray, known: dict[str, Any]) -> Any:
    """NaN in all parameters up to the tenth, once: backward reached the tenth first."""
    return np.where((np.arange(SIZE) <= 10) & (step == ONSET), math.nan, norms).tolist()


def exploded(step: int, norms: np.ndarray, known: dict[str, Any]) -> Any:
    """Everything grows by 60 % a step until it is a million times too large."""
    return (norms * min(1.6 ** (step - ONSET), 1e6)).tolist()


def creeping(step: int, norms: np.ndarray, known: dict[str, Any]) -> Any:
    """Everything grows by 3 % a step: no single jump."""
    return (norms * 1.03 ** (step - ONSET)).tolist()


def dwindling(step: int, norms: np.ndarray, known: dict[str, Any]) -> Any:
    """Everything falls by 2 % a step, and the loss does not."""
    return (norms * 0.98 ** (step - ONSET)).tolist()


def fading(step: int, norms: np.ndarray, known: dict[str, Any]) -> Any:
    """The first four parameters get 100,000 times less."""
    return np.where(np.arange(SIZE) < 4, norms * 1e-5, norms).tolist()


def detached(step: int, norms: np.ndarray, known: dict[str, Any]) -> Any:
    """Parameter 8 is no longer part of the graph."""
    return [None if place == 8 else norm for place, norm in enumerate(norms.tolist())]


def zeroed(step: int, norms: np.ndarray, known: dict[str, Any]) -> Any:
    """The gradient of parameter 12 is all zeros."""
    return np.where(np.arange(SIZE) == 12, 0.0, norms).tolist()


def overshooting(step: int, norms: np.ndarray, known: dict[str, Any]) -> Any:
    """Updates are as large as the weights."""
    known["columns"]["update_ratio"] = everywhere(np.full(SIZE, 0.9))
    return norms.tolist()


@pytest.mark.parametrize(
    ("fault", "rule", "within", "site"),
    [
        (spiked, "norm-spike", 0, "layers.3.weight"),
        (poisoned, "non-finite", 0, "layers.5.weight"),
        (exploded, "total-norm-spike-severe", 8, None),
        (exploded, "exploded", 25, None),
        (creeping, "total-norm-spike", 120, None),
        (dwindling, "total-norm-fade", 199, None),
        (fading, "vanishing-by-share", 25, "layers.0.weight"),
        (fading, "vanishing-by-depth", 60, "layers.0.weight"),
        (detached, "stale", 3, "layers.4.weight"),
        (zeroed, "all-zero", 5, "layers.6.weight"),
        (overshooting, "update-too-big", 20, None),
    ],
)
def test_faults_are_found(fault: Fault, rule: str, within: int, site: str | None) -> None:
    """By the right rule, within its number of steps, with the parameter named."""
    bound_rules = run(HEALTHY["level"], 0, fault)
    firing = [event for event in bound_rules.events if event.kind == "firing" and event.rule == rule]
    assert firing, sorted({event.rule for event in bound_rules.events})
    assert 0 <= firing[0].step - ONSET <= within
    if site is not None:
        assert site in (firing[0].first_cause, *firing[0].sites)
