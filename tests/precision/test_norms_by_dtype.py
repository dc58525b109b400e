"""Every dtype × layout × magnitude, on the host's path and on the device's: 1e-5 of an independent computation."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor, nn

from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.snapshot_assembly import Extras, assemble
from gradwatch.reading.batched_norms import FLOAT32_MAX
from gradwatch.records.snapshot import Sites, Snapshot
from tests.precision.loops import norms_in, watched
from tests.support.examples import examples
from tests.support.recorder import as_on_device

DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
# Elements whose float32 squares overflow or vanish, and for float16 the ends of its range.
MAGNITUDES: dict[torch.dtype, tuple[float, ...]] = {
    torch.float16: (1.0, 1.5e4, 1e-4, 2e-7),
    torch.bfloat16: (1.0, 1e25, 1e-25, 1e-39),
    torch.float32: (1.0, 1e25, 1e-25, 1e-42),
    torch.complex64: (1.0, 1e25, 1e-25, 1e-42),
    torch.float64: (1.0, 1e25, 1e-25, 1e-100),
    torch.complex128: (1.0, 1e25, 1e-25, 1e-100),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "strided": lambda t: t[:, ::3],
    "offset": lambda t: t[1:, 1:],
    "expanded": lambda t: t[:1].expand(50, -1, -1, -1),
    "conjugated": lambda t: t.conj(),
    "negated": lambda t: torch._neg_view(t),
    "scalar": lambda t: t[0, 0, 0, 0],
    "one": lambda t: t[0, 0, 0, :1],
    "sparse": lambda t: _sparse(t, [0, 4, 2]),
    "uncoalesced": lambda t: _sparse(t, [0, 2, 0, 2, 1]),
}


def _sparse(t: Tensor, rows: list[int]) -> Tensor:
    """Rows of an embedding's gradient; equal rows add up."""
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(torch.tensor([rows]), t[: len(rows)], (9, *t.shape[1:]))


def base(dtype: torch.dtype, magnitude: float, size: int = 24) -> Tensor:
    """Numbers of that size, of both signs, in four dimensions."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    values = torch.randn(6, 5, size, 7, generator=generator, dtype=wide)
    values = values if dtype.is_complex else values.clamp(-2, 2)
    return (values * magnitude).to(dtype)


def exact(grad: Tensor) -> float:
    """The L2 norm in 80-bit floats, of the numbers as they are in memory."""
    grad = grad.coalesce().values() if grad.layout is torch.sparse_coo else grad
    values = grad.resolve_conj().resolve_neg()
    plain = (torch.view_as_real(values) if values.is_complex() else values).to(torch.float64).numpy()
    return float(np.sqrt(np.sum(np.square(plain.astype(np.longdouble)))))


def capture_of(grads: list[Tensor], on_device: bool) -> OptimizerCapture:
    """A capture asks its parameters for their gradients only."""
    count = len(grads)
    sites = Sites(
        names=tuple(map(str, range(count))),
        kinds=("param",) * count,
        numels=np.array([grad.numel() for grad in grads], np.int64),
        ndims=np.zeros(count, np.int64),
        depths=np.arange(count),
    )
    params = [
        SimpleNamespace(grad=grad, device=grad.device, is_cpu=grad.is_cpu, _version=0) for grad in grads
    ]
    captured = OptimizerCapture(0, None, params, sites, np.arange(count))  # type: ignore[arg-type]
    if on_device:
        as_on_device(captured)
    return captured


def snapshot_of(grads: list[Tensor], on_device: bool) -> Snapshot:
    """What a step with these gradients is seen as."""
    captured = capture_of(grads, on_device)
    captured.read()
    captured.add_arrivals(list(range(len(grads))))
    return assemble(0, captured.sites, captured.close_window(), Extras(), {}, 1.0)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_gradient_negated_lazily_is_right_with_any_threads(threads: int) -> None:
    """Which reader is taken depends on torch's threads; numpy can read no tensor with the negative bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        test_the_norm_is_right(torch.float32, "negated", on_device=False)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_is_right(dtype: torch.dtype, layout: str, on_device: bool) -> None:
    """Any dtype in any layout at any magnitude: neither overflow nor underflow of squares is seen."""
    for magnitude in MAGNITUDES[dtype]:
        grad = LAYOUTS[layout](base(dtype, magnitude))
        want = exact(grad)
        captured = capture_of([grad], on_device)
        captured.read()
        (norm,), _ = captured.close_window().wait()
        assert norm == pytest.approx(want, rel=1e-5), magnitude


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 600, 5000])
def test_large_tensors_lose_no_digits(size: int, dtype: torch.dtype, on_device: bool) -> None:
    """Up to a million elements, all equal ones included: the worst case of a float32 sum."""
    for grad in (base(dtype, 1.0, size), torch.full((210 * size,), 0.1, dtype=dtype)):
        captured = capture_of([grad] * 5, on_device)  # five of a shape are stacked where they are small
        captured.read()
        norms, _ = captured.close_window().wait()
        assert norms.tolist() == pytest.approx([exact(grad)] * 5, rel=1e-5)


