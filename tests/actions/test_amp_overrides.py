"""A clip on a fused optimizer: by `grad_scale`, without a pass over the gradients and without waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradwatch.records.decision import Decision
from tests.reading.test_foreach_norms import WAITING, Operations
from tests.support.recorder import Recorder

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(3))
MAKERS: list[Any] = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {}),
    (torch.optim.Adagrad, {}),
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("scaler", [False, True])
@pytest.mark.parametrize(("make", "options"), MAKERS)
def test_the_weights_of_torchs_own_clip(make: Any, options: Any, scaler: bool, on_device: bool) -> None:
    """Against `clip_grad_norm_`, with and without a GradScaler; afterwards nothing of ours is on the optimizer."""
    model, twin = net(), net()
    optimizer = make(model.parameters(), 0.05, fused=True, **options)
    reference = make(twin.parameters(), 0.05, fused=True, **options)
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaler) for _ in range(2)]
    with Recorder(model, on_device=on_device) as recorder:
        recorder.wait = not on_device
        recorder.clip = 0.5
        recorder.decide = lambda snapshot: Decision(max_norm=0.5)
        for step in range(6):
            factor = 100.0 if step % 2 else 1e-4
            for each, owner, grad_scaler in ((model, optimizer, scalers[0]), (twin, reference, scalers[1])):
                owner.zero_grad()
                loss = each(X).pow(2).sum() * factor
                grad_scaler.scale(loss).backward()
                if each is twin:
                    grad_scaler.unscale_(owner)
                    torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
                with Operations() as operations:
                    grad_scaler.step(owner)
                grad_scaler.update()
                if each is model and not scaler:
                    names = operations.names
                    assert not [name for name in names if name in ("_foreach_mul_", "mul_")]
                    assert not on_device or not [
                        name for name in names if name in WAITING and make is torch.optim.SGD
                    ]
            assert not hasattr(optimizer, "grad_scale")
            assert not hasattr(optimizer, "found_inf")
            for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            assert norm <= 0.5 * (1 + 1e-5)  # the kernel leaves what it used


def test_a_total_that_is_not_finite_divides_by_nothing() -> None:
    """One bad element is not spread by the divisor: the others move as without a clip."""
    model, twin = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, fused=True)
    reference = torch.optim.SGD(twin.parameters(), 0.05, fused=True)
    for on_device in (False, True):
        with Recorder(model, on_device=on_device) as recorder:
            recorder.wait = not on_device
            recorder.clip = 0.5
            recorder.decide = lambda snapshot: Decision(max_norm=0.5)
            for each, owner in ((model, optimizer), (twin, reference)):
                owner.zero_grad()
                (each(X).pow(2).sum() * 100).backward()
                grad = next(iter(each.parameters())).grad
                assert grad is not None
                grad[0, 0] = torch.inf
                owner.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
