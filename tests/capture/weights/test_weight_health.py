"""`healthy` is a statement about weights: looked at when asked, compared with what they were when last healthy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradwatch
from gradwatch.capture.weights import unoptimized_weights, weight_health
from gradwatch.capture.weights.weight_health import FACTOR, UNREADABLE, Weights
from gradwatch.checkpoint import read_tag
from gradwatch.reading import async_copy, foreach_norms
from gradwatch.rules.files import parse_rules
from gradwatch.sinks.log import LogSink
from tests.reading.test_foreach_norms import WAITING, Operations
from tests.support.acting_cases import Training, run_folder, watched
from tests.support.examples import examples
from tests.support.kept import Kept

QUIET = "rules: {r: {detect: {kind: nonfinite}, severity: warning}}"


class Unrolled(nn.Module):
    """A recurrent net of forty steps, which explodes within its first twenty updates."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.h, self.o = nn.Linear(8, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.shape[0], 64)
        for t in range(x.shape[1]):
            h = torch.relu(self.i(x[:, t]) + self.h(h))
        out: torch.Tensor = self.o(h)
        return out


def test_weights_ruined_in_the_warm_up_are_never_called_healthy() -> None:
    """As the README has it: the checkpoint that is kept restores, to the loss that the model had before its weights
    leapt; all later ones, which explode in their next forward some day, are not vouched for.
    """
    torch.manual_seed(0)
    model, saved = Unrolled(), (-1, {}, math.nan)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    answers = []
    with gradwatch.watch(model, optimizer, rules="default", sinks=[]) as gw:
        for step in range(18):
            x = torch.randn(16, 40, 8)
            loss = nn.functional.mse_loss(model(x), x.sum((1, 2)).unsqueeze(1))
            optimizer.zero_grad()
            loss.backward()
            gw.observe(loss=loss)
            optimizer.step()
            answers.append(gw.healthy)
            if gw.healthy:
                kept = {name: value.clone() for name, value in model.state_dict().items()}
                saved = (step, kept, float(loss.detach()))
        assert gw.last_healthy_step == saved[0]
    assert answers == [True] * 3 + [False] * 15
    model.load_state_dict(saved[1])
    with torch.no_grad():
        x = torch.randn(16, 40, 8)
        restored = float(nn.functional.mse_loss(model(x), x.sum((1, 2)).unsqueeze(1)))
    assert restored < 2 * saved[2]


def test_a_leap_is_vouched_for_after_a_hundred_steps(tmp_path: Path) -> None:
    """Twenty times the largest norm, and weights that leap: the tag says so too, and a checkpoint keeps it.

    The same norm at a rate at which the weights hardly move says nothing.
    """
    for rate in (0.2, 1e-4):
        training, kept = Training(), Kept()
        training.optimizer.param_groups[0]["lr"] = rate
        with watched(training, QUIET, sinks=[kept]) as (gw, _):
            for step in range(102):
                training.step(**({"all": 20.0} if step == 2 else {}))
            assert gw.flush()
            told = [record.checkpoint.healthy for record in kept.records]
            assert gw.healthy is (rate < 0.2)
            if rate < 0.2:
                assert all(told)
                continue
            # It was vouched for as far as was known, until the next step looked.
            assert told == [True] * 3 + [False] * 99
            assert gw.last_healthy_step == 1
            (reason,) = gw.status()["unhealthy_because"]
            assert reason.startswith("at step 2 the total norm jumped, and 2.bias became ")
            saved = json.loads(json.dumps(gw.state_dict()))
            training.step()
            assert gw.healthy
            gw.load_state_dict(saved)
            assert not gw.healthy


def test_what_no_gradient_shows_is_seen_when_asked(tmp_path: Path) -> None:
    """Weights that were overwritten, with NaN or far too large; mended they are healthy again, at once."""
    training = Training()
    with watched(training, QUIET, **run_folder(tmp_path)) as (gw, _):
        training.step()
        assert gw.healthy
        for value in (math.nan, math.inf, 1e30):
            weight = training.model.get_parameter("2.weight")
            good = weight.detach().clone()
            with torch.no_grad():
                weight[0, 0] = value
            assert not gw.healthy
            (reason,) = gw.status()["unhealthy_because"]
            assert "2.weight" in reason
            assert gw.last_healthy_step == 0
            ruined = json.loads(json.dumps(gw.state_dict(), allow_nan=False))
            with torch.no_grad():
                weight.copy_(good)
            assert (gw.healthy, gw.status()["unhealthy_because"]) == (True, [])
    resumed = Training()
    with torch.no_grad():
        resumed.model.get_parameter("2.weight").mul_(1e4)
    with watched(resumed, QUIET) as (gw, _):
        gw.load_state_dict(ruined)
        assert not gw.healthy  # compared with what they were before they were ruined


