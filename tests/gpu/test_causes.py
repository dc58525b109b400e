"""The held-out faults of `tests/localise`, trained on a GPU: module, operation and line are found there too."""

from __future__ import annotations

import pytest

from tests.localise import test_heldout
from tests.localise.heldout.case import CASES, Case

ON_THE_HOST = {"autocast_to_float16_overflows": "its autocast is that of the CPU"}

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about the faults themselves


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cause(case: Case) -> None:
    """The first cause told is the one the case was built with."""
    if case.name in ON_THE_HOST:
        pytest.skip(ON_THE_HOST[case.name])
    test_heldout.test_cause(case)
