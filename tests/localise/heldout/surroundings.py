"""Held-out cases: what comes in, what is kept between steps, and what stands around the model."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

from tests.localise.heldout.case import DATA, T, Watch, batches, case, fit, zero_row
from tests.support.one_rank import one_rank


@case(module="embed", op="embedding")
def embedding_with_a_nan_row(watch: Watch) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.rnn = nn.GRU(4, 5, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            h, _ = self.rnn(self.embed(tokens))  # FAULT
            return h

    model = Tagger()
    with torch.no_grad():
        model.embed.weight[9] = float("nan")  # a token whose pretrained vector was never written
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for step, x in batches():
        tokens = (x.abs() * 3).long().clamp(max=8)
        if step == T:
            tokens[1, 2] = 9
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@case(module=DATA)
def nan_in_the_batch(watch: Watch) -> None:
    def spoil(x: Tensor) -> None:
        x[3, 1] = float("nan")

    fit(watch, nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 1)), batches(spoil))


@case(module=DATA)
def infinite_pixel_in_the_batch(watch: Watch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.bn, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.bn(self.stem(x))).mean((2, 3)))

    def spoil(x: Tensor) -> None:
        x[0, 0, 3, 3] = float("inf")

    fit(watch, Net(), batches(spoil, shape=(4, 1, 8, 8)))


@case(module="cell", op="exp")
def cell_of_a_hand_written_rnn(watch: Watch) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.rec = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            gate = torch.exp(self.inp(x) + self.rec(h))  # FAULT
            return gate / (1 + gate)

    class Rnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Cell()

        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros(len(x), 4)
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
            return h

    def spoil(x: Tensor) -> None:
        x[2, 1:] = 1000.0

    fit(watch, Rnn(), batches(spoil, shape=(8, 4, 3)))


@case(module="body", op="div true_divide")
def forward_hook_of_the_user(watch: Watch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 4, bias=False), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    def normalise(module: nn.Module, args: object, output: Tensor) -> Tensor:
        largest = output.abs().amax(-1, keepdim=True)
        return output / largest  # FAULT

    net = Net()
    net.body.register_forward_hook(normalise)
    fit(watch, net, batches(zero_row))


@case(
    module=("fc", "fc.parametrizations.weight", "fc.parametrizations.weight.0"),
    op="weight_norm _weight_norm _weight_norm_interface div",
)
def weight_norm_of_a_zero_row(watch: Watch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = parametrizations.weight_norm(nn.Linear(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)  # FAULT

    net = Net()

    def prune(step: int) -> None:
        if step == T:
            with torch.no_grad():
                net.fc.parametrizations.weight.original1[1] = 0.0

    fit(watch, net, batches(), prune)


@case(module="window", op="div true_divide")
def buffer_counted_down_in_forward(watch: Watch) -> None:
    class Window(nn.Module):
        left: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("left", torch.tensor(float(T + 1)))

        def forward(self, h: Tensor) -> Tensor:
            self.left -= 1
            return h / self.left  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.window = nn.Linear(6, 4), Window()

        def forward(self, x: Tensor) -> Tensor:
            return self.window(self.fc(x))

    fit(watch, Net(), batches())


@case(module="risky", op="sqrt")
def stochastic_depth_by_python_random(watch: Watch) -> None:
    class Risky(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h + h.square().sum(-1, keepdim=True).sqrt()  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.risky = nn.Linear(6, 4, bias=False), Risky()

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return self.risky(h) if random.random() < 0.4 else h

    def spoil(x: Tensor) -> None:
        zero_row(x)

    random.seed(11)
    spoilt = ((step, x) for step, x in batches(steps=24))

    def later() -> Iterator[tuple[int, Tensor]]:
        for step, x in spoilt:
            if step >= T:
                spoil(x)
            yield step, x

    fit(watch, Net(), later())


@case(module="inner.head", op="log")
def functional_call_of_the_model(watch: Watch) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).square().log()  # FAULT

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = Head()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for _, x in batches(zero_row):
        optimizer.zero_grad()
        out = functional_call(model, dict(model.named_parameters()), (x,))
        out.sum().backward()
        optimizer.step()


@case(module="norm", op="div true_divide")
def ddp_of_one_rank(watch: Watch) -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.pow(2).sum(-1, keepdim=True)  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(6, 4, bias=False), Norm()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.fc(x))

    with one_rank():
        fit(watch, DistributedDataParallel(Net()), batches(zero_row))
