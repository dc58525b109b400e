"""Surroundings of every test of localisation."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Recording is refused in a process that has compiled anything; a test before this one may have."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        yield
        return
    frames = dynamo.counters["frames"]
    before = dict(frames)
    frames.clear()
    yield
    frames.update(before)
