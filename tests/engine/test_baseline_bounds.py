"""A rule compiled to a bound: the same number before the backward as after it, whatever the order of the file."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.detectors import Above, Below, Drift, LossSpike, Sample, Spike
from gradwatch.engine.baseline_bounds import own_state
from gradwatch.policies.norm_bound import at_site, factor_of
from gradwatch.rules.rule_set import Action, Group, Rule
from tests.engine.cases import OptimizerRules, bound, make_snapshot, rule

INF = float("inf")


def clip(to: str | float = "baseline", at: str = "backward") -> tuple[Action, ...]:
    return (Action("clip", {"to": to, "at": at, "local": False}),)


def factors(bound_rules: OptimizerRules, norms: object) -> np.ndarray:
    """float64[S], what hooks would multiply gradients of these norms by."""
    found, values = bound_rules.engine.bounds(bound_rules.state, 0), np.asarray(norms, np.float32)
    return np.array([factor_of(at_site(found, k), float(norm)) for k, norm in enumerate(values)])


def warmed(rules: list[Rule], seed: int, steps: int = 60, groups: tuple[Group, ...] = ()) -> OptimizerRules:
    bound_rules = OptimizerRules(bound(rules, groups=groups))
    rng = np.random.default_rng(seed)
    for step in range(steps):
        bound_rules.step(step, np.exp(rng.normal(0, 0.3, 4)))
    return bound_rules


@pytest.mark.parametrize("of", ["norm", "rms"])
@given(seed=st.integers(0, 10_000), above=st.floats(4, 12), half_life=st.sampled_from([10, 100]))
def test_the_score_of_a_bound_is_the_threshold(of: str, seed: int, above: float, half_life: int) -> None:
    """`score(bound(state)) == threshold`, in terms of the column the rule reads and of the norm the hook sees."""
    spike = Spike(of=of, above=above, half_life=half_life)  # type: ignore[arg-type]
    bound_rules = warmed([rule("spike", spike, do=clip())], seed)
    plan = bound_rules.engine.plan
    (found,) = bound_rules.engine.bounds(bound_rules.state, 0)
    values = found.high / plan.roots if of == "rms" else found.high
    sample = Sample(values.astype(np.float32), np.ones(4, np.bool_))
    score = spike.score(own_state(plan.rules[0], bound_rules.state.baselines), sample)
    assert np.allclose(score, above, rtol=1e-3)


@given(
    seed=st.integers(0, 10_000), site=st.integers(0, 3), factor=st.floats(1.01, 100) | st.floats(0.5, 0.99)
)
def test_a_bound_is_broken_exactly_when_its_rule_breaches(seed: int, site: int, factor: float) -> None:
    """The hook that clips and the verdict that alerts go by one number."""
    bound_rules = warmed([rule("spike", Spike(above=8), do=clip())], seed)
    (found,) = bound_rules.engine.bounds(bound_rules.state, 0)
    norms = np.ones(4, np.float32)
    norms[site] = np.float32(found.high[site]) * np.float32(factor)
    clipped = factors(bound_rules, norms) < 1
    verdict = bound_rules.step(60, norms)
    breaching = verdict.breaching.get("spike", np.zeros(4, np.bool_))
    assert np.array_equal(clipped, breaching)
    assert bool(breaching[site]) == (factor > 1)


def test_a_clipped_spike_comes_down_to_two_sigma() -> None:
    """The baseline target is exp(m + 2σ̂), of what was known before the spike."""
    bound_rules = warmed([rule("spike", Spike(above=8), do=clip())], seed=1)
    baseline = bound_rules.state.baselines[0]
    sigma = np.maximum(1.2533 * baseline.s, 0.10)  # type: ignore[attr-defined]
    (found,) = bound_rules.engine.bounds(bound_rules.state, 0)
    assert np.allclose(found.target, np.exp(baseline.m + 2 * sigma), rtol=1e-5)  # type: ignore[attr-defined]
    norm = found.high * 50
    assert np.allclose(norm * factors(bound_rules, norm), found.target, rtol=1e-5)


@given(st.lists(st.sampled_from([float("nan"), INF, 0.0]), min_size=4, max_size=4))
def test_a_norm_that_says_nothing_is_never_multiplied(norms: list[float]) -> None:
    """0, NaN and Inf get the factor 1, so one bad element never spreads over its tensor."""
    assert (factors(warmed([rule("cap", Above(threshold=1.0), do=clip(0.5))], 0, steps=1), norms) == 1).all()


def test_nothing_is_bounded_while_warming_up() -> None:
    """Without a baseline there is no bound."""
    bound_rules = warmed([rule("spike", Spike(above=8), do=clip())], seed=1, steps=10)
    assert (factors(bound_rules, [1e6] * 4) == 1).all()


def test_a_rule_bounds_its_own_sites_only() -> None:
    """`groups` and `exclude` hold for the bound as they do for the verdict."""
    groups = (Group("matrices", ("*",), 2), Group("rest", ("*",)))
    bound_rules = warmed(
        [rule("cap", Above(threshold=2.0), groups=("matrices",), do=clip(0.5))], 0, groups=groups
    )
    (found,) = bound_rules.engine.bounds(bound_rules.state, 0)
    assert np.array_equal(found.high, [2, INF, 2, INF])
    assert np.allclose(factors(bound_rules, [4.0] * 4), [0.125, 1, 0.125, 1])


@pytest.mark.parametrize(
    "one",
    [
        rule("late", Above(threshold=1.0), for_=2, do=clip(1.0)),
        rule("group", Above(threshold=1.0), scope="group", do=clip(1.0)),
        rule("total", Above(threshold=1.0, of="total_norm"), scope="total", do=clip(1.0)),
        rule("loss", LossSpike(), scope="total", do=clip(1.0)),
        rule("growth", Drift(), do=clip(1.0)),
        rule("small", Below(threshold=1.0), do=clip(1.0)),
        rule("weights", Above(threshold=1.0, of="weight_norm"), do=clip(1.0)),
        rule("shadow", Above(threshold=1.0), mode="shadow", do=clip(1.0)),
        rule("stepped", Above(threshold=1.0), do=clip(1.0, at="step")),
        rule("silent", Above(threshold=1.0)),
    ],
    ids=lambda one: one.id,
)
def test_what_a_hook_cannot_know_or_is_not_to_do_is_no_bound(one: Rule) -> None:
    """Only a per-parameter bound on the gradient norm, due at the first breach, can be known beforehand."""
    engine = bound([one])
    assert not engine.bounds(engine.init(), 0)


def test_the_order_of_rules_never_matters() -> None:
    """Every permutation of a file gives the same factors and the same decision."""
    rules = [
        rule("a", Spike(above=6), do=clip()),
        rule("b", Above(threshold=0.5), do=clip(0.4)),
        rule("c", Spike(of="rms", above=7), do=clip(at="step")),
        rule("d", Spike(of="rms", above=5), do=clip()),
    ]
    found = [warmed(list(order), 3) for order in itertools.permutations(rules)]
    norms = [3.0, 0.1, 40.0, 1.0]
    assert all(np.array_equal(factors(bound_rules, norms), factors(found[0], norms)) for bound_rules in found)
    for bound_rules in found:
        bound_rules.take(make_snapshot(bound_rules.engine.sites, 60, norms))
    assert all(bound_rules.decision == found[0].decision for bound_rules in found)
