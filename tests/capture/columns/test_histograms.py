"""Histograms: every element in its octave, of each parameter or module in turn, and no part of what is trained."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.capture.columns import histograms
from gradwatch.capture.columns.activation_reader import ActivationReader
from gradwatch.capture.columns.histograms import HistogramReader, HistogramTurns
from gradwatch.engine.columns_needed import Needs
from gradwatch.engine.judged_steps import staggered_reads
from gradwatch.reading import chunked_statistics
from gradwatch.reading.async_copy import start_copy
from gradwatch.records.histogram import BINS, LOWEST, Histogram
from gradwatch.records.record import Record
from gradwatch.rules.files import parse_rules
from gradwatch.session.watch import session_of
from gradwatch.taps import module_calls
from tests.reading.test_foreach_norms import WAITING, Operations
from tests.support import odd_activations
from tests.support.kept import Kept
from tests.support.module_calls import ModuleCalls

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own


def by_hand(grad: Tensor, scale: float = 1.0) -> Histogram:
    """All real numbers of a gradient in float64, by log2 of their magnitude."""
    dense = grad.coalesce().values() if grad.is_sparse else grad
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    values = np.abs(real.detach().double().numpy().ravel())
    finite = values[np.isfinite(values) & (values > 0)]
    bins = np.clip(np.floor(np.log2(finite) - np.log2(scale)) - LOWEST, 0, BINS - 1).astype(int)
    zeros = int((values == 0).sum())
    return Histogram(zeros, np.bincount(bins, minlength=BINS), int((~np.isfinite(values)).sum()))


def equal(found: Histogram, expected: Histogram) -> bool:
    """True if all counts are alike."""
    return (found.zeros, found.nonfinite) == (expected.zeros, expected.nonfinite) and np.array_equal(
        found.counts, expected.counts
    )


def reader_of(count: int, every: int) -> HistogramReader:
    """A reader of all of so many parameters, whose turns come at the same step."""
    return HistogramReader(HistogramTurns(every, np.zeros(count, np.intp), np.ones(count, np.bool_)))


def odd() -> dict[str, Tensor]:
    """Gradients of every type, layout and magnitude."""
    torch.manual_seed(0)
    spread = torch.randn(400, 500) * torch.logspace(-20, 10, 500)
    sparse = torch.sparse_coo_tensor([[1, 3, 3]], torch.tensor([2.0, -1.0, 5.0]), (9,))
    exact = torch.tensor([0.0, -0.0, 1.0, 2.0, 0.5, math.nextafter(1.0, 0.0), -4.0])
    return {
        "float32": spread,
        "in columns": spread.t(),
        "strided": spread[::3, 1::2],
        "float64": spread.double() * 1e-40,
        "bfloat16": spread.bfloat16(),
        "float16": spread.half(),
        "complex": torch.randn(30, 30, dtype=torch.complex64),
        "conjugate": torch.randn(30, 30, dtype=torch.complex64).conj(),
        "sparse": sparse,
        "powers of two and zeros": exact,
        "subnormal": torch.tensor([1e-45, -1e-40, 0.0, 1e-38]),
        "subnormal float64": torch.tensor([5e-324, 1e-310, 0.0, 1.0], dtype=torch.float64),
        "beyond the bins": torch.tensor([1e-20, 1e20, -1e30]),
        "not finite": torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0]),
        "one number": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
    }


@pytest.mark.parametrize("at_once", [7, 1 << 22])
def test_a_large_gradient_on_a_device_is_counted_in_parts(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers made of its elements are as many as those of one part, whatever its size; the counts are the same."""
    monkeypatch.setattr(histograms, "AT_ONCE", at_once)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        vector = (torch.randn(500) * torch.logspace(-9, 9, 500)).to(dtype)
        wide = vector if dtype is torch.float64 else vector.float()
        counts, zeros = chunked_statistics.exponents(wide)
        assert histograms._exponents(vector).tolist() == [*counts.tolist(), zeros]


