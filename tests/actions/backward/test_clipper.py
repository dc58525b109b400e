"""`at: backward`: hooks return what they clipped, in the spike's own backward; exact, silent where they must be."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradwatch
from gradwatch.engine.actions.norms_after_actions import unclipped, with_clip_order
from gradwatch.records.decision import Decision
from gradwatch.rules.files import parse_rules
from tests.reading.test_foreach_norms import WAITING, Operations
from tests.support.backward_jobs import BASELINE, CONSTANT, METHODS, POLICY, Job, X, same
from tests.support.examples import examples
from tests.support.kept import Kept
from tests.support.on_device import gradients_on_device

# -- what is done --------------------------------------------------------------------------------------------


def test_a_spike_is_clipped_in_its_own_backward_and_told_the_same_step() -> None:
    """`.grad` is clipped before any optimizer sees it; `norm` is what it was, `norm_applied` what is left."""
    job, bare = Job(BASELINE), Job()
    for group in (*job.optimizer.param_groups, *bare.optimizer.param_groups):
        group["lr"], group["momentum"] = 1e-4, 0.0  # a calm run
    for step in range(60):
        spiked = step == 50
        before = job.weights()
        if spiked:
            for param, twin in zip(bare.model.parameters(), job.model.parameters(), strict=True):
                param.data.copy_(twin.data)
        raw = bare.backward(1000.0 if spiked else 1.0)
        grads = job.step(1000.0 if spiked else 1.0)
        record = job.sink.records[-1]
        events = [event.kind for event in record.verdict.events]
        if not spiked:
            assert record.snapshot.coef.tolist() == [1.0] * 6
            assert events == (["resolved"] if step == 51 else [])
            continue
        assert events == ["firing"]
        assert record.verdict.events[0].rule == "spike"
        wants = torch.tensor([float(grad.double().norm()) for grad in raw])
        assert record.snapshot.norm == pytest.approx(wants.numpy(), rel=1e-5)
        left = torch.tensor([float(grad.double().norm()) for grad in grads])
        column = record.snapshot.column("norm_applied")
        assert column is not None
        assert column.values == pytest.approx(left.numpy(), rel=1e-4)
        assert record.snapshot.total_norm_applied == pytest.approx(float(left.double().norm()), rel=1e-4)
        assert (record.snapshot.coef < 1).any()
        assert all(order.action == "clip" for order in record.decision.orders)
        assert all(param.isfinite().all() for param in job.model.parameters())
        assert not same(before, job.weights())
    job.close()


@pytest.mark.parametrize("method", METHODS)
def test_a_policy_does_the_same_inside_the_backward_as_at_the_step(method: str) -> None:
    """One backward a step, one process: where a policy is applied makes no difference to the weights."""
    inside, outside = Job(POLICY % (method, "backward", "")), Job(POLICY % (method, "step", ""))
    bare = Job()
    for step in range(30):
        spike = 30.0 if step == 20 else 1.0
        inside.step(spike)
        outside.step(spike)
        bare.step(spike)
        for one, other in zip(inside.weights(), outside.weights(), strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)
        for a, b in zip(inside.sink.records, outside.sink.records, strict=True):
            assert a.snapshot.norm == pytest.approx(b.snapshot.norm, rel=1e-5)
            assert a.snapshot.coef == pytest.approx(b.snapshot.coef, rel=1e-4)
    assert not same(inside.weights(), bare.weights())  # it did something at all
    inside.close()
    outside.close()


def test_a_bound_on_each_parameter_is_torchs_clip() -> None:
    """Against `clip_grads_with_norm_` on each parameter alone, given the same norm: equal to the bit."""
    job, bare = Job(POLICY % (METHODS[0], "backward", "")), Job()
    for _ in range(10):
        bare.backward(5.0)
        grads = job.step(5.0)
        for param, norm in zip(bare.model.parameters(), job.sink.records[-1].snapshot.norm, strict=True):
            torch.nn.utils.clip_grads_with_norm_([param], 0.5, torch.tensor(float(norm)))
        assert same(grads, bare.grads())
        bare.optimizer.step()
    job.close()


def test_the_first_backward_is_bounded_where_the_optimizer_is_known() -> None:
    """Hooks are there before the first step; without the optimizer they come with it, one step later."""
    job = Job(CONSTANT % "")
    assert max(job.norms() or [0.0]) == 0.0
    job.backward(100.0)
    assert max(job.norms()) <= 0.5 + 1e-6
    job.close()
    late = Job()
    sink = Kept()
    with gradwatch.watch(late.model, rules=parse_rules(CONSTANT % ""), sinks=[sink], strict=True):
        late.step(100.0)
        assert max(late.norms()) > 0.5
        late.step(100.0)
        assert max(late.norms()) <= 0.5 + 1e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_is_neither_multiplied_nor_spread(method: str, bad: float) -> None:
    """Coefficient 1 for a gradient with a bad element: the others of its tensor stay as found, and it is told."""
    job = Job(POLICY % (method, "backward", "") + "\n")
    for _ in range(8):
        job.step()
    first = next(iter(job.model.parameters()))
    handles = []

    def spoil(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[0, 0] = bad
        return grad

    hooks = dict(first._backward_hooks or {})
    for key in hooks:
        del first._backward_hooks[key]  # type: ignore[union-attr]
    handles.append(first.register_hook(spoil))  # before ours, as a fault in the model would be
    first._backward_hooks.update(hooks)  # type: ignore[union-attr]
    grads = job.step()
    clean = grads[0].flatten()[1:].tolist()
    assert all(math.isfinite(value) for value in clean)
    assert any(value != 0 for value in clean)
    snapshot = job.sink.records[-1].snapshot
    assert not math.isfinite(snapshot.norm[0])
    assert all(math.isfinite(norm) for norm in snapshot.norm[1:])
    for handle in handles:
        handle.remove()
    job.close()


# -- where nothing may be done ---------------------------------------------------------------------------------


def test_nothing_changes_until_something_is_out_of_bounds() -> None:
    """Bit-identical to the unwatched run while no norm exceeds its bound."""
    job, bare = Job(CONSTANT.replace("2.0", "1e6") % ""), Job()
    for _ in range(20):
        assert same(job.step(), bare.step())
    assert same(job.weights(), bare.weights())
    job.close()


@pytest.mark.parametrize("method", ["value, clip_value: 1000000", "agc, ratio: 1000000, last_layer: true"])
def test_a_bound_that_nothing_reaches_is_no_intervention(method: str) -> None:
    """Norms of odd sizes, added up by hook and batched read in two ways: not a step is told as clipped."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 257), torch.nn.Tanh(), torch.nn.Linear(257, 1))
    optimizer, kept = torch.optim.SGD(model.parameters(), 0.01), Kept()
    rules = parse_rules(POLICY % (method, "backward", ""))
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[kept], strict=True):
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.randn(8, 300)).square().mean().backward()
            optimizer.step()
    assert len(kept.records) == 30
    assert [record.decision.orders for record in kept.records if record.decision.orders] == []
    assert all((record.snapshot.coef == 1).all() for record in kept.records)


