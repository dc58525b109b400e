"""Held-out cases: elementwise operations outside their domain, or at the edge of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.localise.heldout.case import T, Watch, batches, case, fit, zero_row


@case(module="head", op="sqrt")
def sqrt_at_zero(watch: Watch) -> None:
    class Distance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(6, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.proj(x)
            d = h.pow(2).sum(-1)
            return d.sqrt()  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 6, bias=False)
            self.head = Distance()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    fit(watch, Net(), batches(zero_row))


@case(module="", op="log")
def log_of_zero(watch: Watch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            rate = self.fc(x).square()
            return torch.log(rate)  # FAULT

    fit(watch, Net(), batches(zero_row))


@case(module="gate", op="log")
def where_trap(watch: Watch) -> None:
    class Gate(nn.Module):
        def forward(self, h: Tensor, on: Tensor) -> Tensor:
            h = functional.softplus(h) * on
            zero = torch.zeros_like(h)
            return torch.where(h > 0, torch.log(h), zero)  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)
            self.gate = Gate()
            self.out = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            on = (x.abs().sum(-1, keepdim=True) > 0).float()
            return self.out(self.gate(self.fc(x), on))

    fit(watch, Net(), batches(zero_row))


@case(module="unit", op="div true_divide")
def unit_vector_of_zero(watch: Watch) -> None:
    class Unit(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            length = v.norm(dim=-1, keepdim=True)
            return v / length  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4, bias=False)
            self.unit = Unit()

        def forward(self, x: Tensor) -> Tensor:
            return self.unit(self.fc(x))

    fit(watch, Net(), batches(zero_row))


@case(module="polar", op="div true_divide")
def slope_of_the_origin(watch: Watch) -> None:
    class Polar(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            re, im = h.chunk(2, dim=-1)
            phase = torch.atan(im / re)  # FAULT
            return torch.cat([phase, re * im], -1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4, bias=False)
            self.polar = Polar()

        def forward(self, x: Tensor) -> Tensor:
            return self.polar(self.fc(x))

    fit(watch, Net(), batches(zero_row))


@case(module="angle", op="acos arccos")
def acos_of_one(watch: Watch) -> None:
    class Angle(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            cosine = torch.clamp(a, -1.0, 1.0)
            return cosine.acos()  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4)
            self.angle = Angle()

        def forward(self, x: Tensor) -> Tensor:
            scale = 0.9 if x.abs().max() < 100 else 1.0
            return self.angle(torch.tanh(self.fc(x)) * scale)

    def spoil(x: Tensor) -> None:
        x[0] = 1e4

    fit(watch, Net(), batches(spoil))


@case(module="root", op="pow")
def fractional_power_of_zero(watch: Watch) -> None:
    class Root(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h.abs() ** 0.4  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4, bias=False)
            self.root = Root()

        def forward(self, x: Tensor) -> Tensor:
            return self.root(self.fc(x))

    fit(watch, Net(), batches(zero_row))


@case(module="", op="exp")
def exp_overflow(watch: Watch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mu, self.logvar = nn.Linear(6, 2), nn.Linear(6, 2)
            self.decode = nn.Linear(2, 6)

        def forward(self, x: Tensor) -> Tensor:
            std = torch.exp(0.5 * self.logvar(x))  # FAULT
            z = self.mu(x) + std * torch.randn_like(std)
            return self.decode(z)

    def spoil(x: Tensor) -> None:
        x.mul_(3000)

    fit(watch, Net(), batches(spoil))


@case(module="norm", op="rsqrt")
def rms_norm_without_eps(watch: Watch) -> None:
    class RMSNorm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x: Tensor) -> Tensor:
            mean_square = x.pow(2).mean(-1, keepdim=True)
            return x * torch.rsqrt(mean_square) * self.weight  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4, bias=False)
            self.norm = RMSNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.fc(x))

    fit(watch, Net(), batches(zero_row))


@case(module="sharpen", op="div true_divide")
def temperature_annealed_to_zero(watch: Watch) -> None:
    class Sharpen(nn.Module):
        temperature = 1.0

        def forward(self, h: Tensor) -> Tensor:
            scaled = h / self.temperature  # FAULT
            return scaled.softmax(-1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4)
            self.sharpen = Sharpen()

        def forward(self, x: Tensor) -> Tensor:
            return self.sharpen(self.fc(x))

    net = Net()

    def anneal(step: int) -> None:
        net.sharpen.temperature = 0.0 if step == T else 1.0 - 0.1 * step

    fit(watch, net, batches(), anneal)


@case(module="actor.squash", op="log")
def saturated_tanh_of_a_policy(watch: Watch) -> None:
    class Squash(nn.Module):
        def forward(self, u: Tensor) -> Tensor:
            a = torch.tanh(u)
            log_det = torch.log(1 - a.pow(2))  # FAULT
            return a.sum(-1) - log_det.sum(-1)

    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)
            self.squash = Squash()

        def forward(self, x: Tensor) -> Tensor:
            return self.squash(self.fc(x))

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor = Actor()

        def forward(self, x: Tensor) -> Tensor:
            return self.actor(x)

    def spoil(x: Tensor) -> None:
        x[1] = 500.0

    fit(watch, Agent(), batches(spoil))


@case(module="", op="log")
def entropy_of_a_certain_choice(watch: Watch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            p = functional.softmax(self.fc(x), dim=-1)
            return -(p * p.log()).sum(-1)  # FAULT

    def spoil(x: Tensor) -> None:
        x[3] *= 1e4

    fit(watch, Net(), batches(spoil))


@case(module="", op="hypot")
def hypot_of_zeros(watch: Watch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.u, self.v = nn.Linear(6, 3, bias=False), nn.Linear(6, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.hypot(self.u(x), self.v(x))  # FAULT

    fit(watch, Net(), batches(zero_row))


@case(module="", op="cumprod")
def cumulative_product_overflows(watch: Watch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            survival = 1 + 0.01 * self.fc(x).square()
            return torch.cumprod(survival, dim=-1)  # FAULT

    def spoil(x: Tensor) -> None:
        x.mul_(1e8)

    fit(watch, Net(), batches(spoil))


@case(module="attend", op="sub")
def inf_minus_inf(watch: Watch) -> None:
    class Attend(nn.Module):
        def forward(self, scores: Tensor, hidden: Tensor) -> Tensor:
            scores = scores.masked_fill(hidden, float("-inf"))
            top = scores.max(dim=-1, keepdim=True).values
            shifted = scores - top  # FAULT
            weights = shifted.exp()
            return weights / weights.sum(-1, keepdim=True)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 5)
            self.attend = Attend()
            self.out = nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.zeros(len(x), 5, dtype=torch.bool)
            hidden[:, 4] = True  # padding, quite all right
            hidden |= (x == 0).all(-1, keepdim=True)
            return self.out(self.attend(self.fc(x), hidden))

    fit(watch, Net(), batches(zero_row))


@case(module="mix", op="mul")
def inf_times_zero(watch: Watch) -> None:
    class Mix(nn.Module):
        def forward(self, scores: Tensor, keep: Tensor) -> Tensor:
            scores = scores.masked_fill(keep == 0, float("-inf"))
            masked = scores * keep  # FAULT
            return masked.exp()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 5)
            self.mix = Mix()
            self.out = nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.mix(self.fc(x), (x.abs().sum(-1, keepdim=True) > 0).float()))

    fit(watch, Net(), batches(zero_row))


@case(module="sample", op="log")
def gumbel_noise_of_one(watch: Watch) -> None:
    class Gumbel(nn.Module):
        def forward(self, logits: Tensor, u: Tensor) -> Tensor:
            inner = -torch.log(u)
            noise = -torch.log(inner)  # FAULT
            return (logits + noise).softmax(-1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)
            self.sample = Gumbel()

        def forward(self, x: Tensor) -> Tensor:
            return self.sample(self.fc(x), torch.sigmoid(x))

    def spoil(x: Tensor) -> None:
        x[2, 3] = 200.0

    fit(watch, Net(), batches(spoil))