def test_float64_gradients_beyond_the_squares_of_float64() -> None:
    """1e200 and 1e-200 on the host: the second look scales first. Not so on a device, where it is Inf or 0."""
    for magnitude in (1e200, 1e-200, 1e-310):
        grad = base(torch.float64, magnitude)
        captured = capture_of([grad, grad], on_device=False)
        captured.read()
        norms, _ = captured.close_window().wait()
        assert norms.tolist() == pytest.approx([exact(grad)] * 2, rel=1e-5)
        seen = snapshot_of([grad, grad], on_device=False)
        assert seen.total_norm == pytest.approx(2**0.5 * exact(grad), rel=1e-5)
        if magnitude > 1:
            assert seen.columns["norm_overflow"].values.tolist() == [1, 1]
            assert not seen.columns["nonfinite"].values.any()


@settings(max_examples=examples(75))
@given(
    arrays(
        np.float32, st.integers(1, 40), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
    ),
    st.booleans(),
)
def test_any_finite_float32_gradient(values: np.ndarray, on_device: bool) -> None:
    """Whatever finite float32 numbers, subnormal and huge ones mixed: the true norm, and never `nonfinite`."""
    grad = torch.from_numpy(values)
    captured = capture_of([grad], on_device)
    captured.read()
    (norm,), _ = captured.close_window().wait()
    assert norm == pytest.approx(exact(grad), rel=1e-5)
    seen = snapshot_of([grad], on_device)
    overflow = bool(seen.columns["norm_overflow"].values[0] if seen.columns else 0)
    if exact(grad) != pytest.approx(
        FLOAT32_MAX, rel=1e-12
    ):  # where rounding a float64 decides, both are right
        assert overflow == (exact(grad) > FLOAT32_MAX)
    assert not seen.columns or not seen.columns["nonfinite"].values.any()
    assert bool(seen.norm[0] == 0) == (not values.any())


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_overflow_underflow_inf_nan_and_zero_are_five_things(on_device: bool) -> None:
    """Told apart on the host and on a device; a device does not count elements, so it says at least one."""
    huge, small = torch.full((400,), 3e38), torch.full((400,), 1e-44)
    inf, nan = torch.ones(400), torch.ones(400)
    inf[:3] = float("inf")
    nan[:2] = float("nan")
    nan[7] = float("inf")
    zero = torch.zeros(400)
    seen = snapshot_of([huge, small, inf, nan, zero], on_device)
    found = {name: column.values.tolist() for name, column in seen.columns.items()}
    counted = (lambda n: n) if not on_device else (lambda n: min(n, 1))
    assert found["norm_overflow"] == [1, 0, 0, 0, 0]
    assert found["nonfinite"] == [0, 0, counted(3), counted(3), 0]
    assert found["nan_count"] == [0, 0, 0, counted(2), 0]
    assert found["inf_count"] == [0, 0, counted(3), 0 if on_device else 1, 0]
    assert np.isinf(seen.norm[0])
    assert seen.norm[1] == pytest.approx(exact(small), rel=0.1)  # a float32 subnormal has few digits
    assert np.isinf(seen.norm[2])
    assert np.isnan(seen.norm[3])
    assert seen.norm[4] == 0


@pytest.mark.parametrize("count", [1, 6])
def test_clipped_overflow_is_seen_as_it_is_applied(count: int) -> None:
    """Gradients of 1e25 scaled down by hand: `norm_applied` is exact, though its float32 squares overflow."""
    model = nn.ParameterList([nn.Parameter(torch.ones(50)) for _ in range(count)])
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    gw, sink = watched(model, optimizer, "observe-only")
    with gw:
        for _ in range(3):
            optimizer.zero_grad()
            sum((parameter * 1e25).sum() for parameter in model).backward()
            want = exact(model[0].grad)
            model[0].grad.mul_(0.5)
            optimizer.step()
    snapshot = sink.records[-1].snapshot
    assert norms_in(sink.records[-1])["0"] == pytest.approx(want, rel=1e-5)
    assert snapshot.column("norm_applied").values[0] == pytest.approx(want / 2, rel=1e-5)
    assert snapshot.total_norm == pytest.approx(want * count**0.5, rel=1e-5)
    assert snapshot.total_norm_applied == pytest.approx(want * (count - 0.75) ** 0.5, rel=1e-5)
