"""Detectors: the laws over the registry, each formula against a slow reference, and what each kind is for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from gradwatch.detectors import (
    DETECTORS,
    Above,
    AllZero,
    Below,
    DepthRatio,
    Detector,
    Drift,
    Drop,
    Fade,
    LossSpike,
    Never,
    NonFinite,
    Rise,
    Sample,
    ScaleCollapse,
    Spike,
    Stale,
    Stuck,
    UpdateRatio,
    breaches,
    clears,
    find_detector,
    register_detector,
    rule_keys,
)
from gradwatch.errors import GradwatchError
from gradwatch.testing import LAWS, Law, check_detector
from tests.detectors import reference
from tests.support.examples import examples

REQUIRED: dict[str, dict[str, Any]] = {"above": {"threshold": 2.0}, "below": {"threshold": 0.5}}

VARIANTS: list[Detector] = [
    *(cls(**REQUIRED.get(kind, {})) for kind, cls in sorted(DETECTORS.items())),
    Spike(half_life=5, warmup=3),
    Spike(warmup=40, above=6.0, clear_below=2.0),
    NonFinite(of="norm_local", values=("nan",)),
    Below(threshold=0.5, above_zero=True),
    DepthRatio(above=1e3, ends=2),
    Drift(fast=2, window=10, lag=4, warmup=2, above=1.5),
    Drop(half_life=3, warmup=2, clear_below=10.0),
    Rise(half_life=3, warmup=2),
    Fade(fast=2, slow=5, warmup=2),
    ScaleCollapse(halvings=2, within=7, settle=3),
]

values_of_one_series = st.lists(
    st.one_of(
        st.floats(1e-6, 1e6),
        st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e-38, 3e38]),
        st.none(),
    ),
    min_size=1,
    max_size=70,
)


def sample_of(values: list[float | None], **aux: list[float]) -> Sample:
    """One step of K series; None = missing."""
    here = np.array([value is not None for value in values])
    filled = np.array([7.0 if value is None else value for value in values], np.float32)
    return Sample(filled, here, {name: np.array(column, np.float32) for name, column in aux.items()})


def scores(detector: Detector, series: list[float | None]) -> list[float]:
    """The scores of one series, sample by sample."""
    state, out = detector.init(1), []
    for value in series:
        sample = sample_of([value])
        out.append(float(detector.score(state, sample)[0]))
        state = detector.learn(state, sample)
    return out


def as_float32(series: list[float | None]) -> list[float | None]:
    """What the package sees of these values."""
    with np.errstate(over="ignore"):
        return [None if value is None else float(np.float32(value)) for value in series]


def assert_close(found: list[float], expected: list[float], tolerance: float) -> None:
    """Equal within an absolute or relative tolerance; NaN where NaN."""
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("detector", VARIANTS, ids=repr)
def test_every_registered_detector_obeys_every_law(detector: Detector, law: Law) -> None:
    """A new detector is tested by existing."""
    for seed in range(examples(1)):
        law(detector, seed)


class Forgetful(Spike):
    """A spike detector that learns NaN: what the laws are there to catch."""

    def learn(self, state: Any, sample: Sample) -> Any:
        """As Spike, but every sample counts as finite."""
        return super().learn(state, sample)._replace(m=np.asarray(sample.values, np.float32))


class Impure(Stale):
    """A detector that writes into the state it was given."""

    def learn(self, state: Any, sample: Sample) -> Any:
        """As Stale, in place."""
        state.seen[:] |= sample.values > 0
        return state


@pytest.mark.parametrize("broken", [Forgetful(), Impure()], ids=lambda one: type(one).__name__)
def test_the_laws_catch_a_broken_detector(broken: Detector) -> None:
    """A law that cannot fail is no law."""
    with pytest.raises((AssertionError, ValueError)):
        check_detector(broken)


@settings(max_examples=examples(75))
@given(values_of_one_series, st.sampled_from([3, 20, 100]), st.sampled_from([1, 5, 20, 40]))
def test_spike_is_its_formula(series: list[float | None], half_life: int, warmup: int) -> None:
    """The vectorised float32 recursion agrees with the plain one in float64."""
    slow = reference.Spike(half_life, warmup)
    expected = [slow(value) for value in as_float32(series)]
    assert_close(scores(Spike(half_life=half_life, warmup=warmup), series), expected, 1e-3)


@settings(max_examples=examples(25))
@given(st.integers(0, 10**6), st.sampled_from([10, 100]))
def test_spike_is_its_formula_over_long_runs(seed: int, half_life: int) -> None:
    """Rounding does not build up: 600 samples, with outliers and holes, through the fast path."""
    rng = np.random.default_rng(seed)
    series: list[float | None] = np.exp(rng.normal(0, 0.3, 600)).tolist()
    for place in rng.integers(0, 600, 12):
        series[place] = [None, math.nan, 1e6, 1e-9, 0.0][int(rng.integers(5))]
    slow, detector, state = reference.Spike(half_life), Spike(half_life=half_life), Spike().init(1)
    for value in series:
        fast, state = detector.advance(state, sample_of([value]))
        exact = slow(as_float32([value])[0])
        if fast is None:
            assert not exact > detector.above + 1e-2
        else:
            assert_close([float(fast[0])], [exact], 2e-3)


@settings(max_examples=examples(50))
@given(values_of_one_series)
def test_loss_spike_is_spike_on_asinh(series: list[float | None]) -> None:
    """Also for losses that are zero or negative."""
    signed = [
        None if value is None else -value if index % 3 == 0 else value for index, value in enumerate(series)
    ]
    slow = reference.Spike(scale=math.asinh)
    assert_close(scores(LossSpike(), signed), [slow(value) for value in as_float32(signed)], 1e-3)


@settings(max_examples=examples(30))
@given(st.integers(0, 10**6), st.integers(1, 9), st.sampled_from([Rise, Drop]))
def test_rise_and_drop_are_their_formula(seed: int, size: int, kind: type[Rise] | type[Drop]) -> None:
    """Changes beyond the median's, with zeros, NaN and holes."""
    rng = np.random.default_rng(seed)
    detector, slow = kind(warmup=10, half_life=20), reference.Share(size, kind.SIGN, 20, 10)
    state = detector.init(size)
    for _ in range(60):
        row: list[float | None] = np.exp(rng.normal(0, 2, size)).tolist()
        for place in range(size):
            if rng.random() < 0.1:
                row[place] = [None, math.nan, math.inf, 0.0][int(rng.integers(4))]
        sample = sample_of(row)
        assert_close(detector.score(state, sample).tolist(), slow(as_float32(row)), 2e-3)
        state = detector.learn(state, sample)


