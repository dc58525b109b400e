"""The laws every detector and every clip policy must pass, built in or third-party.

    from gradwatch.testing import check_detector, check_policy
    check_detector(MyDetector())
    check_policy(MyPolicy())

Each law raises `AssertionError` with its name and what it saw. Samples are drawn from a seeded generator, so
a failure repeats.

Axes: K series, T steps.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors import Detector, Sample, State, breaches
from gradwatch.policies import ElementwisePolicy, Policy
from gradwatch.policies.norm import clip_coefficients
from gradwatch.policies.norm_bound import at_site, factor_of
from gradwatch.records.snapshot import BoolArray, FloatArray

if TYPE_CHECKING:
    from torch import Tensor

SERIES = 7
STEPS = 60
TOLERANCE = 1e-3
"""Relative error of `score(limit(state))`: states may be float32, and x may be a logarithm."""

ROUNDING = 1e-6
"""Relative error allowed where only the order of a sum differs."""

Law = Callable[[Detector, int], None]
PolicyLaw = Callable[[Policy, int], None]
Step = tuple[NDArray[np.float64], BoolArray]


def check_detector(detector: Detector, seed: int = 0) -> None:
    """Run every law on one detector; the first that does not hold raises `AssertionError`."""
    for law in LAWS:
        law(detector, seed)


def draw_samples(detector: Detector, seed: int, steps: int = STEPS, series: int = SERIES) -> list[Sample]:
    """T healthy samples of K series: log-normal values, all present, in every column the detector reads."""
    rng = np.random.default_rng(seed)
    level = rng.normal(0.0, 1.0, series)

    def column() -> FloatArray:
        return np.exp(level + rng.normal(0.0, 0.1, series)).astype(np.float32)

    return [
        Sample(column(), np.ones(series, np.bool_), {name: column() for name in detector.columns[1:]})
        for _ in range(steps)
    ]


def run(detector: Detector, samples: Iterable[Sample], state: State) -> State:
    """The state after learning all samples."""
    for sample in samples:
        state = detector.learn(state, sample)
    return state


def law_pure(detector: Detector, seed: int) -> None:
    """No method writes to its arguments, and the same arguments give the same result."""
    state = _frozen(detector.init(SERIES))
    for sample in draw_samples(detector, seed):
        _frozen((sample.values, sample.present, *sample.aux.values()))
        score = detector.score(state, sample)
        assert _equal((score,), (detector.score(state, sample),)), "pure: two scores of one sample differ"
        after = detector.learn(state, sample)
        assert _equal(after, detector.learn(state, sample)), "pure: learning the same twice differs"
        detector.advance(state, sample)
        state = _frozen(after)


def law_shape(detector: Detector, seed: int) -> None:
    """A score is float64[K] (float64[1] for a kind that makes one series of all); states end in axis K."""
    state = detector.init(SERIES)
    apart = all(not np.shares_memory(a, b) for i, a in enumerate(state) for b in state[:i])
    assert apart, "shape: two arrays of a fresh state are one, so a restored state would be wrong"
    for sample in draw_samples(detector, seed):
        score = detector.score(state, sample)
        assert score.dtype == np.float64, f"shape: score is {score.dtype}"
        assert score.shape == ((1,) if detector.in_depth_order else (SERIES,)), f"shape: score {score.shape}"
        state = detector.learn(state, sample)
        assert all(array.shape[-1] == SERIES for array in state), "shape: a state array does not end in K"


def law_advance(detector: Detector, seed: int) -> None:
    """`advance` is `score` and `learn` in one; a score of None stands for scores that do not breach."""
    state = detector.init(SERIES)
    for sample in _with_faults(detector, seed):
        expected, after = detector.score(state, sample), detector.learn(state, sample)
        score, state = detector.advance(state, sample)
        assert _equal(state, after), "advance: its state is not what learn gives"
        if score is None:
            assert not breaches(detector, expected).any(), "advance: None, but a series breaches"
        else:
            assert _equal((score.astype(np.float64),), (expected,)), "advance: its score is not score's"


def law_pickle(detector: Detector, seed: int) -> None:
    """A detector and its state survive pickling."""
    state = run(detector, draw_samples(detector, seed), detector.init(SERIES))
    copy, copied = pickle.loads(pickle.dumps((detector, state)))
    assert copy == detector, "pickle: the detector came back different"
    assert _equal(copied, state), "pickle: the state came back different"


def law_resume(detector: Detector, seed: int) -> None:
    """A state that went through plain lists goes on as if nothing had happened."""
    samples = _with_faults(detector, seed)
    for cut in (0, 1, 19, 20, 21, 45):
        state = run(detector, samples[:cut], detector.init(SERIES))
        restored = type(state)(
            *(np.array(array.tolist(), array.dtype).reshape(array.shape) for array in state)
        )
        left, right = run(detector, samples[cut:], state), run(detector, samples[cut:], restored)
        assert _equal(left, right), f"resume: differs after a cut at sample {cut}"


def law_permutation(detector: Detector, seed: int) -> None:
    """Permuting the series permutes states and scores; a kind in depth order is exempt."""
    if detector.in_depth_order:
        return
    order = np.random.default_rng(seed).permutation(SERIES)
    state = moved = detector.init(SERIES)
    for sample in _with_faults(detector, seed):
        there = _permuted(sample, order)
        assert _equal((detector.score(state, sample)[order],), (detector.score(moved, there),)), "permutation"
        state, moved = detector.learn(state, sample), detector.learn(moved, there)
        assert _equal(tuple(array[..., order] for array in state), moved), "permutation: states differ"


def law_limit(detector: Detector, seed: int) -> None:
    """`score(limit(state)) == threshold` for an invertible kind, once it judges; no limit for the others."""
    samples = draw_samples(detector, seed, steps=STEPS + 200)
    state = run(detector, samples, detector.init(SERIES))
    limit = detector.limit(state)
    if not detector.invertible:
        assert limit is None, "limit: not invertible, but has a limit"
        return
    assert limit is not None, "limit: invertible, but has none"
    probe = samples[-1]._replace(values=np.broadcast_to(limit, (SERIES,)))
    score = detector.score(state, probe)
    error = np.abs(score - detector.fires_at) / abs(detector.fires_at)
    assert bool((error < TOLERANCE).all()), f"limit: its score is {score}, not {detector.fires_at}"


def law_missing(detector: Detector, seed: int) -> None:
    """A missing sample changes nothing, whatever its values, and is not judged."""
    samples = draw_samples(detector, seed)
    for cut in (0, 5, 20, 50):
        state = run(detector, samples[:cut], detector.init(SERIES))
        gone = samples[cut]._replace(present=np.zeros(SERIES, np.bool_))
        assert _equal(detector.learn(state, gone), state), f"missing: learned at sample {cut}"
        assert bool(np.isnan(detector.score(state, gone)).all()), f"missing: judged at sample {cut}"


def law_nonfinite(detector: Detector, seed: int) -> None:
    """NaN and Inf are never learned: the state of that series stays as it was, at any age."""
    samples = draw_samples(detector, seed)
    for cut in (0, 5, 19, 20, 50):
        state = run(detector, samples[:cut], detector.init(SERIES))
        for poison in (np.nan, np.inf, -np.inf):
            hit = _poisoned(samples[cut], 2, poison)
            after = detector.learn(state, hit)
            same = _equal(tuple(array[..., 2] for array in after), tuple(array[..., 2] for array in state))
            assert same, f"nonfinite: {poison} was learned at sample {cut}"


def law_not_poisoned(detector: Detector, seed: int) -> None:
    """Non-finite samples now and then leave a series exactly where it would be had they been missing."""
    rng = np.random.default_rng(seed + 1)
    state = expected = detector.init(SERIES)
    for sample in draw_samples(detector, seed, steps=3 * STEPS):
        hit = rng.random(SERIES) < 0.2
        values = np.where(hit, rng.choice([np.nan, np.inf, -np.inf], SERIES), sample.values).astype(
            np.float32
        )
        state = detector.learn(state, sample._replace(values=values))
        expected = detector.learn(expected, sample._replace(present=~hit))
    assert all(bool(np.isfinite(array).all()) for array in state), "not poisoned: the state is not finite"
    assert _equal(state, expected), "not poisoned: NaN is not the same as missing"


LAWS: tuple[Law, ...] = (
    law_pure,
    law_shape,
    law_advance,
    law_pickle,
    law_resume,
    law_permutation,
    law_limit,
    law_missing,
    law_nonfinite,
    law_not_poisoned,
)
"""What `check_detector` runs, in this order."""


def _with_faults(detector: Detector, seed: int) -> list[Sample]:
    """Samples with spikes, zeros, NaN, Inf and gaps strewn in."""
    rng = np.random.default_rng(seed + 2)
    out = []
    for sample in draw_samples(detector, seed):
        odd = rng.choice([np.nan, np.inf, 0.0, 1e6, 1e-6], SERIES)
        values = np.where(rng.random(SERIES) < 0.05, odd, sample.values).astype(np.float32)
        out.append(sample._replace(values=values, present=rng.random(SERIES) < 0.95))
    return out


def _poisoned(sample: Sample, series: int, value: float) -> Sample:
    values = sample.values.copy()
    values[series] = value
    return sample._replace(values=values)


def _permuted(sample: Sample, order: NDArray[np.intp]) -> Sample:
    aux = {name: values[order] for name, values in sample.aux.items()}
    return Sample(sample.values[order], sample.present[order], aux)


def _frozen(arrays: State) -> State:
    """The same arrays, which from now on refuse to be written."""
    for array in arrays:
        array.flags.writeable = False
    return arrays


def _equal(left: Iterable[FloatArray | BoolArray], right: Iterable[FloatArray | BoolArray]) -> bool:
    """True if all arrays are equal to the bit, NaN to NaN."""
    pairs = zip(left, right, strict=True)
    return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs)


def check_policy(policy: Policy | ElementwisePolicy, seed: int = 0) -> None:
    """Run every law on one clip policy; the first that does not hold raises `AssertionError`.

    Those of an elementwise policy need torch.
    """
    if isinstance(policy, ElementwisePolicy):
        for shape_law in ELEMENTWISE_LAWS:
            shape_law(policy, seed)
        return
    for law in POLICY_LAWS:
        law(policy, seed)


def draw_norms(seed: int, steps: int = 3 * STEPS, faults: bool = True) -> list[Step]:
    """T steps of `(norms[K], present[K])`: log-normal; with `faults` also spikes, zeros, NaN, Inf and gaps."""
    rng = np.random.default_rng(seed + 3)
    level = rng.normal(0.0, 1.0, SERIES)
    out = []
    for _ in range(steps):
        norms = np.exp(level + rng.normal(0.0, 0.1, SERIES))
        if faults:
            odd = rng.choice([np.nan, np.inf, 0.0, 1e39, 3e38, 1e6, 1e-6, 1e-45], SERIES)
            norms = np.where(rng.random(SERIES) < 0.1, odd, norms)
        out.append((norms, rng.random(SERIES) < 0.95 if faults else np.ones(SERIES, np.bool_)))
    return out


def taught(policy: Policy, steps: Iterable[Step]) -> State:
    """The state after learning all steps."""
    state = policy.init(SERIES)
    for norms, present in steps:
        state = policy.learn(state, norms, present)
    return state


def law_policy_pure(policy: Policy, seed: int) -> None:
    """No method writes to its arguments, and the same arguments give the same result."""
    state = _frozen(policy.init(SERIES))
    for norms, present in draw_norms(seed):
        _frozen((norms, present))
        factors = policy.coefficients(state, norms, present)
        assert _equal((factors,), (policy.coefficients(state, norms, present),)), "pure: two results differ"
        after = policy.learn(state, norms, present)
        assert _equal(after, policy.learn(state, norms, present)), "pure: learning the same twice differs"
        state = _frozen(after)


def law_policy_shape(policy: Policy, seed: int) -> None:
    """Factors are float32[K], finite, not negative, and at most 1 unless it `enlarges`; states end in axis K."""
    state = policy.init(SERIES)
    apart = all(not np.shares_memory(a, b) for i, a in enumerate(state) for b in state[:i])
    assert apart, "shape: two arrays of a fresh state are one, so a restored state would be wrong"
    for norms, present in draw_norms(seed):
        factors = policy.coefficients(state, norms, present)
        assert factors.dtype == np.float32, f"shape: factors are {factors.dtype}"
        assert factors.shape == (SERIES,), f"shape: factors {factors.shape}"
        assert bool((np.isfinite(factors) & (factors >= 0)).all()), f"shape: factors {factors}"
        assert policy.enlarges or bool((factors <= 1).all()), f"shape: {factors} exceed 1"
        state = policy.learn(state, norms, present)
        assert all(array.shape[-1] == SERIES for array in state), "shape: a state array does not end in K"
        finite = all(bool(np.isfinite(array).all()) for array in state)
        assert finite, "shape: the state is not finite"


def law_policy_pickle(policy: Policy, seed: int) -> None:
    """A policy and its state survive pickling."""
    state = taught(policy, draw_norms(seed))
    copy, copied = pickle.loads(pickle.dumps((policy, state)))
    assert copy == policy, "pickle: the policy came back different"
    assert _equal(copied, state), "pickle: the state came back different"


def law_policy_resume(policy: Policy, seed: int) -> None:
    """A state that went through JSON goes on as if nothing had happened."""
    steps = draw_norms(seed)
    states, wanted = [policy.init(SERIES)], []
    for norms, present in steps:
        wanted.append(policy.coefficients(states[-1], norms, present))
        states.append(policy.learn(states[-1], norms, present))
    for cut in (0, 1, 19, 24, 25, 99, 100, 120):
        state = states[cut]
        loaded = json.loads(json.dumps([array.tolist() for array in state], allow_nan=False))
        restored = [
            np.array(values, array.dtype).reshape(array.shape)
            for values, array in zip(loaded, state, strict=True)
        ]
        other = type(state)(*restored) if state else state
        for (norms, present), factors in zip(steps[cut:], wanted[cut:], strict=True):
            same = _equal((factors,), (policy.coefficients(other, norms, present),))
            assert same, f"resume: differs after a cut at step {cut}"
            other = policy.learn(other, norms, present)


def law_policy_permutation(policy: Policy, seed: int) -> None:
    """Permuting the series permutes factors and states, to rounding."""
    order = np.random.default_rng(seed).permutation(SERIES)
    state = moved = policy.init(SERIES)
    for norms, present in draw_norms(seed):
        factors = policy.coefficients(state, norms, present)[order]
        there = policy.coefficients(moved, norms[order], present[order])
        assert np.allclose(factors, there, rtol=ROUNDING, atol=0), "permutation: factors differ"
        state = policy.learn(state, norms, present)
        moved = policy.learn(moved, norms[order], present[order])
        pairs = zip(state, moved, strict=True)
        same = all(np.allclose(a[..., order], b, rtol=ROUNDING, atol=0) for a, b in pairs)
        assert same, "permutation: states differ"


def law_policy_untouched(policy: Policy, seed: int) -> None:
    """A series that is missing, or whose norm is NaN or infinite, gets the factor 1 at any age."""
    for cut in (0, 1, 30, 150):
        state = taught(policy, draw_norms(seed, cut))
        for norms, present in draw_norms(seed + 1):
            out = ~present | ~np.isfinite(norms)
            factors = policy.coefficients(state, norms, present)
            assert bool((factors[out] == 1).all()), f"untouched: {norms[out]} got {factors[out]}"


def law_policy_nonfinite(policy: Policy, seed: int) -> None:
    """NaN and Inf are to every series as if that one were missing: never learned, never spread, at any age."""
    rng = np.random.default_rng(seed + 1)
    state = expected = policy.init(SERIES)
    for norms, present in draw_norms(seed, faults=False):
        hit = rng.random(SERIES) < 0.2
        odd = np.where(hit, rng.choice([np.nan, np.inf, -np.inf], SERIES), norms)
        factors = policy.coefficients(state, odd, present)
        alone = policy.coefficients(expected, norms, present & ~hit)
        assert _equal((factors,), (alone,)), "nonfinite: other series were touched"
        state, expected = policy.learn(state, odd, present), policy.learn(expected, norms, present & ~hit)
        assert _equal(state, expected), "nonfinite: NaN is not the same as missing"


def law_policy_bound(policy: Policy, seed: int) -> None:
    """Inside the backward (`bound`) every norm gets the factor that it gets at the step (`coefficients`)."""
    if not policy.works_in_backward():
        return
    roots = np.sqrt(np.random.default_rng(seed).integers(1, 100, SERIES)).astype(np.float64)
    for cut in (0, 1, 30, 150):
        state = taught(policy, draw_norms(seed, cut))
        bound = policy.bound(state, roots)
        for norms, _ in draw_norms(seed + 1):
            quantity = norms / roots if policy.of == "rms" else norms
            at_step = policy.coefficients(state, quantity, np.ones(SERIES, np.bool_))
            inside = [factor_of(at_site((bound,), k), float(norm)) for k, norm in enumerate(norms)]
            assert np.allclose(inside, at_step, rtol=1e-5, atol=0), f"bound: {inside}, at the step {at_step}"


def law_policy_device(policy: Policy, seed: int) -> None:
    """Every norm gets the factor on a device (`constant_bound`) that it gets on the host."""
    if not policy.works_on_device():
        return
    for norms, present in draw_norms(seed):
        factors = policy.coefficients(policy.init(SERIES), norms, present)
        on_device = clip_coefficients(norms, policy.constant_bound(), present)
        assert np.allclose(on_device, factors, rtol=1e-5, atol=0), (
            f"device: {on_device}, on the host {factors}"
        )


def draw_gradients(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Gradients and their weights, float32, of no, one, two and four dimensions and of many sizes of norm."""
    import torch

    source = torch.Generator().manual_seed(seed)
    for shape in ((), (7,), (5, 3), (4, 3, 2, 2)):
        for size in (1e-12, 1e-4, 1.0, 1e3):
            grad = torch.randn(shape, generator=source, dtype=torch.float32) * size
            yield grad, torch.randn(shape, generator=source, dtype=torch.float32)


