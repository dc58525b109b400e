"""Loss code of the loop run again in a watched training: what is told of it, and what it must not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.localise.loss import loss_rerun, model_calls
from gradwatch.localise.loss.interpreter import interpreter
from gradwatch.records.finding import Finding
from tests.localise.test_in_the_loop import rules
from tests.support.kept import Kept

calls: list[int] = []


def lengths(out: Tensor) -> Tensor:
    """A loss that counts its calls by a list, and prints."""
    calls.append(len(calls))
    print("loss computed")
    return out.square().sum(1).sqrt().mean()  # fault


class Forwards(nn.Module):
    """A model that counts the calls of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(4, 3, bias=False), 0

    def forward(self, x: Tensor) -> Tensor:
        """The layer."""
        self.count += 1
        return self.layer(x)


def train(watched: bool = True, **options: Any) -> tuple[list[Finding], Tensor, Forwards]:
    """Findings, weights and model of a training whose loss has one zero row at step 2."""
    torch.manual_seed(0)
    model, kept = Forwards(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gw = gradwatch.watch(model, optimizer, rules=rules(), sinks=[kept], **options) if watched else None
    for step in range(5):
        x = torch.randn(6, 4)
        if step == 2:
            x[1] = 0
        loss = lengths(model(x))
        optimizer.zero_grad()
        loss.backward()
        if watched or step != 2:
            optimizer.step()
    if gw is not None:
        gw.close()
    findings = [finding for record in kept.records for finding in record.findings]
    return findings, model.layer.weight.detach().clone(), model


def test_the_line_inside_a_function_of_the_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """Told at once, with the line that called it; the function is called as often as the script calls it."""
    calls.clear()
    findings, weight, model = train(strict=True)
    (finding,) = findings
    assert (finding.phase, finding.op, finding.step, finding.module) == ("backward", "sqrt", 2, "")
    assert finding.frame is not None
    assert finding.frame.source.endswith("# fault")
    assert finding.frames[1].source == "loss = lengths(model(x))"
    assert calls == list(range(5))
    assert capsys.readouterr().out.count("loss computed") == 5
    assert model.count == 5
    assert torch.equal(weight, train(watched=False)[1])


@pytest.mark.parametrize("error", [ValueError, MemoryError, RecursionError])
@pytest.mark.parametrize("place", [(interpreter.Interpreter, "run"), (loss_rerun, "loss_statements")])
def test_a_fault_of_ours_leaves_the_loss_side(
    monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], error: type[Exception]
) -> None:
    """Whatever fails while loss code is run again, training goes on as it would and the loss side is told."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error("injected")

    monkeypatch.setattr(*place, fail)
    findings, weight, _ = train()
    assert findings[0].phase == "loss"
    assert torch.equal(weight, train(watched=False)[1])


def test_other_gradients_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the code run again brings other gradients to the outputs, no operation is told."""
    monkeypatch.setattr(model_calls, "same_values", lambda one, other: False)
    findings, _, _ = train(strict=True)
    assert findings[0].phase == "loss"
    assert "other gradients" in findings[0].note


class Adversaries(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = nn.Linear(4, 4), nn.Linear(4, 1)


def watched(model: nn.Module, step_of: Any) -> Finding:
    """The first finding of a training whose third step is bad."""
    torch.manual_seed(0)
    optimizer, kept = torch.optim.SGD(model.parameters(), 0.1), Kept()
    with gradwatch.watch(model, optimizer, rules=rules(), sinks=[kept], strict=True):
        for step in range(4):
            step_of(model, optimizer, step == 2)
    return next(finding for record in kept.records for finding in record.findings)


def adversarial(nets: Adversaries, optimizer: torch.optim.Optimizer, bad: bool) -> None:
    """A step of both, the real batch given second."""
    real = torch.randn(6, 4)
    if bad:
        real[3, 0] = float("nan")
    fake = nets.maker(torch.randn(6, 4))
    loss = nn.functional.softplus(-nets.judge(real)).mean() + nn.functional.softplus(nets.judge(fake)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_the_batch_is_that_of_the_call_it_went_into() -> None:
    """Of several calls the one that was given the NaN, with its row."""
    finding = watched(Adversaries(), adversarial)
    assert (finding.phase, finding.call, finding.samples) == ("input", 1, (3,))


def branches(net: nn.Module, optimizer: torch.optim.Optimizer, bad: bool) -> None:
    """A step whose `backward` stands in each branch."""
    x = torch.randn(6, 4)
    optimizer.zero_grad()
    if bad:
        x[1] = 0
        loss = net(x).square().sum(1).sqrt().mean()  # fault
        loss.backward()
    elif len(x) > 100:
        loss = net(x).abs().mean()
        loss.backward()
    else:
        loss = net(x).square().mean()
        loss.backward()
    optimizer.step()


def test_the_backward_of_the_branch_that_ran() -> None:
    """Each is tried; only one brings the gradients that the step had."""
    finding = watched(nn.Linear(4, 3, bias=False), branches)
    assert finding.frame is not None
    assert (finding.op, finding.frame.source.endswith("# fault")) == ("sqrt", True)


def one_line(net: nn.Module, optimizer: torch.optim.Optimizer, bad: bool) -> None:
    """A step whose loss and `backward` share a line."""
    x = torch.randn(6, 4)
    if bad:
        x[1] = 0
    optimizer.zero_grad()
    # fmt: off
    loss = net(x).square().sum(1).sqrt().mean(); loss.backward()  # noqa: E702
    # fmt: on
    optimizer.step()


def test_a_loss_on_the_line_of_its_backward() -> None:
    """What stands before `backward` on its line is run again as well."""
    finding = watched(nn.Linear(4, 3, bias=False), one_line)
    assert finding.frame is not None
    assert finding.op == "sqrt"
    assert finding.frame.source.startswith("loss = net(x)")
