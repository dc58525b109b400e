"""Models that change while they are trained: converted, adapters, swapped, replaced and copied parameters."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.situations.training import LEARNED, YOUNG, Training, changing, data, net, plain, sgd, square, turns


class Adapted(nn.Module):
    """LoRA: a frozen layer and a low-rank change of it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.up(self.down(x))
        return out


def adapters_added() -> Training:
    model = net()

    def change(training: Training, number: int) -> None:
        if number in (YOUNG, LEARNED):
            place = 0 if number == YOUNG else 2
            model[place] = adapted = Adapted(model[place])  # type: ignore[arg-type]
            wanted = [*adapted.down.parameters(), *adapted.up.parameters()]
            training.optimizers[0].add_param_group({"params": wanted})

    return plain(model, change=change)


@contextmanager
def conversion(how: Callable[[bool], None]) -> Iterator[None]:
    """`.to()` as one of torch's future switches has it."""
    how(True)
    try:
        yield
    finally:
        how(False)


@changing
def through_half(model: nn.Sequential, training: Training) -> None:
    model.half().float()


@changing
def data_assigned(model: nn.Sequential, training: Training) -> None:
    for param in model.parameters():
        param.data = param.data.clone() * 0.9


@changing
def state_assigned(model: nn.Sequential, training: Training) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    training.optimizers = [sgd(model)]


@changing
def parameter_replaced(model: nn.Sequential, training: Training) -> None:
    model[4].weight = nn.Parameter(model[4].weight.detach().clone())  # type: ignore[union-attr, operator]
    training.optimizers = [sgd(model)]


@changing
def emptied(model: nn.Sequential, training: Training) -> None:
    state = copy.deepcopy(model.state_dict())
    model.to_empty(device=torch.get_default_device())
    model.load_state_dict(state)
    training.optimizers = [sgd(model)]


@changing
def overwritten(model: nn.Sequential, training: Training) -> None:
    with conversion(torch.__future__.set_overwrite_module_params_on_conversion):
        model.to(torch.bfloat16).to(torch.float32)
    training.optimizers = [sgd(model)]


@changing
def swapped(model: nn.Sequential, training: Training) -> None:
    training.optimizers[0].zero_grad()
    with conversion(torch.__future__.set_swap_module_params_on_conversion):
        model.to(torch.float64).to(torch.float32)


@changing
def copied(model: nn.Sequential, training: Training) -> None:
    """Copies and pickles train on their own; nothing of them is counted."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        other = sgd(twin)
        twin(data()).sum().backward()
        other.step()


def replaced_in_place() -> Training:
    """Another head with a new optimizer, then a parameter replaced in the groups of the optimizer that there is."""
    model = net()

    def change(training: Training, number: int) -> None:
        if number == YOUNG:
            model[-2] = nn.Linear(6, 2)
            model[-1] = nn.Identity()
            training.optimizers = [sgd(model)]
        if number in (YOUNG + 2, LEARNED):
            optimizer = training.optimizers[0]
            del optimizer.state[model[0].weight]  # type: ignore[arg-type]
            model[0].weight = nn.Parameter(model[0].weight.detach() * 0.5)  # type: ignore[union-attr, operator]
            optimizer.param_groups[0]["params"] = list(model.parameters())

    return plain(model, change=change)


def materialized_after_attach() -> Training:
    model = net().to("meta")

    def change(training: Training, number: int) -> None:
        if number == 0:
            model.to_empty(device=torch.get_default_device())
            for param in model.parameters():
                nn.init.normal_(param, std=0.1)
            training.optimizers = [sgd(model)]

    return plain(model, change=change)


def averaged() -> Training:
    model = net()
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    target = copy.deepcopy(model)

    def change(training: Training, number: int) -> None:
        mean.update_parameters(model)
        mean(data())
        if number == 4:
            target.load_state_dict(copy.deepcopy(model).state_dict())

    return plain(model, lambda: square(model(data()) - target(data()).detach()), change=change)


def pickled_and_back() -> Training:
    model = net()

    def change(training: Training, number: int) -> None:
        buffer = io.BytesIO()
        torch.save((model, training.optimizers[0].state_dict()), buffer)
        buffer.seek(0)
        twin, state = torch.load(buffer, weights_only=False)
        model.load_state_dict(twin.state_dict())
        training.optimizers[0].load_state_dict(state)
        twin(data()).sum().backward()

    return plain(model, change=change)


def grows_in_forward() -> Training:
    """A module that gives itself a new parameter while it runs."""
    model = nn.ModuleList([nn.Linear(6, 6)])

    def turn(training: Training, number: int) -> None:
        if number in (2, 4, LEARNED):
            model.append(nn.Linear(6, 6))
            training.optimizers[0].add_param_group({"params": list(model[-1].parameters())})
        x = data()
        for layer in model:
            x = torch.tanh(layer(x))
        training.loop.backward(square(x))
        training.loop.step(training.optimizers[0])

    return turns(model, turn)
