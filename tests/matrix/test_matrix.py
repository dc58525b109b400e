"""One test per row and number of the matrix, and the table in README.md that says so."""

from __future__ import annotations

import pytest

from tests.matrix.measure import NUMBERS, Row, measured
from tests.matrix.rows import ROWS
from tests.matrix.table import PATH, render

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about what the rows do on purpose


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_matrix(row: Row, number: str) -> None:
    """The number is right to 1e-5 of float64 at every step, or what the row says it is instead."""
    result = measured(row)
    assert result.said(number) == dict(row.special).get(number, "right"), result


def test_table_says_what_was_measured() -> None:
    """README.md is the table of these very results."""
    assert PATH.read_text() == render(ROWS, measured)
