"""A training whose modules take and give out odd things; what went through each is kept by torch's own hooks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.support.module_calls import ModuleCalls


class Pair(nn.Module):
    """Gives out a tuple whose first tensor is of whole numbers."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.topk(3)
        return places, values


class Named(nn.Module):
    """Takes a dict, and gives out a dict that begins with a mask."""

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        x = given["x"]
        return {"mask": x > 0, "hidden": torch.relu(x)}


class View(nn.Module):
    """Gives out a strided view of what it gets, which is written to later."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, ::2].t()


class Spectrum(nn.Module):
    """Gives out complex numbers, by keyword only."""

    def forward(self, *, signal: Tensor) -> Tensor:
        return torch.fft.rfft(signal)


class Odd(nn.Module):
    """Every kind of input and output; `sometimes` is called at each fifth step, `empty` gets a batch at even ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.in_place = nn.ReLU(inplace=True)
        self.pair, self.named, self.view, self.spectrum = Pair(), Named(), View(), Spectrum()
        self.shared = nn.Linear(8, 8)
        self.bf16 = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.f64 = nn.Linear(8, 8, dtype=torch.float64)
        self.empty, self.sometimes, self.never = nn.Linear(8, 2), nn.Tanh(), nn.Tanh()
        self.embedding = nn.Embedding(5, 8)
        self.evaluated = nn.Sequential(nn.Sigmoid()).eval()

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.in_place(self.first(x) * 1.0)
        x = self.shared(x)
        x = self.shared(x + self.embedding(torch.tensor([step % 5])))
        places, values = self.pair(x)
        x = self.named({"x": x + places.sum() * 0.0})["hidden"] + x
        seen = self.view(x)
        size = self.spectrum(signal=x).abs().sum()
        x = self.bf16(x.bfloat16()).float() + self.f64(x.double()).float()
        rest = self.empty(x if step % 2 == 0 else x[:0])
        if step % 5 == 0:
            x = self.sometimes(x)
        return (x.sum() + values.sum() + seen.sum() + size + rest.sum() + self.evaluated(x).sum()) * 0.01


def trained(
    steps: int, around: Callable[[nn.Module, torch.optim.Optimizer, Callable[[], None]], None]
) -> tuple[ModuleCalls, list[Tensor]]:
    """What went through the modules, and the weights at the end, of a training that `around` runs.

    What `around` is given is the model, its optimizer and the training.
    """
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    calls = ModuleCalls([model])

    def train() -> None:
        generator = torch.Generator().manual_seed(7)
        for step in range(steps):
            calls.begin()
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=generator), step).backward()
            optimizer.step()

    around(model, optimizer, train)
    return calls, [param.detach() for param in model.parameters()]
