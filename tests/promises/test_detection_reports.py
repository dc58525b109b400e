"""Scripts that reported a fault which the default pack had measured and judged by nothing: each is told now."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.records.event import Event
from gradwatch.session.watch import session_of
from tests.support.kept import Kept

ON = 200
STEPS = 260


def as_it_is(loss: Tensor) -> Tensor:
    """No fault of the loss."""
    return loss


def none_of_it(loss: Tensor) -> Tensor:
    """The graph is there, and every gradient is zero."""
    return loss * 0


def tenfold(loss: Tensor) -> Tensor:
    """One bad batch."""
    return loss * 10


def hundredfold(loss: Tensor) -> Tensor:
    """A batch that is worse by far."""
    return loss * 100


def nothing(model: nn.Sequential) -> None:
    """No fault after the backward."""


def times_1000(model: nn.Sequential) -> None:
    """Every gradient multiplied by something that is no clip."""
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(1000)


def one_zeroed(model: nn.Sequential) -> None:
    """One gradient set to zero."""
    model.get_parameter("2.weight").grad.zero_()  # type: ignore[union-attr]


@functools.cache
def began(
    loss_of: Callable[[Tensor], Tensor], after: Callable[[nn.Sequential], None], once: bool = False
) -> list[Event]:
    """The Events of rules that began to fire, in a small job with a fault from step 200 on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    kept, target = Kept(), torch.randn(8, 3)
    with gradwatch.watch(model, optimizer, rules="default", sinks=[kept], strict=True):
        for step in range(STEPS):
            inputs, faulty = torch.randn(32, 8), step == ON or (step > ON and not once)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), (inputs @ target).argmax(1))
            (loss_of(loss) if faulty else loss).backward()
            if faulty:
                after(model)
            optimizer.step()
    return [event for record in kept.records for event in record.verdict.events if event.kind == "firing"]


def fired(
    loss_of: Callable[[Tensor], Tensor], after: Callable[[nn.Sequential], None], once: bool = False
) -> dict[str, tuple[int, str]]:
    """The rules that fired and when first, with the parameter named."""
    found: dict[str, tuple[int, str]] = {}
    for event in began(loss_of, after, once):
        found.setdefault(event.rule, (event.step, event.sites[0] if event.sites else event.first_cause))
    return found


def test_a_healthy_job_is_told_nothing_of() -> None:
    """What the others are compared with."""
    assert fired(as_it_is, nothing) == {}


@pytest.mark.parametrize(
    ("loss_of", "after", "once", "rule", "step"),
    [
        (as_it_is, times_1000, False, "grown-before-step", ON),
        (as_it_is, one_zeroed, False, "zeroed-before-step", ON + 2),
        (none_of_it, nothing, False, "total-norm-fall", ON + 19),
        (none_of_it, nothing, False, "no-gradient", ON + 19),
        (lambda loss: loss * 1e-4, nothing, False, "total-norm-fall", ON + 19),
        (tenfold, nothing, True, "total-norm-spike", ON),
        (tenfold, nothing, True, "norm-spike", ON),
    ],
    ids=[
        "times 1000",
        "zeroed",
        "all zero: fall",
        "all zero",
        "times 1e-4",
        "one loss times 10",
        "its parameters",
    ],
)
def test_the_fault_is_told(
    loss_of: Callable[[Tensor], Tensor],
    after: Callable[[nn.Sequential], None],
    once: bool,
    rule: str,
    step: int,
) -> None:
    """By the rule that is about it, at the step at which it can be known."""
    assert fired(loss_of, after, once)[rule][0] == step


def test_a_bad_batch_is_one_alarm() -> None:
    """Its loss, the total norm and single norms jump at one step: one alarm, and the others are part of it."""
    told = began(hundredfold, nothing, once=True)
    assert {event.rule for event in told} >= {"loss-spike", "total-norm-spike-severe", "norm-spike"}
    assert [event.rule for event in told if event.notify] == ["total-norm-spike-severe"]


def noisy(model: nn.Sequential) -> None:
    """Noise as large as some gradients, and much larger than others."""
    for param in model.parameters():
        assert param.grad is not None
        param.grad.add_(torch.randn_like(param.grad) * 0.5)


def decayed(model: nn.Sequential) -> None:
    """Weight decay that the script makes itself."""
    for param in model.parameters():
        assert param.grad is not None
        param.grad.add_(param.detach(), alpha=1.0)


@pytest.mark.parametrize("added", [noisy, decayed])
def test_what_the_script_adds_to_each_gradient_is_no_fault(added: Callable[[nn.Sequential], None]) -> None:
    """Each parameter has a factor of its own then, and some a large one."""
    assert "grown-before-step" not in fired(as_it_is, added)


def one_grown(model: nn.Sequential) -> None:
    """One gradient multiplied, the others left."""
    grad = next(model.parameters()).grad
    assert grad is not None
    grad.mul_(10)


def test_a_gradient_that_has_grown_alone_is_named() -> None:
    """Where the others are as backward left them."""
    assert fired(as_it_is, one_grown)["grown-before-step"] == (ON, "0.weight")


def test_a_gradient_that_was_zeroed_is_named() -> None:
    """The one parameter, and no other."""
    assert fired(as_it_is, one_zeroed)["zeroed-before-step"][1] == "2.weight"


def rates_told(jump_by: str) -> list[int]:
    """Steps at which `lr-jump` fires where the rate is a thousandfold from step 40 on."""
    model, kept = nn.Linear(4, 1), Kept()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), 1e-6)
    with gradwatch.watch(model, rules="default", sinks=[kept], strict=True):
        for step in range(60):
            if step == 40 and jump_by == "a new optimizer":
                optimizer = torch.optim.SGD(model.parameters(), 1e-3)
            if step == 40 and jump_by == "the same":
                optimizer.param_groups[0]["lr"] = 1e-3
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
    events = [(record.snapshot.step, event) for record in kept.records for event in record.verdict.events]
    return [step for step, event in events if (event.rule, event.kind) == ("lr-jump", "firing")]


@pytest.mark.parametrize(("jump_by", "told"), [("a new optimizer", []), ("the same", [40])])
def test_a_new_optimizer_has_a_schedule_of_its_own(jump_by: str, told: list[int]) -> None:
    """A rate beyond anything before is told of the optimizer that had another one, and of no other."""
    assert rates_told(jump_by) == told


def test_a_loss_that_is_never_positive_is_said_to_be_judged_by_no_factor() -> None:
    """A likelihood of densities: rules that take its logarithm have no data, and the account says why."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gradwatch.watch(model, optimizer, rules="default", sinks=[Kept()], strict=True) as gw:
        for _ in range(5):
            optimizer.zero_grad()
            (model(torch.randn(3, 4)).square().mean() - 100).backward()
            optimizer.step()
        reasons = session_of(gw).account().no_data
    assert "loss was not positive" in reasons["loss-rise"]
