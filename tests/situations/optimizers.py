"""Optimizers of unusual make: closures, several at once, scalers, steps inside backward or inside a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.actions.test_lbfgs_and_sam import SharpnessAware
from tests.situations.training import Training, data, net, plain, sgd, square, turns


def closures(make: Callable[[Iterable[nn.Parameter]], Optimizer]) -> Callable[[], Training]:
    """`step(closure)`; the Snapshot of a step is its first gradient's."""

    def situation() -> Training:
        model = net()

        def turn(training: Training, number: int) -> None:
            x, first, optimizer = data(), [True], training.optimizers[0]

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = square(model(x))
                training.loop.backward(loss)
                if first.pop() if first else False:
                    training.loop.note(optimizer)
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
            training.loop.discard()

        return turns(model, turn, make(model.parameters()))

    return situation


SGD = closures(lambda params: torch.optim.SGD(params, lr=0.01))
ADAM = closures(lambda params: torch.optim.Adam(params, 0.01))
LBFGS = closures(lambda params: torch.optim.LBFGS(params, lr=0.01, max_iter=5))
SAM = closures(SharpnessAware)


def in_backward(early: bool) -> Callable[[], Training]:
    """One optimizer a parameter, stepping in a hook that stands before (`early`) or behind those of the watch."""

    def make() -> Training:
        model = net()
        own = {name: torch.optim.Adam([param], 0.01) for name, param in model.named_parameters()}
        training, seen = Training([model], list(own.values()) if early else []), dict[str, float]()

        def at_once(name: str) -> Callable[[Tensor], None]:
            def step(param: Tensor) -> None:
                assert param.grad is not None
                seen[name] = float(param.grad.double().norm())
                own[name].step()
                own[name].zero_grad()

            return step

        def hook() -> None:
            for name, param in model.named_parameters():
                training.kept.append(param.register_post_accumulate_grad_hook(at_once(name)))

        def turn(number: int) -> None:
            if not training.kept:
                hook()
            square(model(data())).backward()
            training.loop.noted(seen)

        if early:
            hook()
        training.step = turn
        return training

    return make


def gan() -> Training:
    """Two optimizers; the critic's tensor hooks hear the generator's backward, too."""
    maker, critic = net(), nn.Sequential(nn.Linear(6, 1))
    of_maker, of_critic = sgd(maker), sgd(critic)
    training = Training([maker, Critic(critic)], [of_maker, of_critic])

    def step(number: int) -> None:
        loop = training.loop
        for _ in range(2):
            of_critic.zero_grad()
            loop.backward(square(critic(maker(data()).detach())))
            loop.step(of_critic)
        of_maker.zero_grad()
        of_critic.zero_grad()
        loop.backward(critic(maker(data())).sum())
        loop.step(of_maker)
        of_critic.zero_grad()
        loop.discard(local=False)

    training.step = step
    return training


class Critic(nn.Module):
    """A model of another name than the generator's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


def one_backward_two_optimizers() -> Training:
    model = net(2)
    training = Training([model], [sgd(model[0]), torch.optim.Adam(model[2].parameters(), 0.01)])

    def step(number: int) -> None:
        model.zero_grad()
        training.loop.backward(square(model(data())))
        for optimizer in training.optimizers[: 1 + number % 2]:
            training.loop.step(optimizer)
        training.loop.discard()

    training.step = step
    return training


def double_firing_step() -> Training:
    class Chained(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = net()
    return plain(model, optimizer=Chained(model.parameters(), 0.01))


def scaled(fused: bool, overflow: int = -1) -> Callable[[], Training]:
    """A GradScaler: the scale is not in the norms, and a rejected step is no step."""

    def make() -> Training:
        model = net()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

        def turn(training: Training, number: int) -> None:
            loop, optimizer = training.loop, training.optimizers[0]
            loss = square(model(data())) * (float("inf") if number == overflow else 1.0)
            loop.scale = scaler.get_scale() if number else 1024.0
            loop.backward(scaler.scale(loss))
            if number == overflow:
                loop.discard()
            else:
                scaler.unscale_(optimizer)
                loop.clip(optimizer)
                loop.note(optimizer)
            scaler.step(optimizer)
            scaler.update()

        return turns(model, turn, torch.optim.AdamW(model.parameters(), 1e-3, fused=fused))

    return make
