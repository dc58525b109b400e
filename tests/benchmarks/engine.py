"""What the engine costs a step: `python -m tests.benchmarks.engine`.

Prints medians (and the 95th percentile) of `evaluate` + `decide`, in milliseconds, for healthy steps after
the warm-up: hot (called in a loop) and cold (16 MiB are touched before each call, as a backward pass does;
the step that matters is the cold one). To reach: 10 rules x 10,000 parameters in 1 ms, cold.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from gradwatch.detectors import Above, Below, Detector, Drift, Drop, NonFinite, NormOverflow, Spike, Stale
from gradwatch.engine import Engine
from gradwatch.rules.files import load_rules
from gradwatch.rules.rule_set import Rule, RuleSet
from tests.engine.cases import GROUPS, OptimizerRules, default_like, make_sites, make_snapshot, rule

WARM = 200
"""Steps before the clock starts: past every warm-up, and past the gains of young baselines."""


def ten() -> tuple[Rule, ...]:
    """Ten rules of the kinds that look at every parameter on every step."""
    detectors: list[Detector] = [
        NonFinite(),
        NormOverflow(),
        Spike(above=6),
        Spike(above=10),
        Spike(of="total_norm"),
        Drift(),
        Drop(),
        Above(threshold=1e3),
        Below(threshold=1e-8, of="rms", above_zero=True),
        Stale(),
    ]
    return tuple(rule(f"rule-{number}", detector) for number, detector in enumerate(detectors))


def twenty() -> tuple[Rule, ...]:
    """The default-like eighteen and two more."""
    return (*default_like(), rule("norm-rail", Above(threshold=1e4)), rule("slow", Spike(half_life=500)))


def measure(ruleset: RuleSet, size: int, steps: int, cold: bool) -> tuple[float, float]:
    """(median, 95th percentile) in seconds of a healthy step over `size` parameters."""
    engine = Engine(ruleset).bind(make_sites(size))
    bound_rules, rng = OptimizerRules(engine), np.random.default_rng(0)
    level, ballast, seconds = np.exp(rng.normal(0, 1, size)), np.zeros(2 << 20), []
    for step in range(WARM + steps):
        norms = (level * np.exp(rng.normal(0, 0.1, size))).astype(np.float32)
        snapshot = make_snapshot(engine.sites, step, norms, scalars={"lr": 1e-3, "loss": 2.0})
        if cold:
            ballast += 1.0
        start = time.perf_counter()
        bound_rules.take(snapshot)
        seconds.append(time.perf_counter() - start)
    timed = seconds[WARM:]
    return float(np.median(timed)), float(np.quantile(timed, 0.95))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="steps measured per row (default 300)")
    steps = parser.parse_args().steps
    sets = {
        "10 rules": RuleSet(groups=GROUPS, rules=ten()),
        "20 rules": RuleSet(groups=GROUPS, rules=twenty()),
        "default": load_rules("default"),
    }
    print(f"{'rules':10}{'parameters':>12}{'hot ms':>10}{'p95':>10}{'cold ms':>10}{'p95':>10}")
    for name, size in (
        ("10 rules", 10_000),
        ("20 rules", 100),
        ("20 rules", 2_000),
        ("default", 100),
        ("default", 2_000),
    ):
        cells = [value * 1e3 for cold in (False, True) for value in measure(sets[name], size, steps, cold)]
        print(f"{name:10}{size:>12,}" + "".join(f"{cell:>10.3f}" for cell in cells))


if __name__ == "__main__":
    main()
