"""Models of unusual make: in-place, tied, lazy, parametrized, sparse, nested, of every dtype."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.odd_models.odd import Odd, data, mlp, plain, sgd
from tests.support.zoo import Call


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


def data_parallel() -> Odd:
    model = nn.DataParallel(mlp())
    return plain(model, lambda: model(data(4, 8)).pow(2).mean())


def traced_by_fx() -> Odd:
    model = torch.fx.symbolic_trace(mlp())
    return plain(model, lambda: model(data(4, 8)).pow(2).mean())
