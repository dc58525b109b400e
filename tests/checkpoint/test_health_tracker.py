"""Which checkpoint is one to go back to, in the process and beside the run; and that a resume goes on as if uncut."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.checkpoint.health_tracker import CheckpointHealthTracker
from gradwatch.records.decision import Decision
from gradwatch.records.record import CheckpointHealth
from gradwatch.records.snapshot import Column
from gradwatch.records.verdict import Verdict
from tests.engine.cases import make_sites, make_snapshot
from tests.support.acting_cases import Training, watched

SKIPS = "rules: {r: {detect: {kind: nonfinite}, severity: critical, do: [skip_step]}}"
WATCHES = "rules: {r: {detect: {kind: nonfinite}, severity: critical}}"
NAN = {"2__weight": math.nan}


def test_a_skipped_nan_is_unhealthy_only_until_the_next_good_step() -> None:
    """The weights were not touched; the last good step is the one before it, then the one after it."""
    training = Training()
    with watched(training, SKIPS) as (gw, kept):
        assert gw.healthy
        assert gw.last_healthy_step is None
        training.step()
        assert (gw.healthy, gw.last_healthy_step) == (True, 0)
        training.step(**NAN)
        assert (gw.healthy, gw.last_healthy_step) == (False, 0)
        assert kept.records[-1].checkpoint == CheckpointHealth(
            False, 0, ("rule r is firing", "a gradient was not finite at step 1")
        )
        training.step()
        assert (gw.healthy, gw.last_healthy_step) == (True, 2)
        assert gw.status()["last_healthy_step"] == 2


def test_a_nan_that_reached_the_optimizer_is_never_forgotten() -> None:
    """Finite gradients afterwards prove nothing about the weights; a state from before it does."""
    training = Training()
    with watched(training, WATCHES) as (gw, _):
        training.step()
        good = gw.state_dict()
        training.step(**NAN)
        with torch.no_grad():
            for param in training.model.parameters():
                param.nan_to_num_(0.0)
        for _ in range(3):
            training.step()
        assert (gw.healthy, gw.last_healthy_step) == (False, 0)
        poisoned = gw.state_dict()
        gw.load_state_dict(good)
        assert (gw.healthy, gw.last_healthy_step) == (True, 0)
        gw.load_state_dict(json.loads(json.dumps(poisoned)))
        assert not gw.healthy


def test_a_resumed_watch_says_so_before_its_first_step() -> None:
    """What was loaded is known of optimizers that have not stepped yet; weights are looked at as they are now."""
    training = Training()
    with watched(training, WATCHES) as (gw, _):
        training.step()
        assert gw.healthy
        good = gw.state_dict()
        with torch.no_grad():
            training.model.get_parameter("2.weight").fill_(math.nan)
        assert not gw.healthy
        ruined = gw.state_dict()
        training.step(**NAN)
        poisoned = gw.state_dict()
    for state, healthy, last in ((good, True, 0), (ruined, True, 0), (poisoned, False, 0)):
        with watched(Training(), WATCHES) as (gw, _):
            gw.load_state_dict(json.loads(json.dumps(state)))
            assert (gw.healthy, gw.last_healthy_step) == (healthy, last)


def test_a_critical_rule_that_fires_is_reason_enough() -> None:
    """A warning is not."""
    for severity in ("critical", "warning"):
        training = Training()
        text = f"rules: {{r: {{detect: {{kind: above, threshold: 5}}, severity: {severity}, keep_firing_for: 2}}}}"
        with watched(training, text) as (gw, _):
            training.step()
            training.step(**{"2__weight": 1000.0})
            training.step()
            assert gw.healthy == (severity == "warning")


@given(
    st.lists(st.sampled_from(["fine", "nan", "inf", "skipped", "zeroed", "rejected", "firing"]), max_size=30)
)
def test_healthy_means_nothing_not_finite_ever_passed(script: list[str]) -> None:
    """Against a plain restatement of the definition, over random runs."""
    sites, health_tracker = make_sites(2), CheckpointHealthTracker(frozenset({"r"}))
    poisoned, last, healthy = False, None, True
    for step, what in enumerate(script):
        value = {
            "nan": math.nan,
            "inf": math.inf,
            "skipped": math.nan,
            "zeroed": math.nan,
            "rejected": math.inf,
        }.get(what, 1.0)
        columns = {"nonfinite": Column(np.array([float(not math.isfinite(value)), 0]), np.ones(2, bool))}
        scalars = {"scaler_skip": 1.0} if what == "rejected" else {}
        snapshot = make_snapshot(sites, step, [value, 1.0], columns=columns, scalars=scalars)
        decision = Decision(
            skip=what == "skipped", zero=np.array([True, False]) if what == "zeroed" else None
        )
        firing = {"r": np.zeros(2, bool)} if what == "firing" else {"harmless": np.ones(2, bool)}
        found = health_tracker.after(snapshot, Verdict(firing=firing), decision)
        poisoned |= what in ("nan", "inf")
        if what != "rejected":
            healthy = what == "fine" and not poisoned
            last = step if healthy else last
        assert (found.healthy, found.last_healthy_step, bool(found.reasons)) == (healthy, last, not healthy)
        restored = CheckpointHealthTracker(frozenset({"r"}))
        restored.load(json.loads(json.dumps(health_tracker.to_dict())))
        assert restored.to_dict() == health_tracker.to_dict()


def test_a_step_that_nobody_judged_is_not_called_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours in the engine, or before it; and a watch that pauses itself after three."""
    from gradwatch.engine import BoundEngine
    from gradwatch.session.pipeline import step_pipeline as judging

    def broken(*args: Any) -> None:
        raise MemoryError("injected")

    training = Training()
    with watched(training, SKIPS, strict=False) as (gw, _):
        training.step()
        for owner, name in ((BoundEngine, "evaluate"), (judging, "assemble")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, broken)
                training.step()
                assert not gw.healthy
            training.step()
            assert gw.healthy
        with monkeypatch.context() as patch:
            patch.setattr(judging, "assemble", broken)
            for _ in range(3):
                training.step()
        training.step()
        assert not gw.healthy
        assert gw.last_healthy_step == 4


