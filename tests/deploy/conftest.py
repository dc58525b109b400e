"""Fixtures of the tests of the monitoring stack."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture
def dead_pid() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    return gone.pid
