"""What Records are taken of: every situation of one process, every situation of two ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gradwatch
from gradwatch.rules.files import parse_rules
from tests.golden.kept import FOLDER, kept, write
from tests.ranks.launch import launch
from tests.situations.catalogue import SITUATIONS
from tests.situations.laws import LOCAL, seeded
from tests.situations.training import STEPS
from tests.support.kept import Kept
from tests.support.zoo import EVERY_TAP

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


RULES = {"default": "default", "every tap": parse_rules(EVERY_TAP), "local norms": parse_rules(LOCAL)}


def areas() -> Iterator[tuple[str, Take]]:
    """(name, how its Records are taken into a folder) of each area."""
    yield "situations", situations
    for name in OF_RANKS:
        yield f"ranks-{name}", ranks(name)


def situations(folder: Path) -> None:
    """Every situation of one process, under the default pack, with every tap, and with norms of each backward."""
    for name, situation in SITUATIONS.items():
        for said, rules in RULES.items():
            training = seeded(situation.make)
            with (
                _situation(folder, f"{name}, {said}"),
                gradwatch.watch(training.models, rules=rules, sinks=[Kept()]),
            ):
                for number in range(STEPS):
                    training.step(number)


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
