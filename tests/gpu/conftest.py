"""Every test of this folder needs a CUDA device, and finds torch as deterministic as it can be there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it is first used


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU every test here is skipped, for one reason."""
    if not torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Operations that have a deterministic form take it, so that two bare runs are alike."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def on_gpu() -> Iterator[None]:
    """What is made without a device lies on the GPU."""
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)
