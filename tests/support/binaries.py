"""Programs that some tests run for real: skipped where one is missing, except in CI, which installs them."""

from __future__ import annotations

import os
import shutil

import pytest


def require(program: str) -> str:
    """The path of `program`; skips the test where it is not installed, and fails it there if CI is set."""
    path = shutil.which(program)
    if path is not None:
        return path
    reason = f"{program} is not installed"
    # `.ci/run` names what it could not install, and says so.
    if os.environ.get("CI") and program != os.environ.get("GRADWATCH_CI_WITHOUT"):
        pytest.fail(f"{reason}, and CI must have it")
    pytest.skip(reason)
