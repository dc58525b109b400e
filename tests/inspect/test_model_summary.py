"""Sizes, counts and the table of a model's layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwatch.inspect import layer_info, model_sizes, module_summary, total_params
from gradwatch.taps import module_calls


class Net(nn.Module):
    """A shared weight, a frozen layer, a module that is not called, dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4 * 64, 10)
        self.tied = nn.Linear(4 * 64, 10, bias=False)
        self.tied.weight = self.head.weight
        self.spare = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.drop(self.norm(self.conv(x))).flatten(1)
        return self.head(y), self.tied(y)


X = torch.randn(2, 1, 8, 8)


def state(model: nn.Module) -> list[Any]:
    return [
        *(tensor.clone() for tensor in model.state_dict().values()),
        *(torch.tensor(module.training) for module in model.modules()),
        torch.get_rng_state(),
    ]


def test_shared_and_frozen_parameters_are_counted_once() -> None:
    """`total_params` counts a shared weight once, and frozen and lazy ones apart."""
    model = nn.ModuleList([Net(), nn.LazyLinear(3)])
    count = total_params(model)
    own = sum(param.numel() for param in Net().parameters())
    assert (count.total, count.frozen, count.trainable, count.uninitialized) == (own, 6, own - 6, 2)
    assert count.bytes == 4 * own


def test_sizes_of_every_output() -> None:
    """Shapes by name as a forward makes them, also of several outputs; empty where a module is not called."""
    sizes = model_sizes(Net(), X)
    assert sizes["conv"] == ((2, 4, 8, 8),)
    assert sizes["spare"] == ()
    assert model_sizes(Net(), X, names="h*") == {"head": ((2, 10),)}


@pytest.mark.filterwarnings("error")
def test_nothing_of_the_model_is_changed() -> None:
    """Modes, weights, running statistics, random state and hooks are what they were."""
    model = Net()
    model.norm.eval()
    before = state(model)
    module_summary(model, X)
    model_sizes(model, X)
    assert all(torch.equal(a, b) for a, b in zip(before, state(model), strict=True))
    assert not any(map(module_calls.noticed, model.modules()))
    with pytest.raises(RuntimeError):
        module_summary(model, X[0, 0])
    assert all(torch.equal(a, b) for a, b in zip(before, state(model), strict=True))
    assert not any(map(module_calls.noticed, model.modules()))


def test_layers_and_flops() -> None:
    """Parameters of each module's own, and torch's count of multiplications and additions."""
    layers = {one.name: one for one in layer_info(Net(), X)}
    assert layers["conv"].flops == 2 * (2 * 64) * 4 * 9
    assert layers["head"].flops == layers["tied"].flops == 2 * 2 * 256 * 10
    assert (layers["head"].params, layers["tied"].params) == (2570, 0)
    assert (layers["spare"].params, layers["spare"].trainable, layers["spare"].output) == (6, 0, ())
    assert layers["Net"].flops is None
    assert layers["Net"].output == ((2, 10), (2, 10))
    assert sum(one.params for one in layers.values()) == total_params(Net()).total


def test_a_part_that_is_named_like_the_model() -> None:
    """Both have a line of their own."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.Twice = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.Twice(x)

    assert [(one.kind, one.flops) for one in layer_info(Twice(), torch.ones(2, 3))] == [
        ("Twice", None),
        ("Linear", 36),
    ]


def test_the_table_as_text_and_html() -> None:
    """The text names every layer and the totals; the HTML escapes what a name may hold."""
    model = nn.Sequential()
    model.add_module("<b>", nn.Linear(3, 2))
    summary = module_summary(copy.deepcopy(model), torch.randn(5, 3))
    text = str(summary)
    assert "<b>" in text
    assert "5×2" in text
    assert "8 parameters (8 trainable, 0 frozen)" in text
    html = summary._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
