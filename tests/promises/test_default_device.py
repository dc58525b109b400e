"""A job whose default device is not the host's: what gradwatch makes for itself stays where it belongs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwatch
from tests.support.kept import Kept


@pytest.fixture
def meta_by_default() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_a_model_on_the_meta_device_is_not_covered(meta_by_default: None, tmp_path: Path) -> None:
    """Its gradients have no values: nothing is judged of them, and that is what coverage says; no internal error."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gradwatch.watch(model, optimizer, sinks=[], run_dir=tmp_path, strict=True) as gw:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
        status = gw.status()
    assert status["coverage"] == 0.0
    assert status["internal_errors"] == {}


def test_a_materialised_model_is_watched_as_ever(meta_by_default: None, tmp_path: Path) -> None:
    """Made on meta, moved to the host, trained while meta is still the default: every norm is there."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kept = Kept()
    with gradwatch.watch(model, optimizer, sinks=[kept], run_dir=tmp_path, strict=True) as gw:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(8, 4, device="cpu")).pow(2).mean().backward()
            optimizer.step()
        assert gw.coverage == 1.0
    assert all(record.snapshot.total_norm > 0 for record in kept.records)


def test_rows_at_fault_are_found_as_ever(meta_by_default: None, tmp_path: Path) -> None:
    """A NaN in the batch of a model on the host: the replay makes nothing of its own where the default device is."""
    with torch.device("cpu"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        batch = torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kept = Kept()
    batch[5, 1] = float("nan")
    with gradwatch.watch(model, optimizer, sinks=[kept], run_dir=tmp_path) as gw:
        model(batch).pow(2).mean().backward()
        optimizer.step()
        assert gw.health.errors() == {}
    (finding,) = (finding for record in kept.records for finding in record.findings)
    assert finding.samples == (5,)
