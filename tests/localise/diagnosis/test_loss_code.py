"""A loss computed in the loop itself: what the loop's own tensors tell of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.incidents.explanation import sentence
from gradwatch.localise.diagnosis import loss_code
from gradwatch.records.finding import Finding
from tests.support.kept import Kept

Loss = Callable[[Tensor, bool], tuple[Tensor, ...]]


def found(make: Loss) -> Finding:
    """What is told first of a training with this loss, which goes wrong at its fourth step."""
    torch.manual_seed(0)
    model, kept = nn.Linear(4, 1), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gradwatch.watch(model, optimizer, rules="default", sinks=[kept], strict=True):
        for step in range(5):
            optimizer.zero_grad()
            out = model(torch.randn(6, 4))
            kept_by_the_loop: Any = make(out, step == 3)
            *_, loss = kept_by_the_loop
            loss.backward()
            optimizer.step()
    return next(finding for record in kept.records for finding in record.findings)


def test_one_operation_that_can_fail_is_named() -> None:
    """sqrt is the only suspect among the nodes after the model; the square is not, for its slope is finite."""
    finding = found(lambda out, bad: ((out - (out.detach() if bad else 0.0)).square().mean().sqrt(),))
    assert (finding.phase, finding.op, finding.node) == ("loss", "sqrt", "SqrtBackward0")
    assert finding.frame is not None
    assert finding.frame.source == "*_, loss = kept_by_the_loop"
    assert "`loss` (loss: float32[], 1 zero of 1, 0 … 0) was computed by sub, pow, mean, sqrt" in finding.note


class Passing(nn.Module):
    """Passes its argument on to a model, as adjoint solvers and averaging wrappers do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def test_a_module_that_passes_on_is_not_blamed() -> None:
    """A wrapper made for one forward calls the model; the NaN is made by the line that calls the wrapper."""
    torch.manual_seed(0)
    model, kept = nn.Linear(4, 1), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gradwatch.watch(model, optimizer, rules="default", sinks=[kept], strict=True):
        for step in range(5):
            optimizer.zero_grad()
            wrapper = Passing(model)
            loss = wrapper(torch.randn(6, 4)).square().mean() * (math.nan if step == 3 else 1.0)
            loss.backward()
            optimizer.step()
    finding = next(finding for record in kept.records for finding in record.findings)
    assert finding.phase == "loss"
    assert [frame.source for frame in finding.frames] == [
        "loss = wrapper(torch.randn(6, 4)).square().mean() * (math.nan if step == 3 else 1.0)"
    ]
    assert sentence(finding).startswith(
        "the loss side: finite outputs, non-finite gradients, of the model called at "
    )


def test_of_several_suspects_none_is_named() -> None:
    """Where two operations could have done it, both are told and neither is blamed."""
    finding = found(lambda out, bad: (((out * (0.0 if bad else 1.0)).exp().log().abs() ** 0.5).sum(),))
    assert (finding.phase, finding.op) == ("loss", "")
    assert "was computed by mul, exp, log, abs, pow, sum" in finding.note


def test_a_norm_is_not_blamed_for_a_loss_that_is_nan() -> None:
    """A length of finite numbers is never NaN: the number it was multiplied with was."""
    finding = found(lambda out, bad: (out.norm(dim=1).mean() * (math.nan if bad else 1.0),))
    assert (finding.phase, finding.op) == ("loss", "")
    assert "linalg_vector_norm makes no NaN from finite inputs" in finding.note


def test_a_power_below_one_is_a_suspect() -> None:
    """The slope of a root is infinite at zero."""
    finding = found(lambda out, bad: (((out * (0.0 if bad else 1.0)).abs() ** 0.5).sum(),))
    assert (finding.phase, finding.op) == ("loss", "pow")


def unheld(loss: Callable[[Tensor, int], Tensor]) -> Finding:
    """What is told first of a training that keeps no tensor of its loss, which goes wrong at its fourth step."""
    torch.manual_seed(0)
    model, kept = nn.Linear(4, 1), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gradwatch.watch(model, optimizer, rules="default", sinks=[kept], strict=True):
        for step in range(5):
            optimizer.zero_grad()
            loss(model(torch.randn(6, 4)), step).backward()
            optimizer.step()
    return next(finding for record in kept.records for finding in record.findings)


def test_a_loss_nobody_holds_is_told_by_those_before_it() -> None:
    """The backwards of the first calls were looked at: the one suspect is named, with the line of the backward."""
    finding = unheld(lambda out, step: out.mul(0.0 if step == 3 else 1.0).abs().sqrt().sum())
    assert (finding.phase, finding.op, finding.node) == ("loss", "sqrt", "SqrtBackward0")
    assert finding.frame is not None
    assert finding.frame.source == "loss(model(torch.randn(6, 4)), step).backward()"
    assert "in the steps recorded, the loss was computed by mul, abs, sqrt, sum" in finding.note


