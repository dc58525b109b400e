"""Differential: every norm the reader gives is within 1e-5 of an independent float64 computation."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.reading.batched_norms import (
    PATIENCE,
    CpuReader,
    RowNorms,
    fastest,
    inspect,
    sum_of_squares,
    suspicious,
)
from gradwatch.reading.cpu_norms import CpuNorms, add_up_all
from gradwatch.reading.read_plan import SMALL
from gradwatch.reading.row_sums import ROW, UNDERFLOW, RowBuffer, divided
from gradwatch.reading.row_sums_by_blas import SquareRows
from gradwatch.reading.row_sums_by_torch import NormRows
from tests.support.examples import examples

KINDS = pytest.mark.parametrize(
    "kind", [NormRows, SquareRows]
)  # the two ways of reading: several threads, one


def reader_of(kind: type[RowBuffer]) -> CpuReader:
    """A reader that reads in this way, which the number of threads otherwise decides."""
    return CpuReader(lambda: kind)


SHAPES = st.one_of(
    st.integers(1, 40).map(lambda n: (n,)),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from(
        [
            (),
            (SMALL,),
            (SMALL + 1,),
            (3, ROW),
            (2 * ROW,),
            (2 * ROW + 7,),
            (300, 701),
            (8 * ROW,),
            (257, 4 * 67),
        ]
    ),
)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
LAYOUTS = st.sampled_from(["plain", "transposed", "strided", "expanded", "sparse"])


def reference(grad: torch.Tensor) -> float:
    """math.fsum over float64 squares of the dense gradient."""
    dense = grad.to_dense() if grad.is_sparse else grad
    values = dense.detach().to(torch.complex128 if dense.is_complex() else torch.float64).reshape(-1)
    squares = values.abs().square().numpy()
    return math.sqrt(
        math.fsum(squares[:100_000].tolist()) + float(squares[100_000:].sum(dtype=np.longdouble))
    )


def make(shape: tuple[int, ...], dtype: torch.dtype, layout: str, scale: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    grad = (torch.randn(shape, generator=generator) * scale).to(dtype)
    if layout == "transposed" and grad.dim() == 2:
        return grad.t()
    if layout == "strided" and grad.numel() > 3:
        return grad.reshape(-1)[::2]
    if layout == "expanded":
        return grad.reshape(-1)[:1].expand(7)
    if layout == "sparse" and grad.dim() == 2:
        indices = torch.tensor([[0, 0, grad.shape[0] - 1]])
        rows = grad[:1].expand(3, -1).clone()
        # Duplicate indices: they add up.
        return torch.sparse_coo_tensor(indices, rows, grad.shape, check_invariants=True)
    return grad


@settings(max_examples=examples(150))
@given(SHAPES, DTYPES, LAYOUTS, st.sampled_from([1e-4, 1.0, 1e3]), st.integers(0, 9))
def test_norm_of_any_gradient(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, scale: float, seed: int
) -> None:
    """Any dtype, layout and size: 1e-5 relative."""
    grad = make(shape, dtype, layout, scale, seed)
    assert math.sqrt(sum_of_squares(grad)) == pytest.approx(reference(grad), rel=1e-5, abs=1e-30)


@KINDS
@settings(max_examples=examples(25))
@given(st.lists(st.tuples(SHAPES, DTYPES, LAYOUTS), min_size=1, max_size=30), st.data())
def test_batched_read_equals_one_by_one(
    kind: type[RowBuffer], specs: list[tuple[tuple[int, ...], torch.dtype, str]], data: st.DataObject
) -> None:
    """A reader planned on one set of gradients stays right when some are missing or changed shape or dtype."""
    reader = reader_of(kind)
    for _ in range(3):
        grads: list[torch.Tensor | None] = []
        for index, (shape, dtype, layout) in enumerate(specs):
            missing = data.draw(st.booleans()) and data.draw(st.booleans())
            grads.append(None if missing else make(shape, dtype, layout, 1.0, index))
        got = reader.read(grads).squares()
        for value, grad in zip(got, grads, strict=True):
            want = 0.0 if grad is None else reference(grad)
            assert math.sqrt(value) == pytest.approx(want, rel=1e-5, abs=1e-30)


@KINDS
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([(8,)] * 6, [(5,)] * 6),  # all alike
        ([(8,)] * 6, [(8, 2)] * 6),
        ([(8, 3, 3)] * 4, [(8,)] * 4),
        ([(4, 2)] * 3 + [(6, 2)], [(4, 3)] * 3 + [(6, 3)]),
        ([(3,), (5,), (3,), (5,)], [(5,), (3,), (5,), (3,)]),  # as many elements as before
        ([(2,), (3,), (4,), (5,)], [(5,), (4,), (3,), (2,)]),
        ([(7,)] * 4, [()] * 4),
        ([(7,)] * 4, [(0,)] * 4),
    ],
)
def test_a_strip_of_other_shapes_than_planned(
    kind: type[RowBuffer], before: list[tuple[int, ...]], after: list[tuple[int, ...]]
) -> None:
    """Small gradients that change their shapes together are not read through the old buffer, nor as each other."""
    reader = reader_of(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it resizes an `out`
        for shapes in (before, after, before):
            grads = [torch.full(shape, k + 1.0) for k, shape in enumerate(shapes)]
            got = np.sqrt(reader.read(grads).squares()).tolist()
            assert got == pytest.approx(
                [math.sqrt(grad.numel()) * float(k + 1) for k, grad in enumerate(grads)]
            )


@KINDS
def test_small_gradients_of_any_size_are_read_in_one_go(kind: type[RowBuffer]) -> None:
    """What differs in its first dimension alone shares a packed group, also where its memory is not contiguous."""
    shapes = [(5,), (300,), (), (5,), (SMALL,), (17,), (6, 1, 3, 3), (2, 1, 3, 3), (6, 1, 3, 3), (9, 1, 3, 3)]
    shapes += [(SMALL + 1,), (3, 4), (4, 3)]
    grads = [torch.randn(shape, generator=torch.Generator().manual_seed(k)) for k, shape in enumerate(shapes)]
    grads[6] = grads[6].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # channels_last
    grads[1] = torch.randn(600)[::2]
    reader = reader_of(kind)
    for _ in range(2):
        read = reader.read(grads)
        assert np.sqrt(read.squares()).tolist() == pytest.approx(list(map(reference, grads)), rel=1e-5)
        assert not read._missed
        assert not read._single
    assert [sorted(packed_group.indices) for packed_group in reader._plan.packed_groups] == [
        [0, 1, 3, 4, 5],
        [6, 7, 8, 9],
    ]


@KINDS
def test_scalars_share_a_strip(kind: type[RowBuffer]) -> None:
    """Gates and scales of no dimension are read together too, and not with vectors of one element."""
    grads = [torch.tensor(float(k)) for k in range(5)] + [torch.tensor([float(k)]) for k in range(5, 9)]
    reader = reader_of(kind)
    for _ in range(2):
        assert np.sqrt(reader.read(grads).squares()).tolist() == pytest.approx(list(range(9)))
    assert [packed_group.indices for packed_group in reader._plan.packed_groups] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8],
    ]


@KINDS
def test_gradients_that_come_and_go_cost_only_their_own_kind_a_strip(kind: type[RowBuffer]) -> None:
    """Where another one is missing each time, the gradients of other shapes are soon read together again."""
    whole: list[torch.Tensor | None] = [torch.full((3 + k // 8,), 2.0) for k in range(16)]
    reader = reader_of(kind)
    for turn in range(PATIENCE + 3):
        grads = whole.copy()
        grads[turn % 8] = None
        read = reader.read(grads)
        squares = [0.0 if grad is None else 4.0 * len(grad) for grad in grads]
        assert read.squares().tolist() == pytest.approx(squares)
    assert [
        packed_group.indices for packed_group in reader._plan.packed_groups if 8 in packed_group.indices
    ] == [list(range(8, 16))]
    assert not set(read._missed) & set(range(8, 16))


@KINDS
def test_a_small_gradient_that_is_missing_costs_no_other_its_norm(kind: type[RowBuffer]) -> None:
    """One absent, a sparse one, a float64 one too small for float32: the others are as they were."""
    reader = reader_of(kind)
    grads: list[torch.Tensor | None] = [torch.full((k + 2,), 2.0) for k in range(6)]
    usual = reader.read(grads).squares().tolist()
    for odd, square in [
        (None, 0.0),
        (torch.full((4,), 2.0).to_sparse(), usual[2]),
        (torch.full((4,), 1e-60, dtype=torch.float64), 0.0),
    ]:
        found = reader.read([*grads[:2], odd, *grads[3:]]).squares()
        assert found.tolist() == pytest.approx([*usual[:2], square, *usual[3:]])
    assert reader.read(grads).squares().tolist() == usual


@settings(max_examples=examples(100))
@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=200),
)
def test_second_look_is_exact(values: list[float]) -> None:
    """NaN and Inf are counted one by one; otherwise the norm is right wherever float64 can hold it."""
    grad = torch.tensor(values, dtype=torch.float32)
    detail = inspect(grad)
    assert detail.nan == sum(math.isnan(v) for v in values)
    assert detail.inf == sum(math.isinf(v) for v in values)
    if not detail.nonfinite:
        exact = [float(v) for v in grad.double().tolist()]
        assert detail.norm == pytest.approx(math.hypot(*exact), rel=1e-9)


@settings(max_examples=examples(100))
@given(st.integers(1, 3000), st.floats(-44, 37), st.integers(0, 5))
def test_unsuspicious_norms_are_right(numel: int, exponent: float, seed: int) -> None:
    """Over the whole range of float32: whatever is not looked at twice is within 1e-5."""
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * torch.tensor(10.0**exponent)
    squares = np.array([sum_of_squares(grad)])
    if not suspicious(squares, np.array([numel]) * UNDERFLOW).size:
        assert math.sqrt(squares[0]) == pytest.approx(reference(grad), rel=1e-5)


@KINDS
@settings(max_examples=examples(40))
@given(st.lists(st.tuples(SHAPES, DTYPES, st.floats(-44, 4)), min_size=1, max_size=12), st.data())
def test_what_a_glance_lets_pass_is_right(
    kind: type[RowBuffer], specs: list[tuple[tuple[int, ...], torch.dtype, float]], data: st.DataObject
) -> None:
    """A glance sees that a read may underflow exactly where a gradient is below its floor; others are within 1e-5."""
    reader = reader_of(kind)
    floor = np.array([math.prod(shape) * UNDERFLOW for shape, _, _ in specs])
    for turn in range(2):
        grads = []
        for index, (shape, dtype, exponent) in enumerate(specs):
            kind = data.draw(
                st.sampled_from(["as planned", "as planned", "zero", "missing"]) if turn else st.just("")
            )
            scale = 0.0 if kind == "zero" else 10.0**exponent
            grads.append(None if kind == "missing" else make(shape, dtype, "plain", scale, index))
        read = reader.read(grads)
        may_underflow = read.may_underflow(grads, floor)
        pairs = list(zip(read.squares(), floor, grads, strict=True))
        assert may_underflow == any(square < least for square, least, grad in pairs if grad is not None)
        if not may_underflow:
            for square, _, grad in pairs:
                assert math.sqrt(square) == pytest.approx(0.0 if grad is None else reference(grad), rel=1e-5)


@pytest.mark.parametrize("numel", [ROW, 2 * ROW - 1, 2 * ROW, 1 << 20, (1 << 20) + 3])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-3, 1.7])
def test_constant_gradient_keeps_its_digits(numel: int, value: float) -> None:
    """Equal elements are the worst case of float32 summation (a whole-tensor dot is off by 4e-4)."""
    grad = torch.full((numel,), value)
    exact = float(grad[0].double()) * math.sqrt(numel)
    assert math.sqrt(sum_of_squares(grad)) == pytest.approx(exact, rel=1e-5)


def test_large_tensor_keeps_its_digits() -> None:
    """38 million elements: within 1e-5, where torch's own single-pass norm loses 1e-3."""
    grad = torch.randn(38_000_000, generator=torch.Generator().manual_seed(0))
    exact = float(np.sqrt(np.square(grad.numpy(), dtype=np.float64).sum()))
    assert math.sqrt(sum_of_squares(grad)) == pytest.approx(exact, rel=1e-6)