def test_an_overflowed_norm_of_finite_elements_poisons_nothing() -> None:
    """The norm is infinite in float32, no element is."""
    counts = Column(np.zeros(2, np.float32), np.ones(2, bool))
    snapshot = make_snapshot(make_sites(2), 0, [math.inf, 1.0], columns={"nonfinite": counts})
    health_tracker = CheckpointHealthTracker(frozenset())
    assert health_tracker.after(snapshot, Verdict(), Decision()).healthy


# -- resume ------------------------------------------------------------------------------------------------

EVERYTHING = """
defaults: {warmup: 20}
rules:
  nan: {detect: {kind: nonfinite}, severity: critical, do: [skip_step: {max_consecutive: 2, then: continue}]}
  spike:
    detect: {kind: spike, above: 6, clear_below: 3}
    exclude: ["0.*"]
    keep_firing_for: 3
    cooldown: 5
    do:
      - clip: {to: baseline}
      - escalate: {after: 2 in 6, to: skip_step}
  rail: {detect: {kind: above, of: total_norm, threshold: 40}, for: 2, keep_firing_for: 2, do: [clip: {to: 5.0}]}
  slow: {detect: {kind: above, threshold: 30}, keep_firing_for: 4, do: [rescale: {factor: 0.5}]}
  shadow: {detect: {kind: spike, of: rms, above: 8}, mode: shadow, do: [clip: {to: baseline}, stop]}
"""
LENGTH = 70


def script() -> list[dict[str, float]]:
    """Seventy steps in which everything happens: spikes in clusters, NaN runs, a rail, a rescale."""
    found: list[dict[str, float]] = [{} for _ in range(LENGTH)]
    for step in (25, 27, 28, 45, 60):
        found[step] = {"2__weight": 300.0}
    for step in (31, 32, 33, 34, 52):
        found[step] = NAN
    for step in (38, 39, 40):
        found[step] = {"all": 400.0}
    for step in (47, 48, 49):
        found[step] = {"0__weight": 3000.0}
    return found


def told(records: list[Any]) -> list[str]:
    """What a run told and did, step by step: events, orders, factors, health; as text, where NaN equals itself."""
    return [
        repr(
            (
                record.snapshot.step,
                record.verdict.events,
                sorted(record.decision.orders, key=repr),
                record.decision.skip,
                record.snapshot.coef.tolist(),
                record.checkpoint,
            )
        )
        for record in records
    ]


@pytest.mark.parametrize("cuts", [10, pytest.param(100, marks=pytest.mark.soak)])
def test_a_resume_is_as_if_uninterrupted_wherever_it_is_cut(cuts: int) -> None:
    """P28: cut at random moments, state through JSON: the same events, orders and weights, nothing twice."""
    scales = script()
    whole = Training(kind=torch.optim.AdamW)
    saved: list[dict[str, Any]] = []
    with watched(whole, EVERYTHING) as (gw, kept):
        for scale in scales:
            saved.append(
                {
                    "gradwatch": json.dumps(gw.state_dict(), allow_nan=False),
                    "model": {key: value.clone() for key, value in whole.model.state_dict().items()},
                    "optimizer": _copied(whole.optimizer.state_dict()),
                    "data": whole.generator.get_state(),
                }
            )
            whole.step(**scale)
    expected, end = told(kept.records), whole.weights()
    assert {event.kind for record in kept.records for event in record.verdict.events} >= {
        "pending",
        "firing",
        "resolved",
        "repeat",
        "escalated",
    }
    acted = {(order.rule, order.action) for record in kept.records for order in record.decision.orders}
    assert acted >= {
        ("nan", "skip_step"),
        ("spike", "clip"),
        ("spike", "skip_step"),
        ("rail", "clip"),
        ("slow", "rescale"),
        ("shadow", "stop"),
    }
    generator = random.Random(28)
    for cut in [generator.randrange(LENGTH) for _ in range(cuts)]:
        resumed = Training(seed=99, kind=torch.optim.AdamW)
        at = saved[cut]
        resumed.model.load_state_dict(at["model"])
        resumed.optimizer.load_state_dict(_copied(at["optimizer"]))
        resumed.generator.set_state(at["data"])
        with watched(resumed, EVERYTHING) as (gw, kept):
            gw.load_state_dict(json.loads(at["gradwatch"]))
            for scale in scales[cut:]:
                resumed.step(**scale)
        assert told(kept.records) == expected[cut:], f"cut at step {cut}"
        assert all(torch.equal(a, b) for a, b in zip(resumed.weights(), end, strict=True))


def _copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(value) for value in state] if isinstance(state, list) else state
