"""A backward that multiplies the gradient is told apart from a loss that is too large, and named where it is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.incidents.explanation import sentence
from gradwatch.incidents.suggestions import suggestion_for
from gradwatch.localise.diagnosis.multiplying_operation import only_multiplier
from gradwatch.localise.diagnosis.node_gain import Passage, passage
from gradwatch.localise.replay.first_nonfinite_in_backward import Culprit, Multiplier
from gradwatch.records.finding import Finding, Frame
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept

RULES = """
version: 1
extends: [default]
rules: {total-norm-spike-severe: {do: [localise]}}
"""
BAD = 60


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0] * ctx.by, None


class Net(nn.Module):
    """Three layers, and gradients that are multiplied behind one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mid, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.after, self.by = "", 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        if self.after == "enter":
            x = Scaled.apply(x, self.by)  # enter
        out = self.head(torch.tanh(self.mid(x)))
        return Scaled.apply(out, self.by) if self.after == "head" else out  # head


def squared(net: nn.Module, x: Tensor, y: Tensor, by: float) -> Tensor:
    """A plain loss."""
    return (net(x) - y).square().mean()


def custom(net: nn.Module, x: Tensor, y: Tensor, by: float) -> Tensor:
    """A custom Function in the loss code."""
    return (Scaled.apply(net(x), by) - y).square().mean()  # custom


def cosines(net: nn.Module, x: Tensor, y: Tensor, by: float) -> Tensor:
    """An angle near 0 in one row: a gain of some hundred, which a layer may have on any day."""
    cosine = torch.tanh(net(x)[:, 0]) * 0.9
    if by > 1:
        cosine = torch.where(torch.arange(len(x)) == 3, cosine - cosine.detach() + 1 - 1e-7, cosine)
    return torch.acos(cosine.clamp(-1 + 6e-8, 1 - 6e-8)).mean()  # cosines


def weighted(net: nn.Module, x: Tensor, y: Tensor, by: float) -> Tensor:
    """A loss that is multiplied by a number."""
    return (net(x) - y).square().mean() * by


def labelled(net: nn.Module, x: Tensor, y: Tensor, by: float) -> Tensor:
    """One label in other units."""
    factors = torch.ones(len(y), 1)
    factors[3] = by
    return (net(x) - y * factors).square().mean()


