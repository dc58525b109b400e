"""What the situations of a module came to, for the tests that ask for it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.launch import launch


@pytest.fixture(scope="module")
def homes(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """Every situation of the test module's JOB, from both ranks, out of one launch."""
    return launch(request.module.JOB)