def test_threads_decide_how_gradients_are_read() -> None:
    """One thread reads by BLAS, several by torch; no clock has a say in it."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = fastest()
        torch.set_num_threads(2)
        assert (alone, fastest()) == (SquareRows if hasattr(np, "vecdot") else NormRows, NormRows)
    finally:
        torch.set_num_threads(before)


@KINDS
@pytest.mark.parametrize("numel", [ROW, 8 * ROW, 1 << 20, (1 << 20) + 4, 250_000 * 64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-3, 1.7])
def test_constant_gradient_keeps_its_digits_when_read_with_others(
    kind: type[RowBuffer], numel: int, value: float
) -> None:
    """The batched read is as exact as the read of one gradient, in either way of reading."""
    grad = torch.full((numel,), value)
    exact = float(grad[0].double()) * math.sqrt(numel)
    read = reader_of(kind).read([grad, torch.ones(3)])
    assert read.total() == pytest.approx(math.hypot(exact, math.sqrt(3)), rel=1e-4)
    assert math.sqrt(read.squares()[0]) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("kind", [NormRows, SquareRows])
def test_gradients_with_a_graph_of_their_own_are_read_as_planned(kind: type[RowBuffer]) -> None:
    """`backward(create_graph=True)` leaves gradients that require one; they are no reason to read one by one."""
    grads = [torch.ones(3, 5, requires_grad=True), torch.ones(4, requires_grad=True) * 2]
    with torch.no_grad():
        read = reader_of(kind).read(grads)
    assert not read._missed
    assert read.squares().tolist() == pytest.approx([15.0, 16.0], rel=1e-5)


@pytest.mark.parametrize("kind", [NormRows, SquareRows])
@pytest.mark.parametrize(
    "numel", [1, 7, ROW, 8 * ROW - 4, 8 * ROW, 8 * ROW + 4, 3 * 8 * ROW + 8, 1000 * 4096, 65_537 * 4]
)
def test_a_read_reaches_every_element_once(kind: type[RowBuffer], numel: int) -> None:
    """Powers of two that float32 adds up without rounding: one element left out, or read twice, would show."""
    shape = divided(numel)
    if shape is None:
        assert numel >= ROW  # a single row at least divides what is smaller
        return
    assert math.prod(shape) == numel
    row_buffer = kind([shape])
    grad = torch.zeros(numel)
    for place in {0, 1, numel // 4 - 1, numel // 4, numel // 2, numel - 1} & set(range(numel)):
        grad.zero_()[place] = 4.0
        rows, total, _ = row_buffer.read([row_buffer.matrix(grad, shape, None)])
        assert total == 4.0
        assert float(kind.squares(rows).sum()) == 16.0
    grad.fill_(2.0)
    rows, _, min_row = row_buffer.read([row_buffer.matrix(grad, shape, None)])
    assert float(kind.squares(rows).sum(dtype=np.float64)) == pytest.approx(4.0 * numel, rel=1e-6)
    assert min_row == pytest.approx(4.0 * shape[-1], rel=1e-6)


@KINDS
def test_large_gradients_keep_apart_from_their_neighbours(kind: type[RowBuffer]) -> None:
    """Whatever the shapes they are read in, the rows of each are added up for it alone; one that is gone is 0."""
    shapes = [
        (3, 5),
        (1 << 19,),
        (1 << 10, 1 << 10),
        (384, 384, 3, 3),
        (700_001,),
        (2 * ROW,),
        (512, 1153),
        (8,),
    ]
    grads: list[torch.Tensor | None] = [torch.randn(shape) * (k + 1) for k, shape in enumerate(shapes)]
    channels = grads[3]
    assert channels is not None
    grads[3] = channels.to(memory_format=torch.channels_last)
    reader = reader_of(kind)
    for gone in (None, 2, 5):
        if gone is not None:
            grads[gone] = None
        expected = [0.0 if grad is None else reference(grad) for grad in grads]
        assert np.sqrt(reader.read(grads).squares()) == pytest.approx(expected, rel=1e-5)
        grads = [None if grad is None else grad * 3 for grad in grads]


@pytest.mark.parametrize("numel", [2 * ROW, 8 * ROW, 3 * 8 * ROW + 8, 1 << 20, 250_000 * 64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-3, 1.7])
def test_one_gradient_alone_keeps_its_digits_too(numel: int, value: float) -> None:
    """One thread's way of reading a single gradient: 1e-5 at worst; what it cannot divide into rows it refuses."""
    grad = torch.full((numel,), value)
    exact = float(grad[0].double()) * math.sqrt(numel)
    square = SquareRows.of(grad)
    assert square is not None
    assert math.sqrt(square) == pytest.approx(exact, rel=1e-5)
    assert SquareRows.of(torch.ones(1_299_709)) is None  # a prime


