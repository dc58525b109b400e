"""Pictures: what is drawn is what was measured, and nothing is drawn of nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gradwatch.errors import GradwatchError
from gradwatch.inspect import (
    ActivationStats,
    UpdateRatios,
    activation_histograms,
    activation_lines,
    gradient_flow,
    update_ratios,
)

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Sigmoid(), nn.Linear(5, 2))


def test_histograms_and_lines_of_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One image a module whose columns are log(1 + counts), and three panels with a line a module; no pyplot."""
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # another test's
    model = net()
    with ActivationStats(model, with_hist=True) as stats:
        for _ in range(6):
            model(X)
    figure = activation_histograms(stats)
    assert [axis.get_title() for axis in figure.axes] == ["0 · Linear", "1 · Sigmoid", "2 · Linear"]
    image = np.asarray(figure.axes[1].images[0].get_array())
    histogram = stats.of["1"][4].histogram
    assert histogram is not None
    assert image.shape == (40, 6)
    assert image[:, 4].tolist() == np.log1p(histogram).tolist()
    figure.savefig(tmp_path / "a.png")
    lines = activation_lines(stats)
    assert lines.axes[1].lines[0].get_ydata().tolist() == [one.std for one in stats.of["0"]]
    lines.savefig(tmp_path / "b.png")
    assert "matplotlib.pyplot" not in sys.modules


def test_gradient_flow_tells_absent_zero_and_nonfinite_apart(tmp_path: Path) -> None:
    """Only finite, non-zero gradients are points; the others have a word each in their place."""
    gradients = {
        "a": torch.ones(3),
        "b": None,
        "c": torch.tensor([1.0, float("nan")]),
        "d": torch.zeros(2),
    }
    axis = gradient_flow(gradients).axes[0]
    words = {text.get_text(): text.get_position()[0] for text in axis.texts}
    assert words == {"no gradient": 1, "not finite": 2, "all zero": 3}
    assert np.isnan(axis.lines[0].get_ydata()).tolist() == [False, True, True, True]
    model = net()
    model(X).sum().backward()
    means = gradient_flow(model).axes[0].lines[1].get_ydata().tolist()
    expected = [float(param.grad.abs().mean()) for param in model.parameters() if param.grad is not None]
    assert means == pytest.approx(expected)


def test_update_ratios_of_matrices() -> None:
    """A line of log10 ratios for each matrix, and the line at 1e-3."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with UpdateRatios(model) as ratios:
        for _ in range(3):
            optimizer.zero_grad()
            model(X).pow(2).sum().backward()
            optimizer.step()
    axis = update_ratios(ratios, matrices_only=True).axes[0]
    drawn = {line.get_label(): line for line in axis.lines}
    assert {"0.weight", "2.weight"} < set(drawn)
    assert "0.bias" not in drawn
    logs = drawn["0.weight"].get_ydata().tolist()
    assert logs == pytest.approx([np.log10(ratio) for _, ratio in ratios.of["0.weight"]])


def test_nothing_is_drawn_of_nothing() -> None:
    """Each picture without data is refused by a sentence that says what is missing."""
    model = net()
    with pytest.warns(RuntimeWarning, match="nothing was seen"), ActivationStats(model) as stats:
        pass
    ratios = UpdateRatios(model)
    ratios.remove()
    with pytest.raises(GradwatchError, match="with_hist=True"):
        activation_histograms(stats)
    with pytest.raises(GradwatchError, match="no module was called"):
        activation_lines(stats)
    with pytest.raises(GradwatchError, match="took a step"):
        update_ratios(ratios)
    with pytest.raises(GradwatchError, match="no parameter"):
        gradient_flow(nn.ReLU())
