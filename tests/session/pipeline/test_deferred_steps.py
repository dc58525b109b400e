"""Judging put off while a loop is calm: the same Records in the same order, and nothing that matters is late."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradwatch
from gradwatch.engine import BoundEngine
from gradwatch.errors import TrainingStopped
from gradwatch.journal import read_journal
from gradwatch.policies.norm import clip_coefficient
from gradwatch.reading.batched_norms import CpuReader
from gradwatch.reading.cpu_norms import CpuNorms
from gradwatch.records.record import Record
from gradwatch.rules.files import parse_rules
from gradwatch.session.binding.optimizer_rules import ORDINARY, ORDINARY_AGAIN
from gradwatch.session.pipeline import deferred_steps, extra_columns, step_pipeline
from gradwatch.session.pipeline.deferred_steps import LONGEST, MOST, Deferral
from gradwatch.session.watch import session_of
from tests.support import warm
from tests.support.kept import Kept

LEARNED = ORDINARY + 10
STEPS = 112
"""Of a run: whatever its deeds lead to has fired by step 110."""
OF_TASKS = 160
"""Steps of optimizers after each other, all of which have the baselines of the first."""
SENTINELS = 15
"""Layers beside the first: the fewest parameters of which most hooks are removed."""
X = torch.randn(64, 3, generator=torch.Generator().manual_seed(3))

Deed = Callable[[nn.Module], None]
Runs = Callable[[str, int], tuple[list[Record], list[int]]]


def build(layers: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), *(nn.Linear(4, 4) for _ in range(layers)))
    for layer in model:
        nn.init.orthogonal_(layer.weight)  # so that gradients neither fade nor grow with depth
    return model, torch.optim.SGD(model.parameters(), 1e-4)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, count: int, deeds: dict[int, Deed] | None = None
) -> Iterator[int]:
    """`count` calm steps; a deed is done to the gradients of its step before the optimizer sees them."""
    for step in range(count):
        optimizer.zero_grad()
        model(X[step % 60 : step % 60 + 4]).pow(2).mean().backward()
        if deeds and step in deeds:
            deeds[step](model)
        optimizer.step()
        yield step


def scaled(factor: float, name: str = "") -> Deed:
    """Multiply the gradients of the parameters whose name starts so, in place."""

    def deed(model: nn.Module) -> None:
        for found, parameter in model.named_parameters():
            if found.startswith(name) and parameter.grad is not None:
                parameter.grad.mul_(factor)

    return deed


def forgotten(model: nn.Module) -> None:
    """One parameter gets no gradient on this step."""
    next(model.parameters()).grad = None


def hooked(model: nn.Module, at: set[int], factor: float) -> None:
    """From autograd itself: one parameter's gradient is `factor` times as large on some backwards."""
    count = [-1]

    def grow(grad: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return grad * factor if count[0] in at else grad

    next(model.parameters()).register_hook(grow)


CASES: dict[str, Callable[[nn.Module], dict[int, Deed]]] = {
    "nothing": lambda model: {},
    "a clip on some steps": lambda model: {step: scaled(0.5) for step in range(70, STEPS, 7)},
    "one gradient shrunk by the user": lambda model: {90: scaled(0.1, "1.")},
    "a parameter without a gradient": lambda model: {90: forgotten, 91: forgotten},
    "a spike of one parameter": lambda model: hooked(model, {100, 101}, 1e4) or {},
    "a small spike": lambda model: hooked(model, {100, 101}, 1.5) or {},
    "a gradient that vanishes": lambda model: hooked(model, set(range(90, 200)), 1e-30) or {},
    "a gradient of zeros": lambda model: hooked(model, {90}, 0.0) or {},
    "zeros from then on": lambda model: hooked(model, set(range(90, 200)), 0.0) or {},
    "NaN": lambda model: hooked(model, {100}, float("nan")) or {},
}


def told(records: list[Record]) -> list[Any]:
    """Everything a Record says but times and costs."""
    return [
        (
            record.snapshot.step,
            record.snapshot.norm.tobytes(),
            record.snapshot.calls.tolist(),
            record.snapshot.coef.tobytes(),
            repr((record.snapshot.total_norm, record.snapshot.total_norm_applied)),
            sorted(record.snapshot.columns),
            repr(record.verdict.events),
            record.decision,
        )
        for record in records
    ]


def run(case: str, layers: int, path: Path, steps_of: int = STEPS) -> tuple[list[Record], list[int]]:
    """The Records of a run, and how many had been judged after each step."""
    model, optimizer = build(layers)
    deeds = CASES[case](model)
    sink, judged = Kept(), []
    with gradwatch.watch(model, optimizer, sinks=[sink], strict=True, run_dir=path):
        for _ in steps(model, optimizer, steps_of, deeds):
            judged.append(len(sink.records))
    return sink.records, judged


@pytest.fixture(autouse=True, scope="module")
def no_clock_decides() -> Iterator[None]:
    """On a busy machine a step may take longer than steps wait for each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred_steps, "LONGEST", math.inf)
        yield


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The runs of cases whose steps may wait, each once: several tests look at the same."""
    return cache(lambda case, layers: run(case, layers, tmp_path_factory.mktemp("late")))


@pytest.mark.parametrize(
    ("layers", "case"),
    [
        *(pytest.param(SENTINELS, case, id=f"sentinels, {case}") for case in CASES),
        *(pytest.param(2, case, id=f"every mark, {case}") for case in ("nothing", "a small spike", "NaN")),
    ],
)
def test_put_off_or_not_the_records_are_the_same(
    case: str, layers: int, late: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens in a calm loop, every number and every Event is what judging at once would give."""
    records, judged = late(case, layers)
    assert any(count < step + 1 for step, count in enumerate(judged)), "nothing was put off"
    with monkeypatch.context() as patch:
        patch.setattr(extra_columns, "ORDINARY", 10**9)
        patch.setattr(step_pipeline, "ORDINARY", 10**9)
        at_once, judged = run(case, layers, tmp_path)
    assert judged == list(range(1, STEPS + 1))
    assert told(records) == told(at_once)


def of_tasks(path: Path, length: int, lost: frozenset[int]) -> tuple[list[Record], list[int]]:
    """The Records of optimizers after each other, each of a copied model, and how many were judged after each step.

    The gradients of these steps, `lost`, are of NaN.
    """
    model, _ = build()
    first = torch.optim.SGD(model.parameters(), 1e-4)
    sink, judged = Kept(), []
    with gradwatch.watch(model, first, sinks=[sink], strict=True, run_dir=path) as gw:
        for begin in range(0, OF_TASKS, length):
            own = copy.deepcopy(model)
            optimizer = torch.optim.SGD(own.parameters(), 1e-4)
            session_of(gw).join([own], [optimizer])
            deeds = {step - begin: scaled(math.nan) for step in lost}
            for _ in steps(own, optimizer, length, deeds):
                judged.append(len(sink.records))
            del own, optimizer
            if lost.intersection(range(begin, begin + length)):
                gc.collect()  # what looks for a cause leaves cycles, and the next optimizer takes the place of this one
    return sink.records, judged


@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("lost", [(), (120, 123)])
def test_steps_of_optimizers_after_each_other_wait_together(
    length: int, lost: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has the baselines of the one before: put off beyond the end of an optimizer, and the same Records."""
    records, judged = of_tasks(tmp_path / "late", length, frozenset(lost))
    assert len(records) == len(judged)
    assert max(step + 1 - count for step, count in enumerate(judged)) > length
    with monkeypatch.context() as patch:
        patch.setattr(extra_columns, "ORDINARY", 10**9)
        patch.setattr(step_pipeline, "ORDINARY", 10**9)
        at_once, judged = of_tasks(tmp_path / "at once", length, frozenset(lost))
    assert judged == list(range(1, len(judged) + 1))
    assert told(records) == told(at_once)


def test_no_more_than_a_few_steps_wait(late: Runs) -> None:
    """At most a few steps are not judged yet, and all are once the run is closed."""
    records, judged = late("nothing", 2)
    assert all(step + 1 - count < MOST for step, count in enumerate(judged))
    assert [record.snapshot.step for record in records] == list(range(STEPS))


class Step(NamedTuple):
    """A step whose numbers have not arrived."""

    number: int
    exchange: Any = None

    def ready(self) -> bool:
        """Not yet."""
        return False


def test_the_oldest_waits_no_longer_than_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock, too, steps become due; all are judged, in order, though one of them fails."""
    now, judged, failed = [100.0], [], []
    monkeypatch.setattr(deferred_steps.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(deferred_steps, "LONGEST", LONGEST)
    waiting = Deferral[Step]()

    def judge(steps: deque[Step]) -> None:
        step = steps.popleft()
        judged.append(step.number)
        if step.number == 0:
            raise ValueError

    waiting.judge = judge
    assert not waiting.submit(Step(0))
    now[0] += LONGEST * 0.9
    assert not waiting.submit(Step(1))
    now[0] += LONGEST * 0.1 + 1e-6
    assert waiting.submit(Step(2))
    waiting.flush(failed.append)
    assert judged == [0, 1, 2]
    assert len(failed) == 1
    assert not waiting.submit(Step(3))


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 100.0])
def test_what_is_unusual_is_judged_in_its_own_step(factor: float, tmp_path: Path) -> None:
    """A NaN is skipped, a jump of the total judged, in the very step, after the calm ones before it."""
    model, optimizer = build()
    hooked(model, {LEARNED + 5}, factor)
    sink = Kept()
    with gradwatch.watch(model, optimizer, sinks=[sink], strict=True, run_dir=tmp_path):
        for step in steps(model, optimizer, LEARNED + 6):
            if step == LEARNED + 4:
                assert len(sink.records) < step + 1
                before = [parameter.detach().clone() for parameter in model.parameters()]
    assert [record.snapshot.step for record in sink.records] == list(range(LEARNED + 6))
    assert sink.records[-1].decision.skip == (not np.isfinite(factor))
    same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert all(same) == (not np.isfinite(factor))


def test_a_loss_that_is_not_finite_is_judged_in_its_own_step(tmp_path: Path) -> None:
    """Rules on what the user observes are not put off when it says that something is wrong."""
    model, optimizer = build()
    sink = Kept()
    with gradwatch.watch(model, optimizer, sinks=[sink], strict=True, run_dir=tmp_path) as gw:
        for _ in steps(model, optimizer, LEARNED):
            gw.observe(loss=1.0)
        gw.observe(loss=float("nan"))
        list(steps(model, optimizer, 1))
        assert "loss-non-finite" in sink.records[-1].verdict.firing


@pytest.mark.parametrize("doing", ["do: [stop]", "do: [{skip_step: {max_consecutive: 2, then: stop}}]"])
def test_a_rule_that_acts_is_never_late(doing: str, tmp_path: Path) -> None:
    """Where a rule acts on more than non-finite gradients, every step is judged before it is taken."""
    rules = parse_rules(
        f"version: 1\nrules:\n  far:\n    detect: {{kind: above, of: total_norm, threshold: 1e9}}\n    {doing}\n"
    )
    model, optimizer = build()
    sink = Kept()
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[sink], strict=True, run_dir=tmp_path):
        for step in steps(model, optimizer, LEARNED + 20):
            assert len(sink.records) == step + 1


CLIPPED = """
version: 1
extends: [default]
clip: {total: {method: norm, max_norm: %s}}
"""


def clipped_run(max_norm: float, path: Path, layers: int = 2, jumps: bool = False) -> tuple[Any, ...]:
    """(Records, how many had been judged after each step, weights) of a run that is clipped by a rule file."""
    model, optimizer = build(layers)
    if jumps:
        hooked(model, set(range(70, STEPS, 9)), 1.6)
    sink, judged = Kept(), []
    rules = parse_rules(CLIPPED % max_norm)
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[sink], strict=True, run_dir=path):
        for _ in steps(model, optimizer, STEPS):
            judged.append(len(sink.records))
    return sink.records, judged, [parameter.detach().clone() for parameter in model.parameters()]


@cache
def totals(layers: int, jumps: bool) -> list[float]:
    """The total norms of an unwatched run."""
    model, optimizer = build(layers)
    if jumps:
        hooked(model, set(range(70, STEPS, 9)), 1.6)
    return [
        float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        for _ in steps(model, optimizer, STEPS)
    ]


def test_a_loop_that_was_calm_is_soon_calm_again(late: Runs) -> None:
    """One odd step has those after it judged at once; not for as long as a loop that is new, though."""
    _, judged = late("a gradient of zeros", 2)
    at_once = [step for step, count in enumerate(judged) if count == step + 1]
    assert set(range(90, 90 + ORDINARY_AGAIN)) <= set(at_once)
    waited = [step for step in range(90, 90 + ORDINARY) if step not in at_once]
    assert waited
    assert waited[0] <= 90 + ORDINARY_AGAIN + 2


def test_a_loop_whose_norm_comes_and_goes_is_calm_all_the_same(tmp_path: Path) -> None:
    """Batches that differ by a factor of three, as in embeddings, are no reason to judge each step at once."""
    model, optimizer = build()
    sink, judged, large = Kept(), [], set(range(0, 200, 5))
    for parameter in model.parameters():
        count = iter(range(200))
        parameter.register_hook(lambda grad, count=count: grad * 3 if next(count) in large else grad)
    rules = parse_rules("version: 1\nrules: {nf: {detect: {kind: nonfinite}, do: [skip_step]}}\n")
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[sink], strict=True, run_dir=tmp_path):
        for _ in steps(model, optimizer, 120):
            judged.append(len(sink.records))
    totals = [record.snapshot.total_norm for record in sink.records]
    assert any(later > 2 * former for former, later in itertools.pairwise(totals))
    at_once = [step for step in range(LEARNED, 120) if judged[step] == step + 1]
    assert len(at_once) <= 2 * (120 - LEARNED) / MOST


@pytest.mark.parametrize("do", ["", ", do: [localise]"], ids=["observing", "with a do"])
def test_a_rule_that_fires_on_and_on_changes_nothing_any_more(do: str, tmp_path: Path) -> None:
    """Once it has fired its steps are put off like calm ones; not where it has something to do on each of them."""
    model, optimizer = build()
    sink, judged = Kept(), []
    rules = parse_rules(
        f"version: 1\nrules: {{small: {{detect: {{kind: below, of: norm, threshold: 1e9}}, for: 3{do}}}}}\n"
    )
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[sink], strict=True, run_dir=tmp_path):
        for _ in steps(model, optimizer, 120):
            judged.append(len(sink.records))
    assert [event.kind for record in sink.records for event in record.verdict.events][:2] == [
        "pending",
        "firing",
    ]
    assert all("small" in record.verdict.breaching for record in sink.records)
    put_off = [step for step in range(LEARNED, 120) if judged[step] < step + 1]
    assert bool(put_off) == (not do)
    assert [record.snapshot.step for record in sink.records] == list(range(120))


@pytest.mark.parametrize(
    ("jumps", "layers"), [(False, 2), (True, SENTINELS)], ids=["every mark", "sentinels, jumps"]
)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.7, 1.1])
def test_a_clip_is_in_time_though_its_verdict_waits(
    share: float, jumps: bool, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and Records are those of a run whose every step is judged at once, wherever the bound lies."""
    norms = sorted(totals(layers, jumps))
    max_norm = (
        1.1 * norms[-1] if share > 1 else max(1e-6, norms[int(share * (STEPS - 1))] * (1 if share else 1e-3))
    )
    late, judged, weights = clipped_run(max_norm, tmp_path / "late", layers, jumps)
    assert any(count < step + 1 for step, count in enumerate(judged)), "nothing was put off"
    with monkeypatch.context() as patch:
        patch.setattr(extra_columns, "ORDINARY", 10**9)
        patch.setattr(step_pipeline, "ORDINARY", 10**9)
        at_once, judged, wanted = clipped_run(max_norm, tmp_path / "at_once", layers, jumps)
    assert judged == list(range(1, STEPS + 1))
    assert told(late) == told(at_once)
    assert all(torch.equal(*pair) for pair in zip(weights, wanted, strict=True))
    bitten = sum(bool((record.snapshot.coef < 1).any()) for record in late)
    assert (bitten > 0) == (share < 1)


@given(
    st.lists(st.floats(-6, 6), min_size=1, max_size=12),
    st.sampled_from([1, 5, 300, 9000]),
    st.one_of(st.floats(-2e-3, 2e-3), st.floats(-1, 1)),
    st.sampled_from([1.0, 1024.0]),
)
def test_a_glance_is_never_wrong_about_a_bound(
    exponents: list[float], numel: int, margin: float, scale: float
) -> None:
    """Where a glance is certain that a clip would change nothing, the exact coefficient is 1, however close."""
    chance = torch.Generator().manual_seed(numel)
    grads = [torch.randn(numel, generator=chance) * 10**exponent for exponent in exponents]
    reading = CpuNorms(CpuReader().read(grads), np.zeros(len(grads)), scale)
    total = float(torch.stack([grad.double().norm() for grad in grads]).norm()) / scale
    max_norm = total * (1 + margin) + 1e-12
    within = reading.surely_within(max_norm)
    norms = reading.norms()
    if within:
        assert clip_coefficient(float(np.sqrt(np.dot(norms, norms))), max_norm) == 1
    elif margin > 2e-3 and max_norm > 1e-3:
        pytest.fail("a bound this far away ought to be seen at a glance")


def test_a_fault_in_the_rules_does_not_cost_the_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound needs no verdict: gradients are clipped, and told to be, while the engine fails."""

    def fails(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr("gradwatch.engine.bound_engine.BoundEngine.evaluate", fails)
    model, optimizer = build()
    sink = Kept()
    rules = parse_rules(CLIPPED % 1e-4)
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[sink], run_dir=tmp_path) as gw:
        for _ in steps(model, optimizer, 3):
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            assert float(nn.utils.get_total_norm(grads)) == pytest.approx(1e-4, rel=1e-2)
    assert all((record.snapshot.coef < 1).all() for record in sink.records)
    assert gw.health.errors() == {"engine": 3}


def test_a_closure_is_clipped_by_what_is_decided(tmp_path: Path) -> None:
    """A step whose closure may be evaluated again is judged at once, so that later evaluations are clipped too."""
    model, optimizer = build()
    sink = Kept()
    rules = parse_rules(CLIPPED % 1e-4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(X[:4]).pow(2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with gradwatch.watch(model, optimizer, rules=rules, sinks=[sink], strict=True, run_dir=tmp_path):
        for step in range(LEARNED + 20):
            optimizer.step(closure)  # type: ignore[call-overload]
            assert len(sink.records) == step + 1


@pytest.mark.parametrize("asking", ["flush", "status", "state_dict", "close"])
def test_who_asks_gets_the_present(asking: str, tmp_path: Path) -> None:
    """flush, status, state_dict and close first judge what waits."""
    model, optimizer = build()
    sink = Kept()
    gw = gradwatch.watch(model, optimizer, sinks=[sink], strict=True, run_dir=tmp_path)
    list(steps(model, optimizer, LEARNED + 5))
    assert len(sink.records) < LEARNED + 5
    answer = getattr(gw, asking)()
    assert len(sink.records) == LEARNED + 5
    if asking == "status":
        assert answer["steps"] == LEARNED + 5
    gw.close()


@pytest.mark.parametrize("layers", [2, SENTINELS], ids=["every mark", "sentinels"])
@pytest.mark.parametrize("case", ["a gradient that vanishes", "a gradient of zeros", "zeros from then on"])
def test_a_second_look_is_never_too_late(case: str, layers: int, late: Runs) -> None:
    """A gradient of zeros, or so small that its squares underflow, has its exact norm and is learned at once."""
    records, judged = late(case, layers)
    assert any(count < step + 1 for step, count in enumerate(judged[:90])), "the loop was not calm"
    assert judged[90] == 91
    assert not any(record.snapshot.provisional for record in records)
    if case == "a gradient that vanishes":
        model, optimizer = build(layers)
        hooked(model, set(range(90, 200)), 1e-30)
        for step in steps(model, optimizer, 95):
            want = float(next(model.parameters()).grad.double().norm())
            assert records[step].snapshot.norm[0] == pytest.approx(want, rel=1e-5)
    else:
        assert records[90].snapshot.norm[0] == 0
        assert records[90].snapshot.calls[0] == 1


def test_a_parameter_added_meanwhile_takes_nothing_away(tmp_path: Path) -> None:
    """What waits is judged with the rules bound to the parameters it was measured on."""
    model, optimizer = build()
    sink = Kept()
    with gradwatch.watch(model, optimizer, sinks=[sink], strict=True, run_dir=tmp_path):
        list(steps(model, optimizer, LEARNED + 5))
        model.append(nn.Linear(4, 4))
        optimizer.add_param_group({"params": list(model[-1].parameters())})
        list(steps(model, optimizer, 1))
    assert [record.snapshot.step for record in sink.records] == list(range(LEARNED + 6))
    assert len(sink.records[-2].snapshot.norm) == 6
    assert len(sink.records[-1].snapshot.norm) == 8


def test_statistics_ruined_by_another_optimizers_batch_are_told_with_every_step(tmp_path: Path) -> None:
    """While running statistics hold a NaN no checkpoint is healthy, whichever optimizer its step was of."""
    torch.manual_seed(0)
    ruined, other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.Linear(3, 4)
    optimizers = [torch.optim.SGD(one.parameters(), 1e-4) for one in (ruined, other)]
    sink, bad = Kept(), LEARNED + 10
    with gradwatch.watch([ruined, other], optimizers, sinks=[sink], strict=True, run_dir=tmp_path):
        for step in range(bad + 2 * MOST):
            for model, optimizer in zip((ruined, other), optimizers, strict=True):
                optimizer.zero_grad()
                batch = X[step % 60 : step % 60 + 4] * (math.nan if step == bad and model is ruined else 1.0)
                model(batch).pow(2).mean().backward()
                optimizer.step()
    told = [one for one in sink.records if one.snapshot.step > bad and one.snapshot.step < bad + 40]
    assert {one.snapshot.optimizer for one in told if one.checkpoint and not one.checkpoint.healthy} == {0, 1}
    assert not any(one.checkpoint and one.checkpoint.healthy for one in told)


def test_statistics_ruined_by_a_forward_without_gradients_are_seen_when_it_is_asked() -> None:
    """A forward in training mode under `no_grad` leaves no gradient to suspect; reset, they are healthy again."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    with gradwatch.watch(model, optimizer, sinks=[Kept()], strict=True) as gw:
        answers = []
        for step in range(3):
            if step == 1:
                with torch.no_grad():
                    model(X[:4] * math.nan)
            elif step == 2:
                model[1].reset_running_stats()
            optimizer.zero_grad()
            model(X[:4]).pow(2).mean().backward()
            optimizer.step()
            answers.append((gw.healthy, gw.status()["unhealthy_because"]))
    said = ["running statistics are not finite: 1.running_mean, 1.running_var"]
    assert answers == [(True, []), (False, said), (True, [])]


def test_a_signal_handler_may_ask_while_steps_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that saves a checkpoint has the steps judged that were about to be: each is told once, without a fault."""
    judge, asked = BoundEngine.evaluate_many, list[int]()

    def interrupted(self: BoundEngine, *args: Any) -> Any:
        found = judge(self, *args)
        if not asked:
            signal.raise_signal(signal.SIGUSR1)
        return found

    model, optimizer = build()
    sink = Kept()
    with gradwatch.watch(model, optimizer, sinks=[sink], strict=True, run_dir=tmp_path) as gw:

        def save(*_: object) -> None:
            asked.append(1)
            gw.state_dict()

        monkeypatch.setattr(BoundEngine, "evaluate_many", interrupted)
        before = signal.signal(signal.SIGUSR1, save)
        try:
            list(steps(model, optimizer, LEARNED + 2 * MOST))
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert asked
    assert [record.snapshot.step for record in sink.records] == list(range(LEARNED + 2 * MOST))


def test_a_sink_that_stops_training_costs_the_others_no_step(tmp_path: Path) -> None:
    """What passes out of one sink, as an order to stop does, keeps none of the steps judged together from the next."""

    class Stopping(Kept):
        def write(self, record: Record) -> None:
            super().write(record)
            if record.snapshot.step == LEARNED + 1:
                raise TrainingStopped("enough")

    model, optimizer = build()
    sink = Kept()
    with gradwatch.watch(model, optimizer, sinks=[Stopping(), sink], run_dir=tmp_path) as gw:
        with pytest.raises(TrainingStopped):
            list(steps(model, optimizer, LEARNED + 2 * MOST))
        assert gw.healthy
        assert gw.status()["account"]["watched"]["unjudged"] == 0
    assert [one.snapshot.step for one in sink.records] == list(range(len(sink.records)))
    assert len(sink.records) > LEARNED + 2


AT_EXIT = """
import os, sys, torch, gradwatch
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), 1e-4)
gw = gradwatch.watch(model, optimizer, run_dir=sys.argv[1], listen="127.0.0.1:0")
for _ in range(75):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
print(gw.run.directory)
if os.fork() == 0:
    sys.exit()
