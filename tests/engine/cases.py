"""Sites, snapshots and rules for the engine's tests: short to write, complete, and deterministic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradwatch.detectors import (
    Above,
    AllZero,
    Below,
    Dead,
    DepthRatio,
    Detector,
    Drift,
    Drop,
    LossNonFinite,
    LossSpike,
    Never,
    NonFinite,
    NormOverflow,
    Spike,
    Stale,
    Stuck,
    UpdateRatio,
)
from gradwatch.engine import BoundEngine, Engine, EngineState
from gradwatch.records.decision import Decision
from gradwatch.records.snapshot import Column, Sites, Snapshot
from gradwatch.records.verdict import Verdict
from gradwatch.rules.rule_set import Action, Group, Rule, RuleSet

SKIP = (Action("skip_step", {"max_consecutive": None, "then": "continue"}),)
GROUPS = (Group("matrices", ("*",), 2), Group("rest", ("*",)))


def make_sites(size: int, modules: int = 0) -> Sites:
    """`size` parameters (weights and biases by turns), then `modules` tapped modules."""
    names = [f"layers.{i // 2}.{'bias' if i % 2 else 'weight'}" for i in range(size)]
    total = size + modules
    return Sites(
        tuple(names + [f"layers.{i}" for i in range(modules)]),
        ("param",) * size + ("module",) * modules,
        np.array([8 if i % 2 else 64 for i in range(size)] + [0] * modules, np.int64),
        np.array([1 if i % 2 else 2 for i in range(size)] + [0] * modules, np.int64),
        np.arange(total, dtype=np.int64),
    )


def make_snapshot(sites: Sites, step: int, norms: Any, **known: Any) -> Snapshot:
    """A snapshot with these norms; `None` in the list = no gradient. `known` overrides any other field."""
    here = np.array([norm is not None for norm in norms])
    norm = np.array([0.0 if n is None else n for n in norms], np.float32)
    with np.errstate(all="ignore"):
        total = float(np.sqrt(np.square(norm[here].astype(np.float64)).sum()))
    fields: dict[str, Any] = {
        "optimizer": 0,
        "step": step,
        "sites": sites,
        "norm": norm,
        "calls": here.astype(np.int32),
        "coef": np.ones(len(norm), np.float32),
        "total_norm": total,
        "total_norm_applied": total,
    }
    return Snapshot(**{**fields, **known})


def everywhere(values: Any) -> Column:
    """A column that was measured at every site."""
    values = np.asarray(values, np.float32)
    return Column(values, np.ones(len(values), np.bool_))


def rule(name: str, detector: Detector, **keys: Any) -> Rule:
    """A rule with its kind's own `for`, unless given."""
    return Rule(name, detector, **{"for_": detector.default_for, **keys})


def bound(rules: list[Rule], size: int = 4, groups: tuple[Group, ...] = (), **keys: Any) -> BoundEngine:
    """These rules bound to `size` parameters."""
    return Engine(RuleSet(groups=groups, rules=tuple(rules), **keys)).bind(make_sites(size))


class OptimizerRules:
    """A bound engine with its state, stepped by hand; keeps every event and decision."""

    def __init__(self, engine: BoundEngine, state: EngineState | None = None) -> None:
        self.engine = engine
        self.state = engine.init() if state is None else state
        self.events: list[Any] = []
        self.decision = Decision()

    def step(self, number: int, norms: Any, **known: Any) -> Verdict:
        """Evaluate and decide one step."""
        return self.take(make_snapshot(self.engine.sites, number, norms, **known))

    def take(self, snapshot: Snapshot) -> Verdict:
        """Evaluate and decide one snapshot."""
        verdict, state = self.engine.evaluate(self.state, snapshot)
        self.decision, self.state = self.engine.decide(state, verdict, snapshot)
        self.events += verdict.events
        return verdict

    @property
    def kinds(self) -> list[tuple[int, str, str]]:
        """(step, kind, rule) of every event so far."""
        return [(event.step, event.kind, event.rule) for event in self.events]


def default_like(**overrides: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Eighteen rules of the size and variety of the default pack."""
    detectors: dict[str, tuple[Detector, dict[str, Any]]] = {
        "non-finite": (NonFinite(), {"severity": "critical", "do": SKIP}),
        "norm-overflow": (NormOverflow(), {"severity": "critical"}),
        "loss-non-finite": (LossNonFinite(), {"severity": "critical"}),
        "loss-spike": (LossSpike(), {}),
        "spike-total": (Spike(of="total_norm", above=6), {}),
        "spike-total-critical": (Spike(of="total_norm", above=10), {"severity": "critical"}),
        "spike-parameter": (Spike(above=10), {"keep_firing_for": 20}),
        "drift": (Drift(), {}),
        "exploded": (Above(threshold=1e3, of="total_norm"), {"for_": 3}),
        "update-too-big": (UpdateRatio(), {}),
        "vanishing": (
            Below(threshold=1e-8, of="rms", above_zero=True),
            {"for_": 20, "groups": ("matrices",)},
        ),
        "vanishing-by-depth": (DepthRatio(), {}),
        "vanishing-by-share": (Drop(), {}),
        "dead": (Dead(), {}),
        "all-zero": (AllZero(), {}),
        "stale": (Stale(), {}),
        "never": (Never(), {}),
        "stuck": (Stuck(), {}),
    }
    return tuple(
        rule(name, detector, **{**keys, "cooldown": 20, **overrides.get(name, {})})
        for name, (detector, keys) in detectors.items()
    )
