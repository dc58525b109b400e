"""Twelve small models of different kinds, each with a batch maker that draws from torch's generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Case = tuple[nn.Module, Callable[[], torch.Tensor]]


def floats(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape)


def tokens(vocabulary: int, *shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(0, vocabulary, shape)


class Call(nn.Module):
    """A model whose forward is a function of its parts."""

    def __init__(self, forward: Callable[..., torch.Tensor], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._call = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._call(self, x)


def mlp() -> Case:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), floats(16, 8)


def mlp_dropout() -> Case:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4)), floats(16, 8)


def cnn_batchnorm() -> Case:
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
    return nn.Sequential(body, nn.Linear(8 * 16, 4)), floats(4, 3, 8, 8)


def residual_in_place() -> Case:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        out = model.conv(x)
        out += x
        return model.act(model.norm(out))

    parts = {"conv": nn.Conv2d(4, 4, 3, padding=1), "norm": nn.BatchNorm2d(4), "act": nn.ReLU(inplace=True)}
    return Call(forward, **parts), floats(4, 4, 6, 6)


def channels_last() -> Case:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 1))
    return model.to(memory_format=torch.channels_last), floats(4, 3, 8, 8)


def lstm() -> Case:
    parts = {"rnn": nn.LSTM(6, 8, num_layers=2, dropout=0.2, batch_first=True), "head": nn.Linear(8, 3)}
    return Call(lambda model, x: model.head(model.rnn(x)[0]), **parts), floats(4, 5, 6)


def gru() -> Case:
    parts = {"rnn": nn.GRU(6, 8, batch_first=True), "head": nn.Linear(8, 3)}
    return Call(lambda model, x: model.head(model.rnn(x)[0]), **parts), floats(4, 5, 6)


def transformer() -> Case:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), floats(2, 6, 16)


def attention() -> Case:
    parts = {"attention": nn.MultiheadAttention(8, 2, batch_first=True), "norm": nn.LayerNorm(8)}
    return Call(lambda model, x: model.norm(model.attention(x, x, x)[0]), **parts), floats(2, 5, 8)


def embedding_tied() -> Case:
    model = Call(
        lambda model, x: model.head(model.embed(x)), embed=nn.Embedding(20, 8), head=nn.Linear(8, 20)
    )
    model.head.weight = model.embed.weight
    return model, tokens(20, 4, 6)


def weight_norm() -> Case:
    first = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(8, 4)), floats(8, 8)


def unused_branch() -> Case:
    parts = {"used": nn.Linear(8, 4), "unused": nn.Linear(8, 4)}
    return Call(lambda model, x: model.used(x), **parts), floats(8, 8)


# Every tap that can be had at once: marks, tensor hooks, module hooks, samplers; and rules that act.
EVERY_TAP = """
version: 1
extends: [default]
modules: {tap: output, names: ["*"]}
histograms: {of: [gradients, activations], every: 2}
rules:
  local: {detect: {kind: above, of: norm_local, threshold: 1e9}}
  tap: {detect: {kind: above, of: grad_output_norm, threshold: 1e9}}
  activations: {detect: {kind: above, of: activation_std, threshold: 1e9}}
  inputs: {detect: {kind: above, of: input_std, threshold: 1e9}, every: 3}
  stuck: {detect: {kind: stuck}}
"""

MODELS: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (
        mlp, mlp_dropout, cnn_batchnorm, residual_in_place, channels_last, lstm, gru, transformer, attention,
        embedding_tied, weight_norm, unused_branch,
    )
}  # fmt: skip
