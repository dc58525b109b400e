"""A rule's action that fails halfway: the gradients are what they were, and the file's own clip holds all the same."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.actions import zero_and_clip
from gradwatch.capture import optimizer_capture as capture
from gradwatch.errors import TrainingStopped
from gradwatch.reading import foreach_functions
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept

RULES = """
version: 1
rules:
  big: {detect: {kind: above, of: norm, threshold: 0.1}, do: [clip: {to: 0.1}]}
clip: {total: {method: norm, max_norm: 1.0}}
"""


def multiplies(monkeypatch: pytest.MonkeyPatch, instead: Any) -> None:
    """Have `instead` called wherever gradients are multiplied at the step."""
    for module in (zero_and_clip, capture, foreach_functions):
        monkeypatch.setattr(module, "multiply", instead)


@pytest.mark.parametrize("done", [0, 1])
def test_the_standing_clip_holds_where_a_rules_clip_fails(
    done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The foreach call fails after `done` gradients were multiplied, and once more: what the rule did is undone."""
    torch.manual_seed(0)
    model, kept = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = gradwatch.watch(
        model, optimizer, rules=parse_rules(RULES), sinks=[kept], run_dir=tmp_path / "run"
    )
    multiply, calls = foreach_functions.multiply, []

    def halfway(grads: Any, factors: Any) -> None:
        calls.append(len(grads))
        if len(calls) > 2:
            return multiply(grads, factors)
        for grad, factor in zip(grads[:done], factors, strict=False):
            grad.mul_(factor)
        raise RuntimeError("halfway")

    multiplies(monkeypatch, halfway)
    (model(torch.randn(4, 6)).sum() * 100).backward()
    optimizer.step()
    total = (
        float(sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None)) ** 0.5
    )
    assert total == pytest.approx(1.0, rel=1e-4)
    watch.flush()
    record = kept.records[-1]
    assert record.decision.max_norm == 1.0
    assert record.snapshot.total_norm_applied == pytest.approx(1.0, rel=1e-4)
    told = [event.summary for event in record.verdict.events if event.kind == "failed"]
    assert len(told) == 1
    assert "some gradients had been changed" not in told[0]
    watch.close()


@pytest.mark.parametrize("on_error", ["pass", "skip_step", "stop"])
@pytest.mark.parametrize("action", ["clip: {to: 0.1}", "rescale: {factor: 0.5}", "zero_nonfinite: {}"])
def test_what_was_changed_halfway_is_put_back_to_the_bit(
    action: str, on_error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the action and whatever is done instead, no gradient differs from what backward left."""
    torch.manual_seed(0)
    model, kept = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    detect = "{kind: nonfinite}" if "zero" in action else "{kind: above, of: norm, threshold: 0.1}"
    rules = parse_rules(
        f"version: 1\nrules: {{r: {{detect: {detect}, on_error: {on_error}, do: [{action}]}}}}\n"
    )
    x = torch.randn(4, 6)
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[kept], run_dir=tmp_path / "run") as gw:
        for step in range(2):
            optimizer.zero_grad()
            (model(x).sum() * (float("nan") if step and "zero" in action else 100)).backward()
            found = [param.grad.clone() for param in model.parameters() if param.grad is not None]
            if step:
                real = zero_and_clip.zero_nonfinite if "zero" in action else foreach_functions.multiply
                calls: list[int] = []

                def halfway(*args: Any, real: Any = real, calls: list[int] = calls) -> None:
                    calls.append(1)
                    real(*([each[:1] for each in args] if isinstance(args[0], list) else args))
                    raise MemoryError("halfway")

                if "zero" in action:
                    monkeypatch.setattr(zero_and_clip, "zero_nonfinite", halfway)
                else:
                    multiplies(monkeypatch, halfway)
            with pytest.raises(TrainingStopped) if step and on_error == "stop" else nullcontext():
                optimizer.step()
        assert len(calls) == 2
        assert gw.health.errors() == {"action": 1}
    left = [param.grad for param in model.parameters()]
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(found, left, strict=True))  # type: ignore[union-attr]
    (told,) = [event.summary for event in kept.records[-1].verdict.events if event.kind == "failed"]
    assert "had been changed" not in told


def test_what_fails_before_it_has_changed_anything_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A passing fault costs nothing but a count: the clip is carried out, once, and told as it was decided."""
    torch.manual_seed(0)
    model, kept = nn.Linear(6, 1), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    multiply, calls = foreach_functions.multiply, []

    def once(grads: Any, factors: Any) -> None:
        calls.append(len(grads))
        if len(calls) == 1:
            raise MemoryError("for a moment")
        return multiply(grads, factors)

    multiplies(monkeypatch, once)
    with gradwatch.watch(
        model, optimizer, rules=parse_rules(RULES), sinks=[kept], run_dir=tmp_path / "run"
    ) as gw:
        (model(torch.randn(4, 6)).sum() * 100).backward()
        optimizer.step()
        assert gw.health.errors() == {"action": 1}
    norms = [float(param.grad.norm()) for param in model.parameters() if param.grad is not None]
    assert norms == pytest.approx([0.1, 0.1], rel=1e-4)
    assert len(calls) == 2
    assert not [event for event in kept.records[-1].verdict.events if event.kind == "failed"]


@pytest.mark.parametrize("done", [0, 1])
def test_a_calm_clip_that_fails_halfway_multiplies_nothing_twice(
    done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standing clip in a calm loop fails once, after `done` gradients: none ends below what it should be."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rules = parse_rules("version: 1\nextends: [default]\nclip: {total: {method: norm, max_norm: 0.5}}\n")
    multiply, broken, x = foreach_functions.multiply, [False], torch.randn(4, 6)

    def halfway(grads: Any, factors: Any) -> None:
        if not broken[0]:
            return multiply(grads, factors)
        broken[0] = False
        multiply(grads[:done], factors) if done else None
        raise RuntimeError("halfway")

    multiplies(monkeypatch, halfway)
    given = []
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[Kept()], run_dir=tmp_path / "run") as gw:
        for step in range(70):
            optimizer.zero_grad()
            (model(x).sum() * 100).backward()
            broken[0] = step == 69
            optimizer.step()
            given.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
        assert gw.health.errors() == {"action": 1}
    for k, (clipped, last) in enumerate(zip(given[-2], given[-1], strict=True)):
        if k < done or not done:
            assert torch.equal(clipped, last)
        else:
            assert float(last.norm()) > 2 * float(clipped.norm())
