"""Held-out cases: where the fault sits: nested, shared, in another file, in place, checkpointed, hooked, replicated."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.localise.heldout import geometry
from tests.localise.heldout.case import DATA, T, Watch, batches, case, fit, zero_row


@case(module="readout", op="sqrt", where=geometry.lengths)
def helper_in_another_file(watch: Watch) -> None:
    class Readout(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return geometry.lengths(h)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4, bias=False)
            self.readout = Readout()

        def forward(self, x: Tensor) -> Tensor:
            return self.readout(self.fc(x))

    fit(watch, Net(), batches(zero_row))


@case(module="", op="mean", where=geometry.rearrange_and_reduce)
def einops_like_helper(watch: Watch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(6, 4), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(geometry.rearrange_and_reduce(self.fc(x), x[:, 0] > 0))

    def spoil(x: Tensor) -> None:
        x[:, 0] = -1.0

    fit(watch, Net(), batches(spoil))


@case(module="graph", op="div true_divide", where=geometry.scatter_mean)
def scatter_helper_of_a_graph(watch: Watch) -> None:
    class Graph(nn.Module):
        def forward(self, h: Tensor, index: Tensor) -> Tensor:
            return geometry.scatter_mean(h, index, 3)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.graph, self.out = nn.Linear(6, 4), Graph(), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.graph(self.fc(x), torch.arange(8) % (2 if x[2, 0] == 0 else 3)))

    fit(watch, Net(), batches(zero_row))


@case(module="blocks.2.gate", op="log")
def deep_in_a_module_list(watch: Watch) -> None:
    class Gate(nn.Module):
        floor = 1.0

        def forward(self, h: Tensor) -> Tensor:
            positive = h.square() * self.floor
            return torch.log(positive + self.floor)  # FAULT

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.gate = nn.Linear(6, 6), Gate()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gate(self.fc(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    net = Net()

    def schedule(step: int) -> None:
        net.blocks[2].gate.floor = 0.0 if step == T else 1.0

    fit(watch, net, batches(), schedule)


@case(module="1.1", op="sqrt")
def activation_in_nested_sequentials(watch: Watch) -> None:
    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.abs() + 0.1 * (x != 0)

    class Abs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt(x.abs())  # FAULT

    net = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Sequential(Shift(), Abs()), nn.Linear(4, 1))
    fit(watch, net, batches(zero_row))


@case(module="encoder.unit", op="div true_divide")
def shared_encoder_called_twice(watch: Watch) -> None:
    class Unit(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            return v / v.abs().sum(-1, keepdim=True)  # FAULT

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.unit = nn.Linear(3, 4, bias=False), Unit()

        def forward(self, x: Tensor) -> Tensor:
            return self.unit(self.fc(x))

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()

        def forward(self, x: Tensor) -> Tensor:
            left, right = x.chunk(2, -1)
            return (self.encoder(left) * self.encoder(right)).sum(-1)

    def spoil(x: Tensor) -> None:
        x[4, 3:] = 0.0

    fit(watch, Siamese(), batches(spoil))


@case(module="act", op="div_ div true_divide")
def division_in_place(watch: Watch) -> None:
    class Scale(nn.Module):
        def forward(self, h: Tensor, count: Tensor) -> Tensor:
            h = h.clone()
            h.div_(count)  # FAULT
            return h.relu_()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.act, self.out = nn.Linear(6, 4), Scale(), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            count = (x != 0).sum(-1, keepdim=True)
            return self.out(self.act(self.fc(x), count))

    fit(watch, Net(), batches(zero_row))


class Safe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.fc(x)))


@case(module="blocks.1.root", op="sqrt")
def checkpointed_without_reentry(watch: Watch) -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.pow(2).sum(-1, keepdim=True).sqrt() * x  # FAULT

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.root = nn.Linear(6, 6, bias=False), Root()

        def forward(self, x: Tensor) -> Tensor:
            return self.root(self.fc(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Safe(), Block()])
            self.out = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            alive = (x != 0).any(-1, keepdim=True).float()
            x = checkpoint(self.blocks[0], x, use_reentrant=False) * alive
            x = checkpoint(self.blocks[1], x, use_reentrant=False)
            return self.out(x)

    fit(watch, Net(), batches(zero_row))


@case(module="blocks.1", op="log")
def checkpointed_with_reentry(watch: Watch) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.log(self.fc(x).square())  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Safe(), Block()])
            self.out = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            alive = (x != 0).any(-1, keepdim=True).float()
            x = self.blocks[0](x) * alive
            x = checkpoint(self.blocks[1], x, use_reentrant=True)
            return self.out(x)

    fit(watch, Net(), batches(zero_row))


@case(module="log", op="SafeLog SafeLogBackward div true_divide")
def custom_function_with_a_bad_backward(watch: Watch) -> None:
    class SafeLog(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clamp(min=1e-6).log()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grads[0] / x  # FAULT

    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return SafeLog.apply(x)  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.log, self.out = nn.Linear(6, 4, bias=False), Log(), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.log(self.fc(x).abs()))

    fit(watch, Net(), batches(zero_row))


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


@contextmanager
def one_rank() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


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
