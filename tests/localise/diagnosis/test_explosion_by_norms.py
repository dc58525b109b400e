"""Where gradients began to be off, by the norms of one step: faults put into one place of real trainings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gradwatch
from gradwatch.incidents.explanation import page, sentence
from gradwatch.incidents.suggestions import suggestion_for
from gradwatch.localise.diagnosis.explosion_by_norms import of_norms
from gradwatch.records.finding import Finding
from gradwatch.rules.files import parse_rules
from tests.localise.diagnosis.test_multiplying_operation import Scaled
from tests.support.kept import Kept

RULES = """
version: 1
rules:
  usual: {detect: {kind: spike, of: norm, above: 1e6}, warmup: 20}
  rise: {detect: {kind: spike, of: total_norm, above: 1e6, factor: 2, window: 50}}
  fall: {detect: {kind: below_recent_min, of: total_norm, above: 2, window: 50}, for: 1, warmup: 20}
  spike: {detect: {kind: spike, of: norm, above: 1e6, factor: 10, window: 50}}
  gone: {detect: {kind: below_recent_min, of: norm, above: 30, window: 50}, for: 1, warmup: 20}
"""
BAD = 70


def named(factors: Mapping[str, tuple[float, float]]) -> tuple[list[str], dict[str, float]]:
    """Parameters of layers in the order of the forward, and the factors by which weights and biases are off."""
    both = [(f"{name}.weight", weight) for name, (weight, _) in factors.items()]
    both += [(f"{name}.bias", bias) for name, (_, bias) in factors.items()]
    return sorted(name for name, _ in both), dict(both)


@given(st.lists(st.tuples(st.floats(0.51, 1.9), st.floats(0.51, 1.9)), max_size=6), st.booleans())
def test_layers_at_their_level_say_nothing(factors: list[tuple[float, float]], exploding: bool) -> None:
    """Whatever their number."""
    assert of_norms(*named({f"l{k}": one for k, one in enumerate(factors)}), exploding) is None


@given(
    st.floats(20, 1e6),
    st.integers(2, 6).flatmap(lambda count: st.tuples(st.just(count), st.integers(0, count - 1))),
    st.booleans(),
)
def test_what_is_off_from_a_layer_on_towards_the_inputs(
    factor: float, place: tuple[int, int], exploding: bool
) -> None:
    """All of them: the loss side. Weights alone, of several layers: the activations that enter the first of them."""
    count, first = place
    off = factor if exploding else 1 / factor
    layers = {f"l{k}": (off, off) if k <= first else (1.0, 1.0) for k in range(count)}
    found = of_norms(*named(layers), exploding)
    assert found is not None
    assert found.at_outputs == (first == count - 1)
    assert found.by == "norms"
    assert not found.at_outputs or found.module == ""
    layers = {f"l{k}": (off if k >= first else 1.0, 1.0) for k in range(count)}
    found = of_norms(*named(layers), exploding)
    assert found is not None
    alone = "exploding" if exploding else "vanishing"  # it may be that of the weights, by a hook
    assert (found.phase, found.module) == ("activations" if first < count - 1 else alone, f"l{first}")


@given(st.floats(2, 9), st.floats(0.1, 0.5), st.floats(100, 1e4))
def test_a_bias_that_scatters_is_no_sign_of_activations(weights: float, bias: float, factor: float) -> None:
    """Its gradient is a sum that cancels: beside a fault of the gradients, or of the loss, it says nothing."""
    found = of_norms(*named({"a": (factor, factor), "b": (1, 1), "c": (weights, bias)}), exploding=True)
    assert found is not None
    assert found.phase == "exploding"
    off = {"a": (factor, factor), "b": (factor, factor), "c": (factor, factor / 4)}
    found = of_norms(*named(off), exploding=True)
    assert found is not None
    assert found.at_outputs


def test_weights_that_are_tied_to_a_head_are_less_off() -> None:
    """A head that shares the weights of an embedding was written to: what came to its outputs is as ever."""
    names, moved = named({"a": (60, 70), "norm": (700, 800)})
    found = of_norms(["embed.weight", *names], {**moved, "embed.weight": 3.0}, exploding=True)
    assert found is not None
    assert not found.at_outputs


def test_a_small_factor_has_no_place() -> None:
    """Healthy layers scatter by as much."""
    found = of_norms(
        *named({"a": (1, 1), "norm": (5.9, 4.4), "b": (4.8, 0.004), "c": (1, 1)}), exploding=True
    )
    assert found is not None
    assert found.module == ""


def test_layers_without_a_bias_may_have_been_entered_before() -> None:
    """As in a low-rank adapter, whose head alone has a bias: it is said so."""
    moved = {"down.weight": 5e5, "up.weight": 4e5, "head.weight": 2e5, "head.bias": 300.0}
    found = of_norms(list(moved), moved, exploding=True)
    assert found is not None
    assert (found.phase, found.module) == ("activations", "head")
    assert "whether it entered down and 1 more before, without biases, norms do not show" in found.note


def test_a_weight_that_is_given_in_parts_is_none_beside_its_bias() -> None:
    """The gradient of a direction has the length of the weight in it: written to, it is off with the inputs as ever."""
    moved = {"a.weight_g": 2e3, "a.weight_v": 2e6, "a.bias": 2e3, "b.weight": 2e6, "b.bias": 1e3}
    found = of_norms(list(moved), moved, exploding=True)
    assert found is not None
    assert found.module != "a"


def test_a_bias_of_one_element_says_nothing_of_inputs() -> None:
    """Its sum cancels: beside a loss that is off it may be off by a tenth of that."""
    names, moved = named({"a": (250, 240), "head": (243, 14.8)})
    found = of_norms(names, moved, exploding=True, few=["head.bias"])
    assert found is not None
    assert found.phase == "exploding"


def test_the_loss_side_is_told_only_where_every_layer_is_off() -> None:
    """A head whose level is not known may be what multiplies, and so may one without a bias."""
    names, moved = named({"a": (50, 50), "b": (50, 50)})
    for head in ({}, {"head.weight": 1.1}, {"head.weight": math.nan}):
        found = of_norms([*names, "head.weight"], {**moved, **head}, exploding=True)
        assert found is not None
        assert not found.at_outputs
    found = of_norms([*names, "head.weight"], {**moved, "head.weight": 50}, exploding=True)
    assert found is not None
    assert found.at_outputs


def test_a_layer_without_a_bias_that_is_off_more_than_any_bias() -> None:
    """It alone is named, and no layer whose bias is a little off."""
    names, moved = named({"a": (1.1, 0.9), "b": (0.6, 0.45)})
    found = of_norms(["stem.weight", *names], {**moved, "stem.weight": 1e-4}, exploding=False)
    assert found is not None
    assert found.module in {"stem", ""}
    moved = {"a.weight": 1.2, "b.weight": 300.0, "c.weight": 0.9}
    found = of_norms(list(moved), moved, exploding=True)
    assert found is not None
    assert found.module == "b"
    assert of_norms(list(moved), dict.fromkeys(moved, 300.0), exploding=True).module == ""  # type: ignore[union-attr]


class Probe(nn.Module):
    """A place of a model where a step may multiply activations (and so gradients), or gradients alone."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_by = self.backward_by = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.forward_by == 1.0 else x * self.forward_by
        return x if self.backward_by == 1.0 else Scaled.apply(x, self.backward_by)


