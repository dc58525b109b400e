"""What torch itself can do on this host: asked of bare torch before a test blames gradwatch for it.

Kernels differ with the CPU: an LSTM in bfloat16, for one, cannot be run by the oneDNN of some AMD processors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")


def by_bare_torch(run: Callable[[], T]) -> T:
    """The result of a run without gradwatch; skips the test, with torch's reason, where torch cannot do it here."""
    try:
        return run()
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"bare torch cannot do this on this host: {error}")
