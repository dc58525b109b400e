"""Models and loops that break other monitors: each makes an `Odd`, whose `step(i)` is one turn of its training."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from tests.test_closures import SharpnessAware
from tests.zoo import Call


@dataclass
class Odd:
    """What is trained: `watched` models, `optimizers` as they stand now, and one turn of the loop."""

    watched: list[nn.Module]
    optimizers: list[Optimizer]
    step: Callable[[int], None] = field(default=lambda number: None)
    kept: list[Any] = field(default_factory=list)  # what the loop holds on to


def data(*shape: int) -> Tensor:
    return torch.randn(*shape)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))


def sgd(*models: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], 0.01, momentum=0.9)


def plain(
    model: nn.Module,
    loss: Callable[[], Tensor],
    optimizer: Optimizer | None = None,
    before: Callable[[Odd, int], None] = lambda odd, number: None,
) -> Odd:
    """The usual loop; `before` runs at the head of every turn and may change anything."""
    odd = Odd([model], [optimizer or sgd(model)])

    def step(number: int) -> None:
        before(odd, number)
        odd.optimizers[0].zero_grad()
        loss().backward()
        odd.optimizers[0].step()

    odd.step = step
    return odd


def in_place_activations() -> Odd:
    model = nn.Sequential(
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 8),
        nn.Hardtanh(-1, 1, True),
        nn.Dropout(0.2, True),
    )
    return plain(model, lambda: model(data(4, 8)).mul_(2).add_(1).pow(2).mean())


def reused_layer() -> Odd:
    model = Call(lambda m, x: m.a(torch.tanh(m.a(torch.tanh(m.a(x))))), a=nn.Linear(8, 8))
    return plain(model, lambda: model(data(4, 8)).pow(2).mean())


def tied_across_models() -> Odd:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    both = Odd([first, second], [torch.optim.SGD([*first.parameters(), second.bias], 0.01)])

    def step(number: int) -> None:
        both.optimizers[0].zero_grad()
        second(torch.tanh(first(data(4, 8)))).pow(2).mean().backward()
        both.optimizers[0].step()

    both.step = step
    return both


def frozen_then_unfrozen_then_frozen() -> Odd:
    model = mlp()
    model[0].requires_grad_(False)

    def before(odd: Odd, number: int) -> None:
        if number in (3, 6):
            model[0].requires_grad_(number == 3)

    return plain(model, lambda: model(data(4, 8)).pow(2).mean(), before=before)


def lazy() -> Odd:
    model = nn.Sequential(nn.LazyLinear(12), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(4))
    model(data(4, 8))
    return plain(model, lambda: model(data(4, 8)).pow(2).mean())


def lazy_at_attach() -> Odd:
    model = nn.Sequential(nn.LazyLinear(12), nn.Tanh(), nn.LazyLinear(4))
    odd = Odd([model], [])

    def step(number: int) -> None:
        loss = model(data(4, 8)).pow(2).mean()
        if not odd.optimizers:
            odd.optimizers.append(sgd(model))
        odd.optimizers[0].zero_grad()
        loss.backward()
        odd.optimizers[0].step()

    odd.step = step
    return odd


def parametrized() -> Odd:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8))
    parametrizations.orthogonal(model[2])
    return plain(model, lambda: model(data(4, 8)).pow(2).mean())


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def parametrized_later() -> Odd:
    model = mlp()

    def before(odd: Odd, number: int) -> None:
        if number == 3:
            parametrize.register_parametrization(model[0], "weight", Double())
        if number == 6:
            parametrize.remove_parametrizations(model[0], "weight")
            odd.optimizers = [sgd(model)]

    return plain(model, lambda: model(data(4, 8)).pow(2).mean(), before=before)


def parameter_list_and_dict() -> Odd:
    model = nn.Module()
    model.many = nn.ParameterList([nn.Parameter(data(8)) for _ in range(3)])
    model.named = nn.ParameterDict({"a b": nn.Parameter(data(8)), "…": nn.Parameter(torch.tensor(0.5))})
    parts = [*model.many, *model.named.values()]
    return plain(model, lambda: sum((p * data(8)).sum().pow(2) for p in parts))  # type: ignore[arg-type, return-value]


def sparse_embedding() -> Odd:
    model = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), 0.01)
    return plain(model, lambda: model(torch.randint(0, 20, (6,))).pow(2).sum(), optimizer)


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


def every_dtype() -> Odd:
    model = nn.Module()
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
    model.many = nn.ParameterList([nn.Parameter(torch.ones(5, dtype=kind)) for kind in kinds])
    model.empty = nn.Parameter(torch.zeros(0, 3))
    model.scalar = nn.Parameter(torch.tensor(0.5))

    def loss() -> Tensor:
        total = model.scalar.pow(2) + model.empty.sum()  # type: ignore[union-attr, operator]
        for param in model.many:  # type: ignore[union-attr]
            total = total + (param * param).abs().double().sum().float()
        return total  # type: ignore[return-value]

    return plain(model, loss, torch.optim.SGD(model.parameters(), 1e-3))


def stride_zero_and_views() -> Odd:
    model = Call(lambda m, x: m.a(x).sum() + m.b.weight.t().sum() + m.b.bias.expand(3, 4).sum(),
                 a=nn.Linear(8, 8), b=nn.Linear(8, 4))  # fmt: skip
    return plain(model, lambda: model(data(4, 8)))


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


class Output(NamedTuple):
    logits: Tensor
    extra: dict[str, list[Tensor]]


def nested_outputs_and_keywords() -> Odd:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, *, x: Tensor, scale: float = 1.0) -> Output:
            return Output(self.layer(x) * scale, {"all": [self.layer(x), x]})

    model = Body()
    return plain(model, lambda: (lambda out: out.logits + out.extra["all"][0])(model(x=data(4, 8))).mean())


def packed_sequences() -> Odd:
    model = nn.LSTM(6, 5, num_layers=2, bidirectional=True)

    def loss() -> Tensor:
        packed = nn.utils.rnn.pack_sequence([data(5, 6), data(3, 6), data(2, 6)])
        out: Tensor = model(packed)[0].data
        return out.pow(2).mean()

    return plain(model, loss, before=lambda odd, number: model.flatten_parameters())


def bare_tensors() -> Odd:
    model = mlp()
    loose = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [loose], "lr": 0.1}], 0.01)
    return plain(model, lambda: (model(data(4, 8)) + loose).pow(2).mean(), optimizer)


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


def traced_by_fx() -> Odd:
    model = torch.fx.symbolic_trace(mlp())
    return plain(model, lambda: model(data(4, 8)).pow(2).mean())


def data_parallel() -> Odd:
    model = nn.DataParallel(mlp())
    return plain(model, lambda: model(data(4, 8)).pow(2).mean())


def saved_tensors_packed() -> Odd:
    model = mlp()

    def loss() -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
            return model(data(4, 8)).pow(2).mean()  # type: ignore[no-any-return]

    return plain(model, loss)


def double_firing_step() -> Odd:
    class Chained(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = mlp()
    return plain(model, lambda: model(data(4, 8)).pow(2).mean(), Chained(model.parameters(), 0.01))


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


ODD: dict[str, Callable[[], Odd]] = {
    make.__name__: make
    for make in (
        in_place_activations, reused_layer, tied_across_models, frozen_then_unfrozen_then_frozen, lazy,
        lazy_at_attach, parametrized, parametrized_later, parameter_list_and_dict, sparse_embedding,
        function_returning_none, gradient_penalty, meta_learning, retained_graph_twice, hessian_from_backward,
        lbfgs, adam_with_closure, sharpness_aware, optimizer_in_backward, gan, one_backward_two_optimizers,
        functional, gradients_by_hand, checkpoint_reentrant, checkpoint_non_reentrant, compiled,
        compiled_wrapper_is_watched, compiled_autograd, compiled_step, adapters_added_later, swapped_tensors,
        assigned_state, replaced_head, materialized_after_attach, averaged, pickled_and_back, every_dtype,
        stride_zero_and_views, users_own_hooks, nested_outputs_and_keywords, packed_sequences, bare_tensors,
        grows_in_forward, anomaly_mode, traced_by_fx, data_parallel, saved_tensors_packed, double_firing_step,
        failing_backward,
    )
}  # fmt: skip