def test_a_blow_up_that_fades_is_not_restored_by_that() -> None:
    """Weights 40 times as large that decay to 5 times are still ruined, resumed or not; at 1.5 they are back.

    `rebaseline` takes them as they are, if they are finite.
    """
    training = Training()
    weight = training.model.get_parameter("2.weight")
    with watched(training, QUIET) as (gw, _):
        training.step()
        good = weight.detach() / weight.detach().square().mean().sqrt()  # beyond the model's level
        weight.data.copy_(good)
        assert gw.healthy
        for factor, healthy in ((40.0, False), (5.0, False), (1.5, True), (1.5 * 5.0, True)):
            weight.data.copy_(good * factor)
            assert gw.healthy is healthy
        weight.data.copy_(good * 400.0)
        assert not gw.healthy
        weight.data.copy_(good * 40.0)
        gw.load_state_dict(json.loads(json.dumps(gw.state_dict())))
        assert not gw.healthy
        gw.rebaseline("a scale of another unit")
        assert gw.healthy


@pytest.mark.parametrize(("looks", "since"), [(0, "watching began"), (1, "they were last healthy")])
def test_what_weights_are_compared_with_is_said(looks: int, since: str) -> None:
    """Where no look since the first step was healthy, they were not "last healthy" at any step that is known."""
    training = Training()
    weight = training.model.get_parameter("2.weight")
    with watched(training, QUIET) as (gw, _):
        for _ in range(looks):
            training.step()
            weight.data.mul_(1.01)
            assert gw.healthy
        training.step()
        weight.data.mul_(1e4)
        assert not gw.healthy
        assert f"times as large as when {since}: 2.weight" in gw.status()["unhealthy_because"][0]


