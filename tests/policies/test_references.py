"""Every clip policy against the implementation it is named after, on finite gradients, step by step.

References: torch itself, optax, pytorch_optimizer, zclip and autoclip as installed; the original autoclip script,
which differs from the package of that name, from its three lines.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradwatch.actions.elementwise_clip import shaped
from gradwatch.detectors import Sample, Spike
from gradwatch.policies import (
    AdaGC,
    AdaptiveGradientClip,
    AutoClip,
    Baseline,
    BlockRMS,
    Centralize,
    ClipByNorm,
    ClipByValue,
    Normalize,
    Policy,
    ZClip,
)
from gradwatch.policies.agc import by_rows
from gradwatch.policies.centralize import centralized
from gradwatch.policies.value import clamped

SHAPES = ((5, 3), (7,), (4, 3, 2, 2), (), (2, 6), (1, 1), (3, 4, 2, 2, 2))
HERE = np.ones(1, np.bool_)


def stream(seed: int, steps: int = 200) -> NDArray[np.float64]:
    """[T] norms: healthy log-normal ones, with spikes of × 3 to × 1000 now and then, and a slow drift."""
    rng = np.random.default_rng(seed)
    norms = np.exp(rng.normal(0.0, 0.3, steps) + np.linspace(0.0, 1.0, steps))
    return np.asarray(norms * np.where(rng.random(steps) < 0.05, 10 ** rng.uniform(0.5, 3, steps), 1.0))


def taken(policy: Policy, norms: NDArray[np.float64]) -> Iterator[tuple[float, float]]:
    """(norm, coefficient) of every step, learned as a loop learns them."""
    state = policy.init(1)
    for norm in norms:
        now = np.array([norm])
        yield norm, float(policy.coefficients(state, now, HERE)[0])
        state = policy.learn(state, now, HERE)


def gradients(seed: int, scale: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """(gradients, weights) of all shapes."""
    generator = torch.Generator().manual_seed(seed)
    return (
        [torch.randn(shape, generator=generator) * scale for shape in SHAPES],
        [torch.randn(shape, generator=generator) * 0.3 for shape in SHAPES],
    )


def params_with(grads: list[Tensor]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 37.0])
def test_norm_by_parameter_is_torchs_one_by_one(scale: float, dtype: torch.dtype) -> None:
    """Scope param: each parameter as if `clip_grad_norm_` were called for it alone, bit-equal given its norm."""
    grads = [grad.to(dtype) for grad in gradients(1, scale)[0]]
    params = params_with(grads)
    norms = np.array([float(nn.utils.clip_grad_norm_([param], 0.5)) for param in params])
    factors = ClipByNorm(0.5).coefficients((), norms, np.ones(len(norms), np.bool_))
    ours = [grad.clone() for grad in grads]
    torch._foreach_mul_(ours, factors.tolist())
    if dtype is not torch.float64:  # there torch makes its factor in float64, and ours is float32 everywhere
        assert all(torch.equal(a, b.grad) for a, b in zip(ours, params, strict=True))
    assert all(torch.allclose(a, b.grad, rtol=1e-6) for a, b in zip(ours, params, strict=True))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("percentile", [10.0, 50.0, 99.0])
def test_autoclip_is_the_original_script(seed: int, percentile: float) -> None:
    """autoclip.py: append the norm, take numpy's percentile of all of them, give it to `clip_grad_norm_`."""
    history: list[float] = []
    for norm, coefficient in taken(AutoClip(percentile), stream(seed)):
        history.append(norm)
        param = nn.Parameter(torch.zeros(1))
        param.grad = torch.tensor([norm], dtype=torch.float32)
        nn.utils.clip_grad_norm_([param], float(np.percentile(history, percentile)))
        assert norm * coefficient == pytest.approx(float(param.grad), rel=2e-6)


def test_autoclips_threshold_is_that_of_the_package() -> None:
    """The package `autoclip` clips to the quantile of the norms before this one: what we have learned by then."""
    from autoclip.torch import (
        QuantileClip,
    )  # references are imported where they are used: each takes a second

    param = nn.Parameter(torch.zeros(1))
    package = QuantileClip(iter([param]), quantile=0.3, history_length=50, global_threshold=True)
    policy = AutoClip(percentile=30.0, history=50)
    state = policy.init(1)
    for norm in stream(4):
        threshold = float(policy.threshold(state)[0])
        param.grad = torch.tensor([norm], dtype=torch.float32)
        package.step()
        assert float(param.grad) == pytest.approx(min(norm, threshold), rel=1e-5)
        state = policy.learn(state, np.array([norm]), HERE)


