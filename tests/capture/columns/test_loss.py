"""The loss without `observe`: what `backward` was called on, summed over the backwards of a step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gradwatch
from gradwatch.capture.columns.loss import Losses
from gradwatch.rules.files import parse_rules
from gradwatch.rules.rule_set import RuleSet
from gradwatch.session.watch import session_of
from tests.support.kept import Kept

Loop = Callable[[nn.Module, torch.optim.Optimizer], float | None]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module) -> Tensor:
    """A loss on a batch of its own."""
    found: Tensor = model(torch.randn(3, 4)).square().mean()
    return found


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One backward; the loss is overwritten in place before the step."""
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward()
    value = loss.item()
    with torch.no_grad():
        loss.fill_(-1.0)
    optimizer.step()
    return value


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Three micro-batches, each a third of the loss."""
    optimizer.zero_grad()
    parts = [loss_of(model) / 3 for _ in range(3)]
    for part in parts:
        part.backward()
    optimizer.step()
    return sum(part.item() for part in parts)


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """A GradScaler multiplies the root."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    loss = loss_of(model)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def several_roots(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Two roots, one of them weighted."""
    optimizer.zero_grad()
    first, second = loss_of(model), loss_of(model)
    torch.autograd.backward([first, second], [None, torch.tensor(0.5)])
    optimizer.step()
    return first.item() + 0.5 * second.item()


