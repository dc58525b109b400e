"""Weights that grow tenfold, and what the loss says of that: a little at every look, or between two of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.rules.files import parse_rules

RULES = "version: 1\nrules: {r: {detect: {kind: above, of: loss, threshold: 1e9}, severity: warning}}"
BLIND = "version: 1\nrules: {r: {detect: {kind: nonfinite}, severity: warning}}"
STEPS = 40


class Growing:
    """Two linear layers with an optimizer each; every step makes the first layer 1.1 times as large."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"first": nn.Linear(6, 6), "second": nn.Linear(6, 6)})
        self.optimizers = [torch.optim.SGD(layer.parameters(), 0.0) for layer in self.model.values()]

    def step(self, gw: gradwatch.Watch, losses: tuple[float, float], factor: float = 1.1) -> None:
        """One step of both optimizers, which have these losses; NaN = not told."""
        for layer, optimizer, loss in zip(self.model.values(), self.optimizers, losses, strict=True):
            optimizer.zero_grad()
            layer(torch.ones(2, 6)).mean().backward()
            if not math.isnan(loss):
                gw.observe(loss=loss)
            optimizer.step()
        with torch.no_grad():
            self.model["first"].weight.mul_(factor)

    def watched(self, rules: str = RULES) -> gradwatch.Watch:
        """Watched from here on."""
        return gradwatch.watch(self.model, self.optimizers, rules=parse_rules(rules), sinks=[])


def answers(losses: tuple[float, float], rules: str = RULES) -> Iterator[bool]:
    """Whether it is healthy after each step; `losses` from the second step on, 1 at the first."""
    training, told = Growing(), rules is RULES
    with training.watched(rules) as gw:
        for step in range(STEPS):
            training.step(gw, (1.0, 1.0) if step == 0 and told else losses)
            yield gw.healthy


def test_growth_for_no_lower_a_loss_is_not_healthy() -> None:
    """Healthy up to ten times the larger of its own and the model's, asked at every step."""
    torch.manual_seed(0)
    model = Growing().model
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    rows = math.sqrt(12 / 72) / 2  # of rows of norm 0.5
    level = max(float(weights.square().mean().sqrt()), rows)
    own = float(model["first"].weight.detach().square().mean().sqrt())
    bound = math.floor(math.log(10 * max(level, own) / own, 1.1))
    assert list(answers((1.0, 0.5))) == [True] * bound + [False] * (STEPS - bound)


@pytest.mark.parametrize(
    ("losses", "rules"), [((0.5, 0.5), RULES), ((0.5, 1.0), RULES), ((math.nan, math.nan), BLIND)]
)
def test_a_lower_loss_allows_it(losses: tuple[float, float], rules: str) -> None:
    """The loss of the optimizer whose weights grow, not of the other; where no rule reads one nothing is said."""
    assert all(answers(losses, rules))


def test_it_is_said_kept_and_taken_back() -> None:
    """The reason names the weight; a checkpoint keeps it; a loss that falls at last, or `rebaseline`, ends it."""
    training = Growing()
    with training.watched() as gw:
        for _ in range(STEPS):
            training.step(gw, (1.0, 0.5))
            healthy = gw.healthy
        assert not healthy
        (reason,) = gw.status()["unhealthy_because"]
        assert reason.startswith("first.weight is ")
        assert reason.endswith(" times as large as when watching began, and the loss is no lower than then")
        saved = json.loads(json.dumps(gw.state_dict(), allow_nan=False))
        for _ in range(60):
            training.step(gw, (0.5, 0.5), factor=1.0)
        assert gw.healthy
    with training.watched() as gw:
        gw.load_state_dict(saved)
        assert not gw.healthy
        training.step(gw, (1.0, 0.5), factor=1.0)
        assert not gw.healthy
        gw.rebaseline("a scale of another unit")
        assert gw.healthy
        for step in range(STEPS):  # no lower than at the first step after it
            training.step(gw, (0.5 if step else 0.3, 0.5))
            healthy = gw.healthy
        assert not healthy


@pytest.mark.parametrize(("loss", "learned"), [(0.5, True), (0.8, False), (2.0, False)])
def test_growth_between_two_looks_is_learning_where_the_loss_is_lower_for_it(
    loss: float, learned: bool
) -> None:
    """Weights 40 times as large as at the last healthy look, where the loss was 0.7: ruined, until a hundred losses are
    lower than it was then. What is healthy from then on is compared with that.
    """
    training = Growing()
    with training.watched() as gw:
        for step in range(60):
            training.step(gw, (0.7 if step else 1.0, 0.5), factor=1.0)
        assert gw.healthy
        training.step(gw, (loss, 0.5), factor=40.0)
        for step in range(130):
            assert gw.healthy is (learned and step >= 100), step
            training.step(gw, (loss, 0.5), factor=1.0)
        training.step(gw, (loss, 0.5), factor=5.0)
        assert gw.healthy is learned
        training.step(gw, (loss, 0.5), factor=20.0)
        assert not gw.healthy
