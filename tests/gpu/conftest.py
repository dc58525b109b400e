"""Every test of this folder needs a CUDA device, and finds torch as deterministic as it can be there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it is first used


OF_TORCH = (
    "Synchronization debug mode is a prototype",
    ".*defaults to a non-deterministic algorithm",
    ".*does not have a deterministic implementation",
    "The AccumulateGrad node's stream does not match",  # in CUDA graphs, bare too: `test_no_warning_is_ours`
)
"""Beginnings of warnings that torch gives there whoever calls it; every other one is an error, as in all tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests of this folder pass over what torch itself warns of."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            for text in OF_TORCH:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{text}:UserWarning"))


class WithoutGPU(pytest.Module):
    """A file whose tests are collected and not run."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        super().collect()
        pytest.skip("needs a GPU", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Without a GPU every file here is skipped, for one reason."""
    return (
        None if torch.cuda.is_available() else WithoutGPU.from_parent(parent, path=module_path)  # type: ignore[no-any-return]
    )


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
