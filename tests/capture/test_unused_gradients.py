"""Gradients that somebody clears before the step, and steps that raise: what counts, and under what number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradwatch
from gradwatch.rules.files import parse_rules
from tests.support.examples import examples
from tests.support.kept import Kept
from tests.support.recorder import Recorder, norms_of, seen

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))


def build(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    for layer in model:
        nn.init.orthogonal_(layer.weight)  # so that no gradient is small
    return model, torch.optim.SGD(model.parameters(), 1e-4)


def backward(model: nn.Module, factor: float = 1.0) -> None:
    (model(X).pow(2).mean() * factor).backward()


@contextlib.contextmanager
def raising(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Steps raise after they have been judged, as an optimizer that is out of memory does."""

    def fail(*_: Any) -> None:
        raise MemoryError

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(MemoryError):
        yield
    handle.remove()


@pytest.mark.parametrize("layers", [2, 30], ids=["every mark", "sentinels"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("micros", [1, 3])
def test_cleared_gradients_do_not_count(layers: int, set_to_none: bool, micros: int) -> None:
    """A batch given up now and then: arrivals and norms are those of the gradients that were left."""
    model, optimizer = build(layers)
    with Recorder(model) as recorder:
        for step in range(14):
            optimizer.zero_grad(set_to_none=set_to_none)
            if step in (3, 10, 11):
                backward(model, 100.0)
                optimizer.zero_grad(set_to_none=set_to_none)
            for _ in range(micros):
                backward(model)
            want = norms_of(model.named_parameters())
            optimizer.step()
            snapshot = recorder.snapshots[-1]
            if step:
                assert seen(snapshot) == pytest.approx(want, rel=1e-5)
                assert set(snapshot.calls.tolist()) == {micros}
                assert snapshot.micro == micros
                assert not snapshot.provisional


def test_a_critic_is_not_credited_with_the_generator_s_backward(tmp_path: Path) -> None:
    """The generator's loss leaves gradients in the critic that are cleared: no arrival, and no local norm."""
    rules = parse_rules(
        "version: 1\nrules:\n  far: {detect: {kind: above, of: norm_local, threshold: 1e9}}\n"
    )
    torch.manual_seed(0)
    generator, critic = nn.Linear(8, 8), nn.Linear(8, 1)
    optimizers = [torch.optim.SGD(one.parameters(), 1e-3) for one in (generator, critic)]
    sink, wants = Kept(), []
    with gradwatch.watch(
        [generator, critic], optimizers, rules=rules, sinks=[sink], strict=True, run_dir=tmp_path
    ):
        for _ in range(6):
            optimizers[0].zero_grad()
            (critic(generator(X)).pow(2).mean() * 1e3).backward()  # far larger in the critic than its own
            optimizers[0].step()
            optimizers[1].zero_grad()
            critic(generator(X).detach()).pow(2).mean().backward()
            wants.append([float(param.grad.double().norm()) for param in critic.parameters()])
            optimizers[1].step()
    judged = sorted({record.snapshot.optimizer for record in sink.records})
    assert judged == [0, 1]
    of_critic = [record.snapshot for record in sink.records if record.snapshot.optimizer == 1]
    for snapshot, want in list(zip(of_critic, wants, strict=True))[1:]:
        assert snapshot.calls.tolist() == [1, 1]
        assert snapshot.micro == 1
        assert snapshot.norm.tolist() == pytest.approx(want, rel=1e-5)
        column = snapshot.column("norm_local")
        assert column is not None
        assert column.values.tolist() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("layers", [2, 30], ids=["every mark", "sentinels"])
@pytest.mark.parametrize("after", ["cleared", "zeroed", "accumulated", "retried"])
def test_a_step_that_raised_has_a_number_of_its_own(layers: int, after: str) -> None:
    """No two Snapshots of one step; the next counts as usual where its gradients are its own alone."""
    model, optimizer = build(layers)
    with Recorder(model) as recorder:
        for step in range(14):
            if step != 9:
                optimizer.zero_grad()
                backward(model)
            elif after != "retried":
                if after != "accumulated":
                    optimizer.zero_grad(set_to_none=after == "cleared")
                backward(model)
            want = norms_of(model.named_parameters())
            with raising(optimizer) if step == 8 else contextlib.nullcontext():
                optimizer.step()
            snapshot = recorder.snapshots[-1]
            assert snapshot.step == step
            if step:
                assert seen(snapshot) == pytest.approx(want, rel=1e-5)
                both = step == 9 and after == "accumulated"
                assert set(snapshot.calls.tolist()) == {2 if both else 1}
                own = step != 9 or after in ("cleared", "zeroed")
                assert snapshot.provisional == (not own)
        assert len(recorder.snapshots) == 14


DEEDS = st.lists(
    st.sampled_from(["backward", "backward", "backward", "none", "zeros", "step", "step", "raise"]),
    min_size=5,
    max_size=40,
)


@settings(max_examples=examples(30))
@given(DEEDS)
def test_whatever_a_loop_does_arrivals_are_those_still_there(deeds: list[str]) -> None:
    """In any order of backwards, clears, steps and failing steps: numbers in order, arrivals and norms right."""
    model, optimizer = build(2)
    arrived, wants = 0, []
    with Recorder(model) as recorder:
        for deed in ["backward", "step", "none", *deeds, "step"]:
            if deed in ("none", "zeros"):
                optimizer.zero_grad(set_to_none=deed == "none")
                arrived = 0
            if deed in ("none", "zeros", "backward"):
                backward(model)
                arrived += 1
            else:
                wants.append((arrived, norms_of(model.named_parameters())))
                with raising(optimizer) if deed == "raise" else contextlib.nullcontext():
                    optimizer.step()
                arrived = 0 if deed == "step" else arrived
        assert [snapshot.step for snapshot in recorder.snapshots] == list(range(len(wants)))
        for snapshot, (count, want) in list(zip(recorder.snapshots, wants, strict=True))[1:]:
            assert set(snapshot.calls.tolist()) == {count}
            assert snapshot.micro == count
            if count:
                assert seen(snapshot) == pytest.approx(want, rel=1e-5)
