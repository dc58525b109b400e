"""Every held-out case run as its user would run it, watched with the default pack; the answer beside the truth."""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradwatch
from gradwatch.records.finding import Finding
from gradwatch.rules.files import parse_rules
from gradwatch.session.watch import Watch
from tests.localise.heldout.case import CASES, DATA, LOSS, Case
from tests.support.kept import Kept

__all__ = ["BEYOND", "CASES", "Score", "run", "totals"]

FILES = ("pointwise", "reductions", "structures", "surroundings", "precision", "loops")
for _file in FILES:
    importlib.import_module(f"tests.localise.heldout.{_file}")

BEYOND = frozenset({"loss_over_no_valid_element"})
"""Cases at fault in plain lines of the loop that leave nothing behind: only "the loss side" is asked of them."""

ASKED = "default"
"""The rules of every case but of those that only grow or fade, whose cause the default pack does not ask for."""

ASKED_OF_FINITE = """
version: 1
extends: [default]
rules:
  norm-overflow: {do: [localise: {by: replay}]}
  total-norm-spike-severe: {do: [localise: {by: replay}]}
  vanishing-by-depth: {do: [localise: {by: replay}]}
  vanishing-by-share: {do: [localise: {by: replay}]}
"""


@dataclass(frozen=True)
class Score:
    """What was told first, beside what is so."""

    case: Case
    finding: Finding | None

    @property
    def module(self) -> bool:
        """One of the right modules; the batch, or the loss, where that is it."""
        found = self.finding
        if self.case.symptom == "healthy":
            return found is None
        if found is None:
            return False
        return any(_is(found, wanted) for wanted in self.case.modules)

    @property
    def op(self) -> bool | None:
        """One of the right operations; None where none is asked for."""
        if not self.case.ops:
            return None
        found = self.finding
        return found is not None and bool({found.op, found.function, found.node} & set(self.case.ops))

    @property
    def line(self) -> bool | None:
        """One of the right lines; None where none is asked for."""
        if not self.case.places:
            return None
        return self.finding is not None and self.finding.where in {
            f"{file}:{line}" for file, line in self.case.places
        }

    def row(self) -> str:
        """A row of the table."""
        marks = " | ".join(
            "–" if ok is None else "yes" if ok else "**no**" for ok in (self.module, self.op, self.line)
        )
        return f"| {self.case.name} | {marks} | {_told(self.finding)} |"


def run(case: Case) -> Score:
    """Train the case under a watch."""
    kept = Kept()
    watches: list[Watch] = []
    rules = _rules(case)

    def watch(models: Any, optimizers: Any) -> Watch:
        watches.append(gradwatch.watch(models, optimizers, rules=rules, sinks=[kept]))
        return watches[-1]

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about the faults themselves
        case.train(watch)
    for one in watches:
        one.close()
        assert not one.health.errors(), (case.name, one.health.errors())
    told = [finding for record in kept.records for finding in record.findings]
    return Score(case, told[0] if told else None)


def totals(scores: Iterable[Score]) -> dict[str, tuple[int, int]]:
    """(right, asked for) by module, operation and line."""
    scored = list(scores)
    found = {}
    for what in ("module", "op", "line"):
        answers = [answer for one in scored if (answer := getattr(one, what)) is not None]
        found[what] = (sum(answers), len(answers))
    return found


def _is(found: Finding, wanted: str) -> bool:
    if wanted == LOSS:
        return found.phase == "loss" or (
            found.module == "" and found.op != ""
        )  # "" = outside of every module
    if wanted == DATA:
        return found.phase == "input"
    if wanted == "":
        return found.module_type != "" and found.module == found.module_type
    return found.module == wanted or found.module.endswith(f".{wanted}")


def _rules(case: Case) -> Any:
    return parse_rules(ASKED_OF_FINITE) if case.finite else ASKED


def _told(found: Finding | None) -> str:
    if found is None:
        return "nothing"
    place = f"{Path(found.where).name} " if found.where else ""
    return f"{place}`{found.op}` in `{found.module}` ({found.phase}, {found.by}) {found.note[:100]}"
