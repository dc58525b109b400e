"""Where gradients began to be off, by the usual levels of layers; a layer that always multiplies them is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gradwatch
from gradwatch.incidents.explanation import page, sentence
from gradwatch.incidents.suggestions import suggestion_for
from gradwatch.localise.diagnosis.usual_layer_norms import suspect, with_levels
from gradwatch.records.finding import Finding, Layer
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept

RULES = """
version: 1
rules:
  usual: {detect: {kind: spike, above: 1e6}, warmup: 5}
  off: {detect: {kind: above, of: total_norm, threshold: 1e4}, for: 1, do: [localise]}
  gone: {detect: {kind: below, of: total_norm, threshold: 1e-4}, for: 1, do: [localise]}
"""
STEPS, BAD = 12, 10


def layers_of(factors: list[float]) -> tuple[list[Layer], dict[str, float]]:
    """Layers `0`, `1`, … in the order of the forward, whose weights are off by these factors."""
    names = [str(number) for number in range(len(factors))]
    moved = {f"{name}.bias": factor for name, factor in zip(names, factors, strict=True)}
    return [Layer(name, "Linear", 1.0, 1.0) for name in names], moved


@pytest.mark.parametrize(
    ("factors", "module", "at_outputs"),
    [
        ([30, 28, 35, 31], "", True),  # from the loss on
        ([30, 28, 1.2, 0.9], "", False),  # between 1 and 2, whose parent is the model
        ([1.0, 40, 1.1, 0.8], "1", False),  # there alone
        ([1.0, 1.1, 0.8, 50], "3", False),
        ([30, 1.0, 28, 1.0], "", False),  # here and there
    ],
)
def test_factors(factors: list[float], module: str, at_outputs: bool) -> None:
    """Explode and vanish are each other's mirror."""
    for exploding in (True, False):
        layers, moved = layers_of([f if exploding else 1 / f for f in factors])
        found = suspect(layers, exploding, moved)
        assert found is not None
        assert (found.module, found.at_outputs) == (module, at_outputs)
        assert found.begins == ("1" if factors[1:3] == [28, 1.2] else "")
        assert ("from 1 on towards the inputs" in sentence(found)) == bool(found.begins)
        assert found.phase == ("exploding" if exploding else "vanishing")


@pytest.mark.parametrize("exploding", [True, False])
def test_a_branch_that_is_off_is_named_by_the_module_that_has_it(exploding: bool) -> None:
    """Beside a residual stream, which carries the gradient on; none where others lie between, or that is the model."""
    names = ("a.norm", "b.norm", "b.up", "b.down", "c.norm", "head")
    for off, module in (
        (("b.norm", "b.up", "b.down"), "b"),
        (("b.norm", "b.down"), ""),
        (("b.down", "c.norm"), ""),
    ):
        factors = {name: 1e-8 if name in off else 1.2 for name in names}
        moved = {f"{name}.bias": 1 / factor if exploding else factor for name, factor in factors.items()}
        found = suspect([Layer(name, "", 1.0, 1.0) for name in names], exploding, moved)
        assert found is not None
        assert (found.module, found.at_outputs) == (module, False)


@given(st.lists(st.floats(0.51, 1.9), max_size=6), st.booleans())
def test_layers_at_their_level_say_nothing(factors: list[float], exploding: bool) -> None:
    """So does one layer alone, of which nothing else is known."""
    for each in (factors, [100.0]):
        layers, moved = layers_of(each)
        found, without = (suspect(layers, exploding, known) for known in (moved, {}))
        assert (found and found.note) == (without and without.note)


def test_a_bias_speaks_apart_from_what_has_the_inputs_in_it() -> None:
    """Of the others the one that is furthest off; a parameter of a module without a call of its own speaks for none."""
    moved = {"a.weight": 1.1, "a.extra": 0.01, "a.bias": 2.0, "b.weight": 3.0, "c.sub.weight": 9.0}
    layers = with_levels([Layer(name, "", 1.0, 1.0) for name in ("a", "b", "c")], moved)
    assert [layer.weights_moved for layer in layers[:2]] == [0.01, 3.0]
    assert layers[0].moved == 2.0
    assert all(map(math.isnan, (layers[1].moved, layers[2].moved, layers[2].weights_moved)))


def test_weights_alone_do_not_say_where() -> None:
    """Activations that are too large make the gradients of weights large behind them, whatever came from the loss."""
    names = ("0", "1", "2")
    layers = [Layer(name, "Linear", 1.0, 1.0) for name in names]
    found = suspect(layers, exploding=True, moved={f"{name}.weight": 50 for name in names})
    assert found is not None
    assert (found.module, found.at_outputs) == ("", False)
    assert "×50" in found.note
    assert suggested(found) == "place-not-shown"


