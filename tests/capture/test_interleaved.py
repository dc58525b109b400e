"""Backwards of several optimizers in turn, or at the same time: each has the norms and losses of its own."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import gradwatch
from tests.support.kept import Kept


def total(model: nn.Module) -> float:
    """The total norm of the gradients there are."""
    return float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


@pytest.mark.parametrize("announced", [True, False], ids=["clip_grad_norm_", "own code"])
def test_a_clip_between_two_backwards_is_no_part_of_the_norm(announced: bool) -> None:
    """The first model is clipped before the second has its backward: its norm is still that before the clip."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    kept, norms = Kept(), []
    with gradwatch.watch(models, optimizers, sinks=[kept], strict=True):
        for _ in range(10):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.randn(5, 3)).square().mean().backward()
                norms.append(total(model))
                if announced:
                    nn.utils.clip_grad_norm_(model.parameters(), norms[-1] / 2)
                else:
                    for param in model.parameters():
                        assert param.grad is not None
                        param.grad.mul_(0.5)
            for optimizer in optimizers:
                optimizer.step()
    found = [record.snapshot for record in kept.records]
    assert [one.total_norm for one in found] == pytest.approx(norms, rel=1e-5)
    assert [one.total_norm_applied for one in found] == pytest.approx([norm / 2 for norm in norms], rel=1e-4)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("seed", range(10))
def test_backwards_of_threads_at_the_same_time_are_told_apart(seed: int) -> None:
    """Four threads train models of their own under one watch, each clipping while backwards of others run."""
    torch.manual_seed(seed)
    models = [nn.Sequential(*[nn.Linear(16, 16) for _ in range(12)]) for _ in range(4)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.0) for model in models]
    batches, norms, losses = [torch.randn(8, 16) for _ in models], [], []
    for model, batch in zip(models, batches, strict=True):
        loss = model(batch).square().mean() * 1000
        loss.backward()
        norms.append(total(model))
        losses.append(loss.item())
        model.zero_grad()
    kept, together = Kept(), threading.Barrier(4, timeout=60)

    def train(k: int) -> None:
        for _ in range(3):
            optimizers[k].zero_grad()
            loss = models[k](batches[k]).square().mean() * 1000
            together.wait()
            loss.backward()
            nn.utils.clip_grad_norm_(models[k].parameters(), norms[k] / 2)
            optimizers[k].step()

    with gradwatch.watch(models, optimizers, sinks=[kept], strict=True):
        threads = [threading.Thread(target=train, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(kept.records) == 12
    for record in kept.records:
        of = record.snapshot.optimizer
        assert record.snapshot.total_norm == pytest.approx(norms[of], rel=1e-4)
        assert record.snapshot.scalars["loss"] == pytest.approx(losses[of], rel=1e-4)
        assert record.snapshot.micro == 1
