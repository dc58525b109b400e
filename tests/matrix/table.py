"""The table of README.md, made from results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.matrix.measure import NUMBERS, STEPS, TOLERANCE, Result, Row

PATH = Path(__file__).with_name("README.md")
HEAD = f"""# Which number is right where

Every row is a training loop of {STEPS} steps in one process, watched with 34 or more parameters where the
situation allows (so that the marks are thinned on the way), and compared at every step with a float64
computation of its own. *Right* means within {TOLERANCE:g} relative at every step that is not provisional, for
exactly the parameters that got a gradient. *Provisional*: the number may be the one after clipping, and the
Snapshot says so. Where clipping is possible every loop clips, so `norm` and `norm_applied` differ.

Written by `python -m tests.matrix`; `pytest tests/matrix` measures it again, one test per row and number.
"""


def render(rows: tuple[Row, ...], result: Callable[[Row], Result]) -> str:
    """The whole file."""
    lines = [HEAD, f"| situation | {' | '.join(f'`{number}`' for number in NUMBERS)} | |"]
    lines.append("|---" * (len(NUMBERS) + 2) + "|")
    for row in rows:
        found = result(row)
        cells = [found.said(number) for number in NUMBERS]
        lines.append(f"| {row.name} | {' | '.join(cells)} | {row.note} |")
    return "\n".join(lines) + "\n"