@pytest.mark.parametrize(
    ("squares", "total"),
    [([9.0, 0.0, 16.0], 5.0), ([1.0, math.inf], math.inf), ([math.nan, 1.0], math.nan), ([], 0.0)],
)
def test_sums_taken_elsewhere_have_a_total_too(squares: list[float], total: float) -> None:
    """Norms that ranks or hooks have put together are glanced at like those of a read."""
    assert RowNorms.of(np.array(squares)).total() == pytest.approx(total, nan_ok=True)


@KINDS
def test_a_glance_stays_what_it_was_when_the_sums_are_taken(kind: type[RowBuffer]) -> None:
    """The total belongs to the read: neither taking the sums nor the next read into the same buffer moves it."""
    reader = reader_of(kind)
    first = reader.read([torch.full((3, 4), 2.0), torch.ones(1 << 14)])
    glance = first.total()
    assert glance == pytest.approx(math.sqrt(48 + (1 << 14)), rel=1e-4)
    first.squares()
    second = reader.read([torch.full((3, 4), 3.0), torch.zeros(1 << 14)])
    assert first.total() == glance
    assert second.total() == pytest.approx(math.sqrt(108), rel=1e-4)


@KINDS
def test_rows_of_zeros_do_not_underflow(kind: type[RowBuffer]) -> None:
    """An embedding's gradient is zero in most rows; only one that is tiny everywhere may underflow."""
    grads = [torch.zeros(1000, 4096), torch.ones(5)]
    floor = np.array([grad.numel() * UNDERFLOW for grad in grads])
    reader = reader_of(kind)
    assert reader.read(grads).may_underflow(grads, floor)
    grads[0][17, 5] = 1e-3
    assert not reader.read(grads).may_underflow(grads, floor)
    grads[0][17, 5] = 1e-18
    assert reader.read(grads).may_underflow(grads, floor)
    grads[0][17, 5] = math.nan
    assert not reader.read(grads).may_underflow(grads, floor)  # it has no norm that could be too small