@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**-5])
@pytest.mark.parametrize("device", [False, True])
def test_each_element_is_in_its_octave(device: bool, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 odd gradients, with a loss scale still in them, on the host and by the operations of a device."""
    grads = odd()
    reader = reader_of(len(grads), 1)
    if device:
        monkeypatch.setattr(histograms, "on_host", lambda tensor: False)
    with Operations() as operations:
        pending = reader.collect(0, lambda: list(grads.values()), scale)
    assert not (device and [name for name in operations.names if name in WAITING and name != "equal"])
    assert pending is not None
    assert pending.ready()
    found = pending.histograms()
    assert len(found) == len(grads) - 1  # all but the empty one
    for k, (name, grad) in enumerate(grads.items()):
        if k in found:
            assert equal(found[k], by_hand(grad, scale)), (name, found[k], by_hand(grad, scale))
            stored = grad.coalesce().values() if grad.is_sparse else grad
            size = stored.numel() * (2 if grad.is_complex() else 1)
            assert found[k].zeros + found[k].counts.sum() + found[k].nonfinite == size


def test_a_scale_that_moves_no_octave_gives_none() -> None:
    """A loss scale that is no power of two cannot be divided out of octaves: no histogram, rather than a wrong one."""
    reader = reader_of(1, 1)
    pending = reader.collect(0, lambda: [torch.ones(3)], start_copy(3.0))
    assert pending is not None
    assert pending.histograms() == {}


def trained(
    rules: str | None, tmp_path: Path, steps: int = 22
) -> tuple[list[Record], list[dict[str, Tensor]], list[Tensor], dict[str, str]]:
    """Records, the gradients of each step, the weights at the end, and the rules without data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5), nn.Linear(5, 2))
    optimizer, kept, grads = torch.optim.SGD(model.parameters(), 0.01), Kept(), []
    reasons: dict[str, str] = {}

    def train() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 30)).square().sum().backward()
            grads.append({name: param.grad.clone() for name, param in model.named_parameters()})  # type: ignore[union-attr]
            optimizer.step()

    if rules is None:
        train()
    else:
        with gradwatch.watch(
            model, optimizer, rules=parse_rules(rules), run_dir=tmp_path, sinks=[kept]
        ) as gw:
            train()
            reasons = dict(session_of(gw).account().no_data)
    return kept.records, grads, [param.detach() for param in model.parameters()], reasons


