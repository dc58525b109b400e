"""Optimizers that step inside backward: one Snapshot per backward with the right norms, and never an action."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradwatch
from gradwatch.records.record import Record
from gradwatch.rules.files import parse_rules
from gradwatch.session.watch import session_of
from tests.session.test_watch import build, step
from tests.support.kept import Kept

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))


class Inside:
    """One SGD per parameter, stepped from its gradient hook; notes every gradient's norm in float64."""

    def __init__(self, model: nn.Module, lr: float = 0.05) -> None:
        self.want: dict[str, float] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.handles: list[Any] = []
        for name, param in model.named_parameters():
            self.optimizers.append(torch.optim.SGD([param], lr))
            self.handles.append(param.register_post_accumulate_grad_hook(self._hook(name)))

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        optimizer = self.optimizers[-1]

        def at_once(param: torch.Tensor) -> None:
            assert param.grad is not None
            self.want[name] = float(param.grad.double().norm())
            optimizer.step()
            optimizer.zero_grad()

        return at_once

    def backward(self, loss: torch.Tensor) -> dict[str, float]:
        """Run it; the norms that were applied in it."""
        self.want = {}
        loss.backward()
        return self.want


def seen(record: Record) -> dict[str, float]:
    snapshot = record.snapshot
    triples = zip(snapshot.sites.names, snapshot.norm.tolist(), snapshot.calls.tolist(), strict=True)
    return {name: norm for name, norm, calls in triples if calls}


@pytest.mark.parametrize("named", [True, False], ids=["named at attach", "found"])
@pytest.mark.parametrize("first", [True, False], ids=["watch first", "hooks first"])
def test_one_snapshot_per_backward(named: bool, first: bool) -> None:
    """Norms as float64 has them, total included, in model order; nothing is provisional and coverage is whole."""
    model, _ = build()
    sink = Kept()
    inside = None if first else Inside(model)
    optimizers = inside.optimizers if named and inside is not None else None
    with gradwatch.watch(model, optimizers, rules="observe-only", sinks=[sink], strict=True) as gw:
        inside = inside or Inside(model)
        for number in range(6):
            want = inside.backward(model(X).pow(2).sum())
            snapshot = sink.records[-1].snapshot
            assert snapshot.step == number
            assert seen(sink.records[-1]) == pytest.approx(want, rel=1e-5)
            assert snapshot.total_norm == pytest.approx(sum(v * v for v in want.values()) ** 0.5, rel=1e-5)
            assert snapshot.sites.names == tuple(name for name, _ in model.named_parameters())
            assert not snapshot.provisional
        assert len(sink.records) == 6
        assert session_of(gw).account().watched.unjudged == 0
        assert gw.coverage == 1.0
        assert gw.health.errors() == {}


def test_training_is_bit_identical_and_never_acted_on() -> None:
    """A NaN backward is reported as firing; what would have been done is recorded as withheld, and not done."""

    def train(watched: bool) -> tuple[list[torch.Tensor], list[Record], dict[str, int]]:
        model, _ = build()
        sink = Kept()
        gw = gradwatch.watch(model, rules="default", sinks=[sink], strict=True) if watched else None
        inside = Inside(model)
        for scale in (1.0, 1.0, float("nan"), 1.0):
            inside.backward(model(X).pow(2).sum() * scale)
        errors = {} if gw is None else gw.health.errors()
        if gw is not None:
            gw.close()
        return [p.detach().clone() for p in model.parameters()], sink.records, errors

    weights, records, errors = train(watched=True)
    bare, _, _ = train(watched=False)
    assert all(torch.equal(a, b) or (a.isnan() & b.isnan()).any() for a, b in zip(weights, bare, strict=True))
    assert all(a.view(torch.int32).equal(b.view(torch.int32)) for a, b in zip(weights, bare, strict=True))
    assert "non-finite" in records[2].verdict.firing
    assert not records[2].decision.skip
    assert {order.shadow for order in records[2].decision.orders} == {True}
    assert errors == {"action": 2}


def test_stop_and_clip_are_withheld_too() -> None:
    """No order reaches a training whose weights have moved already."""
    rules = """
version: 1
rules:
  big: {detect: {kind: above, of: total_norm, threshold: 1e-9}, do: [stop]}
clip: {total: {method: norm, max_norm: 1e-6}}
"""
    model, _ = build()
    sink = Kept()
    with gradwatch.watch(model, rules=parse_rules(rules), sinks=[sink], strict=True):
        want = Inside(model).backward(model(X).pow(2).sum())
    assert seen(sink.records[0]) == pytest.approx(want, rel=1e-5)
    assert sink.records[0].snapshot.total_norm_applied == sink.records[0].snapshot.total_norm
    assert {order.shadow for order in sink.records[0].decision.orders} == {True}


