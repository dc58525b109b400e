"""What is done at the step boundary is exact: a skipped step never happened, a clip is torch's clip."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradwatch.errors import TrainingStopped
from gradwatch.policies.norm import clip_coefficient
from gradwatch.records.decision import Decision, Order
from gradwatch.records.snapshot import Snapshot
from tests.support.recorder import Recorder

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))


def equal(a: Any, b: Any) -> bool:
    """Deep equality of optimizer states, bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def test_skip_makes_no_scheduler_warn() -> None:
    """The LR scheduler sees a called step, so it neither warns nor loses count (warnings are errors here)."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    with Recorder(model) as recorder:
        recorder.decide = lambda snapshot: Decision(skip=True)
        for _ in range(3):
            model(X).sum().backward()
            optimizer.step()
            scheduler.step()
    assert scheduler.last_epoch == 3


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_skip_inside_a_closure(make: Callable[..., torch.optim.Optimizer]) -> None:
    """A step whose backward runs in a closure is skipped as exactly as any other."""
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(X).pow(2).sum()
        loss.backward()
        return loss.item()

    with Recorder(model) as recorder:
        optimizer.step(closure)
        recorder.decide = lambda snapshot: Decision(skip=True)
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step(closure)
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


class Naive(torch.optim.Optimizer):
    """An optimizer that does not check for None, as many people write it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * group["lr"])


def test_optimizer_that_does_not_check_for_none_is_skipped_too() -> None:
    """A naive optimizer finds empty parameter lists instead of None gradients, and has them back afterwards."""
    model = nn.Linear(3, 2)
    optimizer = Naive(model.parameters())
    with Recorder(model) as recorder:
        recorder.decide = lambda snapshot: Decision(skip=True)
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        for _ in range(2):
            optimizer.zero_grad()
            model(X).sum().backward()
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
        assert optimizer.param_groups[0]["params"] == list(model.parameters())
        recorder.decide = lambda snapshot: Decision()
        optimizer.zero_grad()
        model(X).sum().backward()
        optimizer.step()
        assert not any(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


@pytest.mark.parametrize("max_norm", [0.05, 1.0, 1e9])
def test_clip_is_bit_equal_to_torch(max_norm: float) -> None:
    """`clip: {total: {method: norm}}` gives the weights that clip_grad_norm_ gives, given the same norm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    reference = torch.optim.SGD(twin.parameters(), 0.1)
    with Recorder(model) as recorder:
        recorder.decide = lambda snapshot: Decision(max_norm=max_norm)
        for _ in range(5):
            for each, net in ((optimizer, model), (reference, twin)):
                each.zero_grad()
                net(X).pow(2).sum().backward()
            optimizer.step()
            # torch's own arithmetic, fed with the norm gradwatch read (its own norm differs in the last digits).
            norm = torch.tensor(recorder.snapshots[-1].total_norm)
            torch.nn.utils.clip_grads_with_norm_(twin.parameters(), max_norm, norm)
            reference.step()
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        end_to_end = float(torch.nn.utils.get_total_norm([p.grad for p in twin.parameters()]))
        assert end_to_end <= max_norm * (1 + 1e-5)


def test_stop_raises_out_of_the_users_step() -> None:
    """A rule that says stop raises TrainingStopped naming it; the weights have not moved."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(model) as recorder:
        model(X).sum().backward()
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        orders = frozenset({Order("loss-lost", "stop")})
        recorder.decide = lambda snapshot: Decision(stop=True, orders=orders)
        with pytest.raises(TrainingStopped, match="loss-lost"):
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_failing_judge_passes_the_gradient_unchanged() -> None:
    """A fault of ours is counted; the step happens exactly as without us."""
    model = nn.Linear(3, 2)
    twin = copy.deepcopy(model)
    optimizer, reference = (torch.optim.SGD(net.parameters(), 0.1) for net in (model, twin))
    recorder = Recorder(model)

    def broken(snapshot: Snapshot) -> Decision:
        raise ValueError("broken judge")

    recorder.decide = broken
    for _ in range(3):
        for each, net in ((optimizer, model), (reference, twin)):
            each.zero_grad()
            net(X).sum().backward()
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert [component for component, _ in recorder.errors] == ["boundary"] * 3
    recorder.errors.clear()
    recorder.close()


def test_coefficients_and_zeros_reach_the_optimizer_once() -> None:
    """Each gradient takes the smaller of its own factor and the clip's; a zeroed one that of what is left of all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    coef = np.array([0.5, 1.0, 1e-6, 0.25], np.float32)
    zero = np.array([False, False, False, True])
    with Recorder(model) as recorder:
        recorder.decide = lambda snapshot: Decision(max_norm=0.1, coef=coef, zero=zero)
        model(X).pow(2).sum().backward()
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        last = model[2].bias.grad
        assert last is not None
        last[0] = found[3][0] = torch.inf
        left = [torch.where(torch.isfinite(grad), grad, 0.0) for grad in found]
        total = torch.stack([grad.double().norm() for grad in left]).norm().item()
        assert total > 0.1
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step()
    uniform = float(clip_coefficient(total, 0.1))
    expected = [grad * min(factor, uniform) for grad, factor in zip(left, coef.tolist(), strict=True)]
    expected[3] = left[3] * uniform
    for start, grad, parameter in zip(before, expected, model.parameters(), strict=True):
        assert torch.equal(start - grad, parameter)
