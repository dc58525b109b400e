"""Update ratios of each parameter at each step that was asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradwatch.inspect import UpdateRatios
from gradwatch.taps import step_hooks


def test_ratios_are_those_of_the_weights() -> None:
    """‖Δw‖ / max(‖w‖, 0.1) by hand, every second step, of the parameters of the stepping optimizer alone."""
    torch.manual_seed(0)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    both = nn.ModuleList([model, other])
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected: dict[str, list[tuple[int, float]]] = {"0.weight": [], "0.bias": []}
    with UpdateRatios(both, every=2) as ratios:
        for step in range(5):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            optimizer.zero_grad()
            model(torch.randn(4, 3)).pow(2).sum().backward()
            optimizer.step()
            for name, param in model.named_parameters():
                if step % 2 == 0:
                    size = max(float(before[name].norm()), 0.1)
                    expected[f"0.{name}"].append((step, float((param.detach() - before[name]).norm()) / size))
    found = ratios.of
    assert found.pop("1.weight") == found.pop("1.bias") == []
    for name, pairs in expected.items():
        assert [step for step, _ in found[name]] == [0, 2, 4]
        assert [ratio for _, ratio in found[name]] == pytest.approx([ratio for _, ratio in pairs], rel=1e-5)


def test_no_hook_is_left() -> None:
    """torch's step hooks are what they were, also after an exception in the `with`."""
    before = step_hooks.installed()
    with pytest.raises(KeyError), UpdateRatios(nn.Linear(1, 1)):
        raise KeyError
    assert step_hooks.installed() == before
