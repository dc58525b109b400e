"""P5: any legal model works, and its numbers are right: one test a situation asserts every law of README.md."""

from __future__ import annotations

import pytest

from tests.situations.catalogue import SITUATIONS
from tests.situations.laws import LAWS, found
from tests.situations.table import PATH, render

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about what the situations do on purpose


def expected(name: str) -> dict[str, str]:
    """What the catalogue says of every law that it asks."""
    situation = SITUATIONS[name]
    return {law: situation.special.get(law, "right") for law in LAWS if law not in situation.without}


# By inductor the C++ compiler takes half a minute: `.ci/run` asks for it.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak) if "inductor" in name else name for name in SITUATIONS],
)
def test_every_law_holds(name: str) -> None:
    """Numbers, bits and copies are right, or what the catalogue says they are instead."""
    assert found(SITUATIONS[name]) == expected(name)


def test_the_table_says_what_is_tested() -> None:
    """README.md is the table of these very laws."""
    assert PATH.read_text(encoding="utf-8") == render({name: expected(name) for name in SITUATIONS})


def test_there_are_enough_situations() -> None:
    """P5 asks for thirty."""
    assert len(SITUATIONS) >= 85
