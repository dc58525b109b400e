"""Held-out trainings, watched with the default pack: module, operation and line of the fault, on one replayed step."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from tests.localise.heldout.case import STEPS, Case, T
from tests.localise.heldout.score import BEYOND, CASES, run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cause(case: Case) -> None:
    """The first cause told is the one the case was built with."""
    score = run(case)
    assert score.module, score.row()
    if case.name not in BEYOND:
        assert score.op in (True, None), score.row()
        assert score.line in (True, None), score.row()


def test_every_marked_line_is_there() -> None:
    """A case that asks for an operation asks for its line too, and that line is marked in a file that exists."""
    for case in CASES:
        assert bool(case.ops) == bool(case.places), case.name
        for file, line in case.places:
            assert "# FAULT" in Path(file).read_text(encoding="utf-8").splitlines()[line - 1]


def test_goes_wrong_at_one_step_and_not_before() -> None:
    """Without gradwatch, the plain cases have finite gradients up to step T, and not at T."""

    class Watch:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.broken: list[bool] = []
            optimizer.register_step_pre_hook(self.look)

        def look(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            grads = [
                p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
            ]
            self.broken.append(not all(bool(grad.isfinite().all()) for grad in grads))
            for group in optimizer.param_groups if self.broken[-1] else ():
                for param in group["params"]:
                    param.grad = None  # the step is left out

    for case in CASES:
        if case.train.__module__.rsplit(".")[-1] not in ("pointwise", "reductions"):
            continue
        watches: list[Watch] = []

        def watch(model: object, optimizer: torch.optim.Optimizer, into: list[Watch] = watches) -> None:
            into.append(Watch(optimizer))

        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about the faults themselves
            case.train(watch)
        assert watches[0].broken[: T + 1] == [False] * T + [True], case.name
        assert len(watches[0].broken) == STEPS
