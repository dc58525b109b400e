"""Module taps: right numbers, in-place models left alone, copies clean, and a preflight that says why."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gradwatch.capture.columns.module_taps import COLUMNS, INSTEAD, ModuleTaps, TapKind
from gradwatch.capture.columns.pending_columns import PendingColumns
from gradwatch.capture.parameter_names import named_modules
from gradwatch.engine.columns_needed import EVERY_STEP, Needs
from gradwatch.errors import AttachError
from gradwatch.taps import module_calls
from gradwatch.taps.graph.full_backward import preflight

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))


def fail(component: str, error: BaseException) -> None:
    raise AssertionError(component) from error


def taps_on(
    model: nn.Module, kind: TapKind, failed: Callable[[str, BaseException], None] = fail
) -> ModuleTaps:
    needs = Needs(dict.fromkeys(COLUMNS, EVERY_STEP), {})
    return ModuleTaps(list(named_modules([model])), kind, needs, failed)


def values(sampled: PendingColumns, taps: ModuleTaps, column: str) -> dict[str, float]:
    found = sampled.columns()[column]
    return {n: v for n, v, p in zip(taps.names, found.values.tolist(), found.present, strict=True) if p}


class Residual(nn.Module):
    """In-place ReLU and an in-place residual: what `register_full_backward_hook` breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        out += x
        return self.act(out)


def test_output_tap_reads_activation_gradients() -> None:
    """grad_output_norm is the norm of the gradient at a module's output."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    hidden = model[0](X)
    hidden.retain_grad()
    out = model[2](model[1](hidden))
    out.retain_grad()
    out.pow(2).sum().backward()
    taps = taps_on(model, "output")
    model(X).pow(2).sum().backward()
    got = values(taps.collect(0, 1.0), taps, "grad_output_norm")
    assert got["0"] == pytest.approx(float(hidden.grad.norm()), rel=1e-5)
    assert got["2"] == pytest.approx(float(out.grad.norm()), rel=1e-5)
    taps.close()
    assert not any(map(module_calls.noticed, model.modules()))


def test_full_backward_tap_sees_inputs_too() -> None:
    """grad_input_norm comes from register_full_backward_hook; both norms are right."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = X.clone().requires_grad_()
    model(x).pow(2).sum().backward()
    want = float(x.grad.norm())
    taps = taps_on(model, "full_backward")
    model(X.clone().requires_grad_()).pow(2).sum().backward()
    sampled = taps.collect(0, 1.0)
    assert values(sampled, taps, "grad_input_norm")["0"] == pytest.approx(want, rel=1e-5)
    assert "2" in values(sampled, taps, "grad_output_norm")
    taps.close()


def test_full_backward_tap_where_no_input_wants_a_gradient() -> None:
    """The output's gradient is read as torch's own hook would, without torch's warning; a hook of the script warns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    out = model(X)
    out.retain_grad()
    out.square().sum().backward()
    taps = taps_on(model, "full_backward")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X).square().sum().backward()
    got = values(taps.collect(0, 1.0), taps, "grad_output_norm")
    assert got["0"] == pytest.approx(float(out.grad.norm()), rel=1e-5)
    model[0].register_full_backward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="Full backward hook is firing"):
        model(X).square().sum().backward()
    taps.close()


def test_output_tap_is_safe_with_in_place_models() -> None:
    """The default tap changes neither outputs nor gradients of a model full of in-place operations."""
    torch.manual_seed(0)
    model = Residual()
    twin = copy.deepcopy(model)
    taps = taps_on(model, "output")
    for net in (model, twin):
        net(X).pow(2).sum().backward()
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )
    taps.close()


def test_preflight_names_what_full_backward_would_break() -> None:
    """In-place modules and in-place statements are refused with the module, the line and the way out."""
    with pytest.raises(AttachError) as caught:
        preflight(named_modules([Residual()]), INSTEAD)
    message = str(caught.value)
    assert "act: ReLU(inplace=True)" in message
    assert "out += x" in message
    assert "test_module_taps.py:" in message
    assert "tap: output" in message
    preflight(named_modules([nn.Sequential(nn.Linear(3, 3), nn.ReLU())]), INSTEAD)


def test_activation_statistics() -> None:
    """Mean, standard deviation and share of near-zero activations of a module's output."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    taps = taps_on(model, "output")
    model(X)
    sampled = taps.collect(0, 1.0)
    out = model(X).detach()
    assert values(sampled, taps, "activation_mean")["1"] == pytest.approx(float(out.mean()), rel=1e-5)
    assert values(sampled, taps, "activation_std")["1"] == pytest.approx(
        float(out.std(correction=0)), rel=1e-5
    )
    assert values(sampled, taps, "activation_near_zero")["1"] == pytest.approx(
        float((out == 0).float().mean())
    )
    taps.close()


