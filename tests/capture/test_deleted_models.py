"""What the script deletes is freed at once, as in the bare script, and what of it still lives is watched on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from tests.support.kept import Kept


def made() -> nn.Sequential:
    """A small model."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of a model."""
    return torch.optim.Adam(model.parameters(), 0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step; the total norm of its gradients."""
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().mean().backward()
    total = sum(float(param.grad.norm()) ** 2 for param in model.parameters() if param.grad is not None)
    optimizer.step()
    return float(total**0.5)


def refs_of(model: nn.Module) -> list[weakref.ref[nn.Parameter]]:
    """Each parameter, held weakly."""
    return [weakref.ref(param) for param in model.parameters()]


def alive(refs: list[weakref.ref[nn.Parameter]]) -> int:
    """How many of these live."""
    return sum(ref() is not None for ref in refs)


def wholly(model: nn.Module) -> nn.Module:
    """Every parameter is trained."""
    return model


def partly(model: nn.Module) -> nn.Module:
    """Some parameters are frozen, but known to the optimizer."""
    model.get_parameter("0.weight").requires_grad_(False)
    return model


@pytest.fixture
def kept() -> Kept:
    """The Records."""
    return Kept()


@pytest.fixture
def gw(kept: Kept) -> Iterator[Any]:
    """A watch with a model that lives on; without the garbage collector, which must not be needed."""
    torch.manual_seed(0)
    gc.collect()
    gc.disable()
    lives_on = made()
    try:
        with gradwatch.watch(lives_on, rules="default", sinks=[kept], strict=True) as watch:
            step(lives_on, adam(lives_on))
            yield watch
    finally:
        gc.enable()


@pytest.mark.parametrize("prepare", [wholly, partly])
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_parameters_are_freed_with_the_last_that_held_them(
    gw: Any, kept: Kept, prepare: Callable[[nn.Module], nn.Module], first: str
) -> None:
    """Nothing need be made or trained for it, and of what comes next every norm is right."""
    given = []
    for _ in range(4):
        model: Any = prepare(made())
        gw.add([model])
        optimizer: Any = adam(model)
        given += [step(model, optimizer) for _ in range(3)]
        refs = refs_of(model)
        if first == "model":
            del model
            assert alive(refs) == 4  # the optimizer has them
            del optimizer
        else:
            del optimizer
            assert alive(refs) == 4
            del model
        assert alive(refs) == 0
    gw.flush()
    assert [record.snapshot.total_norm for record in kept.records[1:]] == pytest.approx(given, rel=1e-5)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_model_that_no_optimizer_has_is_freed_at_once(gw: Any, kept: Kept, frozen: bool) -> None:
    """A teacher is not held, and one that comes to lie at its addresses, and is trained, is watched."""
    given = []
    for _ in range(5):
        teacher: Any = made().requires_grad_(not frozen)
        gw.add([teacher])
        refs = refs_of(teacher)
        del teacher
        assert alive(refs) == 0
        student: Any = made()
        gw.add([student])
        optimizer: Any = adam(student)
        given.append(step(student, optimizer))
        del student, optimizer
    gw.flush()
    records = kept.records[1:]
    assert [record.snapshot.total_norm for record in records] == pytest.approx(given, rel=1e-5)
    assert [record.snapshot.calls.tolist() for record in records] == [[1, 1, 1, 1]] * 5
    names = tuple(f"Sequential1.{name}" for name, _ in made().named_parameters())
    assert [record.snapshot.sites.names for record in records] == [names] * 5


def test_what_is_made_at_an_address_that_was_freed_is_watched(gw: Any, kept: Kept) -> None:
    """Parameters that no module holds, with gradients set by hand: nothing tells gradwatch but the step itself."""
    given = []
    for k in range(1, 6):
        model: Any = nn.Linear(1, 3, bias=False)
        gw.add([model])
        optimizer: Any = adam(model)
        model(torch.ones(2, 1)).square().mean().backward()
        given.append(float(model.weight.grad.norm()))
        optimizer.step()
        del model, optimizer
        loose: Any = nn.Parameter(torch.zeros(3, 1))
        own: Any = torch.optim.SGD([loose], 0.1)
        session = gw._session
        session.join([], [own], [("loose", loose)])
        loose.grad = torch.full((3, 1), float(k))
        own.step()
        given.append(k * 3**0.5)
        ref = weakref.ref(loose)
        del loose, own
        assert ref() is None
    gw.flush()
    assert [record.snapshot.total_norm for record in kept.records[1:]] == pytest.approx(given, rel=1e-5)


def test_the_inside_of_a_model_that_is_deleted_is_watched_on(gw: Any, kept: Kept) -> None:
    """A backbone outlives the model around it with their optimizer: its norms are read, its weights looked at."""
    model: Any = nn.Sequential(made(), nn.Linear(1, 1))
    gw.add([model])
    optimizer = adam(model)
    step(model, optimizer)
    backbone = model[0]
    del model
    given = [step(backbone, optimizer) for _ in range(3)]
    gw.flush()
    assert [record.snapshot.total_norm for record in kept.records[-3:]] == pytest.approx(given, rel=1e-5)
    assert gw.healthy
    with torch.no_grad():
        backbone[0].weight[0] = torch.nan
    assert not gw.healthy


def test_a_parameter_of_two_models_lives_with_either(gw: Any) -> None:
    """It is freed when both are gone, and watched until then."""
    shared = made()
    outer: Any = nn.Sequential(shared, nn.Linear(1, 2))
    other: Any = nn.Sequential(shared, nn.Linear(1, 3))
    gw.add([outer, other])
    refs = refs_of(shared)
    del outer, shared
    step(other, adam(other))
    assert gw.status()["coverage"] == 1.0
    assert alive(refs) == 4
    del other
    assert alive(refs) == 0


def test_optimizers_that_step_inside_backward_hold_no_deleted_model(gw: Any) -> None:
    """Each parameter with an optimizer of its own, stepped by its hook: freed with the model."""
    model: Any = made()
    gw.add([model])
    own: Any = {param: torch.optim.SGD([param], 0.1) for param in model.parameters()}

    def stepped(param: nn.Parameter) -> None:
        own[param].step()
        own[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(stepped)
    for _ in range(3):
        model(torch.randn(4, 3)).square().mean().backward()
    refs = refs_of(model)
    own.clear()
    del model, param
    assert alive(refs) == 0


class Backbone(nn.Module):
    """A frozen part and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = made().requires_grad_(False)
        self.head = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> Any:
        """The head of what the frozen part makes."""
        return self.head(self.frozen(x))


def assign(model: Any) -> None:
    """A checkpoint takes the place of every parameter."""
    trained = [param.requires_grad for param in model.parameters()]
    model.load_state_dict({k: value.clone() for k, value in model.state_dict().items()}, assign=True)
    for param, wants in zip(model.parameters(), trained, strict=True):
        param.requires_grad_(wants)


def put_anew(model: Any) -> None:
    """Other layers take the place of those of the model."""
    model[0], model[2] = nn.Linear(3, 5), nn.Linear(5, 1)


@pytest.mark.parametrize("replace", [assign, put_anew])
def test_what_is_replaced_in_a_model_is_freed_with_its_optimizer(
    gw: Any, kept: Kept, replace: Callable[[nn.Module], None]
) -> None:
    """The optimizer has the old parameters until another takes its place; no backward need run."""
    model, given = made(), []
    gw.add([model])
    for _ in range(3):
        optimizer: Any = adam(model)
        given += [step(model, optimizer) for _ in range(2)]
        refs = refs_of(model)
        replace(model)
        assert alive(refs) == 4
        del optimizer
        assert alive(refs) == 0
    gw.flush()
    assert [record.snapshot.total_norm for record in kept.records[1:]] == pytest.approx(given, rel=1e-5)
    assert {record.snapshot.coverage for record in kept.records} == {1.0}


def test_frozen_weights_that_are_replaced_are_freed_at_once(gw: Any) -> None:
    """No optimizer has them, and none need die for it; those in their place are looked at."""
    model: Any = Backbone()
    gw.add([model])
    optimizer = adam(model.head)
    step(model, optimizer)
    for replace in (assign, lambda frozen: setattr(model, "frozen", made().requires_grad_(False))):
        refs = refs_of(model.frozen)
        replace(model.frozen)
        assert alive(refs) == 0
        step(model, optimizer)
    assert gw.healthy
    model.frozen[0].weight[0] = torch.nan
    assert not gw.healthy


def test_frozen_weights_that_come_back_are_watched(gw: Any) -> None:
    """A layer is taken out of its place and put back, or wrapped by what takes the place."""
    model: Any = Backbone()
    gw.add([model])
    optimizer = adam(model.head)
    step(model, optimizer)
    layer = model.frozen
    model.frozen = nn.Linear(3, 1)
    model.frozen = layer
    model.frozen = nn.Sequential(layer)
    step(model, optimizer)
    assert gw.status()["coverage"] == 1.0
    assert gw.healthy
    layer[0].weight[0] = torch.nan
    assert not gw.healthy
