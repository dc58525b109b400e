"""Models that change while they are trained: adapters, swapped, replaced and copied parameters."""

from __future__ import annotations

import copy
import io

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.odd_models.odd import Odd, data, mlp, plain, sgd


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


def adapters_added_later() -> Odd:
    model = mlp()

    def before(odd: Odd, number: int) -> None:
        if number == 3:
            model[0] = Adapted(model[0])  # type: ignore[arg-type]
            wanted = [p for p in model[0].parameters() if p.requires_grad]
            odd.optimizers[0].add_param_group({"params": wanted})

    return plain(model, lambda: model(data(4, 8)).pow(2).mean(), before=before)


def swapped_tensors() -> Odd:
    model = mlp()

    def before(odd: Odd, number: int) -> None:
        if number == 3:
            odd.optimizers[0].zero_grad()
            torch.__future__.set_swap_module_params_on_conversion(True)
            model.to(torch.float64).to(torch.float32)
            torch.__future__.set_swap_module_params_on_conversion(False)

    return plain(model, lambda: model(data(4, 8)).pow(2).mean(), before=before)


def assigned_state() -> Odd:
    model = mlp()

    def before(odd: Odd, number: int) -> None:
        if number == 3:
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
            odd.optimizers = [sgd(model)]

    return plain(model, lambda: model(data(4, 8)).pow(2).mean(), before=before)


def replaced_head() -> Odd:
    model = mlp()

    def before(odd: Odd, number: int) -> None:
        if number == 3:
            model[2] = nn.Linear(12, 2)
            odd.optimizers = [sgd(model)]
        if number == 5:
            del odd.optimizers[0].state[model[0].weight]  # type: ignore[arg-type]
            model[0].weight = nn.Parameter(model[0].weight.detach() * 0.5)  # type: ignore[union-attr, operator]
            odd.optimizers[0].param_groups[0]["params"] = list(model.parameters())

    return plain(model, lambda: model(data(4, 8)).pow(2).mean(), before=before)


def materialized_after_attach() -> Odd:
    model = mlp().to("meta")

    def before(odd: Odd, number: int) -> None:
        if number == 0:
            model.to_empty(device="cpu")
            for param in model.parameters():
                nn.init.normal_(param, std=0.1)
            odd.optimizers = [sgd(model)]

    return plain(model, lambda: model(data(4, 8)).pow(2).mean(), before=before)


def averaged() -> Odd:
    model = mlp()
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    target = copy.deepcopy(model)

    def before(odd: Odd, number: int) -> None:
        mean.update_parameters(model)
        mean(data(2, 8))
        if number == 4:
            target.load_state_dict(copy.deepcopy(model).state_dict())

    return plain(
        model, lambda: (model(data(4, 8)) - target(data(4, 8)).detach()).pow(2).mean(), before=before
    )


def pickled_and_back() -> Odd:
    model = mlp()

    def before(odd: Odd, number: int) -> None:
        buffer = io.BytesIO()
        torch.save((model, odd.optimizers[0].state_dict()), buffer)
        buffer.seek(0)
        twin, state = torch.load(buffer, weights_only=False)
        model.load_state_dict(twin.state_dict())
        odd.optimizers[0].load_state_dict(state)
        twin(data(4, 8)).sum().backward()

    return plain(model, lambda: model(data(4, 8)).pow(2).mean(), before=before)


def grows_in_forward() -> Odd:
    """A module that gives itself a new parameter while it runs."""
    model = nn.ModuleList([nn.Linear(8, 8)])
    odd = Odd([model], [sgd(model)])

    def step(number: int) -> None:
        if number in (2, 4):
            model.append(nn.Linear(8, 8))
            odd.optimizers[0].add_param_group({"params": list(model[-1].parameters())})
        x = data(4, 8)
        for layer in model:
            x = torch.tanh(layer(x))
        odd.optimizers[0].zero_grad()
        x.pow(2).mean().backward()
        odd.optimizers[0].step()

    odd.step = step
    return odd
