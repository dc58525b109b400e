"""Clip policies: bit-equal to torch where torch is right, harmless where it is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradwatch.errors import GradwatchError, RuleFileError
from gradwatch.policies import (
    POLICIES,
    AdaGC,
    AdaptiveGradientClip,
    AnyPolicy,
    AutoClip,
    Baseline,
    BlockRMS,
    Centralize,
    ClipByNorm,
    ClipByValue,
    ElementwisePolicy,
    Normalize,
    Policy,
    State,
    ZClip,
    clip_coefficient,
    find_policy,
    register_policy,
)
from gradwatch.policies import policy as registry
from gradwatch.policies.norm import clip_coefficients
from gradwatch.policies.policy import Coefficients, Floats
from gradwatch.records.snapshot import BoolArray
from gradwatch.rules.files import parse_rules
from gradwatch.rules.rule_set import ClipPolicy
from gradwatch.testing import ELEMENTWISE_LAWS, POLICY_LAWS, PolicyLaw, check_policy
from tests.support.examples import examples

torch = pytest.importorskip("torch")
Tensor = torch.Tensor

finite_norms = st.one_of(st.floats(0, 2.0**127, width=32), st.floats(0, 16, width=32))


def torch_coefficient(total_norm: float, max_norm: float) -> float:
    """The very expressions of `torch.nn.utils.clip_grads_with_norm_`."""
    clip_coef = max_norm / (torch.tensor(total_norm, dtype=torch.float32) + 1e-6)
    return float(torch.clamp(clip_coef, max=1.0))


@given(finite_norms, st.floats(1e-6, 1e6))
@example(0.0, 1.0)
@example(1.0, 1.0)
def test_the_coefficient_is_torchs_to_the_bit(total_norm: float, max_norm: float) -> None:
    """Given the same norm, for any norm float32 can hold."""
    found = clip_coefficient(total_norm, max_norm)
    assert found.dtype == np.float32
    assert float(found) == torch_coefficient(total_norm, max_norm)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 37.0, 1e6])
def test_gradients_are_clipped_as_clip_grad_norm_clips_them(scale: float) -> None:
    """End to end: multiplying by the coefficient of torch's own norm gives torch's own gradients."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(5, 3)), torch.nn.Parameter(torch.zeros(7))]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator) * scale
    ours = [param.grad.clone() for param in params]
    total = float(torch.nn.utils.clip_grad_norm_(params, 1.0))
    factor = torch.tensor(clip_coefficient(total, 1.0))
    assert all(torch.equal(grad * factor, param.grad) for grad, param in zip(ours, params, strict=True))


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_clips_nothing(norm: float) -> None:
    """torch would multiply every gradient by NaN or 0."""
    assert clip_coefficient(norm, 1.0) == np.float32(1)


@given(st.floats(0, 2.0**90, width=32), st.floats(1e-6, 1e6))
def test_clipping_never_enlarges_and_meets_its_bound(total_norm: float, max_norm: float) -> None:
    """0 <= coefficient <= 1, and the clipped norm exceeds max_norm by rounding at most."""
    factors = ClipByNorm(max_norm).coefficients((), np.array([total_norm]), np.ones(1, np.bool_))
    coefficient = float(factors[0])
    assert factors[0] == clip_coefficient(total_norm, max_norm)
    assert 0 <= coefficient <= 1
    assert total_norm * coefficient <= max_norm * (1 + 1e-5)


def test_methods_are_registered_once() -> None:
    """As detectors are."""
    assert POLICIES["norm"] is ClipByNorm
    assert find_policy("norm") is ClipByNorm
    assert find_policy("no-such-method") is None
    with pytest.raises(GradwatchError, match="'norm' is registered already"):
        register_policy(type("Other", (), {"method": "norm"}))
    with pytest.raises(GradwatchError, match="lacks the name"):
        register_policy(type("Nameless", (), {"method": 3}))


VARIANTS: tuple[Policy, ...] = (
    ClipByNorm(0.01),
    AutoClip(percentile=100.0),
    AutoClip(percentile=50.0, history=7),
    ZClip(warmup=1),
    ZClip(alpha=0.5, z=0.1, max_norm=1e9),
    AdaGC(warmup=0),
    AdaGC(warmup=3, ratio=0.5, max_norm=1e9),
    Baseline(above=1.0),
    Baseline(half_life=3, warmup=1),
    Normalize(low=0.5, high=2.0),
    Normalize(target=1e30, eps=1e-30),
    BlockRMS(1e-3),
)


