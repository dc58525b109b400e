"""0 · inf is a product, and is reported as one: no division is suspected where there is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.incidents.explanation import page, sentence
from gradwatch.incidents.suggestions import suggestion_for
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept

RULES = "version: 1\nrules: {r: {detect: {kind: nonfinite}, do: [skip_step, localise]}}\n"


class Logits(nn.Module):
    """Three logits a row."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Finite ones."""
        out: Tensor = self.leave(torch.tanh(self.enter(x)))
        return out


class MaskedByProduct(Logits):
    """Logits that a mask has made -inf, times the mask."""

    def forward(self, x: Tensor) -> Tensor:
        """NaN where the mask is 0."""
        mask = (x[:, :3] > 0).float()
        product = super().forward(x).masked_fill(mask == 0, -torch.inf) * mask  # fault
        return product.sum(-1)


class WeightedByNothing(Logits):
    """A weight of 0 for a value that is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        """NaN in the first column."""
        logits, weight = super().forward(x), torch.tensor([0.0, 1.0, 1.0])
        infinite = torch.tensor([torch.inf, 0.0, 0.0])
        return (logits + infinite).mul(weight)  # fault


class SummedByMatrix(Logits):
    """A matrix product that holds 0 · inf."""

    def forward(self, x: Tensor) -> Tensor:
        """NaN everywhere."""
        logits = super().forward(x).masked_fill(x[:, :3] > 0, torch.inf)
        return logits @ torch.tensor([[0.0], [1.0], [1.0]])  # fault


@pytest.mark.parametrize("model", [MaskedByProduct, WeightedByNothing, SummedByMatrix])
def test_a_product_is_suspected(model: type[Logits], tmp_path: Path) -> None:
    """The finding names the line of the product, and neither its sentence, page nor suggestion a division."""
    torch.manual_seed(0)
    net, sink = model(), Kept()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    rules = parse_rules(RULES)
    with gradwatch.watch(net, optimizer, rules=rules, sinks=[sink], run_dir=tmp_path, strict=True):
        net(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
    finding = sink.records[0].findings[0]
    assert finding.op in ("mul", "matmul", "mm")
    assert finding.frames[0].source.endswith("# fault")
    told = [sentence(finding), *page(finding), str(suggestion_for(finding))]
    assert not re.search(r"\bdiv|quotient|0/0", "\n".join(told)), told
