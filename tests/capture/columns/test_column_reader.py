"""Columns of whole tensors are exact, whatever the tensor, and are read when they are due and at no other step."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradwatch.capture.columns.column_reader import COLUMNS, ColumnReader
from gradwatch.capture.columns.gradient_values import GRADIENT_COLUMNS
from gradwatch.capture.columns.optimizer_moments import COSINE, NEAR_ZERO, STATE_COLUMNS
from gradwatch.capture.columns.update_ratio import WEIGHT_MOMENTS
from gradwatch.engine import Engine
from gradwatch.engine.columns_needed import AFTER_A_STEP, EVERY_STEP, OF_UPDATES, Needs
from gradwatch.engine.judged_steps.staggered_reads import Staggering
from gradwatch.records.snapshot import Sites
from gradwatch.rules.files import load_rules
from tests.support.examples import examples

READ = COLUMNS - {COSINE}
"""Columns of one tensor; the cosine of two is tested with the optimizers that keep one of them."""
OF_GRADIENTS = GRADIENT_COLUMNS | STATE_COLUMNS
"""Columns of tensors that stay the same here: the gradients, which are the optimizer's moments too."""


def staggering() -> Staggering:
    """The phases of `parameters`."""
    return Staggering(np.array([param.numel() for param in parameters()]))


def at_every_step(*columns: str, count: int = 6) -> ColumnReader:
    """A reader of whole columns of so many parameters."""
    return ColumnReader(Needs(dict.fromkeys(columns, EVERY_STEP), {}), Staggering(np.ones(count, np.int64)))


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(8, 8), (8, 8), (5,), (100, 100), (), (300, 41)]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.relu(torch.randn_like(param))
    return params


def test_due_at_each_rule_s_own_steps() -> None:
    """Rules of every 4 and 6 on one column, and a staggered one: all at the steps of the first, a part between."""
    whole = {"max_abs": frozenset({4, 6}), "update_ratio": frozenset({4})}
    needs, phases = Needs(whole, {"max_abs": frozenset({3})}), staggering()
    shares = [needs.due("max_abs", step, phases) for step in range(13)]
    counts = [0 if share is None else int(share.sum()) for share in shares]
    assert [step for step, count in enumerate(counts) if count == 6] == [0, 1, 4, 6, 7, 8, 10, 12]
    assert [step for step in range(9) if needs.due("update_ratio", step, phases) is not None] == [4, 8]


@settings(max_examples=examples(7))
@given(
    st.dictionaries(
        st.sampled_from(sorted(COLUMNS)), st.frozensets(st.integers(1, 12), min_size=1, max_size=2)
    ),
    st.dictionaries(
        st.sampled_from(sorted(COLUMNS)), st.frozensets(st.integers(2, 12), min_size=1, max_size=2)
    ),
    st.lists(st.integers(1, 200_000), min_size=1, max_size=6),
)
def test_the_next_step_is_the_first_that_is_due(
    whole: dict[str, frozenset[int]], staggered: dict[str, frozenset[int]], numels: list[int]
) -> None:
    """`next_due` is the first step after that `due` finds, and a reader is idle at no step that has something due."""
    needs, phases, size = Needs(whole, staggered), Staggering(np.array(numels)), len(numels)
    for column, step in itertools.product(sorted(COLUMNS), range(30)):
        found = needs.next_due(column, step, phases)
        later = (s for s in range(step + 1, 200) if needs.due(column, s, phases) is not None)
        assert found == next(later, None)
    reader, params = ColumnReader(needs, phases), [torch.ones(1) for _ in numels]
    for step in range(30):
        due = any(needs.due(name, step, phases) is not None for name in COLUMNS)
        kept = any(needs.due(name, step + 1, phases) is not None for name in OF_UPDATES)
        assert not ((due or kept) and step in reader.idle)
        found = None if step in reader.idle else reader.collect(step, params, lambda: [None] * size)
        assert (found is not None) == due