def law_shape_pure(policy: ElementwisePolicy, seed: int) -> None:
    """`shape` writes to neither argument, gives the same result twice, and keeps the shape and the device."""
    for grad, param in draw_gradients(seed):
        given = grad.clone(), param.clone()
        made = policy.shape(grad, param, 1.0, False).clone()
        assert made.shape == grad.shape, f"pure: {tuple(grad.shape)} became {tuple(made.shape)}"
        assert made.device == grad.device, f"pure: the result is on {made.device}"
        assert made.equal(policy.shape(grad, param, 1.0, True)), "pure: two results differ"
        assert grad.equal(given[0]), "pure: the gradient was written to"
        assert param.equal(given[1]), "pure: the weights were written to"


def law_shape_nonfinite(policy: ElementwisePolicy, seed: int) -> None:
    """NaN and Inf pass as found, and the other rows are as without them (a vector is one row)."""
    for odd in (math.nan, math.inf, -math.inf):
        for grad, param in draw_gradients(seed):
            poisoned = grad.clone()
            poisoned.view(-1)[0] = odd
            made = policy.shape(poisoned, param, 1.0, False)
            assert np.array_equal(made.view(-1)[0].item(), odd, equal_nan=True), (
                f"nonfinite: {odd} was changed"
            )
            if grad.dim() > 1:
                clean = policy.shape(grad, param, 1.0, False)
                assert made[1:].equal(clean[1:]), "nonfinite: other rows were touched"


