"""`python -m tests.matrix`: measure every row and write README.md."""

from __future__ import annotations

import warnings

from tests.matrix.measure import measured
from tests.matrix.rows import ROWS
from tests.matrix.table import PATH, render

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    PATH.write_text(render(ROWS, measured))
    print(f"wrote {PATH}")