def test_beside_an_ordinary_optimizer() -> None:
    """Each kind has Snapshots of its own; neither pauses nor hides the other."""
    model, _ = build()
    ordinary, optimizer = build(1)
    sink = Kept()
    with gradwatch.watch([model, ordinary], sinks=[sink], rules="observe-only", strict=True) as gw:
        inside = Inside(model)
        for _ in range(4):
            want = inside.backward(model(X).pow(2).sum())
            step(ordinary, optimizer)
            got = seen(sink.records[-2])
            assert got == pytest.approx({f"Sequential.{name}": norm for name, norm in want.items()}, rel=1e-5)
        assert [r.snapshot.step for r in sink.records] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert [r.snapshot.optimizer for r in sink.records] == [0, 1] * 4
        assert gw.health.errors() == {}


def test_a_parameter_without_gradient_is_absent_in_that_backward() -> None:
    """Only what stepped in a backward has arrived in it; a late joiner becomes a site."""
    model = nn.ModuleDict({"often": nn.Linear(3, 2), "rare": nn.Linear(3, 2)})
    sink = Kept()
    with gradwatch.watch(model, rules="observe-only", sinks=[sink], strict=True):
        inside = Inside(model)
        for number in range(4):
            loss = model["often"](X).pow(2).sum()
            want = inside.backward(loss + (model["rare"](X).pow(2).sum() if number in (1, 3) else 0))
            assert seen(sink.records[-1]) == pytest.approx(want, rel=1e-5)
    assert len(sink.records[-1].snapshot.sites) == 4


@pytest.mark.parametrize("partly", [True, False], ids=["partly checkpointed", "wholly checkpointed"])
def test_reentrant_checkpoint_does_not_split_a_backward(partly: bool) -> None:
    """The inner backwards of reentrant checkpointing belong to the outer one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    sink = Kept()
    x = X.clone().requires_grad_()
    with gradwatch.watch(model, rules="observe-only", sinks=[sink], strict=True):
        inside = Inside(model)
        for _ in range(4):
            hidden = checkpoint(model[:2], x, use_reentrant=True)
            hidden = checkpoint(model[2:4], hidden, use_reentrant=True)
            rest = model[4:]
            out = rest(hidden) if partly else checkpoint(rest, hidden, use_reentrant=True)
            want = inside.backward(out.pow(2).sum())
            if partly:
                assert seen(sink.records[-1]) == pytest.approx(want, rel=1e-5)
    assert len(sink.records) == 4
    assert seen(sink.records[-1]) == pytest.approx(want, rel=1e-5)


def test_a_backward_that_raises_reports_the_steps_it_took() -> None:
    """Steps before the exception happened, so they are a Snapshot; the next backward starts clean."""
    model, _ = build()
    sink = Kept()
    with gradwatch.watch(model, rules="observe-only", sinks=[sink], strict=True):
        inside = Inside(model)
        inside.backward(model(X).pow(2).sum())
        handle = model[0].weight.register_hook(lambda grad: 1 / 0)  # type: ignore[index, operator, union-attr]
        with pytest.raises(ZeroDivisionError):
            inside.backward(model(X).pow(2).sum())
        partial = dict(inside.want)
        handle.remove()
        want = inside.backward(model(X).pow(2).sum())
    assert seen(sink.records[1]) == pytest.approx(partial, rel=1e-5)
    assert 0 < len(partial) < 4
    assert seen(sink.records[2]) == pytest.approx(want, rel=1e-5)
    assert set(sink.records[2].snapshot.calls.tolist()) == {1}


@pytest.mark.parametrize("named", [True, False], ids=["named at attach", "found"])
def test_the_first_backward_counts_no_gradients_as_cleared_unused(named: bool) -> None:
    """Each is gone at the end of the backward, and its optimizer has used it in there."""
    model = build()[0]
    inside = Inside(model)
    given = inside.optimizers if named else None
    with gradwatch.watch(model, given, sinks=[Kept()], strict=True) as gw:
        for _ in range(3):
            inside.backward(model(X).square().mean())
        watched = gw.status()["account"]["watched"]
    assert (watched["steps"], watched["cleared"]) == (3 * len(inside.optimizers), 0)