@pytest.mark.parametrize(("left", "says"), [(1 - 5e-7, False), (1 - 1e-5, True)])
def test_the_rounding_of_a_norm_is_not_told_as_a_clip(left: float, says: bool) -> None:
    """On a device the hook always multiplies: what two sums of one norm differ by is no clip, more than that is."""
    job = Job(POLICY % ("value, clip_value: 1000000", "step", ""))
    job.step()
    snapshot = job.sink.records[-1].snapshot
    job.close()
    coef = (snapshot.coef * np.float32(left)).astype(np.float32)
    after = replace(snapshot, coef=coef, total_norm_applied=snapshot.total_norm * left)
    assert bool(with_clip_order(Decision(), unclipped(snapshot), after).orders) is says


def test_autograd_grad_gets_its_gradients_untouched() -> None:
    """A tensor hook fires for `torch.autograd.grad` too: what that returns is nobody's step."""
    job = Job(CONSTANT % "")
    loss = job.model(X).pow(2).sum() * 100
    found = torch.autograd.grad(loss, list(job.model.parameters()))
    bare = Job()
    wants = torch.autograd.grad(bare.model(X).pow(2).sum() * 100, list(bare.model.parameters()))
    assert same(list(found), list(wants))
    job.step(100.0)
    assert job.sink.records[-1].snapshot.norm == pytest.approx(
        [float(grad.double().norm()) for grad in wants], rel=1e-5
    )
    job.close()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_double_backward_goes_through_the_clip() -> None:
    """With `create_graph=True` the clipped gradient is differentiable: its factor counts as a constant."""
    job = Job(CONSTANT % "")
    (job.model(X).pow(2).sum() * 100).backward(create_graph=True)
    grads = [param.grad for param in job.model.parameters()]
    assert all(grad is not None and grad.requires_grad for grad in grads)
    assert max(job.norms()) <= 0.5 + 1e-6
    second = torch.autograd.grad(grads[0].sum(), job.model[0].weight)[0]  # type: ignore[union-attr]
    assert second.isfinite().all()
    assert second.abs().sum() > 0
    job.close()
    for param in job.model.parameters():
        param.grad = None  # torch warns of the cycle that create_graph leaves


