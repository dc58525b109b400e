"""A skipped step of an optimizer of other people is taken back, whatever it holds and wherever."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradwatch.actions.skip.backup import OptimizerBackup
from gradwatch.records.decision import Decision
from tests.actions.skip.test_skip import digest
from tests.support.recorder import Recorder

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))


class Stepping(Optimizer):
    """A plain descent over `self.lists()`; below, each keeps something where param_groups do not lead."""

    def __init__(self, model: nn.Module) -> None:
        self.prepare(model)
        super().__init__(model.parameters(), {"lr": 0.1})

    def prepare(self, model: nn.Module) -> None:
        """Set up what it keeps."""

    def reached(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.reached():
            if param.grad is not None:
                param.data.sub_(param.grad, alpha=self.param_groups[0]["lr"])


class HoldsModel(Stepping):
    """Walks a model of its own, and counts in a tensor."""

    def prepare(self, model: nn.Module) -> None:
        self.model, self.updates = model, torch.zeros(())

    def reached(self) -> list[nn.Parameter]:
        self.updates += 1
        return list(self.model.parameters())


class Masters(Stepping):
    """Keeps the weights in double precision beside the model, and writes them back whatever comes."""

    def prepare(self, model: nn.Module) -> None:
        self.masters = [param.detach().double() for param in model.parameters()]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param, master in zip(self.reached(), self.masters, strict=False):
            master.sub_(param.grad.double(), alpha=0.1)
            param.copy_(master)


class Flat(Stepping):
    """Weights and gradients are views of two buffers, which it steps as one."""

    def prepare(self, model: nn.Module) -> None:
        params = list(model.parameters())
        self.flat = torch.cat([param.detach().reshape(-1) for param in params])
        self.flat_grad = torch.zeros_like(self.flat)
        start = 0
        for param in params:
            end = start + param.numel()
            param.data = self.flat[start:end].view_as(param)
            param.grad = self.flat_grad[start:end].view_as(param)
            start = end

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.flat_grad.zero_()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.flat.sub_(self.flat_grad, alpha=0.1)


class Boxed(Stepping):
    """Its list stands behind an object of no known type."""

    def prepare(self, model: nn.Module) -> None:
        self.box = type("Box", (), {})()
        self.box.params = list(model.parameters())

    def reached(self) -> list[nn.Parameter]:
        found: list[nn.Parameter] = self.box.params
        return found


class Momentum(Stepping):
    """Its momentum decays in a dict by position, gradients or not."""

    def prepare(self, model: nn.Module) -> None:
        self.buffers = {number: torch.ones_like(param) for number, param in enumerate(model.parameters())}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for buffer in self.buffers.values():
            buffer.mul_(0.9)
        for number, param in enumerate(self.reached()):
            param.sub_(self.buffers[number].add_(param.grad), alpha=0.1)


class NeedsLists(Stepping):
    """Cannot do with an empty list, and draws a random number before it says so."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        noise = torch.randn(())
        norm = torch.cat([param.grad.reshape(-1) for param in self.reached()]).norm()  # type: ignore[union-attr]
        for param in self.reached():
            param.sub_(param.grad / norm + 1e-3 * noise, alpha=0.1)  # type: ignore[operator]


class Averaged(torch.optim.AdamW):
    """AdamW that goes on after `super().step()`: an average of the weights in an attribute."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.model, self.updates = model, torch.zeros(())
        self.average = [param.detach().clone() for param in model.parameters()]

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.updates += 1
        for average, param in zip(self.average, self.model.parameters(), strict=True):
            average.lerp_(param.detach(), 0.1)
        return result


class Wraps(Stepping):
    """Steps another optimizer, which is watched too."""

    def prepare(self, model: nn.Module) -> None:
        self.inner = [torch.optim.AdamW(model.parameters(), lr=0.1)]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner[0].step()


class ByWeakReference(Stepping):
    """Reaches the model past every copy."""

    def prepare(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)

    def reached(self) -> list[nn.Parameter]:
        model = self.model()
        assert model is not None
        return list(model.parameters())


class ByIdentity(Stepping):
    """Knows its parameters by `id`, so that it raises among copies."""

    def prepare(self, model: nn.Module) -> None:
        self.scale = {id(param): 1.0 for param in model.parameters()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.reached():
            param.sub_(param.grad, alpha=0.1 * self.scale[id(param)])  # type: ignore[arg-type]


class Locked(Stepping):
    """Holds what cannot be copied."""

    def prepare(self, model: nn.Module) -> None:
        self.lock = threading.Lock()


class Raises(Stepping):
    """Raises for a gradient that is not finite, and decays gradients in place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.reached():
            if param.grad is None or not param.grad.isfinite().all():
                raise RuntimeError("not finite")
            param.sub_(param.grad.add_(param, alpha=0.5), alpha=0.1)