os.wait()
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "1 / 0"])
def test_what_waits_is_judged_at_exit(end: str, tmp_path: Path) -> None:
    """A script that just ends leaves a complete journal, whatever way it ends; a forked child adds nothing."""
    script = AT_EXIT.replace("{end}", end)
    done = warm.run([sys.executable, "-c", script, str(tmp_path)])
    directory = done.stdout.split()[0]
    (journal,) = read_journal(directory)
    recorded = [one.record.snapshot.step for one in journal.records()]
    assert recorded == list(range(75)), done.stderr


def test_a_step_whose_numbers_cannot_be_had_costs_no_other() -> None:
    """A device that fails while its numbers are awaited: told, and the steps behind that one are judged as ever."""
    judged, failed = [], []
    waiting = Deferral[Step]()
    waiting.judge = lambda steps: judged.append(steps.popleft().number)

    def is_usual(step: Step) -> bool:
        if step.number == 1:
            raise RuntimeError("device lost")
        return True

    waiting.is_usual = is_usual
    for number in range(3):
        waiting.submit_coming(Step(number))
        waiting.take_arrived(failed.append, depth=1)
    assert [str(error) for error in failed] == ["device lost"]
    assert judged == [0, 1]
    waiting.flush(failed.append)
    assert judged == [0, 1, 2]


def test_what_ranks_exchange_is_awaited_wherever_its_step_waits() -> None:
    """Behind a device as well as behind steps that are not urgent, until it is judged."""
    waiting = Deferral[Step]()
    waiting.judge = lambda steps: steps.popleft()
    waiting.is_usual = lambda step: step.number == 1
    waiting.submit_coming(Step(0))
    assert not waiting.awaits_ranks
    waiting.submit_coming(Step(1, exchange="begun"))
    assert waiting.awaits_ranks
    waiting.take_arrived(pytest.fail, depth=2)  # the first is judged
    assert waiting.awaits_ranks
    waiting.take_arrived(pytest.fail, depth=1)  # the second waits for others
    assert waiting.awaits_ranks
    waiting.flush(pytest.fail)
    assert not waiting.awaits_ranks
