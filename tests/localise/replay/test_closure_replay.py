"""`Watch.step(closure)`: the loss function's own line, in one replayed step, and training bit-identical."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.errors import AttachError
from gradwatch.records.finding import Finding
from tests.localise.models import SqrtAtZero
from tests.localise.test_in_the_loop import broken, rules
from tests.support.kept import Kept


class Noisy(nn.Module):
    """Dropout and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(self.layer(x)), 0.2)


def trained(bad: tuple[int, ...], watched: bool) -> tuple[dict[str, Tensor], list[float], list[Finding], Any]:
    """Six steps with a masked mean in the loss, its mask empty at the bad ones."""
    random.seed(0)
    torch.manual_seed(0)
    model, kept, losses = Noisy(), Kept(), []
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    gw = gradwatch.watch(model, optimizer, rules=rules(), sinks=[kept], strict=True) if watched else None
    for step in range(6):
        x, mask = torch.randn(8, 4), (torch.rand(8, 3) < (0 if step in bad else 0.8)).float()

        def closure(x: Tensor = x, mask: Tensor = mask) -> Tensor:
            optimizer.zero_grad()
            error = (model(x) + random.random()).square()
            loss = (error * mask).sum() / mask.sum()  # fault
            loss.backward()
            return loss

        if gw is not None:
            losses.append(gw.step(closure).item())
        else:
            losses.append(closure().item())
            if step not in bad:
                optimizer.step()
    if gw is not None:
        gw.close()
    findings = [finding for record in kept.records for finding in record.findings]
    return model.state_dict(), losses, findings, (random.getstate(), torch.get_rng_state().tolist())


def test_the_line_of_the_loss_function_is_told() -> None:
    """0/0 in a masked mean outside the model: the operation and its line, exactly."""
    (finding,) = trained((3,), watched=True)[2]
    assert (finding.phase, finding.op, finding.by, finding.module) == ("forward", "div", "closure", "")
    assert finding.frame is not None
    assert finding.frame.source.endswith("# fault")
    assert "whether the step comes again is not known: of a closure" in finding.note


@pytest.mark.parametrize("bad", [(), (2, 4)])
def test_training_is_bit_identical(bad: tuple[int, ...]) -> None:
    """Weights, running statistics, losses and generators are those of the bare loop that skips by hand."""
    state, losses, _, generators = trained(bad, watched=True)
    bare, bare_losses, _, bare_generators = trained(bad, watched=False)
    assert str(losses) == str(bare_losses)
    assert generators == bare_generators
    for name, tensor in bare.items():
        assert torch.equal(tensor, state[name]), name


def test_a_fault_inside_the_model_is_named_by_its_module() -> None:
    """The exact path knows the modules as the replay does, and leaves `.grad` as the closure left it."""
    torch.manual_seed(0)
    model, kept = SqrtAtZero(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gradwatch.watch(model, optimizer, rules=rules(), sinks=[kept], strict=True) as gw:

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(broken(torch.randn(5, 4))).sum()
            loss.backward()
            return loss

        gw.step(closure)
        assert model.enter.weight.grad is not None
        assert model.enter.weight.grad.isnan().any()
    (finding,) = (one for record in kept.records for one in record.findings)
    assert (finding.phase, finding.op, finding.module) == ("backward", "sqrt", "SqrtAtZero")
    assert finding.by == "closure"


def test_it_needs_an_optimizer() -> None:
    """Without one there is nothing to step, and it is said before anything runs."""
    gw = gradwatch.watch(nn.Linear(2, 2), rules=rules(), sinks=[])
    with gw, pytest.raises(AttachError, match="needs the optimizer"):
        gw.step(lambda: None)


def test_switched_off_it_is_the_bare_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """With GRADWATCH=0 the closure runs and the optimizer steps."""
    monkeypatch.setenv("GRADWATCH", "0")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model.weight.detach().clone()
    with gradwatch.watch(model, optimizer) as gw:
        assert gw.step(lambda: model(torch.ones(1, 2)).sum().backward() or 7) == 7
    assert not torch.equal(before, model.weight)
