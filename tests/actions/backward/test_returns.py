"""P3 where hooks act: what they return has the shape, dtype, device and layout of what they were given, or is None."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import gradwatch
from gradwatch.rules.files import parse_rules
from tests.promises.test_hook_returns import SLOW, Injected, Spec, gradient, specs
from tests.support.examples import examples
from tests.support.kept import Kept
from tests.support.on_device import gradients_on_device

RULES = """
version: 1
rules: {{}}
clip:
  total: {{method: {method}}}
  at: backward
"""
METHODS = [
    "norm, max_norm: 0.1, scope: param",
    "normalize, target: 3.0, scope: param",
    "block_rms, threshold: 0.01",
    "value, clip_value: 0.01",
    "agc, ratio: 0.01, last_layer: true",
    "centralize",
]


def kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def finite(tensor: Tensor) -> bool:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return bool(torch.isfinite(values).all())


def acted(made: list[Spec], method: str) -> tuple[int, int]:
    """One backward under a policy: (hooks that returned a gradient, faults of ours); every return is checked."""
    model = Injected(made)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    rules = parse_rules(RULES.format(method=method))
    returned = 0
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[Kept()]) as gw:
        hooks = [next(iter((param._backward_hooks or {}).values()), None) for param in model.parameters()]
        x = torch.ones((), requires_grad=True)
        model(x).backward()
        for param, spec, hook in zip(model.parameters(), made, hooks, strict=True):
            before = gradient(spec)
            assert hook is not None or not param.numel()
            if before is None:
                assert param.grad is None
                continue
            grad = param.grad
            assert grad is not None
            assert kind(grad) == kind(before)
            if finite(before):
                assert finite(grad)
            returned += not torch.equal(grad.to_dense(), before.to_dense())
        optimizer.step()
        return returned, gw.health.errors().get("action", 0)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=examples(5), suppress_health_check=SLOW)
@given(made=specs)
def test_a_gradient_stays_what_it_is(method: str, on_device: bool, made: list[Spec]) -> None:
    """A sample of dtypes, forms and contents, on the host and on the path of a device; no fault, no abort."""
    with pytest.MonkeyPatch.context() as patch:
        if on_device:
            gradients_on_device(patch)
        _, faults = acted(made, method)
        assert faults == 0


def test_they_do_act() -> None:
    """The property above is not met by doing nothing."""
    made: list[Spec] = [(torch.float32, "plain", (3, 4), "normal", seed) for seed in range(20)]
    assert acted(made, METHODS[0]) == (20, 0)


@pytest.mark.soak
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=500, suppress_health_check=SLOW)
@given(made=specs)
def test_ten_thousand_gradients_stay_what_they_are(method: str, made: list[Spec]) -> None:
    """P3 in full, for each policy: 500 backwards of 20 gradients."""
    assert acted(made, method)[1] == 0
