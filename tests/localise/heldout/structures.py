"""Held-out cases: where the fault sits: nested, shared, in another file, in place, checkpointed, hooked, replicated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.localise.heldout import geometry
from tests.localise.heldout.case import T, Watch, batches, case, fit, zero_row


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
