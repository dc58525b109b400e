"""The rescue table: what it computes is what it says, and the claim holds on the smallest of its trainings."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from gradwatch.rules.files import load_rules
from tests.benchmarks.rescue import __main__ as command
from tests.benchmarks.rescue import cells
from tests.benchmarks.rescue.cells import Cell, Outcome, run, run_all
from tests.benchmarks.rescue.faults import FAULTS, Fault, Struck, flip_bit
from tests.benchmarks.rescue.guards import (
    GUARDS,
    AdaGC,
    AutoClip,
    GradwatchBaseline,
    GradwatchCapped,
    GradwatchSkip,
    Guard,
)
from tests.benchmarks.rescue.table import broken_claims, healthy, render, summary, whole
from tests.benchmarks.rescue.trainings import TRAININGS, loss_of

ACTING = [name for name, guard in GUARDS.items() if guard.package == "gradwatch" and not guard.missing()]
ran = cache(run)
"""Several tests look at the same training, whose numbers are the same every time."""
HERE = {"none": 200, "nan": 200, "bit-flip": 200, "loss-x50-every-25": 600, "rate-x20-for-20": 600}
"""Faults, and the steps of a run: what is skipped leaves no trace after so few, what has a baseline needs more."""


OWN = {
    "gradwatch-skip": ("none", "nan", "bit-flip", "loss-x50-every-25"),
    "gradwatch-capped": ("none", "rate-x20-for-20"),
    "gradwatch-baseline": ("none", "loss-x50-every-25"),
}
"""What each guard meets with a rule of its own; against all other faults they have the rules of gradwatch-skip."""


def on_mlp(fault: str, guard: str, like: str = "") -> Outcome:
    """The end of a run as long as those of the fault (or of the one it is `like`)."""
    return ran(Cell("mlp", fault, guard, steps=HERE[like or fault]))


@pytest.fixture(scope="module")
def unguarded() -> dict[str, Outcome]:
    """The MLP without a guard, by fault."""
    torch.set_num_threads(1)
    return {fault: on_mlp(fault, "none") for fault in HERE}


# Those with a baseline need runs three times as long; that they change no healthy run is tested below.
@pytest.mark.parametrize(
    "guard",
    [guard if guard == "gradwatch-skip" else pytest.param(guard, marks=pytest.mark.soak) for guard in ACTING],
)
def test_gradwatch_rescues_the_mlp(guard: str, unguarded: dict[str, Outcome]) -> None:
    """What a guard promises to rescue leaves no trace, and where nothing is wrong it does nothing."""
    outcomes = [*unguarded.values(), *(on_mlp("none", "none", like=fault) for fault in HERE)]
    found = {outcome.cell: outcome for outcome in outcomes}
    for fault in OWN[guard]:
        assert GUARDS[guard]().promises(FAULTS[fault])
        outcome = on_mlp(fault, guard)
        found[outcome.cell] = outcome
        assert bool(outcome.interventions) != FAULTS[fault].healthy
    assert broken_claims(found) == []


def test_what_is_not_finite_is_skipped_by_the_same_rules() -> None:
    """Those of gradwatch-skip, whose runs above stand for the other guards as well."""
    skip, baseline = (load_rules(guard.rules) for guard in (GradwatchSkip, GradwatchBaseline))
    assert GradwatchCapped.rules == GradwatchSkip.rules
    for rule in ("non-finite", "norm-overflow"):
        assert baseline.rule(rule) == skip.rule(rule)


@pytest.mark.parametrize("fault", [fault for fault in HERE if fault != "none"])
def test_the_faults_do_harm(fault: str, unguarded: dict[str, Outcome]) -> None:
    """Without a guard the run ends much worse: there is something to be rescued from."""
    assert not unguarded[fault].loss <= 1.1 * on_mlp("none", "none", like=fault).loss


def test_gradwatch_does_not_change_a_healthy_run(unguarded: dict[str, Outcome]) -> None:
    """The loss of a healthy run is the same to the last bit with and without rules that act."""
    for guard in ACTING:
        assert on_mlp("none", guard).loss == unguarded["none"].loss


@pytest.mark.parametrize(
    "training", [pytest.param(one, marks=[pytest.mark.soak] * (one != "mlp")) for one in TRAININGS]
)
def test_trainings_learn(training: str) -> None:
    """A sixth of each training brings the held-out loss well below that of guessing."""
    few = run(Cell(training, "none", "none", steps=100))
    torch.manual_seed(0)
    model = TRAININGS[training].model()
    with torch.no_grad():
        before = float(loss_of(model, TRAININGS[training].held_out()))
    assert few.loss < 0.8 * before


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faults_strike_when_they_should(training: str, fault: Fault) -> None:
    """Gradients are those of a healthy step before the onset, and other ones at it, unless only the rate is wrong."""
    plan = TRAININGS[training]
    torch.manual_seed(0)
    model = plan.model()
    struck = Struck(fault, model, onset=3)

    def gradients(step: int) -> list[torch.Tensor]:
        model.zero_grad()
        struck.backward(step, plan.batch(0, 7))
        return [param.grad.clone() for param in model.parameters() if param.grad is not None]

    before, at = gradients(2), gradients(3)
    changed = any(not torch.equal(one, other) for one, other in zip(before, at, strict=True))
    assert changed == (not fault.healthy and fault.in_gradients)
    assert (struck.rate(3) != 1) == (not fault.in_gradients)
    if fault.transient:
        assert all(torch.equal(*pair) for pair in zip(before, gradients(4 + 19), strict=True))
        assert struck.rate(3 + 21) == 1


def test_a_bit_flip_is_one_bit() -> None:
    """Of all bits of the gradient exactly one differs, in the largest element, which becomes huge and stays finite."""
    values = torch.tensor([0.01, -0.5, 0.25])
    spoilt = flip_bit(values)
    bits = (values.view(torch.int32) ^ spoilt.view(torch.int32)).tolist()
    assert [bin(one % (1 << 32)).count("1") for one in bits] == [0, 1, 0]
    assert 1e37 < abs(float(spoilt[1])) < math.inf


def test_adagc_is_pytorch_optimizers() -> None:
    """With β₁ = 0 the first moment of pytorch_optimizer's AdaGC is the clipped gradient: ours, step for step."""
    from pytorch_optimizer import AdaGC as AdaGCAdam  # seconds: not for all who collect this

    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 4), nn.Linear(5, 4)
    reference = AdaGCAdam(theirs.parameters(), lr=0.0, betas=(0.0, 0.999), weight_decay=0.0, foreach=False)
    guard = AdaGC()
    guard.attach(ours, reference)
    for step in range(160):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = torch.randn_like(mine) * (30 if step % 40 == 39 else 1)
            other.grad = mine.grad.clone()
        guard.after_backward(step)
        reference.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad, reference.state[other]["exp_avg"], rtol=1e-4, atol=1e-6)