def test_a_model_that_was_initialised_small_may_grow() -> None:
    """As in word2vec, one factor zero: 50 times as large it is of a usual size; 7,000 times is too much."""
    model = nn.Sequential(nn.Embedding(400, 16), nn.Linear(16, 400, bias=False))
    weight = model[0].weight
    nn.init.uniform_(weight, -1 / 32, 1 / 32)
    nn.init.zeros_(model[1].weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with gradwatch.watch(model, optimizer, rules=parse_rules(f"version: 1\n{QUIET}"), sinks=[]) as gw:
        at_first = weight.detach().clone()
        model(torch.arange(4)).sum().backward()
        optimizer.step()
        weight.data.copy_(50 * at_first)
        assert gw.healthy
        weight.data.copy_(7_000 * at_first)
        assert not gw.healthy


def test_a_model_is_healthy_only_if_it_can_be_looked_at() -> None:
    """NaN in the weights a training begins with, and weights on the meta device."""
    training = Training()
    with watched(training, QUIET) as (gw, _):
        assert gw.healthy
        with torch.no_grad():
            training.model.get_parameter("0.bias").fill_(math.nan)
        assert not gw.healthy
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    assert Weights(model.named_parameters).check() == (UNREADABLE,)


def test_weights_that_no_optimizer_moves_are_in_a_checkpoint_too(tmp_path: Path) -> None:
    """A frozen weight with NaN and a module put in with Inf; a frozen mask of -inf is as it should be."""
    training = Training()
    first: Any = training.model[0]
    first.requires_grad_(False)
    with watched(training, QUIET, **run_folder(tmp_path)) as (gw, _):
        training.step()
        with torch.no_grad():
            first.bias[0] = -math.inf
        assert gw.healthy
        with torch.no_grad():
            first.bias[0] = math.nan
        assert not gw.healthy
        assert gw.status()["unhealthy_because"] == [
            "weights that no optimizer updates are not finite: 0.bias"
        ]
        with torch.no_grad():
            first.bias[0] = 0.0
        assert gw.healthy
        first.weight.data[0, 0] = math.nan  # which no version shows
        assert not gw.healthy
        first.weight.data[0, 0] = 0.0
        assert gw.healthy
        extra = nn.Linear(2, 2)
        training.model[1].register_module("extra", extra)
        with torch.no_grad():
            extra.weight[0, 0] = math.inf
        assert not gw.healthy
        training.step()
        assert not gw.healthy


def test_of_many_frozen_weights_some_are_read_at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that no version shows to be written to are all read in as many looks as their size asks for."""
    weights = {f"{k}": torch.zeros(10) for k in range(6)}
    monkeypatch.setattr(unoptimized_weights, "READ_AGAIN", 20)
    found = unoptimized_weights.UnoptimizedWeights(weights.items)
    assert found.check() == ()
    for one in weights.values():
        one.data[0] = math.nan
    named = [found.check()[0].split(": ")[1] for _ in range(3)]
    assert named == ["0, 1", "0, 1, 2 and 1 more", "0, 1, 2 and 3 more"]
    for one in weights.values():
        one.data[0] = 0.0
    assert found.check() == ()


def test_weights_that_were_blown_up_before_they_are_frozen_are_not_forgotten() -> None:
    """A checkpoint holds them: what wants no gradient any more is compared with what it was while it was trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model[0].requires_grad_(False)
    with gradwatch.watch(model, optimizer, rules=parse_rules(f"version: 1\n{QUIET}"), sinks=[Kept()]) as gw:
        for step in range(12):
            if step == 8:
                model[0].requires_grad_(True)
                model[2].requires_grad_(False)
            optimizer.zero_grad()
            loss = (model(torch.randn(16, 4)) - 1).square().mean()
            (loss * (1e7 if step == 7 else 1e-9 if step > 7 else 1.0)).backward()
            optimizer.step()
        assert not gw.healthy
        assert "2.weight" in gw.status()["unhealthy_because"][0]


def test_what_starts_at_zero_may_grow() -> None:
    """A zero bias beside other weights, and a model of nothing but zeros."""
    for model in (nn.Linear(4, 4), nn.Linear(4, 4, bias=False)):
        with torch.no_grad():
            (model.bias if model.bias is not None else model.weight).zero_()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        with gradwatch.watch(model, optimizer, rules="observe-only", sinks=[]) as gw:
            for _ in range(4):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                assert gw.healthy, gw.status()["unhealthy_because"]


def test_a_jump_is_not_vouched_for_before_the_weights_were_looked_at(tmp_path: Path) -> None:
    """The tag: unknown after a step that jumped, known at the next; and it says when weights were looked at."""
    training, kept = Training(), Kept()
    folder = run_folder(tmp_path)
    folder["sinks"].append(kept)
    with watched(training, QUIET, **folder) as (gw, _):
        for _ in range(3):
            training.step()
        training.step(all=500.0)
        checkpoint = kept.records[-1].checkpoint
        assert not checkpoint.healthy
        assert checkpoint.reasons == (
            "the total norm jumped at step 3, and the weights have not been checked since",
        )
        training.step()
        checkpoint = kept.records[-1].checkpoint
        assert checkpoint.weights_step == 3 or not checkpoint.healthy
        assert gw.flush()
        tag = read_tag(tmp_path / "r")
        assert (tag.healthy, tag.weights_step) == (checkpoint.healthy, checkpoint.weights_step)


@pytest.mark.parametrize(
    ("rate", "asked", "do"), [(0.1, False, ""), (0.1, True, ""), (1e-4, True, ""), (0.1, False, "skip_step")]
)
def test_a_jump_that_only_the_weights_confirm_is_an_event(rate: float, asked: bool, do: str) -> None:
    """Three thousand times the largest, the loss as ever: critical at the step at which the weights are found ruined.

    With the norm and the factor of the step that jumped, once. Not where they outlived it, nor for a rule that acts.
    """
    training = Training()
    training.optimizer.param_groups[0]["lr"] = rate
    rules = f"rules: {{r: {{detect: {{kind: jump}}, severity: critical, do: [{do}]}}}}"
    with watched(training, rules) as (gw, kept):
        for step in range(9):
            training.step(**({"all": 3000.0} if step == 4 else {}))
            if asked:
                assert gw.healthy is (step < 4 or rate < 0.1)
    events = [event for record in kept.records for event in record.verdict.events]
    totals = [record.snapshot.total_norm for record in kept.records]
    if do or rate < 0.1:
        assert events == []
        return
    fired, resolved = events
    assert (fired.step, fired.kind, fired.severity) == (5, "firing", "critical")
    assert (fired.value, fired.score) == (totals[4], totals[4] / max(totals[:4]))
    assert fired.threshold == 100
    assert (resolved.step, resolved.kind) == (6, "resolved")


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 3.0, 12.0, 400.0, math.nan, 1e25]), min_size=3, max_size=3))
def test_the_bound_is_ten_times_its_own_or_the_models(scales: list[float]) -> None:
    """Against a plain restatement, for three parameters of other sizes; sums of squares beyond float32 included."""
    was = [np.linspace(0.1, 1, 4), np.zeros(9), np.linspace(-3, 3, 6)]
    named: list[tuple[str, torch.Tensor]] = [
        (f"p{k}", nn.Parameter(torch.tensor(values, dtype=torch.float32))) for k, values in enumerate(was)
    ]
    weights = Weights(lambda: named)
    weights.meet()
    assert weights.check() == ()
    now = [
        values * scale if k != 1 else values + scale
        for k, (values, scale) in enumerate(zip(was, scales, strict=True))
    ]
    level = math.sqrt(sum(float(np.square(values).sum()) for values in was) / sum(map(len, was)))
    for (_, param), values in zip(named, now, strict=True):
        with torch.no_grad():
            param.copy_(torch.tensor(values))
    healthy = all(
        math.sqrt(np.square(values).mean()) <= FACTOR * max(math.sqrt(np.square(before).mean()), level)
        for values, before in zip(now, was, strict=True)
    )
    assert (weights.check() == ()) is healthy
    if healthy:
        weights.renew()
        assert weights.check() == ()


