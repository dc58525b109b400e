"""What a replay reaches beyond one plain call of one model: criteria, children, chance, calls left out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.records.finding import Finding
from gradwatch.taps import module_calls
from tests.support.kept import Kept

GLOBAL_NUMPY = np.random.default_rng(1)
GLOBAL_TORCH = torch.Generator().manual_seed(1)
GLOBAL_PYTHON = random.Random(1)
GLOBAL_LEGACY = np.random.RandomState(1)


def watched(model: Any, train: Callable[[Any], None], optimizer: Any = None) -> list[Finding]:
    """Train under the default pack; what was found."""
    kept = Kept()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 1e-3)
    with gradwatch.watch(model, optimizer, rules="default", sinks=[kept], strict=True):
        train(optimizer)
    return [finding for record in kept.records for finding in record.findings]


class Chancy(nn.Module):
    """Multiplies by 1/0 where its own generator says so, which it does about once in six calls."""

    def __init__(self, draw: Callable[[Chancy], float]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.own_numpy = np.random.default_rng(2)
        self.own_torch = torch.Generator().manual_seed(2)
        self.draw = draw
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        number = self.draw(self)
        self.seen.append(number)
        return self.layer(x) / float(number > 0.15)  # fault


def _from_globals(kind: str) -> float:
    return {
        "numpy": lambda: float(np.random.rand()),
        "default_rng": lambda: float(GLOBAL_NUMPY.random()),
        "RandomState": lambda: float(GLOBAL_LEGACY.rand()),
        "Random": lambda: GLOBAL_PYTHON.random(),
        "Generator": lambda: float(torch.rand((), generator=GLOBAL_TORCH)),
    }[kind]()


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda model: _from_globals("numpy"), id="numpy"),
        pytest.param(lambda model: _from_globals("default_rng"), id="default_rng of the file"),
        pytest.param(lambda model: _from_globals("RandomState"), id="RandomState of the file"),
        pytest.param(lambda model: _from_globals("Random"), id="Random of the file"),
        pytest.param(lambda model: _from_globals("Generator"), id="Generator of the file"),
        pytest.param(lambda model: float(model.own_numpy.random()), id="default_rng of the module"),
        pytest.param(
            lambda model: float(torch.rand((), generator=model.own_torch)), id="Generator of the module"
        ),
    ],
)
def test_the_replay_draws_what_the_step_drew(draw: Callable[[Chancy], float]) -> None:
    """Whatever generator a forward draws from, the step run again draws the same, and the next one too."""
    np.random.seed(0)

    def train(watch: bool) -> tuple[list[float], list[Finding]]:
        for seeded in (GLOBAL_NUMPY, GLOBAL_LEGACY):
            fresh = type(seeded)(np.random.PCG64(1)) if isinstance(seeded, np.random.Generator) else None
            if fresh is not None:
                seeded.bit_generator.state = fresh.bit_generator.state
            else:
                seeded.seed(1)
        GLOBAL_TORCH.manual_seed(1)
        GLOBAL_PYTHON.seed(1)
        np.random.seed(0)
        torch.manual_seed(0)
        model = Chancy(draw)

        def loop(optimizer: Any) -> None:
            for _ in range(40):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                broken = not bool(torch.isfinite(model.layer.weight.grad).all())
                if watch or not broken:
                    optimizer.step()

        if not watch:
            loop(torch.optim.SGD(model.parameters(), 1e-3))
            return model.seen, []
        return model.seen, watched(model, loop)

    bare, _ = train(watch=False)
    seen, findings = train(watch=True)
    assert seen == bare
    assert any(number <= 0.15 for number in bare)
    assert {(one.phase, one.op) for one in findings} == {("forward", "div")}


class Root(nn.Module):
    """The loss is sqrt of a mean square: infinite slope at a perfect fit."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().mean().sqrt()  # fault


class Trainer:
    """Keeps model and criterion as trainers do."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.criterion = Root()

    def loss(self, x: Tensor, y: Tensor | None) -> Tensor:
        out = self.model(x)
        return self.criterion(out, out.detach() if y is None else y)

    def fit(self, optimizer: Any) -> None:
        for step in range(5):
            optimizer.zero_grad()
            self.loss(torch.randn(3, 4), None if step == 3 else torch.randn(3, 1)).backward()
            optimizer.step()


def test_a_criterion_kept_by_a_trainer() -> None:
    """A criterion that is a module is run again too: its operation and its line, not only "the loss side"."""
    trainer = Trainer()
    (finding,) = watched(trainer.model, trainer.fit)
    assert (finding.phase, finding.op, finding.module) == ("backward", "sqrt", "Root")
    assert finding.frame is not None
    assert finding.frame.source.endswith("# fault")
    assert not module_calls.noticed(trainer.criterion)


class Parts(nn.Module):
    """Never called itself, as a LightningModule: the loop calls its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Dropout(0.1))
        self.heads = nn.ModuleList([nn.Linear(4, 1), Lengths()])