def test_autoclip_bounds_by_its_history() -> None:
    """Nine norms in ten are above the tenth percentile: they are clipped to it, the current one included in it."""
    model = nn.Linear(1, 1, bias=False)
    guard = AutoClip()
    guard.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    after = []
    for norm in (10.0, 20.0, 30.0):
        model.weight.grad = torch.full((1, 1), norm)
        guard.after_backward(0)
        after.append(float(model.weight.grad))
    assert after == pytest.approx([10.0, 11.0, 12.0], rel=1e-5)
    assert guard.interventions == 2


@pytest.mark.parametrize("guard", GUARDS)
def test_guards_run_and_count(guard: str) -> None:
    """Every guard gets through a few steps of every kind of layer here, and counts at most one action a step."""
    if why := GUARDS[guard].missing():  # asked here: to import them takes seconds
        pytest.skip(why)
    outcome = run(Cell("gpt", "loss-x64", guard, steps=4))
    assert math.isfinite(outcome.loss)
    assert 0 <= outcome.interventions <= 4


def _outcome(cell: Cell, loss: float, interventions: int = 0) -> Outcome:
    return Outcome(cell, loss, interventions, 0.1)


def test_broken_claims_are_named() -> None:
    """A loss that is too high, lost weights and an intervention in a healthy run each break the claim."""
    base = Cell("mlp", "none", "none")
    found = {
        one.cell: one
        for one in (
            _outcome(base, 1.0),
            _outcome(base._replace(guard="gradwatch-skip"), 1.0, interventions=1),
            _outcome(base._replace(guard="gradwatch-skip", fault="nan"), math.nan, interventions=1),
            _outcome(base._replace(guard="gradwatch-skip", fault="loss-x64"), 1.03, interventions=1),
            _outcome(base._replace(guard="gradwatch-skip", fault="batch-x20"), 1.01, interventions=1),
            _outcome(base._replace(guard="clip", fault="nan"), math.nan, interventions=9),
        )
    }
    said = broken_claims(found)
    assert len(said) == 3
    assert all("gradwatch skip" in line for line in said)