def test_a_backward_within_a_backward_is_no_accumulation() -> None:
    """Reentrant checkpointing runs a backward inside the backward: the hooks go on acting."""
    job = Job(CONSTANT % "")
    for _ in range(3):
        job.optimizer.zero_grad()
        x = X.clone().requires_grad_()
        head = checkpoint(job.model[:2], x, use_reentrant=True)
        (job.model[2:](head).pow(2).sum() * 100).backward()
        assert max(job.norms()) <= 0.5 + 1e-6
        job.optimizer.step()
        snapshot = job.sink.records[-1].snapshot
        assert snapshot.norm.max() > 0.5
        assert (snapshot.norm * snapshot.coef).max() <= 0.5 + 1e-5
    job.close()


# -- on a device -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [each for each in METHODS if not each.startswith("baseline")])
def test_no_operation_waits_for_the_device(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op list of backward and step holds nothing that copies a number to the host; the weights are the same."""
    host = Job(POLICY % (method, "backward", ""))
    for _ in range(6):
        host.step(5.0)
    host.close()
    gradients_on_device(monkeypatch)
    job = Job(POLICY % (method, "backward", ""))
    for step in range(6):
        job.optimizer.zero_grad()
        loss = job.model(X).pow(2).sum() * 5.0
        with Operations() as operations:
            loss.backward()
            job.optimizer.step()
        if step > 1:
            assert "linalg_vector_norm" in operations.names or "norm" in " ".join(operations.names)
            assert [name for name in operations.names if name in WAITING] == []
    assert job.gw is not None
    job.gw.flush()
    for one, other in zip(host.weights(), job.weights(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)
    for a, b in zip(host.sink.records, job.sink.records, strict=True):
        assert a.snapshot.norm == pytest.approx(b.snapshot.norm, rel=1e-5)
        assert a.snapshot.coef == pytest.approx(b.snapshot.coef, rel=1e-4)
    job.close()


def test_a_rule_on_a_device_clips_without_waiting_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is clipped in its own backward on the device; the alert of that step follows a step later."""
    gradients_on_device(monkeypatch)
    job = Job(CONSTANT % "")
    for step in range(6):
        job.optimizer.zero_grad()
        loss = job.model(X).pow(2).sum() * (100.0 if step == 3 else 1e-6)
        with Operations() as operations:
            loss.backward()
            job.optimizer.step()
        assert [name for name in operations.names if name in WAITING] == []
        if step == 3:
            assert max(job.norms()) <= 0.5 + 1e-6
    assert job.gw is not None
    job.gw.flush()
    fired = [
        record.snapshot.step
        for record in job.sink.records
        for e in record.verdict.events
        if e.kind == "firing"
    ]
    assert fired == [3]
    assert job.sink.records[3].snapshot.coef.min() < 0.1
    job.close()


@settings(max_examples=examples(15), deadline=None)
@given(
    st.integers(1, 300),
    st.booleans(),
    st.floats(-18, 30),
    st.sampled_from([0.1, 0.999, 1.001, 1.5, 100.0]),
    st.integers(0, 2**31),
)
def test_a_short_vector_is_held_to_the_very_bound(
    size: int, matrix: bool, exponent: float, times: float, seed: int
) -> None:
    """Whether hooks look at a norm or at its square: what is above the bound is brought to it, all else is not touched,
    over the whole range of float32."""
    chance = torch.Generator().manual_seed(seed)
    values = torch.randn((1, size) if matrix else (size,), generator=chance).double()
    grad = (values / values.norm() * 10**exponent).float()
    bound = float(grad.double().norm()) / times
    param = nn.Parameter(torch.zeros_like(grad))
    clip = f"clip: {{total: {{method: norm, max_norm: {bound!r}, scope: param}}, at: backward}}"
    rules = parse_rules(f"version: 1\nrules: {{}}\n{clip}\n")
    model = nn.ParameterList([param])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[], strict=True):
        (param * grad).sum().backward()
    assert param.grad is not None
    if times < 1:
        assert torch.equal(param.grad, grad)
    else:
        norm = float(grad.double().norm())
        wanted = bound * norm / (norm + 1e-6)  # as torch's clip
        assert float(param.grad.double().norm()) == pytest.approx(wanted, rel=1e-5)
