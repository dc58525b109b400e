"""States that a script takes, in a real watch: which calls count, and what is recorded of them."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import gradwatch
from gradwatch.journal import SavedStatesEntry, read_journal
from gradwatch.records.record import Record
from gradwatch.records.saved_optimizer_state import SavedState, TakenState
from gradwatch.session.watch import Watch, session_of
from tests.support.kept import Kept


class States(Kept):
    """Keeps what the script took, too."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[TakenState] = []

    def take_state(self, taken: TakenState) -> None:
        self.taken.append(taken)


class Failing(States):
    def take_state(self, taken: TakenState) -> None:
        raise ValueError("no room")


def training(*sinks: Any) -> tuple[nn.Module, torch.optim.Optimizer, Watch]:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    return model, optimizer, gradwatch.watch(model, optimizer, sinks=list(sinks))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1, scale: float = 1.0) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        (scale * model(torch.ones(3, 4)).square().mean()).backward()
        optimizer.step()


def saved_in(directory: str) -> tuple[int, int, list[SavedState]]:
    (journal,) = read_journal(directory)
    entries = [each for each in journal.entries() if isinstance(each, SavedStatesEntry)]
    found = {state.number: state for entry in entries for state in entry.states}
    return entries[-1].taken, entries[-1].healthy, [found[number] for number in sorted(found)]


def test_once_a_step_whoever_asks() -> None:
    """Several calls after one step are one state; `gw.state_dict()` is one, too; none before the first step."""
    sink = States()
    model, optimizer, gw = training(sink)
    optimizer.state_dict()
    step(model, optimizer, 3)
    optimizer.state_dict()
    optimizer.state_dict()
    gw.state_dict()
    step(model, optimizer)
    gw.state_dict()
    optimizer.state_dict()
    step(model, optimizer)
    get_optimizer_state_dict(model, optimizer)
    gw.close()
    optimizer.state_dict()
    assert [(one.number, one.steps) for one in sink.taken] == [
        (0, ((0, 2),)),
        (1, ((0, 3),)),
        (2, ((0, 4),)),
    ]


def test_what_is_no_state_of_this_training() -> None:
    """Another optimizer's, gradwatch's own, a copy, a pickle, a load: none of them is one."""
    sink = States()
    model, optimizer, gw = training(sink)
    step(model, optimizer)
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0).state_dict()
    session_of(gw).state_dict()
    copy.deepcopy(optimizer)
    torch.save(optimizer, io.BytesIO())
    optimizer.load_state_dict(
        {"state": {}, "param_groups": [{**group, "params": [0, 1]} for group in optimizer.param_groups]}
    )
    gw.close()
    assert not sink.taken


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer without parameters of its own, as accelerate's does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


@pytest.mark.parametrize(
    "asked", [lambda one: Wrapper(one).state_dict(), lambda one: type(one).state_dict(one)]
)
def test_by_a_wrapper_or_the_class(asked: Callable[[torch.optim.Optimizer], object]) -> None:
    """A framework's wrapper that asks the optimizer inside it is noticed by that."""
    sink = States()
    model, optimizer, gw = training(sink)
    step(model, optimizer)
    asked(optimizer)
    gw.close()
    assert len(sink.taken) == 1


def test_all_optimizers_of_a_gan_are_one_state() -> None:
    """Both are saved after the same steps; each counts its own."""
    sink = States()
    models = [nn.Linear(4, 2), nn.Linear(4, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with gradwatch.watch(nn.ModuleList(models), optimizers, sinks=[sink]):
        step(models[0], optimizers[0], 2)
        step(models[1], optimizers[1])
        for optimizer in optimizers:
            optimizer.state_dict()
    assert [sorted(one.steps) for one in sink.taken] == [[(0, 1), (1, 0)]]


def test_an_error_does_not_reach_the_script() -> None:
    """A sink that fails costs nothing but its count."""
    model, optimizer, gw = training(Failing())
    step(model, optimizer)
    optimizer.state_dict()
    gw.state_dict()
    step(model, optimizer)
    gw.close()
    assert sum(gw.health.errors().values()) == 1


def test_nothing_is_kept_alive() -> None:
    """Model and optimizer go when the script lets go of them, a state having been taken or not."""
    model, optimizer, gw = training(States())
    step(model, optimizer)
    optimizer.state_dict()
    gw.close()
    gone: list[weakref.ref[object]] = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_the_weights_are_not_looked_at_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may take the state at every step: no look, no judging, no waiting at the call."""
    from gradwatch.capture.weights.weight_health import Weights

    model, optimizer, gw = training()
    step(model, optimizer, 3)
    calls: list[str] = []
    monkeypatch.setattr(Weights, "check", lambda self: calls.append("check"))
    monkeypatch.setattr(Weights, "check_if_due", lambda *_: calls.append("due"))
    monkeypatch.setattr(type(session_of(gw)), "catch_up", lambda self: calls.append("catch up"))
    optimizer.state_dict()
    assert not calls
    monkeypatch.undo()
    gw.close()


def test_what_the_journal_has_of_it(tmp_path: Path) -> None:
    """Without one bad gradient: what a look saw is healthy; what came between it and one that found NaN is not."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradwatch.watch(model, optimizer, rules="observe-only", run_dir=tmp_path, run_id="r") as gw:
        step(model, optimizer, 5)
        optimizer.state_dict()
        assert gw.healthy
        step(model, optimizer, 2)
        optimizer.state_dict()
        optimizer.param_groups[0]["lr"] = float("nan")
        step(model, optimizer)
        optimizer.state_dict()
    taken, healthy, states = saved_in(gw.run.directory)
    assert (taken, healthy) == (3, 1)
    assert [(one.step, one.healthy) for one in states] == [(4, True), (6, False), (7, False)]
    assert states[0].looked
    assert states[1].reasons[0].startswith("found later: weights are not finite")


def test_after_the_last_step_it_counts_as_well(tmp_path: Path) -> None:
    """The usual end of a script, train and then save: confirmed by the look at the end of the watch."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradwatch.watch(model, optimizer, run_dir=tmp_path, run_id="r") as gw:
        step(model, optimizer, 5)
        optimizer.state_dict()
    _, _, states = saved_in(gw.run.directory)
    assert [(one.step, one.healthy, one.looked) for one in states] == [(4, True, True)]


def test_a_record_is_as_without_it() -> None:
    """What is judged of the steps does not depend on whether their state is taken."""
    found: list[list[Record]] = []
    for takes in (False, True):
        sink = States()
        torch.manual_seed(0)
        model, optimizer, gw = training(sink)
        for _ in range(40):
            step(model, optimizer)
            if takes:
                optimizer.state_dict()
        gw.close()
        found.append(list(sink.records))
    assert [one.snapshot.total_norm for one in found[0]] == [one.snapshot.total_norm for one in found[1]]
    assert [one.checkpoint for one in found[0]] == [one.checkpoint for one in found[1]]
