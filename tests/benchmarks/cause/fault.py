"""The faults: scripts as users write them, each with one NaN or Inf that happens once, and what the log has to say.

A file in `faults/` holds several scripts. Each begins with a line `# %% name | op: log mul | names: y`: the operations
of which one has to be named (`data` and `weight`: a tensor that was not finite before, `none`: no operation may be
named), and words of which one has to be among what is said. The lines that end in `# <-` are the right ones; any other
operation, tensor or line is a wrong claim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "faults"
BEFORE = """import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)

"""
STEP = 6  # at which every fault happens, counted from 0


@dataclass(frozen=True, slots=True)
class Fault:
    """One script; `lines` are the right ones."""

    name: str
    group: str
    source: str
    ops: frozenset[str]
    lines: frozenset[int]
    names: frozenset[str]


def faults(groups: Iterable[str] = ()) -> list[Fault]:
    """Those of the files of these names; of all files but the frozen ones for none."""
    wanted = list(groups) or [
        path.stem for path in FOLDER.glob("*.txt") if not path.stem.startswith("frozen")
    ]
    return [one for group in sorted(wanted) for one in _read(group)]


def _read(group: str) -> list[Fault]:
    cells = (FOLDER / f"{group}.txt").read_text(encoding="utf-8").split("# %% ")[1:]
    return [_fault(group, cell) for cell in cells]


def _fault(group: str, cell: str) -> Fault:
    head, _, body = cell.partition("\n")
    name, *said = (part.strip() for part in head.split("|"))
    told = dict(part.split(": ") for part in said)
    source = BEFORE + body.rstrip() + "\n"
    lines = frozenset(n for n, text in enumerate(source.splitlines(), 1) if text.endswith("# <-"))
    return Fault(
        name,
        group,
        source,
        frozenset(told["op"].split()),
        lines,
        frozenset(told.get("names", "").split()),
    )