KINDS = [
    HoldsModel, Masters, Flat, Boxed, Momentum, NeedsLists, Averaged,
    Wraps, ByWeakReference, ByIdentity, Locked, Raises,
]  # fmt: skip


def held(value: Any, seen: set[int]) -> list[Any]:
    """Every tensor, gradient and number that an optimizer leads to, in order."""
    if isinstance(value, (int, float, str, bool)) or value is None:
        return [value]
    if isinstance(value, tuple):
        return [one for each in value for one in held(each, seen)]
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [value.detach().clone(), *held(value.grad if value.is_leaf else None, seen)]
    if isinstance(value, nn.Module):
        return held(list(value.parameters()), seen)
    if isinstance(value, dict):
        return [one for key, each in value.items() for one in (*held(key, seen), *held(each, seen))]
    if isinstance(value, list):
        return [one for each in value for one in held(each, seen)]
    if isinstance(value, Optimizer) or type(value).__name__ == "Box":
        kept = {k: v for k, v in vars(value).items() if not k.startswith("_") and k != "step"}
        return held(kept, seen)
    return []


def job(kind: Callable[[nn.Module], Optimizer]) -> tuple[nn.Module, Optimizer, Callable[[], None]]:
    """A model, its optimizer, and a backward that leaves gradients."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = kind(model)

    def backward() -> None:
        optimizer.zero_grad()
        model(X).pow(2).sum().backward()

    return model, optimizer, backward


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_leaves_everything_that_the_optimizer_holds(
    kind: Callable[[nn.Module], Optimizer], first: int
) -> None:
    """Weights, state, attributes, models and random numbers as before; then training goes on as if never asked."""
    _, plain, plain_backward = job(kind)
    for _ in range(first + 2):
        plain_backward()
        plain.step()
    model, optimizer, backward = job(kind)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    with Recorder(model) as recorder:
        for _ in range(first):
            backward()
            optimizer.step()
        recorder.decide = lambda snapshot: Decision(skip=True)
        for _ in range(2):
            backward()
            before, drawn = digest(held(optimizer, set())), torch.get_rng_state()
            optimizer.step()
            assert digest(held(optimizer, set())) == before
            assert torch.equal(torch.get_rng_state(), drawn)
            scheduler.step()  # warns, and so fails, where it thinks that no step was taken
        recorder.decide = lambda snapshot: Decision()
        for _ in range(2):
            backward()
            optimizer.step()
        assert recorder.errors == []
        assert len(recorder.snapshots) == (first + 4) * (2 if kind is Wraps else 1)
    weights = [param for group in plain.param_groups for param in group["params"]]
    assert digest(list(model.parameters())) == digest(weights)


@pytest.mark.parametrize("kind", [Masters, Averaged])
def test_hooks_of_the_user_are_called_as_often_as_ever(kind: Callable[[nn.Module], Optimizer]) -> None:
    """Those of the instance hear of the real optimizer, at both levels of a step; each is called once."""
    model, optimizer, backward = job(kind)
    heard: list[tuple[str, bool]] = []

    def note(where: str) -> Callable[..., None]:
        return lambda found, args, kwargs: heard.append((where, found is optimizer))

    handles = [
        optimizer.register_step_pre_hook(note("pre")),
        optimizer.register_step_post_hook(note("post")),
        register_optimizer_step_pre_hook(note("pre, all")),
        register_optimizer_step_post_hook(note("post, all")),
    ]
    with Recorder(model) as recorder:
        backward()
        optimizer.step()
        usual = copy.copy(heard)
        recorder.decide = lambda snapshot: Decision(skip=True)
        heard.clear()
        backward()
        optimizer.step()
        assert [where for where, _ in heard] == [where for where, _ in usual]
        assert all(real for where, real in heard if where in ("pre", "post"))
        assert recorder.errors == []
    for handle in handles:
        handle.remove()


def test_a_step_that_raises_by_itself_raises_as_without_us() -> None:
    """Fault injection: the step fails whoever takes it; the next one is taken by the real optimizer."""
    model, optimizer, backward = job(Masters)
    optimizer.masters.append("no tensor")  # type: ignore[attr-defined]
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(1)))
    with Recorder(model) as recorder:
        recorder.decide = lambda snapshot: Decision(skip=True)
        backward()
        before = digest(list(model.parameters()))
        with pytest.raises(AttributeError):
            optimizer.step()
        optimizer.param_groups[0]["params"].pop()
        recorder.decide = lambda snapshot: Decision()
        backward()
        optimizer.step()
        assert digest(list(model.parameters())) != before
        assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("unscale", [False, True])
def test_a_skip_under_a_grad_scaler(unscale: bool) -> None:
    """The scaler steps the real optimizer as ever, its scale goes on growing, and the masters stay."""
    model, optimizer, _ = job(Masters)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    with Recorder(model) as recorder:
        for skip in (False, True, False):
            recorder.decide = lambda snapshot, skip=skip: Decision(skip=skip)  # type: ignore[misc]
            optimizer.zero_grad()
            scaler.scale(model(X).pow(2).sum()).backward()
            if unscale:
                scaler.unscale_(optimizer)
            before = digest(list(model.parameters()), optimizer.masters)  # type: ignore[attr-defined]
            scaler.step(optimizer)
            scaler.update()
            after = digest(list(model.parameters()), optimizer.masters)  # type: ignore[attr-defined]
            assert (before == after) == skip
        assert scaler.get_scale() == 2048.0


@dataclass(slots=True)
class Slots:
    """Has no `__dict__`."""

    buffer: torch.Tensor
    count: int = 0


class Holds(Stepping):
    """Changes, in a step, something of every kind that it holds."""

    def prepare(self, model: nn.Module) -> None:
        self.slots = Slots(torch.zeros(2))
        self.seen, self.last = {1}, deque([1, 2], maxlen=2)
        self.table, self.generator = np.zeros(2), torch.Generator()
        self.history: list[Any] = [torch.zeros(2)]
        self.inside = {"a": (torch.zeros(2), [3])}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.slots.buffer += 1
        self.slots.count += 1
        self.seen.add(len(self.seen) + 1)
        self.last.append(self.last[-1] + 1)
        self.table += 1
        torch.rand((), generator=self.generator)
        self.history.append(torch.ones(2))
        self.inside["a"][0].add_(1)
        self.inside["a"][1].clear()
        self.inside["b"] = (torch.ones(2), [])
        self.fresh = 1

    def all(self) -> str:
        """Every bit of it."""
        kept = {name: vars(self)[name] for name in ("seen", "last", "table", "history", "inside")}
        return digest(
            list(map(repr, kept.values())), self.slots.buffer, self.slots.count, self.generator.get_state()
        )


def test_a_backup_puts_everything_back_into_the_same_objects() -> None:
    """Slots, sets, deques, arrays, generators, containers in containers; attributes that are new are gone."""
    optimizer = Holds(nn.Linear(3, 2))
    before, objects = optimizer.all(), {name: id(value) for name, value in vars(optimizer).items()}
    backup = OptimizerBackup(optimizer)
    optimizer.step()
    assert optimizer.all() != before
    backup.restore()
    assert optimizer.all() == before
    assert {name: id(value) for name, value in vars(optimizer).items()} == objects


def test_a_backup_leaves_alone_what_lies_behind_many_objects() -> None:
    """An optimizer that knows its trainer does not have the data copied."""
    optimizer = Stepping(nn.Linear(3, 2))
    data = torch.zeros(2)
    optimizer.trainer = SimpleNamespace(  # type: ignore[attr-defined]
        near=data.clone(), loader=SimpleNamespace(dataset=SimpleNamespace(storage=SimpleNamespace(data=data)))
    )
    near = optimizer.trainer.near  # type: ignore[attr-defined]
    backup = OptimizerBackup(optimizer)
    data.add_(1)
    near.add_(1)
    backup.restore()
    assert near.tolist() == [0, 0]
    assert data.tolist() == [1, 1]


def test_a_backup_lies_on_the_host_where_a_device_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own error of a full device is no reason to take a step that should be skipped."""

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    _, optimizer, backward = job(Momentum)
    backward()
    before = digest(held(optimizer, set()))
    with monkeypatch.context() as device:
        device.setattr(torch.Tensor, "clone", full)
        backup = OptimizerBackup(optimizer)
    optimizer.step()
    assert digest(held(optimizer, set())) != before
    backup.restore()
    assert digest(held(optimizer, set())) == before


def test_a_step_that_refuses_a_nan_does_not_raise_where_it_is_skipped() -> None:
    """It finds zeros, and what it wrote to them is not in the gradients, which are the same tensors as before."""
    model, optimizer, backward = job(Raises)
    with Recorder(model) as recorder:
        backward()
        optimizer.step()
        recorder.decide = lambda snapshot: Decision(skip=True)
        backward()
        grads = [param.grad for param in model.parameters()]
        grads[0].fill_(float("nan"))  # type: ignore[union-attr]
        before = digest(held(optimizer, set()))
        optimizer.step()
        assert digest(held(optimizer, set())) == before
        assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
        assert recorder.errors == []
