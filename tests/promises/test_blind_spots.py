"""Ways in which watching once went blind or told the wrong number, each found by a reader of the code."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.records.record import Record
from gradwatch.session.watch import session_of
from tests.support import warm
from tests.support.kept import Kept
from tests.support.launch_cases import GRADWATCH

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))


def watch(model: nn.Module, optimizer: Any, path: Path) -> tuple[Any, list[Record]]:
    sink = Kept()
    return gradwatch.watch(model, optimizer, sinks=[sink], strict=True, run_dir=path), sink.records


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), 1e-3)


def finite(model: nn.Module) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_an_optimizer_whose_parameters_thaw_keeps_its_lane(tmp_path: Path) -> None:
    """A capture that had no parameter to watch is rebuilt in its place: one label, one count of steps."""
    model, _ = build()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    first, second = (torch.optim.SGD(layer.parameters(), 1e-3) for layer in model)
    gw, records = watch(model, [first, second], tmp_path)
    with gw:
        for step in range(12):
            if step == 4:
                for parameter in model[0].parameters():
                    parameter.requires_grad_(True)
            first.zero_grad()
            second.zero_grad()
            model(X).pow(2).mean().backward()
            first.step()
            second.step()
    assert {record.snapshot.optimizer for record in records} == {0, 1}
    assert max(record.snapshot.step for record in records) == 11


def test_a_step_that_raises_does_not_blind_the_watch(tmp_path: Path) -> None:
    """Where no mark ever speaks (gradients assigned by hand), too: the next NaN is still skipped."""
    model, optimizer = build()
    gw, records = watch(model, optimizer, tmp_path)
    raising = optimizer.register_step_pre_hook(_raise)
    raising.remove()
    with gw:
        for step in range(8):
            loss = model(X).pow(2).mean() * (float("nan") if step == 6 else 1.0)
            params = list(model.parameters())
            for parameter, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                parameter.grad = grad
            if step == 3:
                with pytest.raises(MemoryError), _raising(optimizer):
                    optimizer.step()
            else:
                optimizer.step()
    assert records[-2].decision.skip
    assert len(records) == 8
    assert finite(model)


def _raise(*args: Any) -> None:
    raise MemoryError


@contextmanager
def _raising(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    handle = optimizer.register_step_pre_hook(_raise)
    try:
        yield
    finally:
        handle.remove()


class Twice(torch.optim.SGD):
    """Evaluates twice and then takes the step of its base class, whose hooks fire again."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
            closure()
        return super().step()


def test_the_step_inside_a_step_is_the_same_step(tmp_path: Path) -> None:
    """`super().step()` after a closure that ran twice: one Snapshot a step, and a skip stays a skip."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1e-3)  # from now on the base class's step has hooks
    model, _ = build()
    optimizer = Twice(model.parameters(), 1e-3)
    gw, records = watch(model, optimizer, tmp_path)
    calls = [0]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(X).pow(2).mean() * (float("nan") if calls[0] == 5 else 1.0)
        calls[0] += 1
        loss.backward()
        return loss

    with gw:
        for _ in range(5):
            optimizer.step(closure)
    assert finite(model)
    # The second evaluation of the third step is a Snapshot of its own: it is the one that was not finite.
    assert [record.decision.skip for record in records] == [False, False, False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_is_nobody_s_business(dtype: torch.dtype, tmp_path: Path) -> None:
    """Buffers of ours are float32 on the CPU whatever torch's defaults say."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.randn(4, 8)
    gw, records = watch(model, optimizer, tmp_path)
    torch.set_default_dtype(dtype)
    try:
        with gw:
            for _ in range(4):
                optimizer.zero_grad()
                model(x).pow(2).mean().backward()
                want = [float(p.grad.double().norm()) for p in model.parameters() if p.grad is not None]
                optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert records[-1].snapshot.norm.tolist() == pytest.approx(want, rel=1e-5)


def test_the_default_device_is_nobody_s_business(tmp_path: Path) -> None:
    """Nor do they go where `set_default_device` says."""
    model, optimizer = build()
    gw, records = watch(model, optimizer, tmp_path)
    torch.set_default_device("meta")
    try:
        with gw:
            for _ in range(4):
                optimizer.zero_grad()
                model(X).pow(2).mean().backward()
                optimizer.step()
    finally:
        torch.set_default_device(None)
    assert len(records) == 4


