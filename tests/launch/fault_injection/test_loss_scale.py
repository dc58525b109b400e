"""The loss scale is put back after a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gradwatch.launch.fault_injection.loss_scale import LossScale
from gradwatch.taps import grad_scaler, step_hooks


@pytest.fixture
def _unlistened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scaler classes as before: in a selftest's process they are listened to until its end."""
    removes = [step_hooks.listen(before=lambda *call: None)]  # a step that is called is none that is rejected

    def kept(listen: Callable[[Any], Callable[[], None]]) -> Callable[[Any], None]:
        return lambda listener: removes.append(listen(listener))

    monkeypatch.setattr(grad_scaler, "listen", kept(grad_scaler.listen))
    monkeypatch.setattr(grad_scaler, "listen_scale", kept(grad_scaler.listen_scale))
    yield
    for remove in reversed(removes):
        remove()


@pytest.mark.usefixtures("_unlistened")
def test_the_scale_is_put_back_after_rejected_steps() -> None:
    """Not before the update that lowers it, and while no gradient is scaled by it."""
    param, rejected = nn.Parameter(torch.ones(1)), list[object]()
    optimizer, scaler = torch.optim.SGD([param], 0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def told(optimizer: object) -> None:
        if not rejected:
            loss_scale.put_back()
        rejected.append(optimizer)

    loss_scale = LossScale(told)

    def step(factor: float) -> float:
        optimizer.zero_grad()
        scaler.scale(param.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    assert step(1.0) == 1024.0
    loss_scale.keep()
    assert step(float("nan")) == 512.0
    assert rejected == [optimizer]
    assert step(1.0) == 1024.0
    assert step(float("nan")) == 512.0  # it is put back once
    assert step(1.0) == 512.0
