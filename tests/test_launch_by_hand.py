"""A script that trains without an optimizer, unmodified, under `gradwatch run`."""

from __future__ import annotations

from pathlib import Path

from tests.launch_cases import bare_and_watched

SCRIPT = """
import torch
torch.manual_seed(0)
m = torch.nn.Linear(4, 1)
for t in range(10):
    x = torch.randn(8, 4)
    loss = (m(x) ** 2).mean() if t < 7 else m(x).mean() * float("nan")
    m.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(m.parameters(), 0.25)
    for p in m.parameters():
        p.data.add_(p.grad, alpha=-0.1)
print("weights", m.weight.data.tolist())
"""


def test_sgd_written_by_hand_is_observed_step_by_step(tmp_path: Path) -> None:
    """Ten steps are ten windows, the NaN is told at its own, backwards are counted once, stdout is the bare one's."""
    _, watched = bare_and_watched(SCRIPT, tmp_path)
    assert "0 of 0 steps watched, 10 windows without an optimizer" in watched.stderr
    assert "10 backwards and no step of a torch optimizer seen" in watched.stderr
    assert "observed only" in watched.stderr
    assert "rule=non-finite severity=critical step=7" in watched.stderr