FUNCTIONS: dict[str, tuple[nn.Module, float | None]] = {
    "tanh": (nn.Tanh(), 1.0),
    "sigmoid": (nn.Sigmoid(), 0.25),
    "hardtanh": (nn.Hardtanh(-2.0, 3.0), 1.0),
    "hardtanh, bounds that bfloat16 rounds": (nn.Hardtanh(-0.7, 0.7), 1.0),
    "relu6": (nn.ReLU6(), 1.0),
    "hardsigmoid": (nn.Hardsigmoid(), 1 / 6),
    "relu": (nn.ReLU(), None),
    "gelu": (nn.GELU(), None),
}
"""Each with the largest slope of its function; None where an output does not show its slope."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_saturation_equal_float64_by_hand(name: str, dtype: torch.dtype) -> None:
    """Extremes and moments of output and input; saturated is what autograd gives less than 5 % of the largest slope."""
    function, steepest = FUNCTIONS[name]
    taps = taps_on(nn.Sequential(function), "output")
    x = (torch.randn(5, 400, generator=torch.Generator().manual_seed(5)) * 3).to(dtype)
    out = function(x).double()
    sampled = taps.collect(0, 1.0)
    by_hand = {}
    for side, elements in (("activation", out), ("input", x.double())):
        by_hand |= {
            f"{side}_mean": elements.mean(),
            f"{side}_std": elements.std(correction=0),
            f"{side}_min": elements.min(),
            f"{side}_max": elements.max(),
            f"{side}_near_zero": (elements.abs() < 1e-6).double().mean(),
        }
    if steepest is not None:
        exact = x.double().requires_grad_()
        (slopes,) = torch.autograd.grad(function(exact).sum(), exact)
        by_hand["activation_saturation"] = (slopes < 0.05 * steepest).double().mean()
        assert 0 < by_hand["activation_saturation"] < 1
    found = sampled.columns().keys()
    assert found == by_hand.keys()
    # An output of few digits says where its input was to so many: a few elements lie on either side.
    least = 0.01 if dtype is torch.bfloat16 else 1e-6
    for column, value in by_hand.items():
        got = values(sampled, taps, column)["0"]
        assert got == pytest.approx(float(value), rel=1e-5, abs=least if "saturation" in column else 1e-6), (
            column
        )
    taps.close()


def test_an_empty_output_has_no_values() -> None:
    """A part of a batch may be empty: no mean of nothing, which would be NaN."""
    taps = taps_on(nn.Sequential(function := nn.Tanh()), "output")
    function(torch.zeros(0, 3))
    assert not taps.collect(0, 1.0).columns()
    taps.close()


class Shapes(nn.Module):
    """Gives out a tensor of shapes only, or a quantized one, beside what is trained."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.device == "meta":
            return torch.empty_like(x, device="meta")
        if self.device == "quantized":
            return torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)
        with FakeTensorMode():
            return torch.empty(x.shape)


@pytest.mark.parametrize("device", ["meta", "fake", "quantized"])
@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning", "ignore:.*quantiz:DeprecationWarning")
def test_outputs_that_hold_no_values_cost_no_other_module_its_own(device: str) -> None:
    """A meta or quantized tensor among the outputs was an internal error, a FakeTensor gave unwritten memory."""
    model, faults = nn.ModuleList([nn.Linear(3, 3), Shapes(device)]), []
    taps = taps_on(model, "output", lambda component, error: faults.append(error))
    for step in range(2):
        out = model[0](X)
        model[1](out)
        out.sum().backward()
        collected = taps.collect(step, 1.0)
        for column in ("activation_mean", "grad_output_norm"):
            assert list(values(collected, taps, column)) == ["0"]
    assert not faults


class Nested(nn.Module):
    """Sequences of different lengths."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nested.as_nested_tensor([x[:1], x[1:]], layout=self.layout)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_output_is_all_of_its_components(layout: torch.layout) -> None:
    """It raised inside the tap, at each call."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 3), Nested(layout)])
    taps = taps_on(model, "output")
    out = model[1](model[0](X))
    torch.nested.to_padded_tensor(out * out, 0.0).sum().backward()
    collected = taps.collect(0, 1.0)
    elements = torch.cat([part.detach() for part in out.unbind()]).double()
    assert values(collected, taps, "activation_mean")["1"] == pytest.approx(float(elements.mean()), rel=1e-5)
    norm = 2 * float(elements.norm())
    assert values(collected, taps, "grad_output_norm")["1"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float64), (torch.float32, torch.float64)])
def test_values_beyond_float32_are_finite(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """A model in float64 has activations that float32 does not hold, also beside one in float32."""
    model = nn.ModuleList([nn.Linear(3, 3, dtype=dtype) for dtype in dtypes])
    nn.init.constant_(model[1].weight, 1e200)
    taps = taps_on(model, "output")
    outputs = [layer(X.to(dtype)).detach() for layer, dtype in zip(model, dtypes, strict=True)]
    collected = taps.collect(0, 1.0)
    for column, by_hand in (("activation_mean", torch.mean), ("activation_max", torch.amax)):
        wanted = {str(k): float(by_hand(out.double())) for k, out in enumerate(outputs)}
        assert values(collected, taps, column) == pytest.approx(wanted, rel=1e-5)


def test_copies_and_pickles_carry_no_tap() -> None:
    """deepcopy, AveragedModel and pickle of a tapped model give hooks that do nothing and name nobody."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    taps = taps_on(model, "output")
    twin = copy.deepcopy(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    pickled = pickle.dumps(model)
    assert b"gradwatch" not in pickled
    for each in (twin, average, pickle.loads(pickled)):
        each(X).pow(2).sum().backward()
    assert not taps.collect(0, 1.0).columns()
    taps.close()