class Recurrent(nn.Module):
    """An LSTM between linear layers."""

    after, size = ("rnn", "mid"), (5, 8)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Linear(8, 24), nn.LSTM(24, 24, batch_first=True)
        self.mid, self.out = nn.Linear(24, 24), nn.Linear(24, 4)
        self.probes = nn.ModuleList([Probe(), Probe()])

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.probes[0](self.embed(x)))
        return self.out(torch.relu(self.mid(self.probes[1](hidden[:, -1]))))


class Convolutional(nn.Module):
    """Convolutions with and without BatchNorm, residual; the stem has no bias."""

    after, size = ("third", "head"), (1, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.second_norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.third, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)
        self.probes = nn.ModuleList([Probe(), Probe()])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = x + torch.relu(self.second_norm(self.second(x)))
        x = torch.relu(self.third(self.probes[0](x)))
        return self.head(self.probes[1](x.mean((2, 3))))


class Head1st(nn.Module):
    """A residual network whose head is registered first."""

    after, size = ("blocks.0", "blocks.1"), (16,)

    def __init__(self) -> None:
        super().__init__()
        self.head, self.stem = nn.Linear(32, 4), nn.Linear(16, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(2)
        )
        self.probes = nn.ModuleList([Probe(), Probe()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for probe, block in zip(self.probes, self.blocks, strict=True):
            x = x + block(probe(x))
        return self.head(x)


MODELS = (Recurrent, Convolutional, Head1st)


class Fault(NamedTuple):
    """What a step multiplies: the loss, the batch, one target, or at a probe, or one parameter's gradient."""

    loss: float = 1.0
    batch: float = 1.0
    label: float = 1.0
    hooked: str = ""
    activations: tuple[float, int] = (1.0, 0)
    gradient: tuple[float, int] = (1.0, 0)
    factor: float = 300.0  # of what is hooked


def findings_of(kind: type[nn.Module], fault: Fault, squared: bool) -> list[Finding]:
    """The causes that a training is told of its bad step."""
    torch.manual_seed(3)
    model, kept = kind(), Kept()
    size: tuple[int, ...] = kind.size  # type: ignore[assignment]
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    teacher = torch.randn(math.prod(size), 4)
    bad = False
    if fault.hooked:
        model.get_parameter(fault.hooked).register_hook(lambda g: g * fault.factor if bad else g)
    with gradwatch.watch(model, optimizer, rules=parse_rules(RULES), sinks=[kept]) as gw:
        for step in range(BAD + 1):
            bad = step == BAD
            x = torch.randn(32, *size)
            y = x.flatten(1) @ teacher
            if bad:
                x, y[3] = x * fault.batch, y[3] * fault.label
                (by, place), probes = fault.activations, model.probes
                probes[place].forward_by = by  # type: ignore[index,union-attr,operator]
                by, place = fault.gradient
                probes[place].backward_by = by  # type: ignore[index,union-attr,operator]
            optimizer.zero_grad()
            out = model(x)
            loss = (out - y).square().mean() if squared else nn.functional.cross_entropy(out, y.argmax(1))
            (loss * (fault.loss if bad else 1.0)).backward()
            optimizer.step()
        assert gw.health.errors() == {}
    return [finding for record in kept.records for finding in record.findings if finding.step == BAD]


def faults(kind: type[nn.Module]) -> Iterator[tuple[Fault, Callable[[Finding], bool]]]:
    """Faults, and what a cause that is told of them must say."""
    for by in (300.0, 1e-4):
        yield Fault(loss=by), lambda found: found.at_outputs
        for place in range(2):
            yield (
                Fault(gradient=(by, place)),
                lambda found: not found.at_outputs and found.phase != "activations",
            )
    yield Fault(label=1e3), lambda found: found.at_outputs
    names = [name for name, _ in kind().named_parameters() if "weight" in name]
    for name, factor in ((names[0], 1e-4), (names[len(names) // 2], 300.0), (names[-1], 1e-4)):
        yield Fault(hooked=name, factor=factor), partial(_is_there, name.rpartition(".")[0])


def _is_there(module: str, found: Finding) -> bool:
    return found.module in (module, "") and found.phase != "activations"


# A training for each of a dozen faults; of the convolutional model the faults below are in every run.
@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=[pytest.mark.soak] * (one is Convolutional)) for one in MODELS]
)
def test_no_cause_is_claimed_wrongly(kind: type[nn.Module]) -> None:
    """Of faults of the loss, of gradients on their way and of single parameters; most of them are told."""
    told = tried = 0
    for number, (fault, right) in enumerate(faults(kind)):
        found = findings_of(kind, fault, squared=number % 2 == 0)
        tried, told = tried + 1, told + bool(found)
        for one in found:
            assert right(one), (fault, sentence(one), one.note)
    assert told >= 0.7 * tried


@pytest.mark.parametrize("squared", [True, False])
def test_activations_come_before_the_gradients_that_they_make(squared: bool) -> None:
    """The first layer that they enter is named, though the loss and all gradients are off as well."""
    for kind, place in ((Recurrent, 1), (Convolutional, 0), (Convolutional, 1), (Head1st, 1)):
        after: str = kind.after[place]
        found = findings_of(kind, Fault(activations=(300.0, place)), squared)
        assert found, (kind, place)
        for one in found:
            assert one.phase == "activations", (kind, place, sentence(one), one.note)
            assert one.module.startswith(after)
            assert f"enter {one.module}" in sentence(one)
            suggestion = suggestion_for(one)
            assert suggestion is not None
            assert suggestion.id == "activations"


def test_a_batch_that_is_too_large_enters_the_first_layer() -> None:
    """And the page shows both factors by depth."""
    (first, *_) = findings_of(Head1st, Fault(batch=300.0), squared=True)
    assert (first.phase, first.module) == ("activations", "stem")
    lines = list(page(first))
    assert "| module | its bias ÷ usual | its weights ÷ usual |" in lines
    assert any("norms of this step were compared" in line for line in lines)
    assert Finding.from_dict(first.to_dict()) == first or math.isnan(first.profile[0].at_output)


def test_a_bias_that_is_only_rounding_says_nothing() -> None:
    """That of a convolution before a BatchNorm, whose true gradient is zero."""
    found = findings_of(Convolutional, Fault(gradient=(300.0, 0)), squared=True)
    assert found
    for one in found:
        (second,) = (layer for layer in one.profile if layer.module == "second")
        assert math.isnan(second.moved)
