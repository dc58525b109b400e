"""Held-out cases: numbers beyond their type, Inf before NaN, norms that overflow, gains that explode or fade."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.localise.heldout.case import T, Watch, batches, case, fit

CALM = 200  # steps before a gain goes wrong: baselines want to be learned first


@case(module="wide", op="linear addmm mm matmul")
def autocast_to_float16_overflows(watch: Watch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.wide, self.out = nn.Linear(6, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 1)
            nn.init.constant_(self.wide.weight, 50.0)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.fc(x)) + 1
            h = self.wide(h)  # FAULT
            return self.out(h.float() / 1e4)

    def spoil(x: Tensor) -> None:
        x[1] = 3000.0
        x[2] = -3000.0

    model = Net()
    nn.init.constant_(model.fc.weight, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    watch(model, optimizer)
    for _, x in batches(spoil):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()


@case(module="small", op="to half _to_copy type")
def cast_to_half_overflows(watch: Watch) -> None:
    class Half(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            small = h.to(torch.float16)  # FAULT
            return small.float() * 2

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.small = nn.Linear(6, 4), Half()

        def forward(self, x: Tensor) -> Tensor:
            return self.small(self.fc(x))

    def spoil(x: Tensor) -> None:
        x.mul_(1e6)

    fit(watch, Net(), batches(spoil))


@case(module="act", op="exp")
def exp_in_bfloat16(watch: Watch) -> None:
    class Act(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h.exp().log1p()  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.act = nn.Linear(6, 4), Act()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.fc(x.bfloat16())).float()

    def spoil(x: Tensor) -> None:
        x.mul_(1000)

    fit(watch, Net().to(torch.bfloat16), batches(spoil))


@case(module="", op="pow square mul")
def squares_in_float16(watch: Watch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x).half()
            power = h.pow(2)  # FAULT
            return power.float().mean(-1)

    def spoil(x: Tensor) -> None:
        x.mul_(2000)

    fit(watch, Net(), batches(spoil))


@case(module="bilinear", op="einsum bmm mm matmul")
def einsum_overflows(watch: Watch) -> None:
    class Bilinear(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.einsum("bi,bj->bij", a, b)  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.bilinear = nn.Linear(6, 3), nn.Linear(6, 3), Bilinear()

        def forward(self, x: Tensor) -> Tensor:
            return self.bilinear(self.left(x), self.right(x))

    def spoil(x: Tensor) -> None:
        x.mul_(1e25)

    fit(watch, Net(), batches(spoil))


@case(module="amplify", op="mul")
def product_of_large_scales(watch: Watch) -> None:
    class Amplify(nn.Module):
        scale = 1.0

        def forward(self, h: Tensor) -> Tensor:
            h = h * self.scale
            return h * self.scale  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.amplify = nn.Linear(6, 4), Amplify()

        def forward(self, x: Tensor) -> Tensor:
            return self.amplify(self.fc(x))

    net = Net()

    def schedule(step: int) -> None:
        net.amplify.scale = 1e30 if step == T else 1.0

    fit(watch, net, batches(), schedule)


@case(module="reverse", op="Reverse ReverseBackward mul")
def gradient_reversal_blows_up(watch: Watch) -> None:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
            ctx.strength = strength
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            return -ctx.strength * grads[0], None  # FAULT

    class Adversary(nn.Module):
        strength = 0.1

        def forward(self, h: Tensor) -> Tensor:
            return Reverse.apply(h, self.strength)  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.reverse, self.out = nn.Linear(6, 4), Adversary(), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.reverse(self.fc(x)))

    net = Net()

    def schedule(step: int) -> None:
        net.reverse.strength = 1e300 if step == T else 0.1

    fit(watch, net, batches(), schedule)


class Gain(nn.Module):
    factor = 1.0

    def forward(self, h: Tensor) -> Tensor:
        return h * self.factor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gain = nn.Linear(6, 6), Gain()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x)) * 0.5 + self.gain(x)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@case(module=("blocks.3.gain", "blocks.3"), symptom="exploding")
def one_block_with_a_gain_of_a_million(watch: Watch) -> None:
    net = Deep()

    def schedule(step: int) -> None:
        net.blocks[3].gain.factor = 1e6 if step == CALM else 1.0

    fit(watch, net, batches(steps=CALM + 3), schedule)


@case(module=("blocks.3.gain", "blocks.3"), symptom="overflow")
def one_block_whose_gain_overflows_the_norm(watch: Watch) -> None:
    net = Deep()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    watch(net, optimizer)
    for step, x in batches(steps=CALM + 3):
        net.blocks[3].gain.factor = 1e32 if step == CALM else 1.0
        optimizer.zero_grad()
        net(x).mean().backward()  # linear in the output, so that its own gradient stays small
        optimizer.step()


class Stack(nn.Module):
    """Tanh layers of equal width, each before a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Gain()) for _ in range(5))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@case(module=("blocks.2", "blocks.2.2"), symptom="vanishing")
def one_block_that_fades(watch: Watch) -> None:
    net = Stack()

    def schedule(step: int) -> None:
        net.blocks[2][2].factor = 1e-4 if step >= CALM else 1.0

    fit(watch, net, batches(steps=CALM + 120), schedule)
