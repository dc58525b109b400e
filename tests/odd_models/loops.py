"""Optimizers of unusual make: closures, several at once, steps inside backward or inside a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.actions.test_closures import SharpnessAware
from tests.odd_models.odd import Odd, data, mlp, plain, sgd


def closures(make: Callable[[Iterable[nn.Parameter]], Optimizer]) -> Odd:
    model, odd = mlp(), Odd([], [])
    odd.watched, odd.optimizers = [model], [make(model.parameters())]

    def step(number: int) -> None:
        x = data(4, 8)

        def closure() -> Tensor:
            odd.optimizers[0].zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        odd.optimizers[0].step(closure)  # type: ignore[arg-type]

    odd.step = step
    return odd


def lbfgs() -> Odd:
    return closures(lambda params: torch.optim.LBFGS(params, 0.1, max_iter=3))


def adam_with_closure() -> Odd:
    return closures(lambda params: torch.optim.Adam(params, 0.01))


def sharpness_aware() -> Odd:
    return closures(SharpnessAware)


def optimizer_in_backward() -> Odd:
    model = mlp()
    odd = Odd([model], [torch.optim.Adam([param], 0.01) for param in model.parameters()])
    for param, own in zip(model.parameters(), odd.optimizers, strict=True):

        def at_once(_: Tensor, own: Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        odd.kept.append(param.register_post_accumulate_grad_hook(at_once))
    odd.step = lambda number: model(data(4, 8)).pow(2).mean().backward()
    return odd


def gan() -> Odd:
    maker, critic = mlp(), nn.Linear(4, 1)
    odd = Odd([maker, critic], [sgd(maker), sgd(critic)])

    def step(number: int) -> None:
        for _ in range(2):
            odd.optimizers[1].zero_grad()
            (critic(data(4, 4)) - critic(maker(data(4, 8)).detach())).mean().backward()
            odd.optimizers[1].step()
        odd.optimizers[0].zero_grad()
        critic(maker(data(4, 8))).mean().backward()
        odd.optimizers[0].step()

    odd.step = step
    return odd


def one_backward_two_optimizers() -> Odd:
    model = mlp()
    odd = Odd([model], [sgd(model[0]), torch.optim.Adam(model[2].parameters(), 0.01)])

    def step(number: int) -> None:
        model.zero_grad()
        model(data(4, 8)).pow(2).mean().backward()
        for optimizer in odd.optimizers[: 1 + number % 2]:
            optimizer.step()

    odd.step = step
    return odd


def double_firing_step() -> Odd:
    class Chained(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = mlp()
    return plain(model, lambda: model(data(4, 8)).pow(2).mean(), Chained(model.parameters(), 0.01))