@pytest.mark.parametrize("kind", [Rise, Drop])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_of_few_tensors_the_one_that_changes_is_named(kind: type[Rise] | type[Drop], size: int) -> None:
    """A change of one by 50 counts in full; where it is the other way, those beside it do not change the one way."""
    detector = kind(warmup=50)
    usual = np.geomspace(1, 100, size)
    for place in range(size):
        state = detector.init(size)
        for _ in range(100):
            state = detector.learn(state, sample_of(usual.tolist()))
        for factor in (50.0, 0.02):
            changed = usual * np.where(np.arange(size) == place, factor, 1.05) ** kind.SIGN
            score = detector.score(state, sample_of(changed.tolist()))
            assert np.delete(score, place).max() < 3
            assert bool(score[place] > 45) is (factor > 1)


@pytest.mark.parametrize("kind", [Rise, Drop])
def test_a_change_of_all_is_none_of_one(kind: type[Rise] | type[Drop]) -> None:
    """A model whose norms all become a hundred times larger or smaller."""
    for factor in (0.01, 100.0):
        detector, row = kind(warmup=50), np.geomspace(1, 100, 5)
        state = detector.init(5)
        for _ in range(100):
            state = detector.learn(state, sample_of(row.tolist()))
        assert detector.score(state, sample_of((factor * row).tolist())).max() < 1.01


