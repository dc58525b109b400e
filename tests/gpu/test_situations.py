"""The laws of every training loop in `tests/situations`, with models and data on a GPU."""

from __future__ import annotations

import pytest

from tests.situations.catalogue import SITUATIONS
from tests.situations.laws import found
from tests.situations.test_situations import expected

NOT_BARE = {
    "packed sequences": "bare torch makes the lengths of packed sequences on the default device, and refuses them"
}

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about what the situations do on purpose


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", SITUATIONS)
def test_every_law_holds(name: str) -> None:
    """Numbers, bits and copies are what they are on the host."""
    if name in NOT_BARE:
        pytest.skip(NOT_BARE[name])
    assert found(SITUATIONS[name]) == expected(name)
