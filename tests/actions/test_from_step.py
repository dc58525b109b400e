"""`from_step`: before it no action is carried out and nothing is clipped, wherever it is done; at it, it is."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.rules.files import parse_rules
from gradwatch.rules.rule_set import RuleSet
from tests.actions.test_clip_section import CLIPS
from tests.support.kept import Kept
from tests.support.on_device import gradients_on_device

FIRST, STEPS = 4, 8
X = torch.randn(16, 3, generator=torch.Generator().manual_seed(3))
GROUPS = "groups: {head: {params: ['4.*']}, weights: {params: ['*.weight']}}"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def rules(text: str) -> RuleSet:
    """A rule file with the two groups."""
    return parse_rules(f"version: 1\n{GROUPS}\n{text}\n")


def losses(model: nn.Module, step: int, bad: float = 1.0) -> Tensor:
    """A loss that is spiky from the step before `FIRST` on, so that a clip of anomalies has something to do."""
    loss: Tensor = model(X).square().mean() * (1e3 if step >= FIRST - 1 else 1.0) * bad
    return loss


def applied(found: RuleSet | None) -> list[bytes]:
    """The gradients that the optimizer was about to use at each step, to the bit, and if it was given any."""
    model = net()
    optimizer, given = torch.optim.SGD(model.parameters(), 0.0), list[bytes]()

    def note(*_: object) -> None:
        grads = [torch.zeros(0) if param.grad is None else param.grad for param in model.parameters()]
        given.append(b"".join(grad.numpy().tobytes() for grad in grads))

    def train() -> None:
        optimizer.register_step_pre_hook(note)
        for step in range(STEPS):
            optimizer.zero_grad()
            losses(model, step).backward()
            optimizer.step()

    if found is None:
        train()
        return given
    with gradwatch.watch(model, optimizer, rules=found, sinks=[Kept()], strict=True):
        train()
    return given


def begins(text: str) -> None:
    """Up to `FIRST` the optimizer gets what it would without rules, and from there on other gradients."""
    without, late = applied(None), applied(rules(text))
    assert len(without) == len(late) == STEPS
    assert [one == other for one, other in zip(late, without, strict=True)] == [
        step < FIRST for step in range(STEPS)
    ]


@pytest.mark.parametrize("clip", [name for name in CLIPS if name not in ("baseline", "zclip")])
def test_the_section_clip_begins_at_its_step(clip: str) -> None:
    """Of every policy: by the total, by groups, by element, with a memory or without."""
    begins(f"clip: {CLIPS[clip][:-1]}, from_step: {FIRST}}}")


@pytest.mark.parametrize("clip", ["param", "value", "centralize", "block_rms", "normalize"])
def test_the_section_clip_begins_inside_the_backward(clip: str) -> None:
    """By a bound of its hooks, and by element."""
    said = {**CLIPS, "normalize": "{total: {method: normalize, scope: param}}"}[clip]
    begins(f"clip: {said[:-1]}, at: backward, from_step: {FIRST}}}")


@pytest.mark.parametrize("clip", ["group", "total", "value", "several"])
def test_the_section_clip_begins_on_a_device(clip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host never waits for a number."""
    gradients_on_device(monkeypatch)
    said = {**CLIPS, "total": "{total: {method: norm, max_norm: 0.01}}"}[clip]
    begins(f"clip: {said[:-1]}, from_step: {FIRST}}}")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("device", [False, True])