def coefficient_policies() -> list[Policy]:
    """Every registered method that makes factors, with its defaults, and some others."""
    found: list[Policy] = [cls() for cls in POLICIES.values() if issubclass(cls, Policy)]
    assert {one.method for one in found} == {
        "norm", "autoclip", "zclip", "adagc", "baseline", "normalize", "block_rms",
    }  # fmt: skip
    return found + list(VARIANTS)


@pytest.mark.parametrize("law", POLICY_LAWS, ids=lambda law: law.__name__.removeprefix("law_policy_"))
@pytest.mark.parametrize("policy", coefficient_policies(), ids=repr)
def test_every_policy_keeps_every_law(policy: Policy, law: PolicyLaw) -> None:
    """Pure, float32 and finite, resumable through JSON, permutable; NaN gets 1, is never learned, never spreads."""
    for seed in range(examples(1)):
        law(policy, seed)


@pytest.mark.parametrize("law", ELEMENTWISE_LAWS, ids=lambda law: law.__name__.removeprefix("law_shape_"))
@pytest.mark.parametrize(
    "policy",
    [ClipByValue(1e-3), ClipByValue(2.0), AdaptiveGradientClip(), AdaptiveGradientClip(0.5), Centralize()],
    ids=repr,
)
def test_every_elementwise_policy_keeps_every_law(
    policy: ElementwisePolicy, law: Callable[[ElementwisePolicy, int], None]
) -> None:
    """Writes to no argument, keeps what is not finite, bounds unless it transforms, and knows the loss scale."""
    for seed in range(examples(1)):
        law(policy, seed)


class Broken(ElementwisePolicy):
    """Breaks one law on elements in each way that the laws are there to notice."""

    method = "broken"

    def __init__(self, how: str) -> None:
        self.how = how

    def shape(self, grad: Tensor, param: Tensor, scale: float | Tensor, finite: bool) -> Tensor:
        if self.how == "writes":
            return grad.mul_(0.5)
        if self.how == "flattens":
            return grad.view(-1)
        if self.how == "spreads":
            return grad / grad.norm().clamp(min=1.0)
        if self.how == "grows":
            return grad * 2
        return grad.clamp(-1.0, 1.0) if self.how == "scale" else grad * 0.5

    def idle(self, norm: float) -> bool:
        return self.how == "idle"

    def clamps_at(self) -> float | None:
        return 1.0 if self.how == "clamps" else None


@pytest.mark.parametrize("how", ["writes", "flattens", "spreads", "grows", "scale", "idle", "clamps"])
def test_a_policy_on_elements_that_breaks_a_law_is_found(how: str) -> None:
    """`check_policy` says which."""
    with pytest.raises(AssertionError, match=r"pure|nonfinite|bounds|scale"):
        check_policy(Broken(how))


