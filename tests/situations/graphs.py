"""Backwards of unusual make: custom functions, double backward, checkpointing, compiling, hooks, failures."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tests.situations.training import LEARNED, YOUNG, Training, data, net, plain, square, turns
from tests.support.zoo import Call

INDUCTOR = "inductor" if shutil.which("g++") else "aot_eager"


def accumulated(set_to_none: bool) -> Callable[[], Training]:
    def make() -> Training:
        model = net()

        def turn(training: Training, number: int) -> None:
            training.optimizers[0].zero_grad(set_to_none=set_to_none)
            for _ in range(3):
                training.loop.backward(square(model(data())))
            training.loop.step(training.optimizers[0])

        return turns(model, turn)

    return make


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * 2, None


def function_returning_none() -> Training:
    return plain(
        Call(lambda m, x: NoGradient.apply(m.body(x), m.other.weight), body=net(), other=nn.Linear(6, 6))
    )


def gradient_penalty() -> Training:
    model = net()

    def loss() -> Tensor:
        x = data().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).pow(2).sum() + model(x).sum()

    return plain(model, loss)


def meta_learning() -> Training:
    """MAML: an inner step that is differentiated through."""
    model = net(4)

    def loss() -> Tensor:
        inner = square(model(data()))
        grads = torch.autograd.grad(inner, list(model.parameters()), create_graph=True)
        pairs = zip(model.named_parameters(), grads, strict=True)
        moved = {name: param - 0.1 * grad for (name, param), grad in pairs}
        return square(functional_call(model, moved, (data(),)))

    return plain(model, loss)


def retained_graph_twice() -> Training:
    model = net()

    def turn(training: Training, number: int) -> None:
        loss = square(model(data()))
        training.loop.backward(loss, retain_graph=True)
        training.loop.backward(loss)
        training.loop.step(training.optimizers[0])

    return turns(model, turn)


def graph_of_the_backward() -> Training:
    """`backward(create_graph=True)`: gradients that themselves want gradients."""
    model = net()

    def turn(training: Training, number: int) -> None:
        training.loop.backward(model(data()).pow(3).sum(), create_graph=True)
        training.loop.step(training.optimizers[0])

    return turns(model, turn)


def functional() -> Training:
    model = net()
    return plain(model, lambda: square(functional_call(model, dict(model.named_parameters()), (data(),))))


def transforms_beside() -> Training:
    """torch.func.grad and autograd.grad (batched too) are no backward of this step: nothing of them is counted."""
    model = net()

    def loss() -> Tensor:
        x = data().requires_grad_()
        of = dict(model.named_parameters())
        torch.func.grad(lambda params: functional_call(model, params, (x,)).sum())(of)
        torch.autograd.grad(model(x)[0], list(model.parameters()), torch.eye(6), is_grads_batched=True)
        return square(model(x))

    return plain(model, loss)


def manual_gradients() -> Training:
    """torch.func.grad gives gradients, the loop puts them into `.grad`: no backward is ever seen."""
    model = net(2)

    def turn(training: Training, number: int) -> None:
        x = data()
        of = {name: param.detach() for name, param in model.named_parameters()}
        grads = torch.func.grad(lambda params: square(functional_call(model, params, (x,))))(of)
        for name, param in model.named_parameters():
            param.grad = grads[name]
        training.loop.noted({name: float(grad.double().norm()) for name, grad in grads.items()})
        training.optimizers[0].step()

    return turns(model, turn)


def checkpointed(reentrant: bool) -> Callable[[], Training]:
    def make() -> Training:
        model = Call(
            lambda m, x: checkpoint(m.shared, checkpoint(m.body, m.shared(x), use_reentrant=reentrant),
                                    use_reentrant=reentrant),
            shared=nn.Linear(6, 6), body=nn.Sequential(*net(), nn.Dropout(0.3)),
        )  # fmt: skip
        return plain(model, lambda: square(model(data().requires_grad_())))

    return make


def compiled(backend: str, whole: bool = True) -> Callable[[], Training]:
    def make() -> Training:
        model = net()
        fast = torch.compile(model, backend=backend, fullgraph=whole)
        return plain(model, lambda: square(fast(data())))

    return make


def compiled_wrapper_is_watched() -> Training:
    return plain(torch.compile(net(4), backend="aot_eager"))  # type: ignore[arg-type]


def attached_after_compiling() -> Training:
    model = net()
    fast = torch.compile(model, backend="aot_eager")
    fast(data()).sum().backward()
    model.zero_grad()
    return plain(model, lambda: square(fast(data())))


def compiled_autograd(clip: bool) -> Callable[[], Training]:
    def make() -> Training:
        model = net(2)  # every backward is traced anew: a minute with a large one

        def turn(training: Training, number: int) -> None:
            loss = square(model(data()))
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
                training.loop.backward(loss)
            training.loop.step(training.optimizers[0], clip)

        return turns(model, turn)

    return make


def compiled_step() -> Training:
    model = net(2)  # the update of each parameter is traced
    training = turns(model, lambda training, number: turn())
    take = torch.compile(lambda: training.optimizers[0].step(), backend="eager")

    def turn() -> None:
        training.loop.backward(square(model(data())))
        training.loop.clip(training.optimizers[0])
        training.loop.note(training.optimizers[0])
        take()

    return training


def doubled(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(2)


def users_own_hooks() -> Training:
    model = net(2)
    training = plain(model, clip=False)
    training.kept = [
        model[0].weight.register_hook(lambda grad: grad * 0.5),
        model[2].weight.register_post_accumulate_grad_hook(doubled),
        model[2].register_full_backward_hook(lambda module, inputs, outputs: None),
        model.register_forward_hook(lambda module, inputs, output: output * 1.5),
    ]
    return training


def anomaly_mode() -> Training:
    model = net()
    training = plain(model)
    inner = training.step

    def step(number: int) -> None:
        with torch.autograd.detect_anomaly(check_nan=True):
            inner(number)
        with torch.inference_mode():
            model(data())

    training.step = step
    return training


def saved_tensors_packed() -> Training:
    model = net()

    def loss() -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
            return square(model(data()))

    return plain(model, loss)


def autocast() -> Training:
    model = net()

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return square(model(data()).float())

    return plain(model, loss)


def failing_backward() -> Training:
    """A backward that raises, retried, while the loop is young and when it is learned."""
    model = net()

    def change(training: Training, number: int) -> None:
        if number in (1, YOUNG, 4, LEARNED):
            handle = model[6].weight.register_hook(lambda grad: 1 / 0)  # type: ignore[union-attr, operator]
            try:
                model(data()).sum().backward()
            except ZeroDivisionError:
                handle.remove()

    return plain(model, change=change)