def odd() -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(what it is, a weight, a gradient) in the shapes, layouts, types and ranges that are easily got wrong."""
    torch.manual_seed(1)
    wide = torch.randn(6, 8, 5, 5)
    sparse = torch.sparse_coo_tensor([[0, 3, 3], [1, 1, 1]], [1.0, 2.0, -7.0], (9, 4), check_invariants=True)
    grads = [
        ("scalar", torch.tensor(-3.0)),
        ("empty", torch.zeros(0, 4)),
        ("one element", torch.tensor([0.0])),
        ("more than a chunk", torch.relu(torch.randn(70_001)).neg()),
        ("several chunks and a rest", torch.relu(torch.randn(3, 65_536 + 17))),
        ("channels last", wide.to(memory_format=torch.channels_last)),
        ("transposed", torch.randn(40, 300).t()),
        ("with gaps", torch.randn(50, 40)[::3, ::2]),
        ("expanded", torch.tensor([2.0, 0.0]).expand(100, 2)),
        ("float64", torch.randn(200, 300, dtype=torch.float64)),
        ("bfloat16", torch.relu(torch.randn(200, 400)).bfloat16()),
        ("float16", torch.relu(torch.randn(200, 400)).half()),
        ("complex", torch.randn(30, 30, dtype=torch.complex64)),
        ("conjugate", torch.randn(30, 30, dtype=torch.complex64).conj()),
        ("sparse", sparse),
        ("squares underflow", torch.randn(300) * 1e-30),
        ("subnormal", torch.full((20,), 1e-42)),
        ("squares overflow", torch.randn(300) * 1e30),
        ("negative zeros", torch.tensor([-0.0, 0.0, 1.0])),
        ("a NaN", torch.tensor([1.0, math.nan, -9.0])),
        ("an infinity", torch.tensor([1.0, -math.inf, 9.0])),
    ]
    found = []
    for what, grad in grads:
        dense = grad.to_dense() if grad.is_sparse else grad
        found.append(
            (what, torch.randn_like(dense.resolve_conj(), memory_format=torch.preserve_format), grad)
        )
    return found


@pytest.mark.parametrize("every", [1, 2, 3, 10])
def test_all_are_exact_at_their_cadence(every: int) -> None:
    """Each column of 21 odd tensors equals float64 by hand, at each step of its phase and at no other."""
    whats, weights, grads = zip(*odd(), strict=True)
    numels = np.array([weight.numel() for weight in weights]) * 20  # so large that they get different phases
    phases = Staggering(np.maximum(numels, 1))
    cadence = dict.fromkeys(sorted(READ), frozenset({every}))
    reader = ColumnReader(Needs(cadence, {}) if every == 1 else Needs({}, cadence), phases)
    counts = {name: np.zeros(len(weights), int) for name in READ}
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    for weight, grad in zip(weights, grads, strict=True):  # moments as odd as the gradients
        moment = grad.to_dense() if grad.is_sparse else grad
        optimizer.state[weight] = {"exp_avg": moment, "exp_avg_sq": moment}
    before: list[torch.Tensor] = []
    there = [k for k, what in enumerate(whats) if what != "empty"]
    of_gradients = {
        (name, k): by_hand(name, grads[k], grads[k], grads[k])
        for name in OF_GRADIENTS - {COSINE}
        for k in there
    }
    for step in range(21):
        read = reader.collect(step, weights, lambda: grads, optimizer=optimizer)
        reader.moved(np.ones(len(weights), bool), np.zeros(len(weights), bool), step)
        columns = {} if read is None else read.columns()
        for name, k in itertools.product(READ, range(len(weights))):
            due = phases.phases(every)[k] == step % every and not (name in AFTER_A_STEP and step == 0)
            due = due and not (whats[k] == "empty" and name in OF_GRADIENTS | WEIGHT_MOMENTS)
            assert due == (name in columns and bool(columns[name].present[k])), (name, whats[k], step)
            if due:
                counts[name][k] += 1
                was = before[k] if before else weights[k]
                expected = (
                    of_gradients[name, k] if name in OF_GRADIENTS else by_hand(name, weights[k], was, was)
                )
                # A mean of large numbers of both signs is as good as they are.
                least = 1e-6 * of_gradients["max_abs", k] if name == "mean" else 0.0
                least = 1e-6 if name == "weight_mean" else least
                got = float(columns[name].values[k])
                assert got == pytest.approx(expected, rel=2e-6, abs=least, nan_ok=True), (name, whats[k])
        before = [weight.clone() for weight in weights]
        for weight in weights:
            weight.mul_(1 - 1e-4 * (1 + step % 3))
    assert (counts["max_abs"][there] >= 20 // every).all()
    assert (counts["update_ratio"] >= 20 // every).all()


def by_hand(name: str, weight: torch.Tensor, before: torch.Tensor, grad: torch.Tensor) -> float:
    """The column of one tensor, from all its numbers in float64."""
    if name in STATE_COLUMNS:
        moment = real(grad.to_dense() if grad.is_sparse else grad)
        size = float(np.linalg.norm(moment))
        of_state = {"moment_norm": size, "second_moment_rms": size / math.sqrt(moment.size)}
        return of_state.get(name, float((moment < NEAR_ZERO).mean()))
    if name in GRADIENT_COLUMNS:
        g = real(grad)
        with np.errstate(invalid="ignore"):
            of = {"min": np.min, "max": np.max, "mean": np.mean, "std": np.std}.get(name)
            return float(
                (g == 0).mean() if name == "zero_fraction" else np.abs(g).max() if of is None else of(g)
            )
    if name == "weight_norm":
        return float(np.linalg.norm(real(weight)))
    if name in WEIGHT_MOMENTS:
        return float((np.mean if name == "weight_mean" else np.std)(real(weight)))
    if name == "update_norm":
        return float(np.linalg.norm(real(weight) - real(before)))
    return float(np.linalg.norm(real(weight) - real(before))) / max(float(np.linalg.norm(real(before))), 0.1)


def real(tensor: torch.Tensor) -> np.ndarray:
    """All real numbers that are stored of a tensor, in float64."""
    dense = tensor.coalesce().values() if tensor.is_sparse else tensor.resolve_conj()
    dense = torch.view_as_real(dense) if dense.is_complex() else dense
    return dense.double().numpy().ravel()


def test_update_ratio_is_the_last_update_over_the_weight_before_it() -> None:
    """‖Δw‖/‖w‖ of exactly the parameters that were given a gradient; none after a skipped step."""
    params = parameters()
    reader = at_every_step("update_ratio")
    grads = [param.grad for param in params]
    everyone, none = np.ones(6, np.bool_), np.zeros(6, np.bool_)
    reader.collect(0, params, lambda: grads)
    reader.moved(everyone, zero=none)
    before = [param.detach().clone() for param in params]
    with torch.no_grad():
        for param in params:
            param.mul_(0.75)
    sampled = reader.collect(1, params, lambda: grads)
    assert sampled is not None
    column = sampled.columns()["update_ratio"]
    for k, old in enumerate(before):
        assert column.values[k] == pytest.approx(
            0.25 * float(old.norm()) / max(float(old.norm()), 0.1), rel=1e-4
        )
    reader.moved(none, zero=none)
    later = reader.collect(2, params, lambda: grads)
    assert later is not None
    assert not later.columns()["update_ratio"].present.any()


@pytest.mark.parametrize("size", [8, 400])
def test_a_sparse_weight_is_measured_beside_dense_ones(size: int) -> None:
    """Its values alone have its norm, and that of its update; those of the dense one are right, too."""
    weight, bias = nn.Parameter(torch.eye(size).to_sparse()), nn.Parameter(torch.ones(size))
    weight.grad, bias.grad = torch.eye(size).to_sparse(), torch.ones(size)
    params, everyone, none = [weight, bias], np.ones(2, np.bool_), np.zeros(2, np.bool_)
    reader = at_every_step("update_ratio", "weight_norm", count=2)
    reader.collect(0, params, lambda: [param.grad for param in params])
    reader.moved(everyone, zero=none)
    with torch.no_grad():
        for param in params:
            param.mul_(0.75)
    sampled = reader.collect(1, params, lambda: [param.grad for param in params])
    assert sampled is not None
    assert sampled.columns()["update_ratio"].values.tolist() == pytest.approx([0.25, 0.25])
    assert sampled.columns()["weight_norm"].values.tolist() == pytest.approx([0.75 * size**0.5] * 2)


def test_late_verdicts_find_the_step_they_belong_to() -> None:
    """On a device steps are judged after later ones were sampled: each update is matched with its own verdict."""
    params = parameters()
    reader = at_every_step("update_ratio")
    grads = [param.grad for param in params]
    everyone, none = np.ones(6, np.bool_), np.zeros(6, np.bool_)
    sampled = [reader.collect(step, params, lambda: grads) for step in (100, 101, 102)]
    reader.moved(none, none, 99)  # nothing of step 99 was kept
    reader.moved(everyone, none, 100)
    reader.moved(none, none, 101)
    present = [None if one is None else one.columns().get("update_ratio") for one in sampled]
    assert present[0] is None
    assert present[1] is not None
    assert present[1].present.all()
    assert present[2] is not None
    assert not present[2].present.any()


def test_an_update_without_a_verdict_is_absent() -> None:
    """Where the step before was never judged (a fault of ours), there is no update ratio rather than a wrong one."""
    params = parameters()
    reader = at_every_step("update_ratio", "weight_norm")
    grads = [param.grad for param in params]
    reader.collect(100, params, lambda: grads)
    later = reader.collect(101, params, lambda: grads)
    assert later is not None
    assert later.columns().keys() == {"weight_norm"}


def test_missing_gradients_are_absent() -> None:
    """A parameter without a gradient has no zero fraction."""
    params = parameters()
    grads = [None if k == 2 else param.grad for k, param in enumerate(params)]
    sampled = at_every_step("zero_fraction").collect(0, params, lambda: grads)
    assert sampled is not None
    assert sampled.columns()["zero_fraction"].present.tolist() == [True, True, False, True, True, True]


def test_a_ratio_never_comes_without_the_norm_it_is_relative_to() -> None:
    """A rule on both columns has its samples at each step of its cadence, from step 1 on."""
    cadence = dict.fromkeys(("update_ratio", "weight_norm"), frozenset({10}))
    reader, weights = ColumnReader(Needs({}, cadence), Staggering(np.array([16]))), [torch.ones(4, 4)]
    both = []
    for step in range(40):
        read = reader.collect(step, weights, lambda: weights)
        reader.moved(np.ones(1, np.bool_), np.zeros(1, np.bool_), step)
        columns = {} if read is None else read.columns()
        if "update_ratio" in columns:
            assert "weight_norm" in columns
            both.append(step)
        weights[0] += 0.1
    assert both == [1, 11, 21, 31]


def test_what_is_overdue_is_read_as_soon_as_it_can_be_had() -> None:
    """A gradient where there is one; an update, with what its rule reads beside it, the step after a copy."""
    weights = [torch.ones(3), torch.ones(3), torch.ones(3), torch.ones(3)]
    names = ("update_ratio", "weight_norm", "max_abs")
    reader = ColumnReader(Needs({}, dict.fromkeys(names, frozenset({10}))), Staggering(np.full(4, 3)))
    grads: list[torch.Tensor | None] = [torch.ones(3), None, torch.zeros(3), torch.ones(3)]
    late = np.array([True, True, True, False])  # the last has its turn at step 11
    overdue = {("max_abs",): late, ("update_ratio", "weight_norm"): late}
    nothing = np.zeros(4, np.bool_)
    found = []
    for step in (5, 6, 7):  # nothing is due at these
        read = reader.collect(step, weights, lambda: grads, overdue=overdue, zero=lambda: np.arange(4) == 2)
        reader.moved(~nothing, nothing, step)
        assert read is not None
        found.append({name: np.flatnonzero(one.present).tolist() for name, one in read.columns().items()})
        weights[0] += 1
    assert found[0] == {"max_abs": [0, 2]}
    assert found[1] == found[2] == {"max_abs": [0, 2], "update_ratio": [0], "weight_norm": [0]}
    assert reader.collect(8, weights, lambda: grads) is None  # judged


def test_with_a_gradient_of_zeros_a_weight_that_has_moved_has_an_update() -> None:
    """Momentum and decay move it, or make it NaN: that is an update; a weight that nothing moved has none."""
    weights = [torch.ones(3), torch.ones(3), torch.ones(3)]
    reader = at_every_step("update_norm", count=3)
    reader.collect(0, weights, lambda: weights)
    reader.moved(np.ones(3, np.bool_), zero=np.ones(3, np.bool_))
    weights[0] *= 0.9
    weights[2] *= math.nan
    read = reader.collect(1, weights, lambda: weights)
    assert read is not None
    assert read.columns()["update_norm"].present.tolist() == [True, False, True]


def test_kept_weights_hold_no_more_memory_than_one_part() -> None:
    """Copies are written over those of the step before: of ten parameters at every: 10 there is one copy at a time."""
    weights = [torch.ones(100_000) for _ in range(10)]
    reader = ColumnReader(Needs({}, {"update_ratio": frozenset({10})}), Staggering(np.full(10, 100_000)))
    places = set()
    for step in range(30):
        reader.collect(step, weights, lambda: weights)
        kept = reader._weights._kept
        assert kept is not None
        assert len(kept.copies) == 1
        places |= {copy.data_ptr() for copy in kept.copies.values()}
    assert len(places) == 1


def test_a_weight_that_was_exchanged_has_no_ratio() -> None:
    """Another size, type or layout in the place of a weight is no update of it; the others are told."""
    weights = [torch.ones(4), torch.ones(5), torch.ones(6), torch.randn(2, 3, 4, 4)]
    reader = ColumnReader(Needs({"update_ratio": EVERY_STEP}, {}), Staggering(np.array([4, 5, 6, 96])))
    reader.collect(0, weights, lambda: weights)
    reader.moved(np.ones(4, np.bool_), np.zeros(4, np.bool_), 0)
    weights[0], weights[1] = torch.ones(3), torch.ones(5, dtype=torch.float64)
    weights[3] = weights[3].to(memory_format=torch.channels_last)
    read = reader.collect(1, weights, lambda: weights)
    assert read is not None
    assert read.columns()["update_ratio"].present.tolist() == [False, False, True, False]


def test_nothing_is_read_that_no_rule_is_about() -> None:
    """The default pack judges matrices: a bias is neither read nor copied, an embedding's zeros are not counted."""
    model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "body": nn.Linear(4, 4)})
    names, params = zip(*model.named_parameters(), strict=True)
    own = np.arange(len(params))
    numels, ndims = np.array([p.numel() for p in params]), np.array([p.ndim for p in params])
    engine = Engine(load_rules("default")).bind(Sites(names, ("param",) * len(params), numels, ndims, own))
    reader = ColumnReader(engine.needs.only(COLUMNS), engine.plan.staggering, own)
    reader.collect(0, params, lambda: params)
    reader.moved(np.ones(len(params), np.bool_), np.zeros(len(params), np.bool_), 0)
    read = reader.collect(1, params, lambda: params)
    assert read is not None
    found = {name: [names[k] for k in np.flatnonzero(one.present)] for name, one in read.columns().items()}
    assert found == {
        "zero_fraction": ["body.weight"],
        "weight_norm": ["embed.weight", "body.weight"],
        "update_ratio": ["embed.weight", "body.weight"],
    }