def zclip_by_formula(
    norms: NDArray[np.float64], alpha: float, limit: float, warmup: int, cap: float
) -> list[float]:
    """The norm that ZClip leaves of each (Kumar et al. 2025, section 3, and the repository's warm-up), in floats."""
    found, first, mean, variance = [], [], None, 0.0
    for norm in norms.tolist():
        if mean is None:
            first.append(norm)
            found.append(norm * min(1.0, cap / (norm + 1e-6)))
            if len(first) == warmup:
                mean = sum(first) / warmup
                variance = sum((each - mean) ** 2 for each in first) / warmup
            continue
        deviation = variance**0.5
        score = (norm - mean) / (deviation + 1e-6)
        adaptive = mean + limit * limit * deviation / score if score > limit else norm
        bound = min(adaptive, cap)
        found.append(norm * bound / (norm + 1e-6) if norm > bound else norm)
        mean = alpha * mean + (1 - alpha) * adaptive
        variance = alpha * variance + (1 - alpha) * (adaptive - mean) ** 2
    return found


@pytest.mark.parametrize("cap", [1.0, None])
@pytest.mark.parametrize("seed", range(4))
def test_zclip_is_its_formula(seed: int, cap: float | None) -> None:
    """Mean, variance, z and reciprocal scaling over 200 steps with spikes, with and without its `max_norm`."""
    norms = stream(seed)
    expected = zclip_by_formula(norms, 0.97, 2.5, 25, math.inf if cap is None else cap)
    found = [norm * coefficient for norm, coefficient in taken(ZClip(max_norm=cap), norms)]
    assert found == pytest.approx(expected, rel=1e-6)
    untouched = [norm == after for norm, after in zip(norms, expected, strict=True)]
    clipped = [coefficient < 1 for _, coefficient in taken(ZClip(max_norm=cap), norms)]
    assert clipped[25:] == [not one for one in untouched[25:]]


@pytest.mark.parametrize("cap", [1.0, None])
def test_zclip_is_the_package_of_that_name(cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`zclip.ZClip.step` on a parameter whose gradient has that norm."""
    monkeypatch.setitem(sys.modules, "lightning", None)  # it would import that, which takes seconds
    from zclip import ZClip as ReferenceZClip

    model = nn.Linear(1, 1, bias=False)
    reference = ReferenceZClip(max_grad_norm=cap)
    for norm, coefficient in taken(ZClip(max_norm=cap), stream(5)):
        model.weight.grad = torch.tensor([[norm]], dtype=torch.float32)
        reference.step(model)
        assert norm * coefficient == pytest.approx(float(model.weight.grad), rel=1e-6)


@pytest.mark.parametrize("warmup", [1, 5, 100])
@pytest.mark.parametrize("seed", range(2))
def test_adagc_is_the_optimizer_of_that_name(seed: int, warmup: int) -> None:
    """Its momentum with beta1 = 0 is the gradient it clipped: equal to ours, parameter by parameter, step by step."""
    from pytorch_optimizer import AdaGC as ReferenceAdaGC

    rng = np.random.default_rng(seed)
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((4, 3), (5,), (2, 2))]
    optimizer = ReferenceAdaGC(params, betas=(0.0, 0.999), weight_decay=0.0, warmup_steps=warmup)
    policy = AdaGC(warmup=warmup)
    state = policy.init(len(params))
    here = np.ones(len(params), np.bool_)
    for step in range(130):
        for param in params:
            size = 10 ** rng.uniform(-1, 1) * (100 if step % 37 == 36 else 1)
            param.grad = torch.from_numpy(rng.normal(0, size, param.shape)).float()
        grads = [param.grad.clone() for param in params]
        norms = np.array([float(grad.double().norm()) for grad in grads])
        factors = policy.coefficients(state, norms, here)
        state = policy.learn(state, norms, here)
        optimizer.step()
        for grad, param, factor in zip(grads, params, factors, strict=True):
            torch.testing.assert_close(
                grad * float(factor), optimizer.state[param]["exp_avg"], rtol=2e-5, atol=1e-9
            )


@pytest.mark.parametrize("seed", range(3))
def test_baseline_acts_where_spike_fires(seed: int) -> None:
    """Bound exp(m + 2σ̂) of the detector's own state, on the steps at which a `spike` rule of the same z would fire."""
    detector = Spike(above=6.0)
    seen: Any = detector.init(1)
    acted = 0
    for norm, coefficient in taken(Baseline(), stream(seed)):
        sample = Sample(np.array([norm]), HERE)
        fires = bool(detector.score(seen, sample)[0] > 6.0)
        bound = np.exp(float(seen.m[0]) + 2 * max(1.2533 * float(seen.s[0]), 0.10))
        assert coefficient == pytest.approx(min(1.0, bound / (norm + 1e-6)) if fires else 1.0, rel=1e-5)
        seen = detector.learn(seen, sample)
        acted += fires
    assert acted


def test_normalize_is_its_formula() -> None:
    """target / (norm + eps); with `low` and `high` only outside of them."""
    norms = np.array([0.0, 1e-3, 0.5, 1.0, 2.0, 1e5])
    here = np.ones(6, np.bool_)
    always = Normalize(target=2.0).coefficients((), norms, here)
    assert always.tolist() == pytest.approx([1.0, *(2.0 / (norms[1:] + 1e-6))])
    outside = Normalize(target=1.0, low=0.5, high=2.0).coefficients((), norms, here)
    assert outside.tolist() == pytest.approx([1.0, 1 / (1e-3 + 1e-6), 1.0, 1.0, 1.0, 1e-5])
    above = Normalize(high=2.0).coefficients((), norms, here)
    assert above.tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0, 1.0, 1e-5])


