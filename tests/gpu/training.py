"""Trainings on a GPU in the ways people write them: mixed precision, compiled, captured, fused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tests.benchmarks.workloads import GPT, Batch

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 1e-2, momentum=0.9),
    "sgd-fused": lambda params: torch.optim.SGD(params, 1e-2, momentum=0.9, fused=True),
    "adam": lambda params: torch.optim.Adam(params, 1e-3),
    "adamw-fused": lambda params: torch.optim.AdamW(params, 1e-3, fused=True),
    "adamw-capturable": lambda params: torch.optim.AdamW(params, 1e-3, capturable=True),
}


class LSTM(nn.Module):
    """Two layers of cuDNN's LSTM and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(16, 32, 2, dropout=0.2, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rnn(x)[0][:, -1])
        return logits


def cnn() -> nn.Module:
    """Two convolutions with batch norm and dropout, channels last."""
    return nn.Sequential(
        *(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        ),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 10)),
    ).to(memory_format=torch.channels_last)


def mlp() -> nn.Module:
    """Three layers."""
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))


def _of(*shape: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(32, *shape, device="cuda"), torch.randint(0, 10, (32,), device="cuda"))


def _text() -> Batch:
    tokens = torch.randint(0, 64, (8, 33), device="cuda")
    return tokens[:, :-1], tokens[:, 1:].flatten()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "mlp": (mlp, _of(16)),
    "cnn": (cnn, _of(3, 16, 16)),
    "lstm": (LSTM, _of(12, 16)),
    "gpt": (lambda: GPT(64, 32, 2, 2, 32), _text),
}


@dataclass
class Training:
    """One training on a GPU: `precision` is fp32, bf16 (autocast) or fp16 (autocast and a GradScaler).

    `micro` backwards a step; `compiled` runs the model through torch.compile; `max_norm` clips as torch does, None does
    not. `factor[step]` multiplies the loss of that step.
    """

    model_name: str = "mlp"
    optimizer_name: str = "adamw-fused"
    precision: str = "fp32"
    micro: int = 1
    compiled: bool = False
    max_norm: float | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        make, self.batch = MODELS[self.model_name]
        self.model = make().cuda()
        self.optimizer = OPTIMIZERS[self.optimizer_name](self.model.parameters())
        self.called = torch.compile(self.model) if self.compiled else self.model
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.precision == "fp16", init_scale=1024.0)
        self.losses: list[Tensor] = []

    def step(self, factor: float = 1.0) -> None:
        """One step, of which torch waits for nothing that is not asked for."""
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float16
        self.optimizer.zero_grad()
        for _ in range(self.micro):
            x, y = self.batch()
            with torch.autocast("cuda", dtype, enabled=self.precision != "fp32"):
                loss = functional.cross_entropy(self.called(x), y) * factor
            self.scaler.scale(loss).backward()
            self.losses.append(loss.detach())
        if self.max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def gradients(self) -> dict[str, Tensor]:
        """The gradients by name, as they are now, copied."""
        named = self.model.named_parameters()
        return {name: param.grad.clone() for name, param in named if param.grad is not None}

    def weights(self) -> list[Tensor]:
        """Copies of the weights."""
        return [param.detach().clone() for param in self.model.parameters()]
