"""Models of unusual make: in-place, tied, lazy, parametrized, sparse, nested, of every dtype."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.situations.training import LEARNED, YOUNG, Training, data, net, plain, sgd, square, turns
from tests.support.zoo import MODELS, Call


def of_zoo(name: str) -> Training:
    model, batch = MODELS[name]()
    return plain(model, lambda: model(batch()).pow(2).mean(), torch.optim.AdamW(model.parameters(), 1e-3))


def in_place_activations() -> Training:
    model = nn.Sequential(
        *(*net(8), nn.Linear(6, 6), nn.ReLU(inplace=True)),
        *(nn.Linear(6, 6), nn.Hardtanh(-1, 1, True), nn.Dropout(0.2, True)),
    )
    return plain(model, lambda: square(model(data()).mul_(2).add_(1)))


def in_place_outputs() -> Training:
    def forward(m: Any, x: Tensor) -> Tensor:
        out = m.body(x)
        out += x
        return m.act(out).add(1).mul_(2)  # type: ignore[no-any-return]

    return plain(Call(forward, body=net()[:-1], act=nn.ReLU(inplace=True)))


def reused_layer() -> Training:
    return plain(Call(lambda m, x: m.a(torch.tanh(m.a(torch.tanh(m.a(x))))), a=nn.Linear(6, 6)))


def tied_and_reused() -> Training:
    model = Call(lambda m, x: m.head(m.body(m.body(m.embed(x)))), embed=nn.Embedding(9, 6), body=net(),
                 head=nn.Linear(6, 9, bias=False))  # fmt: skip
    model.head.weight = model.embed.weight
    return plain(model, lambda: square(model(torch.randint(0, 9, (4,)))))


def tied_across_models() -> Training:
    first, second = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6))
    second[0].weight = first.weight
    optimizer = torch.optim.SGD([*first.parameters(), second[0].bias], 0.01)

    def turn(training: Training, number: int) -> None:
        training.loop.backward(square(second(torch.tanh(first(data())))))
        training.loop.step(optimizer)

    both = turns(first, turn, optimizer)
    both.models = [first, second]
    return both


def frozen_and_unfrozen() -> Training:
    model = net()
    model[2].requires_grad_(False)

    def change(training: Training, number: int) -> None:
        if number in (YOUNG, 6, LEARNED):
            model[2].requires_grad_(number != 6)

    return plain(model, change=change)


def unused() -> Training:
    return plain(Call(lambda m, x: m.used(x), used=net(), unused=nn.Linear(6, 6)))


def lazy() -> Training:
    model = nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), *net(), nn.LazyLinear(4))
    model(data())
    return plain(model)


def lazy_at_attach() -> Training:
    model = nn.Sequential(nn.LazyLinear(6), *net(), nn.LazyLinear(4))
    training = Training([model], [])

    def step(number: int) -> None:
        loss = square(model(data()))
        if not training.optimizers:
            training.optimizers.append(sgd(model))
        training.optimizers[0].zero_grad()
        training.loop.backward(loss)
        training.loop.step(training.optimizers[0])

    training.step = step
    return training


def parametrized() -> Training:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 6))
    parametrizations.orthogonal(model[2])
    return plain(model)


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def parametrized_later() -> Training:
    model = net()

    def change(training: Training, number: int) -> None:
        if number in (YOUNG, LEARNED):
            parametrize.register_parametrization(model[0], "weight", Double())
        if number in (6, LEARNED + 2):
            parametrize.remove_parametrizations(model[0], "weight")
            training.optimizers = [sgd(model)]

    return plain(model, change=change)


def parameter_list_and_dict() -> Training:
    model = nn.Module()
    model.many = nn.ParameterList([nn.Parameter(data(8)) for _ in range(3)])
    model.named = nn.ParameterDict({"a b": nn.Parameter(data(8)), "…": nn.Parameter(torch.tensor(0.5))})
    parts = [*model.many, *model.named.values()]
    return plain(model, lambda: sum((p * data(8)).sum().pow(2) for p in parts))  # type: ignore[arg-type, return-value]


def sparse_embedding() -> Training:
    model = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), 0.01)
    return plain(model, lambda: square(model(torch.randint(0, 20, (6,)))), optimizer, clip=False)


def sparse_among_dense() -> Training:
    model = Call(lambda m, x: m.body(m.embed(x)), embed=nn.Embedding(9, 6, sparse=True), body=net())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return plain(model, lambda: square(model(torch.randint(0, 9, (6,)))), optimizer, clip=False)


def of_dtype(dtype: torch.dtype) -> Training:
    model = net().to(dtype)
    return plain(model, lambda: square(model(data().to(dtype)).float()))


def complex_parameters() -> Training:
    model = nn.ParameterList([nn.Parameter(torch.randn(5, dtype=torch.complex64)) for _ in range(34)])
    return plain(model, lambda: sum((p * data(5)).abs().sum() for p in model))  # type: ignore[arg-type, return-value]


def every_dtype() -> Training:
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

    return plain(model, loss, torch.optim.SGD(model.parameters(), 1e-3), clip=False)


def stride_zero_and_views() -> Training:
    model = Call(lambda m, x: m.a(x).sum() + m.b.weight.t().sum() + m.b.bias.expand(3, 4).sum(),
                 a=nn.Linear(6, 6), b=nn.Linear(6, 4))  # fmt: skip
    return plain(model, lambda: model(data()))


class Output(NamedTuple):
    logits: Tensor
    extra: dict[str, list[Tensor]]


class Nested(nn.Module):
    """Nested outputs, keyword-only inputs, a ModuleList, and `.forward()` called directly."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([net(9), net(9)])

    def forward(self, *, x: Tensor, scale: float = 1.0) -> Output:
        outs = [part.forward(x) for part in self.parts]
        return Output(outs[0] * scale, {"all": [*outs, x]})


def nested_outputs_and_keywords() -> Training:
    model = Nested()
    return plain(model, lambda: square((lambda out: out.logits + sum(out.extra["all"]))(model(x=data()))))


def packed_sequences() -> Training:
    model = nn.LSTM(6, 5, num_layers=2, bidirectional=True)

    def loss() -> Tensor:
        packed = nn.utils.rnn.pack_sequence([data(5, 6), data(3, 6), data(2, 6)])
        return square(model(packed)[0].data)

    return plain(model, loss, change=lambda training, number: model.flatten_parameters())


def recurrent_and_attention() -> Training:
    model = Call(lambda m, x: m.attend(*[m.rnn(m.body(x))[0]] * 3)[0], body=net(), rnn=nn.LSTM(6, 6, 2),
                 attend=nn.MultiheadAttention(6, 2))  # fmt: skip
    return plain(model, lambda: square(model(data(3, 2, 6))))


def bare_tensors() -> Training:
    model = net(2)
    loose = torch.zeros(6, requires_grad=True)
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [loose], "lr": 0.1}], 0.01)
    return plain(model, lambda: square(model(data()) + loose), optimizer)


def data_parallel() -> Training:
    model = net()
    around = nn.DataParallel(model)
    return plain(model, lambda: square(around(data())))


def data_parallel_is_watched() -> Training:
    return plain(nn.DataParallel(net()))


def traced_by_fx() -> Training:
    return plain(torch.fx.symbolic_trace(net()))