@KINDS
@pytest.mark.parametrize("value", [1e30, math.inf, -math.inf, math.nan, 1e-40])
def test_reading_raises_no_warning(kind: type[RowBuffer], value: float) -> None:
    """Squares beyond float32 are ours to find out, whatever the script has numpy do about overflows."""
    grads = [torch.full((1 << 17,), value), *(torch.full((5,), value) for _ in range(8))]
    for how in ("warn", "raise"):
        with warnings.catch_warnings(), np.errstate(all=how):  # type: ignore[call-overload]
            warnings.simplefilter("error")
            read = reader_of(kind).read(grads)
            total, squares = read.total(), read.squares()
        assert not 0 < total < math.inf
        assert not ((squares > 0) & (squares < math.inf)).any()


@KINDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_a_gradient_of_another_dtype_is_not_converted(kind: type[RowBuffer], dtype: torch.dtype) -> None:
    """A place that was planned for float32 and finds something else is read by itself, with all its digits."""
    reader = reader_of(kind)
    reader.read([torch.ones(1 << 17)])
    other = torch.full((1 << 17,), 300.0).to(dtype)  # its square is beyond float16
    assert math.sqrt(reader.read([other]).squares()[0]) == pytest.approx(reference(other), rel=1e-5)


@KINDS
def test_gradients_that_come_later_are_planned_for(kind: type[RowBuffer]) -> None:
    """A first read before any gradient is there (another loop's clip) does not have them read one by one for good."""
    reader, grads = reader_of(kind), [torch.full((5,), 2.0) for _ in range(40)]
    reader.read([None] * 40)
    for _ in range(PATIENCE + 1):
        read = reader.read(grads)
        assert read.squares() == pytest.approx([20.0] * 40, rel=1e-6)
    assert not read._single


@settings(max_examples=examples(10))
@given(st.integers(0, 10**6))
def test_norms_of_many_reads_at_once_are_those_of_each(seed: int) -> None:
    """Bit by bit, by BLAS and by torch, beside reads that were not as planned."""
    rng = np.random.default_rng(seed)
    shapes = [tuple(rng.integers(1, 80, rng.integers(1, 3))) for _ in range(int(rng.integers(1, 9)))] + [
        (120, 130)
    ]
    for kind in (NormRows, SquareRows):
        found = []
        for together in (False, True):
            rng = np.random.default_rng(seed)
            reader, readings = CpuReader(lambda kind=kind: kind), []  # type: ignore[misc]
            for absent in (False, False, True, False, False):
                grads = [torch.from_numpy(rng.normal(size=shape).astype(np.float32)) for shape in shapes]
                rows = reader.read([None, *grads[1:]] if absent else grads)
                readings.append(CpuNorms(rows, np.zeros(len(grads)), 1.0))
            readings[1].norms()
            if together:
                add_up_all(readings)
                assert [reading.rows._rows is None for reading in readings] == [True, True, False, True, True]
            found.append([reading.norms().tolist() for reading in readings])
        assert found[0] == found[1]
