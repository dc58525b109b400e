"""Runs that are healthy for the most part, and rule sets of every shape, for the laws of judging at a glance."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from gradwatch.detectors import (
    Above,
    AboveRecentMax,
    AllZero,
    Below,
    BelowRecentMin,
    Dead,
    DepthRatio,
    Drift,
    Drop,
    Fade,
    LossNonFinite,
    LossSpike,
    LrJump,
    NonFinite,
    Rise,
    Spike,
    Stale,
    Stuck,
    UpdateRatio,
)
from gradwatch.engine import BoundEngine, Engine
from gradwatch.records.snapshot import Column
from gradwatch.rules.condition import Condition, When
from gradwatch.rules.files import load_rules
from gradwatch.rules.rule_set import Action, Rule, RuleSet
from tests.engine.cases import GROUPS, default_like, everywhere, make_sites, rule

SIZE = 8
STEPS = 260
COSTLY = {"zero_fraction": (0.1, 0.95), "update_ratio": (1e-3, 0.5), "weight_norm": (4.0, 90.0)}
"""Columns of whole tensors: a usual value of each, and one that a rule has something to say of."""


def mostly_healthy(seed: int, steps: int = STEPS) -> list[dict[str, Any]]:
    """A run that is healthy but for a burst of faults now and then."""
    rng = np.random.default_rng(seed)
    level, out = np.exp(rng.normal(0, 1, SIZE)), []
    for step in range(steps):
        spread = rng.choice([0.1] * 9 + [0.6])
        norms: list[float | None] = (level * np.exp(rng.normal(0, spread, SIZE))).tolist()
        if rng.random() < 0.006:
            norms[int(rng.integers(SIZE))] = [None, np.nan, np.inf, 0.0, 1e6, 1e-12, 1e-40][rng.integers(7)]
        scalars = {"lr": 1e-3 if step % 90 else 1e-2}
        if rng.random() < 0.5:
            scalars["loss"] = float(rng.choice([2.0, 2.1, np.nan], p=[0.6, 0.39, 0.01]))
        if rng.random() < 0.5:
            scalars["reward"] = float(rng.choice([1.0, -1.0, 30.0, np.nan], p=[0.6, 0.38, 0.01, 0.01]))
        known: dict[str, Any] = {"scalars": scalars, "provisional": rng.random() < 0.01}
        if rng.random() < 0.05:
            known["coef"] = rng.choice([1.0, 0.3, 0.0, 40.0, np.nan], SIZE, p=[0.8, 0.15, 0.02, 0.02, 0.01])
        if (
            step % 3
        ):  # as a capture gives them to rules that are judged on some sites at each step, and to others
            known["columns"] = {
                name: Column(
                    rng.choice(values, SIZE, p=[0.99, 0.01]).astype(np.float32), rng.random(SIZE) < 0.5
                )
                for name, values in COSTLY.items()
            }
        if step % 50 == 0:
            known["columns"] = {"zero_fraction": everywhere(rng.choice([0.1, 0.95], SIZE))}
        out.append({"step": step, "norms": norms, **known})
    return out


def with_faults_that_stay(seed: int, steps: int = STEPS) -> list[dict[str, Any]]:
    """As `mostly_healthy`, but parameters vanish, explode, get zeros or no gradient for tens of steps on end."""
    rng, faults = np.random.default_rng(seed + 1), dict[int, float | None]({2: None} if seed % 2 else {})
    out = mostly_healthy(seed, steps)
    for step in out:
        if rng.random() < 0.08:
            site, fault = int(rng.integers(SIZE)), [None, 0.0, 1e-9, 1e-3, 500.0, None, 0.0][rng.integers(7)]
            faults[site] = fault
        if faults and rng.random() < 0.08:
            del faults[min(faults)]
        for site, fault in faults.items():
            usual = step["norms"][site]
            step["norms"][site] = fault if not fault or usual is None else fault * usual
    return out


def with_costly_columns_that_stay(seed: int, steps: int = STEPS) -> list[dict[str, Any]]:
    """Steady norms, while what is judged on some sites at each step is out of the usual for tens of steps on end."""
    rng, bad = np.random.default_rng(seed + 2), dict[str, set[int]]({name: set() for name in COSTLY})
    level, out = np.exp(rng.normal(0, 0.1, SIZE)), []
    for step in range(steps):
        if rng.random() < 0.05:
            bad[str(rng.choice(list(COSTLY)))] ^= {int(rng.integers(SIZE))}
        present = rng.random(SIZE) < (0.5 if rng.random() < 0.03 else 1.0)
        columns = {
            name: Column(
                np.array([values[site in bad[name]] for site in range(SIZE)], np.float32), present.copy()
            )
            for name, values in COSTLY.items()
        }
        norms = (level * (1 + rng.uniform(-0.01, 0.01, SIZE))).tolist()
        out.append({"step": step, "norms": norms, "columns": columns, "scalars": {"lr": 1e-3, "loss": 2.0}})
    return out


@cache
def packs() -> dict[str, tuple[Rule, ...]]:
    """Rule sets of every shape: shipped, alike, by group, over totals, with `every`, with tight bounds."""
    odd = (
        rule("group", Above(threshold=60.0), scope="group"),
        rule("total", Below(threshold=0.5), scope="total"),
        rule("every", Spike(above=3.0), every=3),
        rule("group-spike", Spike(above=4.0), scope="group"),
        rule("rms", Below(threshold=0.005, of="rms")),
        rule("rms-spike", Spike(of="rms", above=4.0)),
        rule("lr", Above(threshold=5e-3, of="lr")),
        rule("calls", Below(threshold=1.0, of="calls")),
        rule("applied", Above(threshold=80.0, of="norm_applied")),
        rule("nan", NonFinite(values=("nan",)), scope="total"),
        rule("loss", Above(threshold=2.15, of="loss")),
    )
    observed = (
        rule("high", Above(threshold=20.0, of="observed.reward")),
        rule("low", Below(threshold=-2.0, of="observed.reward"), for_=2),
        rule("spike", Spike(of="observed.reward", above=4.0, warmup=5)),
        rule("spike-signed", LossSpike(of="observed.reward", above=4.0, warmup=5)),
        rule("drift", Drift(of="observed.reward", above=1.5, fast=3, window=20, lag=5, warmup=20)),
        rule("nan", LossNonFinite(of="observed.reward")),
        rule("never", Above(threshold=0.0, of="observed.other")),
    )
    tight = (
        rule("spike", Spike(above=2.0, warmup=5, half_life=10)),
        rule("spike-hard", Spike(above=6.0, warmup=5, half_life=10), exclude=("layers.0.*",)),
        rule("spike-total", Spike(of="total_norm", above=2.0, warmup=5, half_life=10)),
        rule("drift", Drift(above=1.5, fast=3, window=20, lag=5, warmup=20)),
        rule("drop", Drop(above=3.0, warmup=10, half_life=10), for_=2),
        rule("rise", Rise(above=3.0, warmup=10, half_life=10), for_=2),
        rule("fade", Fade(above=1.3, warmup=10, fast=3, slow=30), for_=2),
        rule("fading", DepthRatio(below=0.5), for_=1),
        rule("growing", DepthRatio(above=20.0, ends=2), for_=1),
        rule("stale", Stale(), for_=1),
        rule("zero", AllZero(min_ndim=0), for_=2),
    )
    staggered = (
        rule("dead", Dead(min_ndim=0), every=3, for_=1),
        rule("dead-late", Dead(min_ndim=0), every=7, for_=2, keep_firing_for=9),
        rule("big", UpdateRatio(above=0.3), every=3, for_=1),
        rule("stuck", Stuck(), every=3, for_=1),
        rule("weights", Spike(of="weight_norm", above=3.0, warmup=3), every=4),
    )
    beside = (
        *staggered,
        rule("all", Above(of="zero_fraction", threshold=0.5)),
        rule("total", Above(of="zero_fraction", threshold=0.3), scope="total", every=5),
        rule("norm", Spike(above=4.0)),
    )
    extremes = (
        rule("surge", AboveRecentMax(above=1.5, window=25, warmup=5)),
        rule("surge-total", AboveRecentMax(of="total_norm", above=1.2, window=9, lag=3, warmup=3), for_=2),
        rule("surge-loss", AboveRecentMax(of="loss", above=1.04, window=5, warmup=2)),
        rule("surge-seen", AboveRecentMax(of="observed.reward", above=2.0, window=40, warmup=2)),
        rule("fall", BelowRecentMin(above=1.5, window=20, lag=4, warmup=5), for_=2),
        rule("fall-total", BelowRecentMin(of="total_norm", above=1.1, window=10, lag=0, warmup=5), for_=1),
        rule("surge-group", AboveRecentMax(above=1.5, window=12, warmup=5), scope="group"),
        rule(
            "surge-part", AboveRecentMax(above=1.5, window=30, warmup=5), scope="total", groups=("matrices",)
        ),
        rule("surge-rms", AboveRecentMax(of="rms", above=1.5, window=11, warmup=5)),
        rule("fall-group", BelowRecentMin(above=1.5, window=20, lag=4, warmup=5), scope="group", for_=2),
        rule("rate", LrJump()),
        rule("grown", Above(of="coef", threshold=1.5)),
        rule("zeroed", Below(of="coef", threshold=1e-6), for_=2),
    )
    alike = (  # one bank of values of all kinds, which not every step has
        rule("loss", AboveRecentMax(of="loss", above=1.4, window=12, warmup=5)),
        rule("norm", AboveRecentMax(above=1.4, window=12, warmup=5)),
        rule("seen", AboveRecentMax(of="observed.reward", above=1.4, window=12, warmup=5)),
    )
    conditions = (
        *tight,
        rule("loss", Above(threshold=2.15, of="loss")),
        rule("seen", Above(threshold=20.0, of="observed.reward")),
        rule("unseen", Above(threshold=0.0, of="observed.other")),
        rule("every", Spike(above=3.0, warmup=5), every=3),
        rule("dead", Dead(min_ndim=0), every=3, for_=1),
        rule("nan", NonFinite(), do=(Action("skip_step", {"max_consecutive": None, "then": "continue"}),)),
        joining("both", all_of("spike", "drift"), 10),
        joining("one", any_of("loss", all_of("zero", "stale"), "fading"), for_=2, keep_firing_for=5),
        joining("without", all_of("spike-total", not_("seen", 40)), 3, cooldown=20),
        joining("calm", not_("spike-hard"), for_=3),
        joining("unknown", all_of("spike", not_("unseen")), 5),
        joining("chain", all_of("both", not_("unknown")), 4),
        joining("chained", any_of("chain", all_of(not_("calm"), "spike")), 2),
        joining("rare", any_of(all_of("every", "dead"), "nan"), 7),
    )
    windows = (  # of which most steps leave none active
        rule("spike-total", Spike(of="total_norm", above=3.0, warmup=5, half_life=20)),
        rule("seen", Above(threshold=20.0, of="observed.reward")),
        rule("late", Spike(of="total_norm", above=90.0, warmup=100)),
        joining("both", all_of("spike-total", "seen"), 30),
        joining("known", all_of("spike-total", not_("late")), 60),
        joining("unless", all_of("seen", not_("spike-total", 9)), 40),
        joining("next", all_of("both", not_("unless")), 20),
    )
    acting = (
        *conditions,
        joining("stops", all_of("both", "fading"), 4, do=(Action("stop", {}),)),
        joining("clips", any_of("spike-total", "drift"), do=(Action("clip", {"to": 1.0, "at": "step"}),)),
    )
    default = load_rules("default").rules
    return {
        "default": default,
        "like": default_like(),
        "odd": odd,
        "observed": observed,
        "tight": tight,
        "extremes": extremes,
        "alike": alike,
        "staggered": staggered,
        "beside": beside,
        "conditions": conditions,
        "windows": windows,
        "acting": acting,
    }


def joining(name: str, condition: Condition, within: int = 1, **keys: Any) -> Rule:
    """A rule with a condition on others."""
    return Rule(name, When(_with_window(condition, within)), "total", **keys)


def _with_window(condition: Condition, within: int) -> Condition:
    """The condition with this window, where its parts have none of their own."""
    parts = tuple(_with_window(part, within) for part in condition.parts)
    return replace(condition, parts=parts, within=within if condition.within == 1 else condition.within)


def all_of(*parts: str | Condition) -> Condition:
    """Holds where each of these does."""
    return Condition("all", parts=tuple(map(_part, parts)))


def any_of(*parts: str | Condition) -> Condition:
    """Holds where one of these does."""
    return Condition("any", parts=tuple(map(_part, parts)))


def not_(part: str | Condition, within: int = 1) -> Condition:
    """Holds where this does not; within a window of its own where that is not 1."""
    return _with_window(Condition("not", parts=(_part(part),)), within)


def _part(part: str | Condition) -> Condition:
    return Condition("rule", part) if isinstance(part, str) else part


def bind(rules: tuple[Rule, ...]) -> BoundEngine:
    """These rules in the groups of the shipped pack; on a model so large that staggered sites have different phases."""
    sites = make_sites(SIZE)
    large = replace(sites, numels=sites.numels * (4096 if rules[0].staggered else 1))
    return Engine(RuleSet(groups=(*GROUPS, *load_rules("default").groups), rules=rules)).bind(large)


DISTINCT = [name for name in packs() if name != "conditions"]
"""For the laws, which are heavy: "acting" has all the rules of "conditions", and two that act."""