@pytest.mark.parametrize("exploding", [True, False])
def test_a_head_without_a_level_may_be_the_place(exploding: bool) -> None:
    """The loss side is told only where nothing between the known layers and the outputs explains it."""
    for behind, at_outputs in ((48.0, False), (1.1, True)):
        at_output = behind if exploding else 1 / behind
        layers, moved = layers_of([50, 50] if exploding else [0.02, 0.02])
        layers = [layers[0], replace(layers[1], at_output=at_output), Layer("head", "Linear", 1.0, 1.0)]
        found = suspect(layers, exploding, moved)
        assert found is not None
        assert (found.module, found.at_outputs) == ("", at_outputs)


def test_layers_that_are_not_off_alike_are_not_blamed_on_the_loss() -> None:
    """Activations times fifty make the loss large, and the gradient grow once more on its way."""
    for factors in ([4000, 80], [80, 4000, 80]):
        layers, moved = layers_of(factors)
        for exploding in (True, False):
            known = moved if exploding else {name: 1 / factor for name, factor in moved.items()}
            found = suspect(layers, exploding, known)
            assert found is not None
            assert (found.module, found.at_outputs) == ("", False)


def test_an_everyday_gain_is_no_place_where_no_usual_level_is_known() -> None:
    """A LayerNorm that multiplies by two, or by fifty, does so in a step whose loss is too large as in any other."""
    for gain, module in ((2.0, ""), (50.0, ""), (1e5, "norm")):
        layers = [Layer("norm", "LayerNorm", 1.0, gain), Layer("head", "Linear", 1.0, 1.0)]
        found = suspect(layers, True, {})
        assert found is not None
        assert (found.module, found.at_outputs) == (module, False)
        assert f"{gain:.3g}" in found.note


def suggested(finding: Finding) -> str:
    """The entry of the catalogue that is told with it."""
    suggestion = suggestion_for(finding)
    return "" if suggestion is None else suggestion.id


@dataclass
class Net:
    """A model whose first layer multiplies gradients by fifty at every step, and what a step changes in it."""

    model: nn.Sequential
    scale: list[float]


class Scaled(nn.Module):
    """Multiplies by what stands in a list."""

    def __init__(self, by: list[float]) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by[0]


def net() -> Net:
    torch.manual_seed(0)
    by = [1.0]
    small = nn.Linear(8, 16)
    with torch.no_grad():
        small.weight.mul_(0.02)
        small.bias.mul_(0.02)
    body = nn.Sequential(nn.Linear(16, 16), Scaled(by), nn.Linear(16, 16))
    return Net(nn.Sequential(small, nn.LayerNorm(16), body, nn.Linear(16, 1)), by)


def cause_of(weight: Callable[[bool], float], inside: Callable[[bool], float]) -> Finding:
    """The cause told of a training whose loss, and whose inner layer, are multiplied at its bad step."""
    made, kept = net(), Kept()
    optimizer = torch.optim.SGD(made.model.parameters(), 1e-5)
    with gradwatch.watch(made.model, optimizer, rules=parse_rules(RULES), sinks=[kept]) as gw:
        for step in range(STEPS):
            optimizer.zero_grad()
            made.scale[0] = inside(step == BAD)
            loss = made.model(torch.randn(32, 8)).square().mean()
            (loss * weight(step == BAD)).backward()
            optimizer.step()
        assert gw.health.errors() == {}
    (finding,) = (finding for record in kept.records for finding in record.findings)
    return finding


def one(bad: bool) -> float:
    """Nothing is changed."""
    return 1.0


def test_a_loss_that_is_too_large_is_not_blamed_on_a_layer() -> None:
    """The LayerNorm multiplies gradients by far more than any other layer, then as ever."""
    found = cause_of(lambda bad: 1e6 if bad else 1.0, one)
    assert found.at_outputs
    assert found.module == ""
    assert suggested(found) == "exploding-outputs"
    assert max(found.profile, key=lambda layer: layer.gain if math.isfinite(layer.gain) else 0).module == "1"
    assert "too large already where they reach the model's last layer" in sentence(found)
    assert any("÷ usual" in line for line in page(found))
    assert Finding.from_dict(found.to_dict()).to_dict() == found.to_dict()


def test_a_loss_that_is_too_small_is_not_blamed_on_a_layer() -> None:
    """Vanished alike in all layers."""
    found = cause_of(lambda bad: 1e-8 if bad else 1.0, one)
    assert found.at_outputs
    assert found.phase == "vanishing"
    assert suggested(found) == "vanishing-outputs"


def test_a_layer_that_multiplies_once_is_found() -> None:
    """Between the two layers of `body`, which both have parameters; the loss is divided by what that makes of it."""
    found = cause_of(lambda bad: 1e-5 if bad else 1.0, lambda bad: 1e5 if bad else 1.0)
    assert not found.at_outputs
    assert found.module == "2.1"
    assert suggested(found) == "exploding"