@pytest.mark.parametrize("broken", [False, True])
def test_untouched_is_said_of_weights_that_were_looked_at(broken: bool, capsys: Any) -> None:
    """A skipped NaN: the log says that the weights are as they were, unless they were ruined before."""
    training = Training()
    skips = "rules: {r: {detect: {kind: nonfinite}, severity: critical, do: [skip_step]}}"
    with watched(training, skips, sinks=[LogSink("json")]) as _:
        training.step()
        if broken:
            with torch.no_grad():
                training.model.get_parameter("0.weight").fill_(1e20)
        training.step(**{"2__weight": math.nan})
    (line,) = [
        entry
        for entry in map(json.loads, capsys.readouterr().err.splitlines())
        if entry["event"].endswith("firing")
    ]
    assert line.get("weights") == (None if broken else "untouched, finite before")


def test_looks_that_nobody_asked_for_take_a_thousandth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look of 20 ms, due at each of a thousand steps of half a second: one in twenty seconds."""
    clock, looks = [0.0], []
    monkeypatch.setattr(weight_health, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    weights = Weights(nn.Linear(2, 2).named_parameters)
    begin = weights._begin

    def begun(*given: Any) -> Any:
        clock[0] += 0.02
        looks.append(clock[0])
        return begin(*given)

    monkeypatch.setattr(weights, "_begin", begun)
    for _ in range(1000):
        clock[0] += 0.5
        weights.check_if_due(dict, urgent=False)
    assert 20 <= len(looks) <= 1 + 0.001 * clock[0] / 0.02


def test_from_a_device_a_look_comes_late_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accelerator's path on CPU tensors: the same answers, no operation that waits, the steps of its beginning."""
    named: list[tuple[str, torch.Tensor]] = [
        ("a", nn.Parameter(torch.ones(3))),
        ("b", nn.Parameter(torch.ones(2))),
    ]
    there, statistics = [False], [("mean", torch.full((4,), math.inf)), ("var", torch.ones(4))]
    weights = Weights(lambda: named, statistics=lambda: statistics)
    monkeypatch.setattr(async_copy, "on_host", lambda tensor: False)
    monkeypatch.setattr(foreach_norms.DeviceNorms, "ready", lambda reading: there[0])
    with Operations(looks=True) as operations:
        weights.meet()
        with torch.no_grad():
            named[0][1].fill_(1e6)
        assert weights.check_if_due(lambda: {0: 7}, urgent=True) is None
        assert weights.check_if_due(lambda: {0: 8}, urgent=True) is None
    assert not set(WAITING) & set(operations.names)
    there[0] = True
    found = weights.check_if_due(lambda: {0: 9}, urgent=False)
    assert found is not None
    assert found[0] == {0: 7}
    assert "a" in found[1][0]
    assert found.statistics == ("mean",)
    assert weights.check() == found[1]
    with torch.no_grad():
        named[0][1].fill_(2.0)
    assert weights.check() == ()