KEPT = Path(__file__).parent / "optax_reference.npz"


@pytest.fixture(scope="module")
def by_optax() -> tuple[list[Tensor], list[Tensor], Any]:
    """(gradients, weights, what optax made of them): kept, since importing JAX takes seconds.

    The gradients too: of one seed torch draws others where the processor has other instructions.
    """
    kept = np.load(KEPT)
    count = sum(name.startswith("g") for name in kept)
    of = {kind: [torch.from_numpy(kept[f"{kind}{k}"]) for k in range(count)] for kind in "gw"}
    return of["g"], of["w"], kept


@pytest.mark.soak
def test_what_is_kept_of_optax_is_what_it_makes(tmp_path: Path) -> None:
    """The optax that is installed makes of the gradients in the file what stands there beside them."""
    kept = np.load(KEPT)
    # No shape of three dimensions: optax takes those for attention heads.
    arrays = {name: kept[name] for name in kept if name[0] in "gw"}
    np.savez(tmp_path / "in.npz", ratio=0.02, eps=1e-3, threshold=0.7, **arrays)
    command = [
        sys.executable,
        "-m",
        "tests.policies.optax_reference",
        str(tmp_path / "in.npz"),
        str(tmp_path / "out.npz"),
    ]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=240)
    made = np.load(tmp_path / "out.npz")
    assert set(made) == set(kept) - set(arrays)
    for name in made:
        np.testing.assert_allclose(made[name], kept[name], rtol=1e-6)


def test_agc_is_optaxs(by_optax: tuple[list[Tensor], list[Tensor], Any]) -> None:
    """`optax.adaptive_grad_clip` on vectors, matrices and convolution kernels, its layout turned into torch's."""
    grads, weights, reference = by_optax
    changed = 0
    for k, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
        if grad.shape == (1, 1):
            continue  # optax squeezes it first, which makes no difference to a single element
        expected = torch.from_numpy(reference[f"agc{k}"])
        torch.testing.assert_close(by_rows(grad, weight, 0.02, 1e-3), expected, rtol=1e-5, atol=0)
        changed += not torch.equal(grad, expected)
    assert changed >= 5


def test_block_rms_is_optaxs(by_optax: tuple[list[Tensor], list[Tensor], Any]) -> None:
    """`optax.clip_by_block_rms`, given the root mean squares."""
    grads, _, reference = by_optax
    rms = np.array([float(grad.double().square().mean().sqrt()) for grad in grads])
    factors = BlockRMS(0.7).coefficients((), rms, np.ones(len(rms), np.bool_))
    for k, (grad, factor) in enumerate(zip(grads, factors, strict=True)):
        expected = torch.from_numpy(reference[f"rms{k}"]).reshape(grad.shape)
        torch.testing.assert_close(grad * float(factor), expected, rtol=1e-5, atol=0)
    assert (factors < 1).any()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_agc_is_that_of_pytorch_optimizer(scale: float) -> None:
    """`pytorch_optimizer.agc`, which is timm's, where both take the same for a row."""
    from pytorch_optimizer import agc as reference_agc

    for grad, weight in zip(*gradients(5, scale), strict=True):
        expected = reference_agc(weight.clone(), grad.clone())
        found = shaped(grad, weight, [AdaptiveGradientClip()])
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_centralize_is_that_of_pytorch_optimizer() -> None:
    """`centralize_gradient`: every shape."""
    from pytorch_optimizer import centralize_gradient

    for grad in gradients(6)[0]:
        expected = grad.clone()
        centralize_gradient(expected)
        torch.testing.assert_close(centralized(grad), expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(shaped(grad, grad, [Centralize()]), centralized(grad))


@pytest.mark.parametrize("clip_value", [1e-3, 0.5, 1e3])
def test_value_is_torchs(clip_value: float) -> None:
    """`clip_grad_value_`, to the bit."""
    grads, _ = gradients(7)
    params = params_with(grads)
    nn.utils.clip_grad_value_(params, clip_value)
    for grad, param in zip(grads, params, strict=True):
        assert torch.equal(clamped(grad, clip_value), param.grad)
        assert torch.equal(shaped(grad, grad, [ClipByValue(clip_value)]), param.grad)
