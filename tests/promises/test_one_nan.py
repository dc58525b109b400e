"""One NaN is one event and one skipped step: nothing is learned of it, nothing else is skipped for it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.detectors import Drift, LossNonFinite, NonFinite, Spike
from gradwatch.engine import EngineState
from gradwatch.rules.rule_set import Action, Rule
from tests.engine.cases import SKIP, OptimizerRules, bound, rule
from tests.support.acting_cases import Training, watched
from tests.support.examples import examples

CLIP = (Action("clip", {"to": "baseline", "at": "step", "local": False}),)
SIZE = 4


def rules() -> list[Rule]:
    """Skips on NaN; clips and skips on spikes; learns in every way there is."""
    return [
        rule("nan", NonFinite(), severity="critical", do=SKIP, cooldown=20),
        rule("spike", Spike(above=6), do=CLIP),
        rule("total", Spike(of="total_norm", above=6), scope="total", do=SKIP),
        rule("rms", Spike(of="rms", above=8), scope="group", do=CLIP),
        rule("drift", Drift(of="total_norm"), scope="total"),
    ]


def baselines(state: EngineState) -> Any:
    """Everything that was learned."""
    return state.to_dict()["baselines"]


broken = st.sampled_from([math.nan, math.inf])


@settings(max_examples=examples(15))
@given(
    seed=st.integers(0, 10_000),
    at=st.integers(0, 70),
    sites=st.sets(st.integers(0, SIZE - 1), min_size=1),
    value=broken,
)
def test_one_nan_one_event_no_extra_skip_baselines_as_if_it_had_not_been(
    seed: int, at: int, sites: set[int], value: float
) -> None:
    """Over random healthy streams: with the NaN step, and without it, everything learned is the same to the bit."""
    rng = np.random.default_rng(seed)
    stream = [np.exp(rng.normal(0.0, 0.1, SIZE)).tolist() for _ in range(80)]
    hurt, spared = OptimizerRules(bound(rules(), SIZE)), OptimizerRules(bound(rules(), SIZE))
    skips = []
    for step, norms in enumerate(stream):
        if step == at:
            norms = [value if k in sites else norm for k, norm in enumerate(norms)]
            before = baselines(hurt.state)
            hurt.step(step, norms)
            assert baselines(hurt.state) == before
        else:
            hurt.step(step, norms)
            spared.step(step, norms)
        skips += [step] if hurt.decision.skip else []
    assert skips == [at]
    assert [(s, kind) for s, kind, name in hurt.kinds if name == "nan" and kind != "resolved"] == [
        (at, "firing")
    ]
    assert not [entry for entry in hurt.kinds if entry[2] != "nan"]
    assert baselines(hurt.state) == baselines(spared.state)


@settings(max_examples=examples(10))
@given(seed=st.integers(0, 10_000), hits=st.lists(st.booleans(), min_size=80, max_size=80), value=broken)
def test_any_number_of_nans_are_skipped_and_nothing_is_learned_of_them(
    seed: int, hits: list[bool], value: float
) -> None:
    """Skips fall exactly on the NaN steps; an event begins each run of them; baselines know only the others."""
    rng = np.random.default_rng(seed)
    hurt, spared = OptimizerRules(bound(rules(), SIZE)), OptimizerRules(bound(rules(), SIZE))
    skips = []
    for step, hit in enumerate(hits):
        norms = np.exp(rng.normal(0.0, 0.1, SIZE)).tolist()
        if hit:
            hurt.step(step, [value, *norms[1:]])
        else:
            hurt.step(step, norms)
            spared.step(step, norms)
        skips += [hurt.decision.skip]
    assert skips == hits
    began = [step for step, hit in enumerate(hits) if hit and not (step and hits[step - 1])]
    assert [step for step, kind, name in hurt.kinds if (kind, name) == ("firing", "nan")] == began
    assert baselines(hurt.state) == baselines(spared.state)


@pytest.mark.parametrize(
    ("severity", "steps", "told"),
    [
        ("critical", 1, ["nan"]),
        ("info", 1, ["nan", "loss"]),
        ("critical", 5, ["loss"]),
    ],
)
def test_a_nan_loss_is_part_of_that_of_its_gradients_only_where_this_is_told(
    severity: Any, steps: int, told: list[str]
) -> None:
    """A rule on gradients of lower severity, or one that waits for steps, does not silence the rule on the loss."""
    both = [
        rule("nan", NonFinite(), severity=severity, for_=steps),
        rule("loss", LossNonFinite(), severity="critical", scope="total"),
    ]
    judged = OptimizerRules(bound(both, SIZE))
    judged.step(0, [1.0] * SIZE, scalars={"loss": 1.0})
    judged.step(1, [math.nan] * SIZE, scalars={"loss": math.nan})
    assert sorted(name for _, kind, name in judged.kinds if kind == "firing") == sorted(told)


TEXT = """
rules:
  nan: {detect: {kind: nonfinite}, severity: critical, do: [skip_step]}
  spike: {detect: {kind: spike, above: 6}, do: [clip: {to: baseline}]}
"""


@settings(max_examples=examples(5))
@given(seed=st.integers(0, 1000), at=st.integers(0, 39), value=broken)
def test_training_with_one_nan_is_training_without_that_step(seed: int, at: int, value: float) -> None:
    """Real hooks: weights and optimizer state end bit-identical to a run in which that batch never was a step."""
    import torch

    hurt, spared = Training(seed, torch.optim.AdamW), Training(seed, torch.optim.AdamW)
    with watched(hurt, TEXT) as (_, kept), watched(spared, TEXT):
        for step in range(40):
            if step == at:
                hurt.step(all=value)
                spared.backward()  # the data moves on; nobody steps
                spared.optimizer.zero_grad()
            else:
                hurt.step()
                spared.step()
    assert [record.snapshot.step for record in kept.records if record.decision.skip] == [at]
    for mine, other in zip(hurt.weights(), spared.weights(), strict=True):
        assert torch.equal(mine, other)
