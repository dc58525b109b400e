"""Statistics of activations: equal to torch's on odd values, at the calls asked for, in the mode asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradwatch.inspect import ActivationStats
from gradwatch.inspect.activation_stats import BLOCK, Activation

EDGES = st.sampled_from([0.0, -0.0, 0.05, -0.05, 10.0, -10.0, 10.1, 1e-30, 1e8, -3.7])


def of(values: Tensor, **options: object) -> Activation:
    """The statistics of one output."""
    module = nn.Identity()
    with ActivationStats({"one": module}, **options) as stats:  # type: ignore[arg-type]
        module(values)
    return stats.of["one"][0]


def expected(values: Tensor) -> tuple[float, float, float]:
    """By hand, in float64."""
    wide = values.detach().double()
    return (
        float(wide.mean()),
        float(wide.std()),
        float((values.double().abs() <= np.float32(0.05)).double().mean()),
    )


SEEDED = torch.Generator().manual_seed(3)
CASES = {
    "normal": torch.randn(3, BLOCK // 2 + 7, generator=SEEDED),
    "far from zero": torch.randn(5000, generator=SEEDED) * 1e-2 + 100,
    "constant": torch.full((777,), 3.0),
    "relu": torch.randn(50, 50, generator=SEEDED).relu(),
    "bfloat16": torch.randn(999, generator=SEEDED).bfloat16(),
    "float64": torch.randn(999, dtype=torch.float64, generator=SEEDED),
    "integers": torch.arange(100),
    "squares beyond float32": torch.full((100,), 1e30),
    "beyond float32": torch.tensor([1e300, 1.0, -3e299], dtype=torch.float64),
    "strided": torch.randn(60, 40, generator=SEEDED).t()[::3],
    "expanded": torch.randn(1, 9, generator=SEEDED).expand(50, 9),
    "sparse": torch.eye(9).to_sparse(),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", CASES)
def test_equal_to_float64_by_hand(case: str) -> None:
    """Mean and standard deviation to 1e-5 of the larger of them, the share near zero exactly."""
    values = CASES[case]
    dense = values.to_dense() if values.is_sparse else values
    found, (mean, std, near) = of(values), expected(dense.coalesce().values() if dense.is_sparse else dense)
    if case == "sparse":  # the values that are stored
        mean, std, near = 1.0, 0.0, 0.0
    size = max(abs(mean), std)
    assert found.mean == pytest.approx(mean, abs=1e-5 * size)
    assert found.std == pytest.approx(std, abs=1e-5 * max(std, 1e-3 * size))
    assert found.near_zero == near


@given(st.lists(EDGES, min_size=2, max_size=60))
def test_the_histogram_counts_as_torch_does(values: list[float]) -> None:
    """Bins of |x| as `torch.histc` has them; what lies above the top is in none."""
    tensor = torch.tensor(values)
    found = of(tensor, with_hist=True).histogram
    assert found is not None
    assert found.sum() == int((tensor.abs() <= 10).sum())
    assert found.tolist() == torch.histc(tensor.abs(), 40, 0, 10).tolist()


def test_nan_and_inf_are_shown() -> None:
    """One NaN makes mean and deviation NaN, is not near zero, and is counted in no bin."""
    values = torch.tensor([0.0, float("nan"), 1.0, float("inf")])
    found = of(values, with_hist=True)
    assert np.isnan(found.mean)
    assert np.isnan(found.std)
    assert found.near_zero == 0.25
    assert found.histogram is not None
    assert found.histogram.sum() == 2


def test_every_and_mode() -> None:
    """Each N-th call of the mode asked for, counted from its first one."""
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    x = torch.randn(4, 3)
    with ActivationStats(model, every=3) as train, ActivationStats(model, mode="eval") as evaluated:
        for k in range(8):
            model.train(k != 5)
            model(x)
    assert [one.call for one in train.of["0"]] == [0, 3, 6]
    assert [one.call for one in evaluated.of["1"]] == [0]
    assert train.of["0"][0].histogram is None
    with pytest.raises(ValueError, match="every=0"):
        ActivationStats(model, every=0)


def test_a_training_is_bit_identical() -> None:
    """Weights after some steps are those of a training that nobody looks at."""

    def trained(looked_at: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters())
        stats = ActivationStats(model, with_hist=True) if looked_at else None
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).pow(2).sum().backward()
            optimizer.step()
        if stats is not None:
            assert len(stats.of["2"]) == 5
            stats.remove()
        return [param.detach().clone() for param in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))
