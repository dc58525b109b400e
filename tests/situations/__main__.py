"""`python -m tests.situations`: measure every row and write README.md."""

from __future__ import annotations

import warnings

from tests.situations.catalogue import SITUATIONS
from tests.situations.laws import found
from tests.situations.table import PATH, render

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    PATH.write_text(render({name: found(situation) for name, situation in SITUATIONS.items()}))
    print(f"wrote {PATH}")