def law_shape_bounds(policy: ElementwisePolicy, seed: int) -> None:
    """No element grows, unless it `transforms`; one that is `idle` changes nothing; a clamp clamps."""
    for grad, param in draw_gradients(seed):
        made = policy.shape(grad, param, 1.0, False)
        grown = bool((made.abs() > grad.abs() * (1 + 1e-6)).any())
        assert policy.transforms or not grown, "bounds: an element became larger"
        assert not policy.idle(float(grad.norm())) or made.equal(grad), "bounds: idle, and yet changed"
        most = policy.clamps_at()
        assert most is None or made.equal(grad.clamp(-most, most)), "bounds: more than a clamp"


def law_shape_scale(policy: ElementwisePolicy, seed: int) -> None:
    """A gradient that carries a loss scale becomes the same, times the scale; also as a 0-dim tensor."""
    import torch

    for grad, param in draw_gradients(seed):
        expected = policy.shape(grad, param, 1.0, False) * 1024.0
        for scale in (1024.0, torch.tensor(1024.0)):
            made = policy.shape(grad * 1024.0, param, scale, False)
            assert torch.allclose(made, expected, rtol=1e-4, atol=0), (
                "scale: the loss scale changes the result"
            )


ELEMENTWISE_LAWS: tuple[Callable[[ElementwisePolicy, int], None], ...] = (
    law_shape_pure,
    law_shape_nonfinite,
    law_shape_bounds,
    law_shape_scale,
)
"""What `check_policy` runs on a policy that treats elements or rows apart."""

POLICY_LAWS: tuple[PolicyLaw, ...] = (
    law_policy_pure,
    law_policy_shape,
    law_policy_pickle,
    law_policy_resume,
    law_policy_permutation,
    law_policy_untouched,
    law_policy_nonfinite,
    law_policy_bound,
    law_policy_device,
)
"""What `check_policy` runs, in this order."""