def test_parameters_without_values_are_said_to_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part of the model that is left on the meta device belongs to no optimizer, and could not be measured in one."""
    model, optimizer = build()
    with torch.device("meta"):
        model.register_module("later", torch.nn.Linear(2, 2))
    head = torch.nn.Sequential(*list(model)[:-1])
    with gradwatch.watch(model, optimizer, run_dir=tmp_path):
        for _ in range(3):
            optimizer.zero_grad()
            head(X).pow(2).mean().backward()
            optimizer.step()
    said = capsys.readouterr().err
    assert "nothing is measured of parameters without values: later.weight" in said
    assert "belong to no watched optimizer" not in said


@pytest.mark.parametrize("calm", [False, True], ids=["young", "calm"])
def test_a_gradient_spoilt_after_backward_is_skipped(calm: bool, tmp_path: Path) -> None:
    """NaN written into `.grad` between backward and step (hand-written averaging does) is a non-finite gradient."""
    model, optimizer = build()
    gw, records = watch(model, optimizer, tmp_path)
    with gw:
        for step in range(80):
            optimizer.zero_grad()
            model(X).pow(2).mean().backward()
            if step == (75 if calm else 20):
                model[0].weight.grad[0, 0] = float("nan")
            optimizer.step()
            if step == (75 if calm else 20):
                assert records[-1].decision.skip
                assert np.isfinite(records[-1].snapshot.norm).all()
                column = records[-1].snapshot.column("nonfinite")
                assert column is not None
                assert column.values.tolist() == [1, 0, 0, 0]
    assert finite(model)


def test_a_new_optimizer_does_not_take_steps_from_the_old_one_s_baselines(tmp_path: Path) -> None:
    """What waited to be judged is learned before an optimizer made anew takes the capture over."""
    model, optimizer = build()
    gw, records = watch(model, optimizer, tmp_path)
    with gw:
        for step in range(80):
            if step == 78:
                assert len(records) < step
                optimizer = torch.optim.SGD(model.parameters(), 1e-3)
            optimizer.zero_grad()
            model(X).pow(2).mean().backward()
            optimizer.step()
        state = gw.state_dict()
    assert [record.snapshot.step for record in records] == list(range(80))
    drift = next(rows for key, rows in _baselines(state).items() if key.startswith("drift(5"))
    assert drift["fields"]["n"][0] >= 79


def _baselines(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state["lanes"]["0"]["engine"]["baselines"]
    return found


def test_a_gradient_replaced_twice_is_seen(tmp_path: Path) -> None:
    """A large gradient replaced by one that got the id of the first is another gradient all the same."""
    model = nn.Linear(2300, 2300, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    gw, records = watch(model, optimizer, tmp_path)
    with gw:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(1, 2300)).sum().backward()
            for _ in range(2):
                model.weight.grad = model.weight.grad * 0.5
            optimizer.step()
    assert [float(record.snapshot.coef[0]) for record in records] == pytest.approx([0.25] * 6)


def test_asking_from_another_thread_judges_nothing(tmp_path: Path) -> None:
    """A thread that polls `status()` never races the thread that trains: Records stay in order."""
    model, optimizer = build()
    gw, records = watch(model, optimizer, tmp_path)
    done = threading.Event()

    def poll() -> None:
        while not done.is_set():
            gw.status()

    interval = sys.getswitchinterval()
    with gw:
        thread = threading.Thread(target=poll)
        thread.start()
        sys.setswitchinterval(1e-5)  # threads take turns often, and neither waits long for the other
        try:
            for _ in range(400):
                optimizer.zero_grad()
                model(X).pow(2).mean().backward()
                optimizer.step()
        finally:
            sys.setswitchinterval(interval)
            done.set()
            thread.join()
    assert [record.snapshot.step for record in records] == list(range(400))


def test_gradients_of_autograd_grad_are_not_held(tmp_path: Path) -> None:
    """With a rule on `norm_local`, what `torch.autograd.grad` returns is let go when the next backward begins."""
    from gradwatch.rules.files import parse_rules

    rules = parse_rules(
        "version: 1\nrules:\n  local: {detect: {kind: above, of: norm_local, threshold: 1e9}}\n"
    )
    model, optimizer = build()
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[], strict=True, run_dir=tmp_path) as gw:
        for _ in range(3):
            optimizer.zero_grad()
            model(X).pow(2).mean().backward()
            optimizer.step()
        torch.autograd.grad(model(X).pow(2).mean(), list(model.parameters()))
        optimizer.zero_grad()
        model(X).pow(2).mean().backward()
        local = next(iter(session_of(gw).attached.rule_bindings)).local
        assert local is not None
        assert not local._running.pending


REPLACED_STEP = """
import torch
from torch import nn
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step(closure=None):
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(param.grad, alpha=0.1)
optimizer.step = step
for number in range(12):
    optimizer.zero_grad()
    (model(torch.randn(8, 4)).square().mean() * (float("nan") if number == 7 else 1)).backward()
    optimizer.step()
"""


def test_an_optimizer_whose_step_was_replaced_is_told_while_it_trains(tmp_path: Path) -> None:
    """Its weights move and no step is seen: a line says so at once, and the account counts what was NaN."""
    (tmp_path / "x.py").write_text(REPLACED_STEP)
    done = warm.run([*GRADWATCH, "run", "--", sys.executable, "x.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no step of their SGD is seen" in done.stderr
    assert done.stderr.index("no step of their SGD is seen") < done.stderr.index("steps watched")
    assert "gradients were cleared 11 times (4 of them NaN or Inf, 11 of them beside weights" in done.stderr
