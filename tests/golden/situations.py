"""What Records are taken of: every row of the matrix, every model of the zoo, every situation of two ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import gradwatch
from gradwatch.rules.files import parse_rules
from tests.golden.kept import FOLDER, kept, write
from tests.matrix.measure import Loop
from tests.matrix.rows import ROWS
from tests.odd_models import ODD
from tests.promises.test_zoo import STEPS, make
from tests.ranks.launch import launch
from tests.support.kept import Kept
from tests.support.zoo import EVERY_TAP, MODELS

OF_RANKS = (
    "situations",
    "actions",
    "skips",
    "policies",
    "closures",
    "by_hand",
    "causes",
    "faults",
    "parting",
    "uneven",
)
"""Modules of `tests.ranks`."""

Take = Callable[[Path], None]


def areas() -> Iterator[tuple[str, Take]]:
    """(name, how its Records are taken into a folder) of each area."""
    yield "matrix", matrix
    yield "zoo", zoo
    for name in OF_RANKS:
        yield f"ranks-{name}", ranks(name)


def matrix(folder: Path) -> None:
    """Every row, as the matrix runs it."""
    for row in ROWS:
        torch.manual_seed(1)
        torch._dynamo.reset()
        loop = Loop()
        with _situation(folder, row.name):
            try:
                row.run(loop)
            finally:
                if loop.gw is not None:
                    loop.gw.close()


def zoo(folder: Path) -> None:
    """Every model, under the default pack and with every tap."""
    for rules, name in ((rules, name) for name in (*MODELS, *ODD) for rules in ("default", "every tap")):
        torch._dynamo.reset()
        with _situation(folder, f"{name}, {rules}"):
            odd = make(name)
            loaded = parse_rules(EVERY_TAP) if rules == "every tap" else "default"
            with gradwatch.watch(odd.watched, rules=loaded, sinks=[Kept()]):
                for number in range(STEPS):
                    odd.step(number)


def ranks(name: str) -> Take:
    """Every situation of a module of `tests.ranks`; each rank writes its own."""

    def take(folder: Path) -> None:
        os.environ[FOLDER] = str(folder)
        try:
            launch(f"tests.ranks.{name}")
        finally:
            del os.environ[FOLDER]

    return take


@contextmanager
def _situation(folder: Path, name: str) -> Iterator[None]:
    with warnings.catch_warnings(), kept() as lines:
        warnings.simplefilter("ignore")
        try:
            yield
        except Exception as error:  # part of what happens there
            lines.append(f'{{"raised": "{type(error).__name__}"}}')
    write(folder, name, lines)
