"""Gradients that are not what a backward left in `.grad`: written by the loop itself, then clipped by torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import gradwatch
from gradwatch.capture import optimizer_capture, optimizer_gradients
from gradwatch.rules.files import parse_rules
from gradwatch.rules.rule_set import RuleSet
from tests.support.kept import Kept
from tests.support.on_device import gradients_on_device
from tests.support.recorder import norms_of, seen

STEPS = 14
Clip = Callable[[nn.Module], object]


def by_per_sample_gradients(model: nn.Module, batch: torch.Tensor) -> None:
    """The mean of per-sample gradients, as differentially private training takes it."""
    weights = {name: param.detach() for name, param in model.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return functional_call(model, weights, (sample,)).square().mean()

    each = vmap(grad(loss), (None, 0))(weights, batch)
    for name, param in model.named_parameters():
        param.grad = each[name].mean(0)


def by_autograd_grad(model: nn.Module, batch: torch.Tensor) -> None:
    params = list(model.parameters())
    for param, found in zip(params, torch.autograd.grad(model(batch).square().mean(), params), strict=True):
        param.grad = found


def by_tasks_made_to_agree(model: nn.Module, batch: torch.Tensor) -> None:
    """The sum of two tasks' gradients, each from a backward of its own, put in the place of the second's."""
    found: list[list[torch.Tensor]] = []
    for task in batch.chunk(2):
        model.zero_grad()
        model(task).square().mean().backward()
        found.append([param.grad for param in model.parameters() if param.grad is not None])
    for param, first, second in zip(model.parameters(), *found, strict=True):
        param.grad = first + second


WAYS = [by_per_sample_gradients, by_autograd_grad, by_tasks_made_to_agree]


@pytest.mark.parametrize("layers", [1, 20], ids=["few", "thinned"])
@pytest.mark.parametrize("differentiate", WAYS)
@pytest.mark.parametrize(
    "clip",
    [
        lambda model: clip_grad_norm_(model.parameters(), 1e-3),
        lambda model: clip_grad_value_(model.parameters(), 1e-4),
    ],
    ids=["norm", "value"],
)
def test_norms_are_those_before_the_clip_once_the_loop_is_known(
    differentiate: Callable[[nn.Module, torch.Tensor], None], clip: Clip, layers: int
) -> None:
    """Only the second step may be provisional: the first shows that no backward is ever heard here."""
    torch.manual_seed(0)
    deep = [layer for _ in range(layers) for layer in (nn.Linear(8, 8), nn.Tanh())]
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *deep, nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = Kept()
    before: list[dict[str, float]] = []
    applied: list[dict[str, float]] = []
    with gradwatch.watch(model, optimizer, rules=RuleSet(), sinks=[kept]) as gw:
        for _ in range(STEPS):
            optimizer.zero_grad()
            differentiate(model, torch.randn(4, 4))
            before.append(norms_of(model.named_parameters()))
            clip(model)
            applied.append(norms_of(model.named_parameters()))
            optimizer.step()
        gw.flush()
        records = list(kept.records)
    assert len(records) == STEPS
    assert not any(record.snapshot.provisional for record in records[2:])
    for record, raw, clipped in zip(records, before, applied, strict=True):
        if not record.snapshot.provisional:
            assert seen(record.snapshot) == pytest.approx(raw, rel=1e-5)
            column = record.snapshot.column("norm_applied")
            assert column is not None
            assert dict(
                zip(record.snapshot.sites.names, column.values.tolist(), strict=True)
            ) == pytest.approx(clipped, rel=1e-5)


def test_gradients_set_by_hand_arrive_though_their_norm_repeats() -> None:
    """A sign or normalised gradient has one norm in every step: each is told, and clipped."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kept = Kept()
    clip = parse_rules("version: 1\nclip: {total: {method: block_rms, threshold: 0.5}}\n")
    with gradwatch.watch(model, optimizer, rules=clip, sinks=[kept], strict=True):
        for _ in range(STEPS):
            optimizer.zero_grad()
            model.weight.grad = torch.randn(1, 4).sign() * 5
            optimizer.step()
    found = [record.snapshot for record in kept.records]
    assert [one.calls.tolist() for one in found] == [[1]] * STEPS
    assert [one.total_norm for one in found] == pytest.approx([10.0] * STEPS)
    assert [one.total_norm_applied for one in found] == pytest.approx([1.0] * STEPS)


