"""Backwards of unusual make: custom functions, double backward, checkpointing, compiling, hooks, failures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tests.odd_models.odd import Odd, data, mlp, plain
from tests.support.zoo import Call


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * 2, None


def function_returning_none() -> Odd:
    model = Call(lambda m, x: NoGradient.apply(m.a(x), m.b.weight), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    return plain(model, lambda: model(data(4, 8)).pow(2).mean())


def gradient_penalty() -> Odd:
    model = mlp()

    def loss() -> Tensor:
        x = data(4, 8).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).pow(2).mean() + model(x).mean()

    return plain(model, loss)


def meta_learning() -> Odd:
    """MAML: an inner step that is differentiated through."""
    model = mlp()

    def loss() -> Tensor:
        inner = model(data(4, 8)).pow(2).mean()
        grads = torch.autograd.grad(inner, list(model.parameters()), create_graph=True)
        pairs = zip(model.named_parameters(), grads, strict=True)
        moved = {name: param - 0.1 * grad for (name, param), grad in pairs}
        out: Tensor = functional_call(model, moved, (data(4, 8),))
        return out.pow(2).mean()

    return plain(model, loss)


def retained_graph_twice() -> Odd:
    model = mlp()
    odd = plain(model, lambda: model(data(4, 8)).pow(2).mean())

    def step(number: int) -> None:
        odd.optimizers[0].zero_grad()
        loss = model(data(4, 8)).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        odd.optimizers[0].step()

    odd.step = step
    return odd


def hessian_from_backward() -> Odd:
    """`backward(create_graph=True)`: gradients that themselves want gradients."""
    model = mlp()
    odd = plain(model, lambda: model(data(4, 8)).pow(2).mean())

    def step(number: int) -> None:
        odd.optimizers[0].zero_grad()
        model(data(4, 8)).pow(3).mean().backward(create_graph=True)
        odd.optimizers[0].step()

    odd.step = step
    return odd


def functional() -> Odd:
    model = mlp()
    return plain(model, lambda: functional_call(model, dict(model.named_parameters()), (data(4, 8),)).mean())


def gradients_by_hand() -> Odd:
    """torch.func.grad gives gradients, the loop puts them into `.grad`: no backward is ever seen."""
    model = mlp()
    odd = plain(model, lambda: data(1).sum())

    def step(number: int) -> None:
        x = data(4, 8)
        of = {name: param.detach() for name, param in model.named_parameters()}
        grads = torch.func.grad(lambda params: functional_call(model, params, (x,)).pow(2).mean())(of)
        for name, param in model.named_parameters():
            param.grad = grads[name]
        odd.optimizers[0].step()

    odd.step = step
    return odd


def checkpointed(reentrant: bool) -> Odd:
    model = Call(
        lambda m, x: checkpoint(m.shared, checkpoint(m.body, m.shared(x), use_reentrant=reentrant),
                                use_reentrant=reentrant),
        shared=nn.Linear(8, 8), body=nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh()),
    )  # fmt: skip
    return plain(model, lambda: model(data(4, 8).requires_grad_()).pow(2).mean())


def checkpoint_reentrant() -> Odd:
    return checkpointed(True)


def checkpoint_non_reentrant() -> Odd:
    return checkpointed(False)


def compiled() -> Odd:
    model = mlp()
    run = torch.compile(model, backend="aot_eager")
    return plain(model, lambda: run(data(4, 8)).pow(2).mean())


def compiled_wrapper_is_watched() -> Odd:
    run = torch.compile(mlp(), backend="aot_eager")
    return plain(run, lambda: run(data(4, 8)).pow(2).mean())


def compiled_autograd() -> Odd:
    model = mlp()
    odd = plain(model, lambda: data(1).sum())

    def step(number: int) -> None:
        odd.optimizers[0].zero_grad()
        loss = model(data(4, 8)).pow(2).mean()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
            loss.backward()
        odd.optimizers[0].step()

    odd.step = step
    return odd


def compiled_step() -> Odd:
    model = mlp()
    odd = plain(model, lambda: data(1).sum())
    take = torch.compile(lambda: odd.optimizers[0].step(), backend="eager")

    def step(number: int) -> None:
        odd.optimizers[0].zero_grad()
        model(data(4, 8)).pow(2).mean().backward()
        take()

    odd.step = step
    return odd


def doubled(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(2)


def users_own_hooks() -> Odd:
    model = mlp()
    odd = plain(model, lambda: model(data(4, 8)).pow(2).mean())
    odd.kept = [
        model[0].weight.register_hook(lambda grad: grad * 0.5),
        model[2].weight.register_post_accumulate_grad_hook(doubled),
        model[2].register_full_backward_hook(lambda module, inputs, outputs: None),
        model.register_forward_hook(lambda module, inputs, output: output * 1.5),
    ]
    return odd


def anomaly_mode() -> Odd:
    model = mlp()
    odd = plain(model, lambda: model(data(4, 8)).pow(2).mean())
    inner = odd.step

    def step(number: int) -> None:
        with torch.autograd.detect_anomaly(check_nan=True):
            inner(number)
        with torch.inference_mode():
            model(data(2, 8))

    odd.step = step
    return odd


def saved_tensors_packed() -> Odd:
    model = mlp()

    def loss() -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
            return model(data(4, 8)).pow(2).mean()  # type: ignore[no-any-return]

    return plain(model, loss)


def failing_backward() -> Odd:
    model = mlp()
    odd = plain(model, lambda: model(data(4, 8)).pow(2).mean())
    inner = odd.step

    def step(number: int) -> None:
        if number % 3 == 1:
            handle = model[0].bias.register_hook(lambda grad: 1 / 0)
            try:
                model(data(4, 8)).sum().backward()
            except ZeroDivisionError:
                handle.remove()
        inner(number)

    odd.step = step
    return odd
