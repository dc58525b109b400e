"""The table of README.md, made from what was found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.situations.catalogue import SITUATIONS
from tests.situations.laws import LAWS, TOLERANCE
from tests.situations.training import STEPS

PATH = Path(__file__).with_name("README.md")
HEAD = f"""# Which law holds where

Every row is a training loop of {STEPS} steps in one process, with 34 or more parameters where the situation allows
(so that the marks are thinned on the way). Its numbers are compared at every step with a float64 computation of their
own: *right* means within {TOLERANCE:g} relative at every step that is not provisional, for exactly the parameters
that got a gradient. *Provisional*: the number may be the one after clipping, and the Snapshot says so. Where clipping
is possible every loop clips, so `norm` and `norm_applied` differ. `given`: the norms after clipping are, as a set,
those of the gradients that the optimizer was given, as a step hook of its own finds them. `bits`: watched with every
tap, with nets of a few layers, weights, buffers, optimizer states and random generators end as without a watch.
`copies`: a deep copy or a saved file holds nothing of ours. In every run nothing of ours fails, every parameter is
covered, there is one Snapshot a step, and no step is skipped. An empty cell is not asked, and the last column says
why.

Written by `python -m tests.situations`; `pytest tests/situations` measures it again, one test a row.
"""


def render(found: Mapping[str, Mapping[str, str]]) -> str:
    """The whole file."""
    lines = [
        HEAD,
        f"| situation | {' | '.join(f'`{law}`' for law in LAWS)} | |",
        "|---" * (len(LAWS) + 2) + "|",
    ]
    for name, situation in SITUATIONS.items():
        cells = [found[name].get(law, "") for law in LAWS]
        why = "; ".join(dict.fromkeys(filter(None, (situation.note, *situation.without.values()))))
        lines.append(f"| {name} | {' | '.join(cells)} | {why} |")
    return "\n".join(lines) + "\n"
