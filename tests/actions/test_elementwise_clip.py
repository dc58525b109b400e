"""Elementwise clip policies: the strictest candidate per element, whatever the order, and nothing spread."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwatch.actions.elementwise_clip import Elementwise, shaped
from gradwatch.errors import GradwatchError
from gradwatch.policies import AdaptiveGradientClip, Centralize, ClipByValue, ElementwisePolicy
from gradwatch.policies.agc import by_rows
from gradwatch.policies.centralize import centralized
from gradwatch.policies.gradient_rows import row_norms
from gradwatch.policies.value import clamped
from tests.support.examples import examples

POLICIES: tuple[ElementwisePolicy, ...] = (
    ClipByValue(0.3),
    ClipByValue(1e-4),
    AdaptiveGradientClip(),
    AdaptiveGradientClip(ratio=0.5),
    Centralize(),
)
SHAPES = ((5, 3), (7,), (4, 3, 2, 2), (), (1, 4))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[ElementwisePolicy], float]:
    """A gradient, its parameter, some policies in some order, a factor."""
    shape = draw(st.sampled_from(SHAPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    scale = 10.0 ** draw(st.integers(-6, 6))
    grad = torch.randn(shape, generator=generator) * scale
    param = torch.randn(shape, generator=generator)
    policies = draw(st.lists(st.sampled_from(POLICIES), min_size=1, max_size=4, unique=True))
    return grad, param, policies, draw(st.sampled_from([1.0, 0.5, 1e-3, 2.0]))


@given(cases())
@settings(max_examples=examples(50))
def test_each_element_takes_the_smallest_candidate(
    case: tuple[Tensor, Tensor, list[ElementwisePolicy], float],
) -> None:
    """Made of the centralized gradient where that is asked for, each candidate by itself, in whatever order."""
    grad, param, policies, factor = case
    base = centralized(grad) if Centralize() in policies else grad
    candidates = [base * factor]
    for policy in policies:
        if isinstance(policy, ClipByValue):
            candidates.append(base.clamp(-policy.clip_value, policy.clip_value))
        if isinstance(policy, AdaptiveGradientClip):
            candidates.append(by_rows(base, param, policy.ratio, policy.eps))
    least = torch.stack([candidate.abs() for candidate in candidates]).amin(0)
    found = shaped(grad, param, policies, factor)
    assert torch.equal(found.abs(), least)
    assert not ((found != 0) & (found.sign() != base.sign())).any()
    for order in itertools.permutations(policies):
        assert torch.equal(shaped(grad, param, order, factor), found)


@given(cases(), st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 1000))
@settings(max_examples=examples(50))
def test_what_is_not_finite_spreads_to_no_other_row(
    case: tuple[Tensor, Tensor, list[ElementwisePolicy], float], bad: float, where: int
) -> None:
    """The bad element passes as found, its row for those that look at rows; every other row as without it."""
    grad, param, policies, _ = case
    if not grad.dim():
        return
    hit = grad.clone()
    hit.view(-1)[where % grad.numel()] = bad
    element = torch.isfinite(hit)
    found, clean = shaped(hit, param, policies), shaped(grad, param, policies)
    assert torch.equal(found[~element].nan_to_num(7.0), hit[~element].nan_to_num(7.0))
    row = element.flatten(1).all(1) if grad.dim() > 1 else element.all()
    assert torch.equal(found[row], clean[row])
    assert torch.isfinite(found[element]).all()


@given(cases(), st.sampled_from([2.0**-8, 1024.0, 65536.0]))
@settings(max_examples=examples(50))
def test_a_loss_scale_changes_nothing_but_the_scale(
    case: tuple[Tensor, Tensor, list[ElementwisePolicy], float], scale: float
) -> None:
    """Gradients that still carry one are bounded as if they did not, and still carry it afterwards."""
    grad, param, policies, factor = case
    plain = shaped(grad, param, policies, factor)
    for given_as in (scale, torch.tensor(scale)):
        scaled = shaped(grad * scale, param, policies, factor, given_as)
        torch.testing.assert_close(scaled / scale, plain, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [*SHAPES, (3, 0), (0,)])
def test_bounds_hold_in_every_dtype_and_layout(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Rows within their bound, elements within theirs, to the rounding of the dtype; also channels_last and strided."""
    torch.manual_seed(1)
    grad, param = (torch.randn(shape).mul(3).to(dtype) for _ in range(2))
    layouts = [grad]
    if grad.dim() == 4:
        layouts.append(grad.contiguous(memory_format=torch.channels_last))
    if grad.dim() == 2:
        layouts.append(grad.repeat(1, 2)[:, ::2].contiguous().t().contiguous().t())
    for each in layouts:
        element = Elementwise([(policy, np.array([True])) for policy in POLICIES], ("weight",))
        made = element.shaped([each], [param], {})
        if not each.numel():
            assert made == {}
            continue
        each.copy_(made[0])
        assert each.abs().max() <= 1e-4 * (1 + 2e-2)
        alone = by_rows(grad * 100, param, 0.01, 1e-3).to(dtype)
        bound = row_norms(param).float().clamp(min=1e-3) * 0.01
        assert (row_norms(alone).float() <= bound * (1 + 2e-2)).all()


def test_rows_that_need_nothing_keep_every_bit() -> None:
    """A healthy gradient inside all bounds comes back as it was."""
    grad, param = torch.randn(6, 4) * 1e-6, torch.randn(6, 4)
    assert torch.equal(shaped(grad, param, [ClipByValue(1.0), AdaptiveGradientClip()]), grad)
    assert torch.equal(clamped(grad, 1.0), grad)


@given(
    st.sampled_from(POLICIES),
    st.floats(1e-7, 10.0),
    st.sampled_from([(1, 1), (1, 6), (6, 1), (3, 4)]),
    st.booleans(),
    st.integers(0, 1000),
)
@settings(max_examples=examples(100))
def test_a_gradient_is_passed_over_only_if_nothing_would_change(
    policy: ElementwisePolicy, norm: float, shape: tuple[int, int], lonely: bool, seed: int
) -> None:
    """`idle(norm)` is certain for any gradient of that norm, all of it in one element included; a NaN is never idle."""
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(shape, generator=generator)
    if lonely:
        grad = torch.zeros(shape)
        grad.view(-1)[seed % grad.numel()] = 1.0
    grad = grad / grad.norm() * norm
    param = torch.zeros(shape)  # bounded by eps alone
    element = Elementwise([(policy, np.array([True]))], ("weight",))
    made = element.shaped([grad], [param], {}, 1.0, [float(grad.double().norm())])
    assert torch.equal(made.get(0, grad), shaped(grad, param, [policy]))
    assert not policy.idle(math.nan)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    """The message says which parameter, and what to do."""
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    element = Elementwise([(ClipByValue(1.0), np.array([True]))], ("tokens.weight",))
    with pytest.raises(
        GradwatchError, match=r"'value' needs a dense gradient, and that of 'tokens.weight' is sparse"
    ):
        element.shaped([table.weight.grad], [table.weight], {})