def penalised(net: nn.Module, x: Tensor, y: Tensor, by: float) -> Tensor:
    """A gradient penalty whose own backward is wrong."""
    x = x.requires_grad_()
    out = net(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    slope = Scaled.apply(slope, by)  # penalised
    return (out - y).square().mean() + 0.1 * (slope.norm(dim=1) - 1).square().mean()


def weighted_penalty(net: nn.Module, x: Tensor, y: Tensor, by: float) -> Tensor:
    """A gradient penalty with a weight that is too large."""
    x = x.requires_grad_()
    out = net(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (out - y).square().mean() + by * 0.1 * (slope.norm(dim=1) - 1).square().mean()


class Fault(NamedTuple):
    """A training, and what is to be said of it: the mark of the line, "" = no operation, and the loss side or not."""

    loss: Callable[..., Tensor]
    after: str = ""
    mark: str = ""
    at_outputs: bool = False
    says: str = ""
    op: str = "Scaled"


FAULTS = {
    "in-the-model": Fault(squared, after="enter", mark="enter"),
    "at-its-end": Fault(squared, after="head", mark="head"),
    "in-the-loss": Fault(custom, mark="custom"),
    "in-one-row": Fault(cosines, mark="cosines", op="acos"),
    "in-a-double-backward": Fault(penalised, mark="penalised"),
    "weight-of-the-loss": Fault(weighted, at_outputs=True, says="the loss is at ×"),
    "label": Fault(labelled, at_outputs=True, says="the loss is at ×"),
    "weight-of-a-penalty": Fault(weighted_penalty),
}


def causes(fault: Fault, directory: Path, localise: bool = True) -> tuple[list[Finding], list[Tensor]]:
    """The causes told of the bad step of a training, and its weights at the end."""
    torch.manual_seed(0)
    net, kept = Net(), Kept()
    optimizer, teacher = torch.optim.SGD(net.parameters(), 1e-3), torch.randn(8, 4)
    rules = parse_rules(RULES if localise else RULES.replace("localise", ""))
    with gradwatch.watch(net, optimizer, rules=rules, sinks=[kept], run_dir=directory, strict=True):
        for step in range(BAD + 3):
            net.by = 1e5 if step == BAD else 1.0
            net.after = fault.after if step == BAD else ""
            x = torch.randn(32, 8)
            loss = fault.loss(net, x, x @ teacher, net.by)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = [finding for record in kept.records for finding in record.findings if finding.step == BAD]
    return found, [param.detach().clone() for param in net.parameters()]


@pytest.mark.parametrize("name", FAULTS)
def test_where_it_began(name: str, tmp_path: Path) -> None:
    """The operation and its line by replay; by norms alone nothing that is not so; the weights end the same."""
    fault = FAULTS[name]
    found, weights = causes(fault, tmp_path / "with")
    replayed = next(one for one in found if one.by == "replay")
    assert (replayed.frame.source.rpartition("# ")[2] if replayed.frame else "") == fault.mark, replayed
    assert (replayed.op != "", replayed.at_outputs) == (fault.mark != "", fault.at_outputs), replayed
    assert fault.says in sentence(replayed)
    if fault.mark:
        assert f"gradients that explode in the backward of {fault.op}" in sentence(replayed)
        suggestion = suggestion_for(replayed)
        assert suggestion is not None
        assert suggestion.id == "multiplying-operation"
    for one in found:
        assert one.phase != "activations", one
        if one.by == "norms":
            assert (
                not one.at_outputs
                or "or of what follows" in sentence(one)
                or "or what follows" in sentence(one)
            )
    _, without = causes(fault, tmp_path / "without", localise=False)
    assert all(map(torch.equal, weights, without))


def test_a_double_backward_has_no_place_by_norms(tmp_path: Path) -> None:
    """Its gradients come to layers by two ways: the weights of the head are off, and its bias is not."""
    found, _ = causes(FAULTS["weight-of-a-penalty"], tmp_path, localise=False)
    assert found
    for one in found:
        assert (one.module, one.begins, one.at_outputs) == ("", "", False), one
        assert "create_graph" in one.note


def node(gain: float, line: int = 1, made: float = 1.0) -> Multiplier:
    """An operation that multiplies."""
    culprit = Culprit("log", "LogBackward0", ("", ""), (Frame("train.py", line),), (), None, False)
    return Multiplier(culprit, Passage(1.0, made, gain))


@pytest.mark.parametrize(
    ("nodes", "named"),
    [
        ([node(1e5)], True),
        ([node(1e5), node(2e5)], True),  # the same line twice
        ([node(1e5), node(1e5, line=2)], False),  # either may be
        ([node(1e7)], False),  # far more than the gradients are off: it does so at every step
        ([node(1e3)], False),  # far less
        ([node(1e5, made=1e3)], False),  # what it made did not arrive
        ([], False),
    ],
)
def test_only_one_operation_that_explains_it_is_named(nodes: list[Multiplier], named: bool) -> None:
    """Of gradients that are off by 1e5."""
    assert (only_multiplier(nodes, 1e5, arrived=1.0) is not None) is named


MADE: dict[str, tuple[Callable[[Tensor], Tensor], float | None]] = {
    "sum": (torch.sum, 1.0),  # gives all elements what it got
    "loss-scale": (lambda x: x * 65536, None),
    "weight": (lambda x: x / torch.tensor(1e-4), None),
    "log": (torch.log, 1e6),
    "weights": (lambda x: x * torch.full((1000,), 50.0), 50.0),
}


def test_few_rows_stand_out() -> None:
    """One of 32 whose slope is large; not half of them, nor all."""
    for large, stands_out in ((1, True), (16, False), (32, False)):
        x = torch.ones(32, 3)
        x[:large] = 1e-4
        made = torch.log(x.requires_grad_().clone())
        node, found = made.grad_fn, []
        assert node is not None
        node.register_hook(
            lambda onward, came, node=node, found=found: found.append(passage(node, onward, came))
        )
        made.mean().backward()
        assert found[0] is not None
        assert found[0].few_rows is stands_out


@pytest.mark.parametrize("name", MADE)
def test_gain(name: str) -> None:
    """That of a product with a number is none: it may be one at every step."""
    make, gain = MADE[name]
    made = make(torch.full((1000,), 1e-6, requires_grad=True).clone())
    node, found = made.grad_fn, []
    assert node is not None
    node.register_hook(lambda onward, came: found.append(passage(node, onward, came)))
    made.backward(torch.ones_like(made))
    (only,) = found
    assert (only and only.gain) == (gain and pytest.approx(gain, rel=1e-4))
