"""A rule compiled to a limit: the same number before the backward as after it, whatever the order of the file."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.detectors import Above, Below, Drift, LossSpike, Sample, Spike
from gradwatch.engine.limiting import own_state
from gradwatch.limits import Limits, Row
from gradwatch.rules import Action, Group, Rule
from tests.engine_cases import Course, bound, make_snapshot, rule

INF = float("inf")
NORMS = st.floats(0, 2.0**90, width=32) | st.sampled_from([float("nan"), INF, 0.0])


def clip(to: str | float = "baseline", at: str = "step") -> tuple[Action, ...]:
    return (Action("clip", {"to": to, "at": at, "local": False}),)


def row(trigger: list[float], target: list[float]) -> Row:
    return Row(np.array(trigger, np.float32), np.array(target, np.float32))


def arrays(size: int) -> st.SearchStrategy[np.ndarray]:
    bound_ = st.floats(2.0**-20, 2.0**20, width=32) | st.just(INF)
    return st.lists(bound_, min_size=size, max_size=size).map(lambda found: np.array(found, np.float32))


def any_limits(size: int = 3) -> st.SearchStrategy[Limits]:
    flags = st.lists(st.booleans(), min_size=size, max_size=size).map(lambda found: np.array(found, np.bool_))
    rows = st.lists(st.builds(Row, arrays(size), arrays(size)), max_size=3).map(tuple)
    return st.builds(Limits, rows, st.none() | arrays(size), st.none() | flags)


@given(any_limits(), any_limits(), any_limits())
def test_limits_are_a_join_semilattice(a: Limits, b: Limits, c: Limits) -> None:
    """Joining is commutative, associative and idempotent, so the order of rules in a file never matters."""
    assert a | b == b | a
    assert (a | b) | c == a | (b | c)
    assert a | a == a
    assert a | Limits() == a


@given(any_limits(), any_limits(), st.lists(NORMS, min_size=3, max_size=3))
def test_a_join_is_never_milder_than_either(a: Limits, b: Limits, norms: list[float]) -> None:
    """Of two orders for one gradient the smaller coefficient holds; 1 is what nobody ordered."""

    def ordered(limits: Limits) -> np.ndarray:
        """Coefficients by plain Python, inf where no order touches a site."""
        out = []
        for k, norm in enumerate(np.array(norms, np.float32)):
            found = [
                min(np.float32(1), one.target[k] / (norm + np.float32(1e-6)))
                for one in limits.rows
                if norm > one.trigger[k]
            ]
            found += [] if limits.scale is None else [limits.scale[k]]
            out.append(min(found, default=np.float32(INF)) if np.isfinite(norm) else np.float32(INF))
        return np.array(out, np.float32)

    with np.errstate(all="ignore"):
        both = np.minimum(ordered(a), ordered(b))
    expected = np.where(np.isfinite(both), both, np.float32(1))
    assert np.array_equal((a | b).coefficients(norms), expected)


@given(any_limits())
def test_a_nonfinite_norm_is_never_multiplied(limits: Limits) -> None:
    """NaN and Inf get the coefficient 1, so one bad element never spreads over its tensor."""
    assert (limits.coefficients([float("nan"), INF, float("nan")]) == 1).all()


def warmed(rules: list[Rule], seed: int, steps: int = 60, groups: tuple[Group, ...] = ()) -> Course:
    course = Course(bound(rules, groups=groups))
    rng = np.random.default_rng(seed)
    for step in range(steps):
        course.step(step, np.exp(rng.normal(0, 0.3, 4)))
    return course


@pytest.mark.parametrize("of", ["norm", "rms"])
@given(seed=st.integers(0, 10_000), above=st.floats(4, 12), half_life=st.sampled_from([10, 100]))
def test_the_score_of_a_limit_is_the_threshold(of: str, seed: int, above: float, half_life: int) -> None:
    """`score(limit(state)) == threshold`, in terms of the column the rule reads and of the norm the hook sees."""
    spike = Spike(of=of, above=above, half_life=half_life)  # type: ignore[arg-type]
    course = warmed([rule("spike", spike, do=clip())], seed)
    plan = course.engine.plan
    (limit,) = course.engine.limits(course.state).rows
    values = limit.trigger / plan.roots if of == "rms" else limit.trigger
    score = spike.score(
        own_state(plan.rules[0], course.state.baselines), Sample(values, np.ones(4, np.bool_))
    )
    assert np.allclose(score, above, rtol=1e-3)


@given(
    seed=st.integers(0, 10_000), site=st.integers(0, 3), factor=st.floats(1.01, 100) | st.floats(0.5, 0.99)
)
def test_a_limit_is_broken_exactly_when_its_rule_breaches(seed: int, site: int, factor: float) -> None:
    """The hook that clips and the verdict that alerts go by one number."""
    course = warmed([rule("spike", Spike(above=8), do=clip())], seed)
    limits = course.engine.limits(course.state)
    norms = np.ones(4, np.float32)
    norms[site] = limits.rows[0].trigger[site] * np.float32(factor)
    others = limits.coefficients(norms) < 1
    verdict = course.step(60, norms)
    breaching = verdict.breaching.get("spike", np.zeros(4, np.bool_))
    assert np.array_equal(others, breaching)
    assert bool(breaching[site]) == (factor > 1)


def test_a_clipped_spike_comes_down_to_two_sigma() -> None:
    """The baseline target is exp(m + 2σ̂), of what was known before the spike."""
    course = warmed([rule("spike", Spike(above=8), do=clip())], seed=1)
    baseline = course.state.baselines[0]
    sigma = np.maximum(1.2533 * baseline.s, 0.10)  # type: ignore[attr-defined]
    (limit,) = course.engine.limits(course.state).rows
    assert np.allclose(limit.target, np.exp(baseline.m + 2 * sigma), rtol=1e-5)  # type: ignore[attr-defined]
    norm = limit.trigger * 50
    after = norm * course.engine.limits(course.state).coefficients(norm)
    assert np.allclose(after, limit.target, rtol=1e-5)


def test_nothing_is_limited_while_warming_up() -> None:
    """Without a baseline there is no limit."""
    course = warmed([rule("spike", Spike(above=8), do=clip())], seed=1, steps=10)
    assert (course.engine.limits(course.state).coefficients([1e6] * 4) == 1).all()


def test_a_rule_limits_its_own_sites_only() -> None:
    """`groups` and `exclude` hold for the limit as they do for the verdict."""
    groups = (Group("matrices", ("*",), 2), Group("rest", ("*",)))
    course = warmed([rule("cap", Above(threshold=2.0), groups=("matrices",), do=clip(0.5))], 0, groups=groups)
    limits = course.engine.limits(course.state)
    assert np.array_equal(limits.rows[0].trigger, np.array([2, INF, 2, INF], np.float32))
    assert np.allclose(limits.coefficients([4.0] * 4), [0.125, 1, 0.125, 1])


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
        rule("silent", Above(threshold=1.0)),
    ],
    ids=lambda one: one.id,
)
def test_what_a_hook_cannot_know_is_no_limit(one: Rule) -> None:
    """Only a per-parameter bound on the gradient norm, due at the first breach, can be known beforehand."""
    engine = bound([one])
    assert not engine.limits(engine.init())


def test_limits_are_told_apart_by_where_they_hold() -> None:
    """`at: backward` clips are for the hook, the others for the step."""
    rules = [
        rule("hooked", Above(threshold=1.0), do=clip(0.5, at="backward")),
        rule("stepped", Above(threshold=4.0), do=clip(2.0)),
    ]
    engine = bound(rules)
    state = engine.init()
    assert [one.trigger[0] for one in engine.limits(state, "backward").rows] == [1]
    assert [one.trigger[0] for one in engine.limits(state, "step").rows] == [4]
    assert len(engine.limits(state).rows) == 2
    assert engine.limits(state) == engine.limits(state, "step") | engine.limits(state, "backward")


def test_the_order_of_rules_never_matters() -> None:
    """Every permutation of a file gives the same limits and the same decision."""
    rules = [
        rule("a", Spike(above=6), do=clip()),
        rule("b", Above(threshold=0.5), do=clip(0.4)),
        rule("c", Spike(of="rms", above=7), do=clip()),
    ]
    found = [warmed(list(order), 3) for order in itertools.permutations(rules)]
    limits = [course.engine.limits(course.state) for course in found]
    assert all(one == limits[0] for one in limits)
    for course in found:
        course.take(make_snapshot(course.engine.sites, 60, [3.0, 0.1, 40.0, 1.0]))
    assert all(course.decision == found[0].decision for course in found)


def test_limits_of_a_part_of_the_sites() -> None:
    """`at` picks the sites of one rank or one lane."""
    limits = Limits((row([1, 2, 3], [1, 1, 1]),), np.array([0.5, INF, INF], np.float32))
    part = limits.at(slice(1, 3))
    assert np.array_equal(part.coefficients([9.0, 9.0]), limits.coefficients([9.0, 9.0, 9.0])[1:])