def test_tables_show_the_worst() -> None:
    """The summary shows the worst loss of all trainings and adds up interventions; the whole table, each."""
    found = {
        one.cell: one
        for one in (
            _outcome(Cell("mlp", "none", "none"), 2.0),
            _outcome(Cell("gpt", "none", "none"), 1.0),
            _outcome(Cell("mlp", "nan", "clip"), 5.0, 3),
            _outcome(Cell("gpt", "nan", "clip"), 1.5, 4),
        )
    }
    rows = summary(found, ["none", "clip"])
    assert rows[-1] == ["NaN in one batch", "–", "2.50 (7)"]
    assert [row[-1] for row in whole(found, ["none", "clip"])[1:]] == ["–", "2.50 (3)", "–", "1.50 (4)"]
    assert render(rows, markdown=True).splitlines()[1] == "| --- | --- | --- |"


def test_results_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is not run again, a line torn by a kill is; NaN survives the file."""
    ran: list[Cell] = []

    def fake(cell: Cell) -> Outcome:
        ran.append(cell)
        return _outcome(cell, math.nan if cell.fault == "nan" else 1.5)

    monkeypatch.setattr(cells, "run", fake)
    store, wanted = tmp_path / "results.jsonl", [Cell("mlp", "none", "none"), Cell("mlp", "nan", "none")]
    first = list(run_all(wanted, 1, store))
    with store.open("a") as file:
        file.write('\n{"cell": ["mlp", "bit-fl')
    again = list(run_all([*wanted, Cell("mlp", "bit-flip", "none")], 1, store))
    assert ran == [*wanted, Cell("mlp", "bit-flip", "none")]
    assert repr(again[:2]) == repr(first)
    assert len(list(run_all(again_cells := [one.cell for one in again], 1, store))) == len(again_cells)
    assert len(ran) == 3


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command adds the healthy runs it compares with, prints strict JSON, and exits 1 on a breach."""

    def fake(cell: Cell) -> Outcome:
        return _outcome(cell, math.nan if cell.fault == "nan" else 1.0, interventions=cell.guard != "none")

    monkeypatch.setattr(cells, "run", fake)
    assert command.main(["--only", "lstm/nan/gradwatch-skip", "--json"]) == 1
    told = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    assert [(one["fault"], one["guard"]) for one in told["outcomes"]] == [
        ("nan", "gradwatch-skip"),
        ("none", "none"),
    ]
    assert told["outcomes"][0]["relative"] is None
    assert len(told["broken_claims"]) == 1
    assert command.main(["--only", "lstm/bit-flip/gradwatch-skip", "--markdown"]) == 0
    assert "| bit-flip in one gradient | – | 1.00 (1) |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["--only", "nothing/like/this"])


def test_healthy_is_the_same_run_unguarded() -> None:
    """Seed and training stay; fault and guard go."""
    assert healthy(Cell("gpt", "nan", "clip", 3)) == Cell("gpt", "none", "none", 3)
    assert Guard().promises(FAULTS["none"]) is False
