"""`scope: module` with `clip: {at: backward}`: an explosion is stopped between the layers where it begins."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.errors import AttachError, RuleFileError
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
RULES = """
version: 1
modules: {tap: full_backward, names: ["1"]}
rules:
  explosion:
    detect: {kind: above, of: grad_input_norm, threshold: 2.0}
    scope: module
    do: [clip: {to: 0.5, at: backward%s}]
"""


class Explodes(torch.autograd.Function):
    """The identity, whose backward multiplies by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(Explodes.apply(x, self.factor))  # type: ignore[no-any-return, no-untyped-call]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer(), Layer())


def backward(model: nn.Sequential, factor: float) -> list[Tensor]:
    model.zero_grad()
    model[1].factor = factor  # type: ignore[assignment]
    (model(X).pow(2).mean() * 0.1).backward()
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def norm(grads: list[Tensor]) -> float:
    return float(torch.stack([grad.double().norm() for grad in grads]).norm())


def test_an_explosion_is_stopped_between_the_layers() -> None:
    """The layers before it see a bounded gradient, those after it the one they see without us; told the same step."""
    model, bare, sink = build(), build(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with gradwatch.watch(model, optimizer, rules=parse_rules(RULES % ""), sinks=[sink], strict=True) as gw:
        for factor in (1.0, 1.0, 1e6, 1.0):
            raw, seen = backward(bare, factor), backward(model, factor)
            optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(raw[2:], seen[2:], strict=True))
            events = [event.kind for event in sink.records[-1].verdict.events]
            if factor == 1.0:
                assert all(torch.equal(a, b) for a, b in zip(raw, seen, strict=True))
                continue
            assert events == ["firing"]
            column = sink.records[-1].snapshot.column("grad_input_norm")
            assert column is not None
            passed = float(column.values[column.present][0])
            assert passed > 2
            # What came before is linear in what was passed on.
            assert norm(seen[:2]) == pytest.approx(norm(raw[:2]) * 0.5 / passed, rel=1e-4)
        assert gw.health.errors() == {}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_left_alone(bad: float) -> None:
    """A factor made of NaN or Inf would spread it: coefficient 1."""
    model, bare, sink = build(), build(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with gradwatch.watch(model, optimizer, rules=parse_rules(RULES % ""), sinks=[sink], strict=True):
        raw, seen = backward(bare, bad), backward(model, bad)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(raw, seen, strict=True))
        optimizer.step()


def test_a_grad_scaler_switches_it_off() -> None:
    """Scaled gradients are never measured against an unscaled bound, unless insisted; then the scale is taken out."""
    for insists in (False, True):
        model, bare = build(), build()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        rules = parse_rules(RULES % (", local: true" if insists else ""))
        scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
        with gradwatch.watch(model, optimizer, rules=rules, sinks=[Kept()]) as gw:
            for factor in (1.0, 1e6):
                for each in (model, bare):
                    each.zero_grad()
                    each[1].factor = factor  # type: ignore[assignment]
                    scaler.scale(each(X).pow(2).mean() * 0.1).backward()
                same = all(
                    torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
                    for a, b in zip(model.parameters(), bare.parameters(), strict=True)
                )
                assert same == (not insists or factor == 1.0)
                scaler.step(optimizer)
                scaler.update()
            assert gw.health.errors() == ({} if insists else {"action": 1})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("tap: full_backward", "tap: output"), "needs `modules: {tap: full_backward}`"),
        (("to: 0.5", "to: baseline"), "write `to: NUMBER`|baseline"),
        (("grad_input_norm", "grad_output_norm"), "that a module passes on"),
        (("of: grad_input_norm", "of: norm"), "cannot be used with scope 'module'"),
    ],
)
def test_what_cannot_be_bounded_is_refused_at_attach(change: tuple[str, str], said: str) -> None:
    """Each with the reason."""
    model = build()
    with pytest.raises((AttachError, RuleFileError), match=said):
        gradwatch.watch(model, rules=parse_rules((RULES % "").replace(*change)), sinks=[Kept()])


def test_a_model_that_full_backward_hooks_would_break_is_refused() -> None:
    """The preflight of the taps stands before every bound."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)))
    with pytest.raises(AttachError, match="inplace"):
        gradwatch.watch(model, rules=parse_rules(RULES % ""), sinks=[Kept()])


def test_inputs_without_a_gradient_are_left_alone() -> None:
    """A first layer has no grad_input: returning one would raise in the user's backward; torch warns of nothing."""
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, rules=parse_rules(RULES % ""), sinks=[Kept()], strict=True):
        loss = model(X).pow(2).sum() * 1e3
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss.backward()
        optimizer.step()


@pytest.mark.parametrize("micro", [1, 2])
def test_what_was_done_between_the_layers_is_told_with_its_norms(micro: int) -> None:
    """Rule, module, norms before and after and the factor, over all calls of a step; nothing where nothing was done."""
    model, sink = build(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with gradwatch.watch(model, optimizer, rules=parse_rules(RULES % ""), sinks=[sink], strict=True):
        for factor in (1.0, 1e6):
            model.zero_grad()
            model[1].factor = factor  # type: ignore[assignment]
            for _ in range(micro):
                (model(X).pow(2).mean() * 0.1).backward()
            optimizer.step()
    calm, struck = sink.records
    assert not calm.decision.orders
    column = struck.snapshot.column("grad_input_norm")
    assert column is not None
    (order,) = struck.decision.orders
    assert (order.rule, order.action, order.site, order.count) == ("explosion", "clip", "1", 1)
    assert order.before == pytest.approx(float(column.values[column.present][0]), rel=1e-5)
    assert order.after == pytest.approx(0.5 * micro**0.5, rel=1e-4)
    assert order.coefficient == pytest.approx(0.5 * micro**0.5 / order.before, rel=1e-4)


def test_shadow_says_what_it_would_have_bounded() -> None:
    """The same words with `mode: shadow`, and not a bit changed."""
    model, bare, sink = build(), build(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    rules = parse_rules(RULES % "" + "    mode: shadow\n")
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[sink], strict=True):
        raw, seen = backward(bare, 1e6), backward(model, 1e6)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(raw, seen, strict=True))
    (order,) = sink.records[-1].decision.orders
    assert order.shadow
    assert (order.action, order.site) == ("clip", "1")
    assert order.after == pytest.approx(0.5, rel=1e-4)


def test_a_clip_of_the_total_is_told_beside_a_bound_on_a_module() -> None:
    """One bounds what flows between layers, the other the parameters: neither keeps the other from being told."""
    model, sink = build(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    rules = parse_rules(RULES % "" + "clip: {total: {method: norm, max_norm: 0.01}}\n")
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[sink], strict=True):
        backward(model, 1e6)
        optimizer.step()
    orders = {order.rule: order for order in sink.records[-1].decision.orders}
    assert set(orders) == {"explosion", "clip:"}
    assert (orders["clip:"].site, orders["clip:"].count) == ("", 6)
    assert orders["clip:"].after == pytest.approx(0.01, rel=1e-4)
