"""P3: our hooks return nothing, whatever gradient comes, and what reaches `.grad` is what reaches it without us."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradwatch
from gradwatch.rules.files import parse_rules
from tests.support.examples import examples
from tests.support.kept import Kept

MANY = 20  # gradients a backward
RULES = """
version: 1
extends: [observe-only]
modules: {tap: output, names: ["*"]}
rules:
  local: {detect: {kind: above, of: norm_local, threshold: 1e9}}
  tap: {detect: {kind: above, of: grad_output_norm, threshold: 1e9}}
"""
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
FORMS = ["plain", "transposed", "strided", "expanded", "sparse", "none"]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 4), (0, 3), (2, 3, 4), (40, 60)]
FILLS = ["normal", "nan", "inf", "-inf", "mixed", "zero", "huge", "tiny"]
Spec = tuple[torch.dtype, str, tuple[int, ...], str, int]


def gradient(spec: Spec) -> Tensor | None:
    """A gradient of the given dtype, form, shape and content; made afresh from its seed."""
    dtype, form, shape, fill, seed = spec
    if form == "none":
        return None
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if fill in ("nan", "inf", "-inf", "zero"):
        values = torch.full(shape, 0.0 if fill == "zero" else float(fill), dtype=torch.float64)
    elif fill == "mixed" and values.numel():
        odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, 1.0], dtype=torch.float64)
        values = odd[torch.randint(0, 5, shape, generator=generator)]
    elif fill in ("huge", "tiny"):
        values = values * (1e30 if fill == "huge" else 1e-30)
    values = values.to(dtype)
    if form == "transposed":
        return values.mT.contiguous().mT if values.dim() >= 2 else values
    if form == "strided":
        return values.repeat_interleave(2, -1)[..., ::2] if values.dim() else values
    if form == "expanded":
        return values[:1].expand(shape) if values.dim() and values.shape[0] else values
    if form == "sparse" and values.dim() and dtype not in DTYPES[:2]:  # torch cannot add sparse halves
        return values.to_sparse()
    return values


class Inject(torch.autograd.Function):
    """A scalar whose gradient for its input is whatever the spec says."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, spec: Spec) -> Tensor:
        ctx.spec = spec
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return gradient(ctx.spec), None


class Injected(nn.Module):
    """MANY parameters, each with a gradient of its own kind."""

    def __init__(self, specs: list[Spec]) -> None:
        super().__init__()
        self.specs = specs
        self.params = nn.ParameterList(
            [nn.Parameter(torch.zeros(shape, dtype=dtype)) for dtype, _, shape, _, _ in specs]
        )

    def forward(self, x: Tensor) -> Tensor:
        return sum((Inject.apply(p, s) for p, s in zip(self.params, self.specs, strict=True)), x)


def bits(grad: Tensor | None) -> Any:
    """Layout, dtype, strides and every bit."""
    if grad is None:
        return None
    if grad.layout is torch.sparse_coo:
        grad = grad.coalesce()
        return "sparse", bits(grad.indices()), bits(grad.values())
    raw = grad.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    data = raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b""
    return grad.dtype, tuple(grad.shape), grad.stride(), data


def arrived(specs: list[Spec], watched: bool) -> list[Any]:
    """The bits of every `.grad` after two backwards, the second one accumulating."""
    model = Injected(specs)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = torch.ones((), requires_grad=True)
    found = []
    gw = None
    if watched:
        gw = gradwatch.watch(model, optimizer, rules=parse_rules(RULES), sinks=[Kept()], strict=True)
    for number in range(2):
        model(x).backward()
        found.append([bits(param.grad) for param in model.parameters()])
        if gw is not None and number == 0:
            for param in model.parameters():
                for hook in (param._backward_hooks or {}).values():
                    assert hook(param.grad) is None
                for hook in (param._post_accumulate_grad_hooks or {}).values():
                    assert hook(param) is None
    if gw is not None:
        assert gw.health.errors() == {}
        gw.close()
    return found


specs = st.lists(
    st.tuples(
        st.sampled_from(DTYPES), st.sampled_from(FORMS), st.sampled_from(SHAPES), st.sampled_from(FILLS),
        st.integers(0, 2**31),
    ),
    min_size=MANY,
    max_size=MANY,
)  # fmt: skip
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=examples(5), suppress_health_check=SLOW)
@given(specs)
def test_no_gradient_is_touched(specs: list[Spec]) -> None:
    """A sample of the kinds below: hooks return None, and every bit of every gradient is as without us."""
    assert arrived(specs, watched=True) == arrived(specs, watched=False)


@pytest.mark.soak
@settings(max_examples=500, suppress_health_check=SLOW)
@given(specs)
def test_ten_thousand_gradients_are_not_touched(specs: list[Spec]) -> None:
    """P3 in full: 500 backwards of 20 gradients."""
    assert arrived(specs, watched=True) == arrived(specs, watched=False)