@pytest.mark.parametrize("every", [1, 3, 10])
def test_parameters_take_turns(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chosen parameter every N steps, at its phase and at no other step, of the gradient of that step."""
    monkeypatch.setattr(staggered_reads, "SMALLEST_PART", 1)
    rules = f"version: 1\nhistograms: {{every: {every}, params: ['*.weight']}}\nrules: {{}}\n"
    records, grads, _, reasons = trained(rules, tmp_path)
    assert reasons == {}
    names = records[0].snapshot.sites.names
    phases = staggered_reads.Staggering(records[0].snapshot.sites.numels).phases(every)
    assert len(set(phases.tolist())) > 1 or every == 1
    for record, now in zip(records, grads, strict=True):
        due = {
            k
            for k, name in enumerate(names)
            if name.endswith("weight") and phases[k] == record.snapshot.step % every
        }
        assert record.snapshot.histograms.keys() == due
        assert all(equal(found, by_hand(now[names[k]])) for k, found in record.snapshot.histograms.items())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scale", [1024.0, 1000.0])
def test_under_a_scaler_they_are_of_unscaled_gradients(scale: float, fused: bool, tmp_path: Path) -> None:
    """A fused optimizer gets them scaled: divided out, and none where that is a scale that moves no octave."""
    torch.manual_seed(0)
    model, x, kept = nn.Linear(30, 4), torch.randn(8, 30), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    rules = parse_rules("version: 1\nhistograms: {every: 1}\nrules: {}\n")
    with gradwatch.watch(model, optimizer, rules=rules, run_dir=tmp_path, sinks=[kept]) as gw:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            plain = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        account = session_of(gw).account()
    reasons = account.no_data
    assert account.watched.without_histogram == (3 if fused and scale == 1000.0 else 0)
    found = kept.records[-1].snapshot.histograms
    if fused and scale == 1000.0:
        assert found == {}
        assert "no power of two" in reasons["histograms:gradients"]
    else:
        assert reasons == {}
        assert set(found) == {0, 1}
        assert all(equal(one, by_hand(plain[k])) for k, one in found.items())


def test_a_gradient_that_is_absent_at_each_of_its_turns_is_read_at_the_first_step_that_has_it() -> None:
    """Two heads by turns, and `every: 4`: the second never had a gradient when it was its turn."""
    reader = reader_of(2, 4)
    found = []
    for step in range(9):
        grads = [torch.ones(3), None] if step % 2 == 0 else [None, torch.ones(5)]
        pending = reader.collect(step, lambda grads=grads: grads, 1.0)  # type: ignore[misc]
        found.append([] if pending is None else [*pending.histograms()])
    assert found == [[0], [1], [], [], [0], [1], [], [], [0]]


def test_training_is_bit_identical(tmp_path: Path) -> None:
    """With histograms of everything at each step, weights end as without a watch."""
    bare = trained(None, tmp_path)[2]
    seen = trained("version: 1\nhistograms: {every: 1}\nrules: {}\n", tmp_path)[2]
    assert all(map(torch.equal, bare, seen))


def test_a_choice_that_matches_nothing_says_so(tmp_path: Path) -> None:
    """It stands among what had no data, with the reason."""
    rules = "version: 1\nhistograms: {params: ['encoder.*']}\nrules: {r: {detect: {kind: nonfinite}}}\n"
    assert trained(rules, tmp_path, 3)[3] == {
        "histograms:gradients": "`histograms: params:` matches no parameter"
    }


def watched(rules: str, tmp_path: Path, steps: int) -> tuple[list[Record], ModuleCalls, dict[str, str]]:
    """Records of the training with odd activations, what went through its modules, and rules without data."""
    kept, reasons = Kept(), dict[str, str]()

    def around(model: nn.Module, optimizer: torch.optim.Optimizer, train: Callable[[], None]) -> None:
        with gradwatch.watch(
            model, optimizer, rules=parse_rules(rules), run_dir=tmp_path, sinks=[kept]
        ) as gw:
            train()
            reasons.update(session_of(gw).account().no_data)

    calls, _ = odd_activations.trained(steps, around)
    return kept.records, calls, reasons


ACTIVATIONS = """version: 1
modules: {{tap: output}}
histograms: {{of: [{of}], every: {every}, modules: ["[!e]*", "empty", "evaluated*"]}}
rules: {{}}
"""


@pytest.mark.parametrize("of", ["activations", "activations, gradients"])
@pytest.mark.parametrize("every", [1, 3, 10])
def test_modules_take_turns(every: int, of: str, tmp_path: Path) -> None:
    """Each every N steps, of its last call with elements; one that has none at its turn, as soon as it has."""
    rules = ACTIVATIONS.format(of=of, every=every)
    records, calls, reasons = watched(rules, tmp_path, 34)
    assert reasons == {}
    sites = records[0].snapshot.sites
    modules = [k for k, kind in enumerate(sites.kinds) if kind == "module"]
    phases = staggered_reads.Staggering(np.zeros(len(modules), np.int64)).phases(every)
    chosen = {
        k: int(phase) for k, phase in zip(modules, phases, strict=True) if sites.names[k] != "embedding"
    }
    overdue: set[int] = set()
    read: dict[str, int] = {}
    for record, now in zip(records, calls.outputs, strict=True):
        step, found = record.snapshot.step, record.snapshot.histograms
        due = {k for k, phase in chosen.items() if phase == step % every} | overdue
        overdue = {k for k in due if sites.names[k] not in now}
        assert {k for k in found if k in chosen} == due - overdue
        assert "gradients" in of or found.keys() == due - overdue
        for k in due - overdue:
            assert equal(found[k], by_hand(now[sites.names[k]])), (step, sites.names[k])
            read[sites.names[k]] = read.get(sites.names[k], 0) + 1
    parts = {"pair", "named", "view", "bf16", "f64", "shared", "in_place", "spectrum", "first"}
    assert read.keys() == parts | {"empty", "sometimes", "Odd"}
    assert all(read[name] >= 34 // every for name in parts)
    assert ({*found} & {k for k, kind in enumerate(sites.kinds) if kind == "param"} != set()) == (
        of != "activations" and every == 1
    )


def test_histograms_of_activations_on_a_device_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the operations of a device, in the forward: the same counts, and nothing that copies a number to the host."""
    module, turns = nn.Tanh(), HistogramTurns(1, np.zeros(1, np.intp), np.ones(1, np.bool_))
    reader = ActivationReader({}, Needs(), staggered_reads.Staggering(np.zeros(1, np.int64)), turns)
    monkeypatch.setattr(histograms, "on_host", lambda tensor: False)
    for x in (torch.randn(3, 5), torch.randn(7, 5)):
        with Operations() as operations:
            reader.read(0, module, x)
        assert not [name for name in operations.names if name in WAITING]
    found = reader.take_histograms()
    assert found is not None
    assert equal(found.histograms()[0], by_hand(x))
    assert reader.take_histograms() is None


def test_nothing_is_read_of_modules_that_no_histogram_is_asked_of(tmp_path: Path) -> None:
    """Without activations among `of`, calls of modules are not even noticed."""
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for of, noticed in (("gradients", False), ("activations", True)):
        rules = parse_rules(ACTIVATIONS.format(of=of, every=10))
        with gradwatch.watch(model, optimizer, rules=rules, run_dir=tmp_path, sinks=[Kept()]):
            assert module_calls.noticed(model[0]) is noticed


def test_no_tensor_outlives_its_step(tmp_path: Path) -> None:
    """Outputs whose histograms were taken are freed with the script's own references."""
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rules = parse_rules(ACTIVATIONS.format(of="activations", every=1))
    with gradwatch.watch(model, optimizer, rules=rules, run_dir=tmp_path, sinks=[Kept()]):
        out = model(torch.ones(4, 3))
        out.sum().backward()
        gone = weakref.ref(out)
        del out
        assert gone() is None
        optimizer.step()


@pytest.mark.parametrize(
    ("modules", "trains", "reason"),
    [
        ("nowhere", True, "`histograms: modules:` matches no tapped module"),
        ("*", False, "was called in training mode"),
    ],
)
def test_activations_that_never_come_are_listed(
    modules: str, trains: bool, reason: str, tmp_path: Path
) -> None:
    """With the reason, beside histograms of gradients that did come."""
    model = nn.Sequential(nn.Linear(3, 2)).train(trains)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rules = parse_rules(f"""version: 1
modules: {{tap: output}}
histograms: {{of: [gradients, activations], every: 1, modules: ["{modules}"]}}
rules: {{}}
""")
    with gradwatch.watch(model, optimizer, rules=rules, run_dir=tmp_path, sinks=[Kept()]) as gw:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        (listed,) = dict(session_of(gw).account().no_data).items()
    assert listed[0] == "histograms:activations"
    assert reason in listed[1]