def test_a_gradient_left_from_the_last_step_did_not_arrive() -> None:
    """Never cleared and never written to: the same tensor of the same version is no gradient of this step."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kept = Kept()
    with gradwatch.watch(model, optimizer, rules=RuleSet(), sinks=[kept], strict=True):
        model.weight.grad = torch.ones(1, 4)
        for step in range(4):
            if step == 2:
                model.weight.grad.copy_(-torch.ones(1, 4))  # of the same norm, and new
            optimizer.step()
    assert [record.snapshot.calls.tolist() for record in kept.records] == [[1], [0], [1], [0]]


@pytest.mark.parametrize("how", ["assigned", "written"])
@pytest.mark.parametrize("clearing", ["none", "zeros", "left"])
def test_a_clip_of_the_model_they_are_taken_from_does_not_read_them(how: str, clearing: str) -> None:
    """A3C: a local model is clipped while the shared one, which gets its gradients, has those of the last step."""
    torch.manual_seed(0)
    shared, local = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1)
    kept, norms = Kept(), []
    with gradwatch.watch(shared, optimizer, rules=RuleSet(), sinks=[kept], strict=True):
        for step in range(STEPS):
            if clearing != "left":
                optimizer.zero_grad(set_to_none=clearing == "none")
            local.zero_grad()
            local(torch.randn(5, 4) * (step + 1)).square().mean().backward()
            clip_grad_norm_(local.parameters(), 40.0)
            for mine, theirs in zip(shared.parameters(), local.parameters(), strict=True):
                assert theirs.grad is not None
                if how == "written" and mine.grad is not None:
                    mine.grad.copy_(theirs.grad)
                else:
                    mine.grad = theirs.grad.clone() if how == "written" else theirs.grad
            norms.append(norms_of(shared.named_parameters()))
            optimizer.step()
    assert [seen(record.snapshot) for record in kept.records] == [
        pytest.approx(one, rel=1e-5) for one in norms
    ]
    # Whether a backward was missed is not known at once.
    assert [record.snapshot.provisional for record in kept.records][2:] == [False] * (STEPS - 2)


def test_a_gradient_that_lies_where_the_last_one_did_arrives_after_a_swap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device no norm tells it from the freed one, and a swap of the parameters has silenced the hooks."""
    gradients_on_device(monkeypatch)
    for module in (optimizer_gradients, optimizer_capture):
        monkeypatch.setattr(
            module,
            "id",
            lambda one: id(one) if isinstance(one, nn.Parameter) or not isinstance(one, torch.Tensor) else 7,
            raising=False,
        )
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    kept = Kept()
    with gradwatch.watch(model, optimizer, rules="observe-only", sinks=[kept]):
        for step in range(4):
            optimizer.zero_grad()
            if step == 2:
                torch.__future__.set_swap_module_params_on_conversion(True)
                try:
                    model.to(torch.float64).to(torch.float32)
                finally:
                    torch.__future__.set_swap_module_params_on_conversion(False)
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    assert [record.snapshot.calls[:2].tolist() for record in kept.records] == [[1, 1]] * 4


@pytest.mark.parametrize("without_optimizer", [False, True])
def test_gradients_that_are_not_held_may_be_swapped(
    monkeypatch: pytest.MonkeyPatch, without_optimizer: bool
) -> None:
    """Of a large model nothing of ours refers to a gradient, nor stops `Module.to` between backward and step."""
    monkeypatch.setattr(optimizer_gradients, "KEPT", 0)
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    given, kept = {}, Kept()
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        gw = gradwatch.watch(model, rules="observe-only", sinks=[kept], strict=True) if watched else None
        for step in range(6):
            model(torch.randn(3, 4)).square().sum().backward()
            if step % 2:
                model.double().float()
            if without_optimizer:
                with torch.no_grad():
                    for param in model.parameters():
                        param -= 0.1 * param.grad
            else:
                optimizer.step()
            model.zero_grad()
        given[watched] = torch.cat([param.detach().flatten() for param in model.parameters()])
        if gw is not None:
            gw.close()
    assert torch.equal(given[False], given[True])
    assert len(kept.records) == 6