def test_of_several_suspects_nobody_holds_none_is_named() -> None:
    """Two operations could have done it: both are told, neither is blamed."""
    finding = unheld(lambda out, step: out.mul(0.0 if step == 3 else 1.0).abs().sqrt().log().sum())
    assert (finding.phase, finding.op) == ("loss", "")
    assert "the loss was computed by mul, abs, sqrt, log, sum" in finding.note


@pytest.mark.parametrize("bad", ["first", "other"])
def test_the_line_told_is_that_of_the_call_at_fault(bad: str) -> None:
    """As in a GAN: the model is called from two lines of one step, and the loss of one call is not finite."""
    torch.manual_seed(0)
    model, kept = nn.Linear(4, 1), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gradwatch.watch(model, optimizer, rules="default", sinks=[kept], strict=True):
        for step in range(14):
            factor = {bad: float("nan")} if step == 12 else {}
            optimizer.zero_grad()
            first = model(torch.randn(6, 4))
            other = model(torch.randn(6, 4))
            (first.sum() * factor.get("first", 1.0) + other.sum() * factor.get("other", 1.0)).backward()
            optimizer.step()
    finding = next(finding for record in kept.records for finding in record.findings)
    assert finding.phase == "loss"
    assert finding.frame is not None
    assert finding.frame.source == f"{bad} = model(torch.randn(6, 4))"


def test_losses_that_differ_from_step_to_step_tell_nothing() -> None:
    """Nothing is made up where it is not known what the loss of this step was made of."""
    finding = unheld(
        lambda out, step: out.exp().sum() if step == 0 else out.mul(0.0 if step == 3 else 1.0).sqrt().sum()
    )
    assert (finding.phase, finding.op) == ("loss", "")
    assert "was computed by" not in finding.note


@pytest.mark.parametrize("broken", [ValueError, RecursionError])
def test_a_fault_of_ours_leaves_the_answer(broken: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails in looking at the loop costs the detail, not the finding, nor the training."""

    def fail(*args: object) -> Any:
        raise broken("ours")

    monkeypatch.setattr(loss_code, "amended", fail)
    torch.manual_seed(0)
    model, kept = nn.Linear(4, 1), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gradwatch.watch(model, optimizer, rules="default", sinks=[kept]) as gw:
        for step in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 4)).mul(0.0 if step == 3 else 1.0).abs().sqrt().sum()
            loss.backward()
            optimizer.step()
        assert gw.health.errors() == {"localise": 1}
    finding = next(finding for record in kept.records for finding in record.findings)
    assert finding.phase == "loss"
    assert torch.isfinite(model.weight).all()


def test_a_tensor_exponent_is_not_asked_of_a_freed_graph() -> None:
    """`base ** tensor` saves its exponent in the graph: once freed it cannot be read, and need not be."""
    base = torch.ones(3, requires_grad=True)
    powers = base ** torch.tensor([1.5])
    node = powers.grad_fn
    powers.sum().backward()
    assert node is not None
    assert loss_code.singular(node)


def trained(loss_of: Callable[[Tensor, Tensor, bool], Tensor]) -> Finding:
    """The one finding of a training whose seventh step is at fault; a function without `assert`, which reads locals."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    kept = Kept()
    with gradwatch.watch(model, optimizer, sinks=[kept], strict=True):
        for step in range(8):
            labels = torch.zeros(8, 4)
            labels[0, 0] = float("nan") if step == 6 else 0.0
            optimizer.zero_grad()
            loss = loss_of(model(torch.randn(8, 4)), labels, step == 6)
            loss.backward()
            optimizer.step()
    (finding,) = (finding for record in kept.records for finding in record.findings)
    return finding


def test_a_nan_label_is_no_reason_to_name_an_operation() -> None:
    """The loss is NaN and the loop holds a NaN that no gradient flows to: it is named, and no operation is."""
    finding = trained(lambda out, labels, bad: (out - labels).pow(2).mean().sqrt())
    assert (finding.phase, finding.op) == ("loss", "")
    assert "`labels`, which no gradient flows to, was not finite" in finding.note


def test_a_division_by_a_number_is_not_blamed_for_zero_times_infinity() -> None:
    """`/ 2` is a multiplication as far as the graph tells: where something was multiplied by inf it is no suspect."""
    finding = trained(
        lambda out, labels, bad: (out * (0 if bad else 1) * (math.inf if bad else 1)).mean() / 2
    )
    assert (finding.phase, finding.op) == ("loss", "")