@settings(max_examples=examples(30))
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_stale_and_never_are_their_formulas(calls: list[int]) -> None:
    """Counted by hand."""
    stale, never = reference.Stale(), reference.Never()
    series: list[float | None] = [float(count) for count in calls]
    assert_close(scores(Stale(), series), [stale(count) for count in calls], 0)
    assert_close(scores(Never(), series), [never(count) for count in calls], 0)


rows = st.lists(
    st.one_of(st.none(), st.sampled_from([0.0, 1.0, math.nan, math.inf]), st.floats(1e-9, 1e9)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=examples(75))
@given(rows)
def test_all_zero_and_depth_ratio_are_their_formulas(row: list[float | None]) -> None:
    """One step over many sites."""
    sample = sample_of(row)
    assert_close(AllZero().score((), sample).tolist(), reference.all_zero(row), 0)
    for ends in (1, 2):
        expected = [reference.depth_ratio(as_float32(row), ends)]
        assert_close(DepthRatio(ends=ends).score((), sample).tolist(), expected, 1e-6)


@settings(max_examples=examples(100))
@given(
    st.lists(
        st.sampled_from([65536.0, 4096.0, 2048.0, 1024.0, 512.0, 1.0, 0.5, 0.0, math.nan, None]), max_size=40
    ),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(0, 5),
)
def test_scale_collapse_is_its_formula(
    series: list[float | None], halvings: int, within: int, settle: int
) -> None:
    """Halvings of the last steps after settling, over what is allowed; or floor over scale, if that is more."""
    slow = reference.ScaleCollapse(halvings, within, settle)
    detector = ScaleCollapse(halvings=halvings, within=within, settle=settle)
    want = [slow(value) for value in series]
    assert scores(detector, series) == pytest.approx(want, rel=1e-6, nan_ok=True)


def test_a_scale_that_begins_at_the_floor_has_not_collapsed() -> None:
    """`init_scale=1` is no alarm; a scale below that of the beginning is."""
    found = scores(ScaleCollapse(), [1.0, 1.0, 1.0, 0.5])
    assert [score >= 1 for score in found] == [False, False, False, True]


@settings(max_examples=examples(100))
@given(st.one_of(st.floats(), st.floats(-2, 2)), st.floats(-2, 2))
def test_above_and_below_agree_with_nan_safe_predicates(value: float, threshold: float) -> None:
    """`above` is `not (x <= threshold)`, so NaN trips it; `below` says nothing of NaN."""
    sample = Sample(np.array([value]), np.array([True]))
    high, low = Above(threshold=threshold), Below(threshold=threshold)
    assert bool(breaches(high, high.score((), sample))[0]) is (not value <= threshold)
    assert bool(breaches(low, low.score((), sample))[0]) is (value < threshold)


@settings(max_examples=examples(100))
@given(rows)
def test_calm_bounds_never_hide_a_breach(row: list[float | None]) -> None:
    """Where `calm(low, high)` holds for the values present, no score breaches."""
    sample = sample_of(row)
    there = sample.values[sample.present]
    low, high = (float(there.min()), float(there.max())) if len(there) else (math.inf, -math.inf)
    aux = {name: np.full(len(row), 0.5, np.float32) for name in ("norm", "weight_norm")}
    stateless = [one for one in VARIANTS if not one.init(1)]
    assert len(stateless) > 8
    for detector in stateless:
        if detector.cannot_breach(low, high):
            score = detector.score((), sample._replace(aux=aux))
            assert not breaches(detector, score).any(), detector


@pytest.mark.parametrize("detector", VARIANTS, ids=repr)
def test_a_score_never_both_breaches_and_is_not_judged(detector: Detector) -> None:
    """NaN neither breaches nor clears; the threshold is on exactly one side."""
    levels = np.array([np.nan, detector.fires_at, np.inf, -np.inf])
    breach, clear = breaches(detector, levels), clears(detector, levels)
    assert not breach[0]
    assert not clear[0]
    assert not (breach & clear).any()
    assert breach[1] == (detector.comparison == "at_least")


def test_a_spike_of_infinity_is_not_a_spike() -> None:
    """Inf and NaN are `nonfinite`'s business; a spike says nothing of them, and goes on as before."""
    found = scores(Spike(), [*([1.0, 1.1] * 15), math.inf, math.nan, 1.05])
    assert math.isnan(found[30])
    assert math.isnan(found[31])
    assert abs(found[32]) < 1


def test_an_outlier_is_seen_again_soon_after_a_huge_one() -> None:
    """Winsorised: a spike of 1,000 times does not hide one of 10 times five steps later."""
    rng = np.random.default_rng(0)
    series = np.exp(rng.normal(0, 0.15, 400))
    series[200] *= 1000
    series[205] *= 10
    found = scores(Spike(), series.tolist())
    assert found[200] > 10
    assert found[205] > 6


def test_keeping_to_judge_over_a_rebaseline_has_no_blind_window() -> None:
    """After a re-baseline that keeps judging, a spike on the next sample is still seen."""
    for keep, seen in ((True, True), (False, False)):
        detector, state = Spike(), Spike().init(1)
        for _ in range(60):
            state = detector.learn(state, sample_of([1.0]))
        state = detector.rebaseline(state, np.array([True]), keep)
        assert bool(breaches(detector, detector.score(state, sample_of([1e6])))[0]) is seen
        for _ in range(20):
            state = detector.learn(state, sample_of([50.0]))
        assert abs(float(detector.score(state, sample_of([50.0]))[0])) < 0.1


def test_update_ratio_and_stuck_need_a_weight_to_be_relative_to() -> None:
    """A matrix that starts at zero is not judged; one that rests for want of a gradient is not stuck."""
    big = sample_of([5.0, 5.0], weight_norm=[1.0, 0.0], norm=[1.0, 1.0])
    assert breaches(UpdateRatio(), UpdateRatio().score((), big)).tolist() == [True, False]
    still = sample_of([0.0, 0.0, 0.0], weight_norm=[1.0, 0.0, 1.0], norm=[1.0, 1.0, 0.0])
    assert breaches(Stuck(), Stuck().score((), still)).tolist() == [True, False, False]


def test_registering_a_kind_twice_raises() -> None:
    """Two packages cannot both own a word of the rule language; the same class again is harmless."""
    register_detector(Spike)
    with pytest.raises(GradwatchError, match="'spike' is registered already"):
        register_detector(type("Other", (Detector,), {"kind": "spike", "__slots__": ()}))
    assert find_detector("spike") is Spike
    assert find_detector("no-such-kind") is None


def test_only_baselines_take_warmup_and_half_life() -> None:
    """The keys of a rule that a kind understands are declared on its fields."""
    assert rule_keys(Spike) == {"warmup", "half_life"}
    assert rule_keys(Drift) == {"warmup"}
    for cls in DETECTORS.values():
        assert bool(rule_keys(cls)) == cls.has_baseline, cls


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("spike", {"abve": 3}),
        ("spike", {"above": -1}),
        ("spike", {"above": 5, "clear_below": 6}),
        ("above", {}),
        ("above", {"threshold": math.nan}),
        ("below", {"threshold": 1.0, "clear_above": 0.5}),
        ("dead", {"at_least": 1.5}),
        ("depth_ratio", {"above": 1e3, "below": 1e-3}),
        ("drift", {"above": 1.0}),
        ("nonfinite", {"values": []}),
        ("above", {"threshold": 1.0, "of": "nrom"}),
        ("above_recent_max", {"above": 1.0}),
        ("above_recent_max", {"window": 0}),
        ("below_recent_min", {"above": 0.5}),
        ("above_usual", {"above": 1.0}),
        ("below_usual", {"half_life": 0}),
        ("below_recent_min", {"lag": -1}),
    ],
)
def test_wrong_hyper_parameters_are_refused(kind: str, given: dict[str, Any]) -> None:
    """Through pydantic, as the rule file does."""
    with pytest.raises(ValidationError):
        TypeAdapter(DETECTORS[kind]).validate_python(given)
