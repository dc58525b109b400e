"""The optimizer in whose steps faults are injected."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from gradwatch.launch.fault_injection.followed_optimizer import PATIENCE, FollowedOptimizer


def _optimizer() -> Optimizer:
    return SGD([nn.Parameter(torch.ones(1))], 0.1)


def _step(followed: FollowedOptimizer, optimizer: Optimizer, times: int = 1) -> bool:
    own = False
    for _ in range(times):
        own = followed.steps_of(optimizer)
        if own:
            followed.count()
    return own


def test_the_first_one_is_followed_among_others() -> None:
    """A critic may take many steps between two of its own; many optimizers may step one after another."""
    followed, first, *others = FollowedOptimizer(), *(_optimizer() for _ in range(50))
    assert _step(followed, first)
    for _ in range(3):
        assert not _step(followed, others[0], PATIENCE)
        assert not any(_step(followed, other) for other in others[1:])
        assert _step(followed, first)
    assert (followed.steps, followed.changes) == (4, 0)


def test_another_one_is_followed_where_the_first_has_stopped() -> None:
    """Its steps count from there on, and the most and total of both are kept."""
    followed, probe, main = FollowedOptimizer(), _optimizer(), _optimizer()
    _step(followed, probe, 7)
    assert not _step(followed, main, PATIENCE)
    assert _step(followed, main, 3)
    assert (followed.steps, followed.most, followed.total, followed.changes) == (3, 7, 10, 1)


def test_another_one_is_followed_at_once_where_the_first_is_gone() -> None:
    """No reference keeps it."""
    followed, first = FollowedOptimizer(), _optimizer()
    _step(followed, first)
    del first
    assert _step(followed, _optimizer())
    assert followed.changes == 1
