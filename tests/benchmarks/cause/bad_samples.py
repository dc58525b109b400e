"""`python -m tests.benchmarks.cause samples`: bad samples planted in trainings, and which rows the log names.

A file in `samples/` holds several scripts, each after a line `# %% name | rows: 17 | at: 30017 | spike | ranks: 2`: the
rows of the batch that are bad and their positions in the dataset (none: it cannot be known which), whether the
gradients only spike, and the number of ranks. A row named that is not among them is a wrong claim.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.cause.score import fields_of
from tests.support import warm

FOLDER = Path(__file__).parent / "samples"
FILES = ("planted", "unknown", "later", "sharded")
SECONDS = 240
BEFORE = """import os
from contextlib import nullcontext

import gradwatch
import torch
import torch.nn.functional as F
from torch import nn

N, STEP, ROW = 32, 30, 17
rank = int(os.environ.get("RANK", 0))
torch.manual_seed(rank)
torch.set_num_threads(1)


def watch(net, opt):
    return gradwatch.watch(net, opt, rules="rules.yaml")


def ids(step, part=0, rank=0):
    return torch.arange(N) + 100_000 * rank + 1000 * step + 100 * part


"""
BEFORE_RANKS = """import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meeting"), rank=rank, world_size=2)

"""
AFTER = """
import hashlib
gw.close()
_state = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
for _one in net.parameters():
    _one = _one.detach()
    _state.update(getattr(_one, "_local_tensor", _one).numpy().tobytes())
print("digest", _state.hexdigest())
"""
RULES = """version: 1
extends: [default]
rules:
  non-finite: {do: [skip_step, LOCALISE]}
  total-norm-spike-severe: {do: [LOCALISE]}
sinks: [log: {}]
"""
_NAMED = re.compile(r"rows? (?P<rows>[\d, ]+) of the batch")
_POSITIONS = re.compile(r"positions (?P<positions>[\d, ]+) in the dataset")


@dataclass(frozen=True, slots=True)
class Planted:
    """One script, the rows that are bad in it, and their positions in the dataset; () where no row can be named."""

    name: str
    source: str
    rows: tuple[int, ...]
    at: tuple[int, ...]
    spike: bool
    ranks: int


@dataclass(frozen=True, slots=True)
class Named:
    """What the log said: of every cause the rows and their positions, () where none was named."""

    planted: Planted
    causes: tuple[str, ...]
    claims: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    digest: str

    @property
    def right(self) -> bool:
        """The rows, with their positions, in the first cause told; where they cannot be known, none."""
        if not self.causes or self.wrong:
            return False
        return self.claims[0] == (self.planted.rows, self.planted.at)

    @property
    def wrong(self) -> bool:
        """Some cause names another row, or another position."""
        return any(one not in ((), (self.planted.rows, self.planted.at), ((), ())) for one in self.claims)

    def row(self) -> str:
        """A row of the table."""
        marks = f"{'yes' if self.right else '**no**'} | {'**wrong**' if self.wrong else ''}"
        planted = ", ".join(map(str, self.planted.at)) or "not to be known"
        return f"| {self.planted.name} | {planted} | {marks} | {' // '.join(self.causes) or 'nothing'} |"


def planted(file: str) -> list[Planted]:
    """The scripts of one file."""
    cells = (FOLDER / f"{file}.txt").read_text(encoding="utf-8").split("# %% ")[1:]
    return [_planted(cell) for cell in cells]


def _planted(cell: str) -> Planted:
    head, _, body = cell.partition("\n")
    name, *said = (part.strip() for part in head.split("|"))
    told = dict(part.partition(": ")[::2] for part in said)
    ranks = int(told.get("ranks", 1))
    source = BEFORE + (BEFORE_RANKS if ranks > 1 else "") + body.rstrip() + "\n" + AFTER
    rows, at = (tuple(map(int, told.get(key, "").split())) for key in ("rows", "at"))
    return Planted(name, source, rows, at, "spike" in told, ranks)


def run(one: Planted, localise: bool = True) -> Named:
    """Train it on its ranks, and read the log of the first."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(one.source, encoding="utf-8")
        order = "localise: {by: replay}"
        rules = (
            RULES.replace("LOCALISE", order)
            if localise
            else RULES.replace(", LOCALISE", "").replace("[LOCALISE]", "[]")
        )
        Path(folder, "rules.yaml").write_text(rules, encoding="utf-8")
        started = [
            warm.Process([sys.executable, "train.py"], folder, _environment(rank, one.ranks))
            for rank in range(one.ranks)
        ]
        try:
            ended = [process.communicate(SECONDS) for process in started]
        finally:
            for process in started:
                process.kill()
    if any(code for code, _, _ in ended):
        raise RuntimeError(f"{one.name} failed:\n" + "\n".join(err for _, _, err in ended))
    said = [dict(fields_of(line)) for line in ended[0][2].splitlines() if "gradwatch cause" in line]
    digest = next(line for line in ended[0][1].splitlines() if line.startswith("digest"))
    return Named(
        one, tuple(map(_short, said)), tuple(_claim(cause.get("samples", "")) for cause in said), digest
    )


def _environment(rank: int, ranks: int) -> dict[str, str]:
    if ranks == 1:
        return dict(os.environ)
    return {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}


def _claim(samples: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rows, positions = _NAMED.search(samples), _POSITIONS.search(samples)
    return (
        _numbers(rows["rows"]) if rows else (),
        _numbers(positions["positions"]) if positions else (),
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _short(said: dict[str, str]) -> str:
    return f"{said['cause'][:60]}: {said.get('samples', '')} [{said.get('note', '')[-200:]}]"


def score(names: Sequence[str]) -> int:
    """Print the table and the totals; 1 where a claim is wrong."""
    print("| planted | position | right | wrong | said |\n|---|---|---|---|---|")
    wrong = 0
    for file in FILES:
        found = list(_scored(one for one in planted(file) if not names or one.name in names))
        wrong += sum(one.wrong for one in found)
        print(
            f"\n{file}: {sum(one.right for one in found)} of {len(found)}, wrong: {sum(one.wrong for one in found)}\n"
        )
    return int(wrong > 0)


def _scored(chosen: Iterable[Planted]) -> Iterator[Named]:
    for one in chosen:
        named = run(one)
        print(named.row(), flush=True)
        yield named


def compared(names: Sequence[str]) -> int:
    """Train each with and without `localise`; 1 where one ends otherwise."""
    chosen = [one for file in FILES for one in planted(file) if not names or one.name in names]
    other = [one.name for one in chosen if run(one).digest != run(one, localise=False).digest]
    print(f"equal with and without localise: {len(chosen) - len(other)} of {len(chosen)}", *other)
    return int(bool(other))