class Forgetful(Policy):
    """Breaks one law in each way that the laws are there to notice."""

    method = "forgetful"

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Forgetful) and other.fault == self.fault

    __hash__ = None  # type: ignore[assignment]

    def init(self, count: int) -> tuple[np.ndarray, ...]:
        return ZClip().init(count)

    def coefficients(self, state: object, norms: np.ndarray, present: np.ndarray) -> np.ndarray:
        if self.fault == "spreads":
            return np.full(len(norms), 0.5 if np.isnan(norms).any() else 1.0, np.float32)
        if self.fault == "wide":
            return np.ones(len(norms))
        if self.fault == "touches":
            return np.where(np.isfinite(norms), 1, 0).astype(np.float32)
        return np.ones(len(norms), np.float32)

    def learn(
        self, state: tuple[np.ndarray, ...], norms: np.ndarray, present: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        if self.fault == "learns":
            return state._replace(mean=np.where(norms <= 1e9, norms, 7.0))  # type: ignore[attr-defined]
        if self.fault == "writes":
            state[1][:] += 1
        return state


@pytest.mark.parametrize("fault", ["spreads", "wide", "touches", "learns", "writes"])
def test_the_laws_notice_what_they_are_there_for(fault: str) -> None:
    """A policy that breaks one is refused; the same one without the fault is not."""
    check_policy(Forgetful(""))
    with pytest.raises((AssertionError, ValueError)):
        check_policy(Forgetful(fault))


def test_one_nan_does_not_blind_zclip() -> None:
    """Published, one NaN makes mean and variance NaN, and ZClip clips nothing for ever after."""
    policy = ZClip(max_norm=1e9)
    state = policy.init(1)
    here = np.ones(1, np.bool_)
    rng = np.random.default_rng(0)
    for step in range(100):
        norm = np.array([math.nan if step == 50 else np.exp(rng.normal(0, 0.1))])
        assert step != 50 or float(policy.coefficients(state, norm, here)[0]) == 1.0
        state = policy.learn(state, norm, here)
    assert float(policy.coefficients(state, np.array([1000.0]), here)[0]) < 0.01


def test_a_zero_norm_does_not_freeze_a_parameter_under_adagc() -> None:
    """γ is the least norm of the warm-up; a gradient of exactly 0 must not make it 0."""
    policy = AdaGC(warmup=5, max_norm=1e9)
    state = policy.init(1)
    here = np.ones(1, np.bool_)
    for norm in (1.0, 0.0, 1.0, 1.0, 1.0, 1.0):
        state = policy.learn(state, np.array([norm]), here)
    assert float(policy.coefficients(state, np.array([1.0]), here)[0]) == pytest.approx(1.0)


def test_autoclips_ring_forgets_the_oldest() -> None:
    """After `history` norms, the threshold is the percentile of exactly the latest ones, for each series."""
    policy = AutoClip(percentile=25.0, history=5)
    state = policy.init(2)
    told: list[list[float]] = [[], []]
    rng = np.random.default_rng(1)
    for _ in range(60):
        norms, present = rng.lognormal(size=2), rng.random(2) < 0.7
        state = policy.learn(state, norms, present)
        for series in np.flatnonzero(present):
            told[series].append(float(np.float32(norms[series])))
        expected = [np.percentile(each[-5:], 25.0) if each else math.inf for each in told]
        assert policy.threshold(state).tolist() == pytest.approx(expected, rel=1e-12)
        assert len(state.ring) <= 5


@given(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=5), st.floats(1e-6, 1e6))
def test_many_norms_are_clipped_as_each_alone(norms: list[float], max_norm: float) -> None:
    """The vector form is the scalar one, to the bit."""
    found = clip_coefficients(np.array(norms), max_norm, np.ones(len(norms), np.bool_))
    assert found.tolist() == [float(clip_coefficient(norm, max_norm)) for norm in norms]


def test_a_method_of_another_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """`clip:` may name what an installed package provides, and its keys are checked like any other's."""

    @dataclass(frozen=True, slots=True)
    class Halve(Policy):
        """Halves what exceeds `most`."""

        method: ClassVar[str] = "halve"
        most: registry.Positive = 1.0

        def coefficients(self, state: State, norms: Floats, present: BoolArray) -> Coefficients:
            return np.where(present & (norms > self.most), 0.5, 1.0).astype(np.float32)

    class Entry:
        def load(self) -> type[AnyPolicy]:
            return Halve

    def plugins(group: str, installed: object) -> dict[str, list[Entry]]:
        return {"halve": [Entry()]} if group == "gradwatch.policies" else {}

    monkeypatch.setattr("gradwatch.runtime.registry._plugins", plugins)
    try:
        rules = parse_rules("version: 1\nclip: {total: {method: halve, most: 2}}")
        assert rules.clip is not None
        assert rules.clip.total == ClipPolicy("halve", {"most": 2.0, "scope": "total"})
        with pytest.raises(RuleFileError, match="GW101 unknown key 'least'"):
            parse_rules("version: 1\nclip: {total: {method: halve, least: 2}}")
    finally:
        POLICIES.pop("halve", None)


def test_elementwise_methods_are_in_the_registry_too() -> None:
    """Ten methods in all, each of one of the two families."""
    others = {name for name, cls in POLICIES.items() if issubclass(cls, ElementwisePolicy)}
    assert others == {"value", "agc", "centralize"}
    assert len(POLICIES) == 10


def test_a_policy_that_would_change_no_gradient_is_refused() -> None:
    """It would be accepted in a rule file and do nothing; one derived from a known one is taken."""

    class Halve(ElementwisePolicy):
        method = "halve"

    class Idle(Policy):
        method = "halve"

    class Neither(AnyPolicy):
        method = "halve"

    class Tighter(ClipByValue):
        method = "tighter"

    for cls in (Halve, Idle, Neither):
        with pytest.raises(GradwatchError, match="would change no gradient: give it `coefficients`"):
            register_policy(cls)
    assert "halve" not in POLICIES
    assert register_policy(Tighter) is Tighter
    del POLICIES["tighter"]