def test_a_skip_begins_at_its_step(device: bool, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of NaN before it is taken, as without rules; a fused optimizer on a device is told without the host."""
    if device:
        gradients_on_device(monkeypatch)
    found = rules(f"rules: {{nan: {{detect: {{kind: nonfinite}}, do: [skip_step], from_step: {FIRST}}}}}")
    for at in (FIRST - 1, FIRST):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 1e-6, fused=fused)
        with gradwatch.watch(model, optimizer, rules=found, sinks=[Kept()], strict=True):
            for step in range(at + 1):
                optimizer.zero_grad()
                losses(model, 0, math.nan if step == at else 1.0).backward()
                optimizer.step()
        finite = all(bool(param.isfinite().all()) for param in model.parameters())
        assert finite == (at >= FIRST), at


@pytest.mark.parametrize("at", ["step", "backward"])
def test_a_clip_of_a_rule_begins_at_its_step(at: str) -> None:
    """Also where the bound is in force before the rule fires, in the backward."""
    clip = f"do: [{{clip: {{to: 0.001, at: {at}}}}}], for: 1, from_step: {FIRST}"
    begins(f"rules: {{high: {{detect: {{kind: above, of: norm, threshold: 0.0}}, {clip}}}}}")


def test_a_bound_between_modules_begins_at_its_step() -> None:
    """What a module passes on is left alone before."""
    rule = "detect: {kind: above, of: grad_input_norm, threshold: 0.0001}, for: 1"
    clip = f"do: [{{clip: {{to: 0.0001, at: backward}}}}], from_step: {FIRST}"
    begins(f"modules: {{tap: full_backward}}\nrules: {{high: {{{rule}, {clip}}}}}")


def test_micro_batches_are_dropped_from_its_step_on() -> None:
    """Of two micro-batches the one of NaN is left out, and not before."""
    model, got = net(), list[bool]()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    optimizer.register_step_pre_hook(
        lambda *_: got.append(
            all(bool(one.grad.isfinite().all()) for one in model.parameters() if one.grad is not None)
        )
    )
    text = f"rules: {{nan: {{detect: {{kind: nonfinite}}, do: [drop_micro], from_step: {FIRST}}}}}"
    with gradwatch.watch(model, optimizer, rules=rules(text), sinks=[Kept()], strict=True):
        for _ in range(STEPS):
            optimizer.zero_grad()
            losses(model, 0).backward()
            losses(model, 0, math.nan).backward()
            optimizer.step()
    assert got == [step >= FIRST for step in range(STEPS)]


def test_the_policies_learn_before_they_clip() -> None:
    """At its first step `autoclip` clips as it would have done, had it clipped all along: it sees norms before that."""
    always = applied(rules("clip: {total: {method: autoclip}}"))
    late = applied(rules(f"clip: {{total: {{method: autoclip}}, from_step: {FIRST}}}"))
    assert late[FIRST:] == always[FIRST:]
    assert late[:FIRST] != always[:FIRST]


def test_every_evaluation_of_a_closure_is_clipped_from_its_step_on() -> None:
    """LBFGS asks for several gradients in a step; the later ones too are left alone before it."""

    def evaluations(text: str) -> list[list[bytes]]:
        model, got = net(), list[list[bytes]]()
        optimizer = torch.optim.LBFGS(model.parameters(), 1e-6, max_iter=3)
        with gradwatch.watch(model, optimizer, rules=rules(text), sinks=[Kept()], strict=True):
            for step in range(STEPS):
                got.append([])

                def closure(step: int = step) -> Tensor:
                    optimizer.zero_grad()
                    loss = losses(model, step)
                    loss.backward()
                    return loss

                optimizer.step(closure)
                got[-1] += [param.detach().numpy().tobytes() for param in model.parameters()]
        return got

    without, late = (
        evaluations("rules: {}"),
        evaluations(f"clip: {{total: {{method: norm, max_norm: 0.001}}, from_step: {FIRST}}}"),
    )
    assert late[:FIRST] == without[:FIRST]
    assert late[FIRST] != without[FIRST]


def test_records_say_nothing_of_a_clip_before_its_step() -> None:
    """Neither an order nor a factor; after it both."""
    model, sink = net(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    found = rules(f"clip: {{total: {{method: norm, max_norm: 0.0001}}, from_step: {FIRST}}}")
    with gradwatch.watch(model, optimizer, rules=found, sinks=[sink], strict=True) as gw:
        for step in range(STEPS):
            optimizer.zero_grad()
            losses(model, step).backward()
            optimizer.step()
        gw.flush()
    said = [(bool(one.decision.orders), one.snapshot.total_norm_applied < 0.001) for one in sink.records]
    assert said == [(step >= FIRST, step >= FIRST) for step in range(STEPS)]


def test_a_job_that_is_resumed_goes_on_with_its_steps(tmp_path: Path) -> None:
    """With its state the number of the next step is the saved one; without it steps begin anew, and the rule waits."""
    found = rules(
        f"rules: {{high: {{detect: {{kind: above, of: total_norm, threshold: 0.0}}, for: 1, from_step: {FIRST}}}}}"
    )

    def run(steps: int, state: dict[str, object] | None) -> tuple[list[int], dict[str, object]]:
        model, sink = net(), Kept()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        with gradwatch.watch(model, optimizer, rules=found, sinks=[sink], strict=True) as gw:
            if state is not None:
                gw.load_state_dict(state)
            for _ in range(steps):
                optimizer.zero_grad()
                losses(model, 0).backward()
                optimizer.step()
            gw.flush()
            saved = json.loads(json.dumps(gw.state_dict()))
        return [event.step for one in sink.records for event in one.verdict.events], saved

    before, saved = run(3, None)
    assert before == []
    assert run(3, saved)[0] == [FIRST]
    assert run(3, None)[0] == []