class Lengths(nn.Module):
    """The length of each row."""

    def forward(self, h: Tensor) -> Tensor:
        return h.square().sum(-1, keepdim=True).sqrt()  # fault


@pytest.mark.parametrize("head", [0, 1])
def test_a_loop_that_calls_the_parts_of_a_model(head: int) -> None:
    """Where nobody calls the model itself its parts are held, and named by their place in it."""
    torch.manual_seed(0)
    model = Parts()

    def loop(optimizer: Any) -> None:
        for step in range(7):
            optimizer.zero_grad()
            x = torch.randn(3, 4)
            if step == 5:
                x[1] = 0
            h = model.encoder(x)
            (model.heads[1](h) + (model.heads[0](h) if head == 0 else 0.0)).sum().backward()
            optimizer.step()

    (finding,) = watched(model, loop)
    assert (finding.phase, finding.op, finding.module) == ("backward", "sqrt", "heads.1")
    assert not any(map(module_calls.noticed, model.modules()))


def test_a_call_whose_input_was_overwritten_is_left_out() -> None:
    """The other micro-batches of the step are run again, and the finding says that one was not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Lengths())

    def loop(optimizer: Any) -> None:
        for step in range(5):
            optimizer.zero_grad()
            first, second = torch.randn(3, 4), torch.randn(3, 4)
            if step == 3:
                second[0] = 0
            model(first).sum().backward()
            model(second).sum().backward()
            first.zero_()
            optimizer.step()

    (finding,) = watched(model, loop)
    assert (finding.op, finding.module, finding.call) == ("sqrt", "1", 1)
    assert "1 of 2 calls not run again: an input was written into" in finding.note


def test_a_saved_python_number_is_described() -> None:
    """Division by a number of Python's keeps a tensor that a dispatch mode would be handed as a float."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    kept = Kept()
    with gradwatch.watch(model, optimizer, rules="default", sinks=[kept], strict=True) as gw:
        for step in range(4):
            x, scale = torch.randn(3, 4), 0.0 if step == 2 else 2.0

            def closure(x: Tensor = x, scale: float = scale) -> Tensor:
                optimizer.zero_grad()
                loss = model(x).square().sum() / scale
                loss.backward()
                return loss

            gw.step(closure)
    (finding,) = (one for record in kept.records for one in record.findings)
    assert (finding.op, finding.by) == ("div", "closure")


def test_an_infinity_in_the_batch_is_the_batch() -> None:
    """An infinity that came in with the data is blamed where weights are multiplied with it; a mask of them is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def loop(optimizer: Any) -> None:
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(5, 4)
            if step == 2:
                x[1, 2] = float("inf")
            model(x).sum().backward()
            optimizer.step()

    (finding,) = watched(model, loop)
    assert (finding.phase, finding.op, finding.module) == ("input", "addmm", "0")


class Fails(nn.Module):
    """Goes wrong as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, how: str = "") -> Tensor:
        h = self.b(self.a(x))
        if how == "log":
            return (h - h).log()
        return (h - h).square().sum(-1).sqrt() if how == "sqrt" else h


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("at", [3, 30])
def test_gradients_thrown_away_are_of_no_step(to_none: bool, at: int) -> None:
    """A window that the loop discards (its own check for NaN, say) is not blamed for the step that follows."""
    torch.manual_seed(0)
    model = Fails()

    def loop(optimizer: Any) -> None:
        for step in range(at + 3):
            if step == at:
                model(torch.randn(3, 4), "log").sum().backward()
                optimizer.zero_grad(set_to_none=to_none)
            model(torch.randn(3, 4), "sqrt" if step == at else "").sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)

    (finding,) = watched(model, loop)
    assert (finding.phase, finding.op, finding.step) == ("backward", "sqrt", at)


def test_micro_batches_are_not_thrown_away() -> None:
    """Accumulation clears nothing: the first of three micro-batches is found."""
    torch.manual_seed(0)
    model = Fails()

    def loop(optimizer: Any) -> None:
        for step in range(6):
            for micro in range(3):
                model(torch.randn(3, 4), "sqrt" if (step, micro) == (4, 0) else "").sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    (finding,) = watched(model, loop)
    assert (finding.op, finding.call) == ("sqrt", 0)