def thrown_away(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """A backward whose gradients are cleared counts for nothing."""
    (loss_of(model) + 100).backward()
    return plain(model, optimizer)


def penalised(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """`autograd.grad` within the step is no loss of its own."""
    optimizer.zero_grad()
    x = torch.randn(3, 4, requires_grad=True)
    out = model(x).sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    loss = out.square() + grad.norm()
    loss.backward()
    optimizer.step()
    return loss.item()


def reentrant(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """A checkpoint that runs a backward inside the backward."""
    optimizer.zero_grad()
    x = torch.randn(3, 4, requires_grad=True)
    loss: Tensor = checkpoint(model, x, use_reentrant=True).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def by_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """The backward runs inside `step`."""
    values = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        values.append(loss.item())
        return loss

    optimizer.step(closure)
    return values[0]


def of_no_scalar(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A root of several elements is no loss."""
    optimizer.zero_grad()
    out = model(torch.randn(3, 4))
    out.backward(torch.ones_like(out))
    optimizer.step()


LOOPS: list[Loop] = [
    plain,
    accumulated,
    scaled,
    several_roots,
    thrown_away,
    penalised,
    reentrant,
    by_closure,
    of_no_scalar,
]


@pytest.mark.parametrize("loop", LOOPS)
def test_the_loss_of_a_step_is_what_its_gradient_is_of(loop: Loop) -> None:
    """Whatever a step's backwards look like, its Record holds the sum of their roots, or no loss at all."""
    model, optimizer = make()
    kept = Kept()
    with gradwatch.watch(model, optimizer, rules=RuleSet(), sinks=[kept], strict=True):
        expected = [loop(model, optimizer) for _ in range(4)]
    told = [record.snapshot.scalars.get("loss") for record in kept.records]
    assert told == [None if value is None else pytest.approx(value, rel=1e-6) for value in expected]


def test_a_thinned_loop_goes_on_and_stays_calm() -> None:
    """With most marks removed and judging put off, each step still has the loss of its own backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)], nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kept = Kept()
    with gradwatch.watch(model, optimizer, rules=RuleSet(), sinks=[kept], strict=True) as gw:
        expected = [plain(model, optimizer) for _ in range(70)]
        assert session_of(gw).attached.capture.captures[0].pruning.pruned
        assert len(kept.records) < 70
    told = [record.snapshot.scalars.get("loss") for record in kept.records]
    assert told == pytest.approx(expected, rel=1e-6)


def test_each_optimizer_has_the_loss_that_reached_it() -> None:
    """A generator's loss goes through the critic, whose own steps must not have it."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    of_g, of_c = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (generator, critic))
    kept, expected = Kept(), []
    with gradwatch.watch([generator, critic], [of_g, of_c], rules=RuleSet(), sinks=[kept], strict=True):
        for _ in range(5):
            of_c.zero_grad()
            loss_c = critic(generator(torch.randn(4, 2)).detach()).square().mean() + 5
            loss_c.backward()
            of_c.step()
            of_g.zero_grad()
            loss_g = critic(generator(torch.randn(4, 2))).mean() - 7
            loss_g.backward()
            of_g.step()
            expected += [loss_c.item(), loss_g.item()]
    assert [record.snapshot.scalars["loss"] for record in kept.records] == pytest.approx(expected)


def test_rules_on_the_loss_work_in_a_script_that_observes_nothing() -> None:
    """`loss-non-finite` of the shipped rules fires on a NaN loss that was not observed, though gradients are finite."""
    model, optimizer = make()
    kept = Kept()
    with gradwatch.watch(model, optimizer, rules="observe-only", sinks=[kept], strict=True):
        for step in range(4):
            optimizer.zero_grad()
            (loss_of(model) + (math.nan if step == 3 else 0.0)).backward()
            optimizer.step()
    assert "loss-non-finite" in kept.records[3].verdict.firing


class Packed:
    """What a graph holds in the place of a tensor that its backward needs."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def alive_after_backwards(watched: bool) -> list[tuple[bool, int]]:
    """After each of three backwards that keep their graph: whether the loss is gone, how much graphs still hold."""
    model, optimizer = make()
    saved: list[weakref.ref[Packed]] = []
    found = []

    def pack(tensor: Tensor) -> Packed:
        packed = Packed(tensor)
        saved.append(weakref.ref(packed))
        return packed

    rules = parse_rules("version: 1\nrules: {l: {detect: {kind: above, of: loss, threshold: 1e9}}}")
    gw = gradwatch.watch(model, optimizer, rules=rules, sinks=[Kept()])
    if not watched:
        gw.close()
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
            loss = loss_of(model)
        loss.backward(retain_graph=True)
        gone = weakref.ref(loss)
        del loss
        found.append((gone() is None, sum(ref() is not None for ref in saved)))
        optimizer.step()
    gw.close()
    return found


def test_what_is_kept_of_a_loss_holds_no_graph() -> None:
    """The loss, and what its graph has saved, are freed as in a bare loop, while the step waits to be judged."""
    bare = alive_after_backwards(watched=False)
    assert [gone for gone, _ in bare] == [True] * 3
    assert alive_after_backwards(watched=True) == bare


def test_a_loss_with_a_tensor_exponent_is_no_internal_error() -> None:
    """`** torch.tensor([1.5])`, whose backward has a logarithm and a mask of its own: healthy, each loss is heard."""
    model, optimizer = make()
    kept = Kept()
    with gradwatch.watch(model, optimizer, rules="default", sinks=[kept]) as gw:
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = ((model(torch.randn(8, 4)).abs() + 1) ** torch.tensor([1.5])).mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        assert gw.status()["internal_errors"] == {}
    assert [record.snapshot.scalars["loss"] for record in kept.records] == pytest.approx(losses)
    assert not any(record.findings for record in kept.records)


def test_a_root_that_is_no_scalar_is_said_once() -> None:
    """A rule that needs a loss and gets none has its reason told, once, and it is no internal error."""

    class Saying(Kept):
        def __init__(self) -> None:
            super().__init__()
            self.said: list[str] = []

        def internal_error(self, component: str, error: BaseException) -> None:
            self.said.append(f"{component}: {error}")

    model, optimizer = make()
    kept = Saying()
    with gradwatch.watch(model, optimizer, rules="observe-only", sinks=[kept]) as gw:
        for _ in range(3):
            of_no_scalar(model, optimizer)
        assert not gw.status()["internal_errors"]
    assert len(kept.said) == 1
    assert "a tensor of 3 elements" in kept.said[0]


def test_a_dispatch_mode_of_the_user_sees_no_read() -> None:
    """Reading the root is no operation for a mode (a FLOP counter) that is on around the backward."""
    seen: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def backward() -> list[str]:
        loss = torch.tensor(2.0, requires_grad=True) * 1.0
        seen.clear()
        with Noting():
            loss.backward(torch.tensor(1.5))
        return list(seen)

    bare = backward()
    losses = Losses(lambda component, error: pytest.fail(f"{component}: {error}"))
    try:
        watched = backward()
        found = losses.latest()
    finally:
        losses.close()
    assert found is not None
    assert found.value == 3.0
    assert watched == bare


def test_a_backward_that_python_does_not_start_takes_no_other_ones_loss() -> None:
    """C++ may call the engine itself: its step has no loss, which is said once, and the one after it has its own."""
    first, optimizer = make()
    second, other = make()
    sink, said = Kept(), list[str]()
    with gradwatch.watch([first, second], [optimizer, other], sinks=[sink], rules="default") as gw:
        session_of(gw).attached.capture.losses.refused = said.append
        for step in range(3):
            plain(first, optimizer)
            loss = loss_of(second)
            if step == 1:
                torch.ops.aten._backward(loss, list(second.parameters()), None, None, False)
            else:
                loss.backward()
            other.step()
            other.zero_grad()
            told = sink.records[-1].snapshot.scalars.get("loss")
            assert told is None if step == 1 else told == pytest.approx(loss.item())
    assert said == ["backward was started from C++"]


def test_a_backward_that_torch_refuses_is_no_error_of_ours() -> None:
    """Of a loss made under `no_grad` the script gets torch's error, and nothing is counted against the watch."""
    model, optimizer = make()
    with gradwatch.watch(model, optimizer, rules="observe-only", sinks=[]) as gw:
        plain(model, optimizer)
        with torch.no_grad():
            loss = loss_of(model)
        with pytest.raises(RuntimeError, match="does not require grad"):
            loss.backward()
        assert gw.health.errors() == {}
