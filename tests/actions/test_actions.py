"""Actions at the step: exact, in the step of the fault, told with their numbers, and no more than was asked."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

import gradwatch
from gradwatch.actions import step_actions
from gradwatch.errors import RuleFileError, TrainingStopped
from gradwatch.records.decision import Decision, Order
from gradwatch.rules.files import parse_rules
from tests.support.acting_cases import WARM, Training, kinds, orders, watched
from tests.support.recorder import Recorder

SPIKE = "rules: {r: {detect: {kind: spike, above: 8}, do: [clip: {to: baseline}]}}"


def test_a_spike_is_clipped_in_its_own_step() -> None:
    """×1000 in one parameter: coefficient < 1 there and 1 elsewhere, brought to exp(m + 2σ̂), weights finite."""
    training = Training()
    with watched(training, SPIKE) as (gw, kept):
        training.warm_up()
        usual = max(float(record.snapshot.norm[2]) for record in kept.records)
        training.backward(**{"2__weight": 1000.0})
        before = training.norms()
        training.optimizer.step()
        after = training.norms()
        record = kept.records[-1]
        assert record.snapshot.sites.names[2] == "2.weight"
        coef = record.snapshot.coef
        assert coef[2] < 0.01
        assert (np.delete(coef, 2) == 1).all()
        assert after["2.weight"] == pytest.approx(before["2.weight"] * float(coef[2]), rel=1e-6)
        assert after["2.weight"] < 2 * usual
        assert {name: norm for name, norm in after.items() if name != "2.weight"} == {
            name: norm for name, norm in before.items() if name != "2.weight"
        }
        assert all(torch.isfinite(param).all() for param in training.model.parameters())
        told = orders(record)["clip"]
        assert (told.rule, told.site, told.count, told.shadow) == ("r", "2.weight", 1, False)
        assert told.before == pytest.approx(before["2.weight"], rel=1e-6)
        assert told.after == pytest.approx(after["2.weight"], rel=1e-6)
        assert told.coefficient == pytest.approx(float(coef[2]), rel=1e-6)
        assert kinds(kept) == [(WARM, "firing")]
        training.step()
        assert kinds(kept) == [(WARM, "firing"), (WARM + 1, "resolved")]
        assert not kept.records[-1].decision.acts
        assert gw.health.errors() == {}


@pytest.mark.parametrize(
    ("scope", "key"), [("param", ""), ("group", ", groups: [head, body]"), ("total", ", groups: [head]")]
)
def test_a_clip_to_a_number_is_exact_at_every_scope(scope: str, key: str) -> None:
    """The applied norm of each parameter, group or selection is the bound; what is not selected stays."""
    training = Training()
    text = f"""
groups: {{head: {{params: ["2.*"]}}, body: {{params: ["0.*"]}}}}
rules:
  r: {{detect: {{kind: above, threshold: 1e-6}}, scope: {scope}{key}, do: [clip: {{to: 0.01}}]}}
"""
    with watched(training, text) as (_, kept):
        training.backward()
        before = training.norms()
        training.optimizer.step()
        after = training.norms()

    def over(norms: dict[str, float], prefix: str) -> float:
        return math.sqrt(sum(norm**2 for name, norm in norms.items() if name.startswith(prefix)))

    parts = {"param": list(before), "group": ["2.", "0."], "total": ["2."]}[scope]
    for part in parts:
        expected = before[part] if scope == "param" else over(before, part)
        factor = min(1.0, 0.01 / (expected + 1e-6))
        found = after[part] if scope == "param" else over(after, part)
        assert found == pytest.approx(expected * factor, rel=1e-5)
    if scope == "total":
        assert all(after[name] == before[name] for name in before if name.startswith("0."))
    record = kept.records[-1]
    assert record.snapshot.total_norm_applied == pytest.approx(over(after, ""), rel=1e-5)
    assert record.snapshot.total_norm == pytest.approx(over(before, ""), rel=1e-5)


def test_a_clip_of_the_total_is_that_of_torch() -> None:
    """A rule over total_norm multiplies every gradient as `clip_grad_norm_` does, given the same norm."""
    text = "rules: {r: {detect: {kind: above, of: total_norm, threshold: 0.01}, do: [clip: {to: 0.01}]}}"
    ours, theirs = Training(), Training()
    with watched(ours, text) as (_, kept):
        ours.step()
    theirs.backward()
    total = torch.nn.utils.clip_grad_norm_(theirs.model.parameters(), 0.01)
    theirs.optimizer.step()
    for mine, other in zip(ours.weights(), theirs.weights(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-6, atol=0)
    told = orders(kept.records[-1])["clip"]
    assert (told.site, told.before) == ("", pytest.approx(float(total), rel=1e-6))
    assert told.after == pytest.approx(0.01, rel=1e-3)


def test_factors_come_from_what_the_users_clip_left() -> None:
    """The trigger is the norm before the user's clip; the coefficient is for what is left after it."""
    training = Training()
    text = "rules: {r: {detect: {kind: above, threshold: 0.05}, do: [clip: {to: 0.02}]}}"
    with watched(training, text) as (_, kept):
        training.step()  # the loop is learned
        training.backward(all=100.0)
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
        left = training.norms()
        training.optimizer.step()
        assert training.norms() == left  # 0.01 in all is within 0.02 for each
        assert kinds(kept)[-1][1] in ("firing", "repeat")
        assert not kept.records[-1].decision.orders  # nothing was done, so nothing is said to have been
        training.backward(all=100.0)
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
        left = training.norms()
        training.optimizer.step()
        told = orders(kept.records[-1])["clip"]
        assert told.before == pytest.approx(max(left.values()), rel=1e-6)
        assert max(training.norms().values()) == pytest.approx(0.02, rel=1e-3)


def test_with_a_longer_for_the_clip_acts_once_firing() -> None:
    """`for: 3`: two spikes pass, the third is clipped."""
    training = Training()
    text = "rules: {r: {detect: {kind: above, threshold: 5}, for: 3, do: [clip: {to: 0.5}]}}"
    with watched(training, text) as (_, kept):
        for _ in range(4):
            training.step(**{"2__weight": 1000.0})
        training.step()
    assert [record.decision.coef is not None for record in kept.records] == [False, False, True, True, False]


def test_a_nonfinite_gradient_is_not_multiplied() -> None:
    """A clip never spreads one NaN over its tensor, nor zeroes a gradient for one Inf."""
    training = Training()
    text = "rules: {r: {detect: {kind: above, threshold: 0.001}, do: [clip: {to: 0.0001}]}}"
    with watched(training, text) as (_, kept):
        training.backward(**{"2__weight": math.nan, "0__weight": math.inf})
        parameters = dict(training.model.named_parameters())
        before = {name: parameters[name].grad.clone() for name in ("2.weight", "0.weight")}  # type: ignore[union-attr]
        training.optimizer.step()
        for name, grad in before.items():
            after = parameters[name].grad
            assert after is not None
            assert torch.equal(after.nan_to_num(7.0), grad.nan_to_num(7.0))
        coef = dict(zip(kept.records[-1].snapshot.sites.names, kept.records[-1].snapshot.coef, strict=True))
        assert coef["2.weight"] == coef["0.weight"] == 1
        assert coef["0.bias"] < 1


def test_rescale_stands_from_the_next_step_until_the_rule_is_resolved() -> None:
    """Nothing at the step it fires; then every gradient of the rule × factor; then nothing again."""
    training = Training()
    text = """
rules:
  r: {detect: {kind: above, threshold: 5}, keep_firing_for: 2, do: [rescale: {factor: 0.25}]}
"""
    with watched(training, text) as (_, kept):
        training.step()
        training.step(**{"2__weight": 1000.0})
        for _ in range(4):
            training.step()
    factors = [float(record.snapshot.coef[2]) for record in kept.records]
    assert factors == [1, 1, 0.25, 0.25, 0.25, 1]
    assert all((np.delete(record.snapshot.coef, 2) == 1).all() for record in kept.records)
    assert kept.records[1].verdict.events[0].actions == ("rescale",)
    assert not kept.records[1].decision.orders
    told = orders(kept.records[2])["rescale"]
    assert (told.site, told.coefficient) == ("2.weight", 0.25)
    assert told.after == pytest.approx(0.25 * told.before)  # type: ignore[operator]


def test_a_factor_above_one_gives_way_to_a_clip() -> None:
    """Of an amplification and a bound on one gradient the bound holds; elsewhere the gradient grows."""
    training = Training()
    text = """
rules:
  grow: {detect: {kind: below, threshold: 1e6}, do: [rescale: {factor: 3.0}]}
  cap: {detect: {kind: above, threshold: 5}, do: [clip: {to: 1.0}]}
"""
    with watched(training, text) as (_, kept):
        training.step()
        training.step(**{"2__weight": 1000.0})
    coef = kept.records[-1].snapshot.coef
    assert coef[2] < 1
    assert (np.delete(coef, 2) == 3).all()


def test_zero_nonfinite_zeroes_those_elements_and_nothing_else() -> None:
    """The NaN becomes 0, its neighbours and the other gradients stay to the bit."""
    training = Training()
    text = "rules: {r: {detect: {kind: nonfinite}, do: [zero_nonfinite]}}"
    with watched(training, text) as (gw, kept):
        training.backward(**{"2__weight": math.nan})
        before = [param.grad.clone() for param in training.model.parameters()]  # type: ignore[union-attr]
        training.optimizer.step()
        for old, param in zip(before, training.model.parameters(), strict=True):
            assert param.grad is not None
            assert torch.equal(param.grad, torch.where(torch.isfinite(old), old, torch.zeros_like(old)))
        told = orders(kept.records[-1])["zero_nonfinite"]
        assert (told.site, told.count) == ("2.weight", 1)
        assert all(torch.isfinite(param).all() for param in training.model.parameters())
        training.step()
        assert gw.healthy  # nothing that is not finite ever reached the optimizer


@pytest.mark.parametrize("clip", ["norm, max_norm: 0.01", "norm, max_norm: 1000"])
def test_what_zeroing_leaves_keeps_to_the_bound_on_the_total(clip: str) -> None:
    """One NaN does not take the file's own clip off that step; the record tells the norm that the optimizer got."""
    training = Training()
    text = f"rules: {{r: {{detect: {{kind: nonfinite}}, do: [zero_nonfinite]}}}}\nclip: {{total: {{method: {clip}}}}}"
    with watched(training, text) as (_, kept):
        training.step()
        training.backward(**{"2__weight": math.nan})
        finite = [param.grad.nan_to_num(0.0) for param in training.model.parameters()]  # type: ignore[union-attr]
        total = float(torch.nn.utils.get_total_norm(finite))
        training.optimizer.step()
        factor = min(1.0, float(clip.split()[-1]) / total)
        for old, param in zip(finite, training.model.parameters(), strict=True):
            torch.testing.assert_close(param.grad, old * factor)
    record = kept.records[-1]
    assert record.snapshot.total_norm_applied == pytest.approx(total * factor, rel=1e-4)
    told = orders(record)
    assert set(told) == ({"zero_nonfinite", "clip"} if factor < 1 else {"zero_nonfinite"})
    if factor < 1:
        assert (told["clip"].before, told["clip"].after) == (
            pytest.approx(total),
            pytest.approx(0.01, rel=1e-4),
        )


def test_zero_nonfinite_is_refused_under_a_grad_scaler() -> None:
    """It would hide the overflow from the scaler: said once, told as withheld, not done."""
    training = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    text = "rules: {r: {detect: {kind: nonfinite}, do: [zero_nonfinite]}}"
    with watched(training, text) as (gw, kept):
        training.optimizer.zero_grad()
        loss = training.model(torch.randn(4, 6)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(training.optimizer)
        bad = training.model[2].weight.grad
        assert bad is not None
        bad[0, 0] = math.nan  # after the scaler has looked
        scaler.step(training.optimizer)
        assert not torch.isfinite(bad).all()
        (order,) = kept.records[-1].decision.orders
        assert order.shadow
        assert gw.health.errors() == {"action": 1}


SHADOW = """
rules:
  cap: {detect: {kind: above, threshold: 5}, mode: shadow, do: [clip: {to: 0.5}]}
  nan: {detect: {kind: nonfinite}, mode: shadow, do: [skip_step, stop]}
  slow: {detect: {kind: above, threshold: 5}, mode: shadow, do: [rescale: {factor: 0.5}]}
"""


def test_shadow_mode_tells_the_coefficient_and_changes_no_bit() -> None:
    """Weights are those of the unwatched run; the orders say what would have been done."""
    plain, training = Training(), Training()
    script: list[dict[str, float]] = [{}, {"2__weight": 1000.0}, {"2__weight": 1000.0}, {}, {}]
    for scale in script:
        plain.step(**scale)
    with watched(training, SHADOW) as (_, kept):
        for scale in script:
            training.step(**scale)
        for mine, other in zip(training.weights(), plain.weights(), strict=True):
            assert torch.equal(mine, other)
        told = orders(kept.records[1])["clip"]
        assert told.shadow
        assert told.coefficient == pytest.approx(0.5 / (told.before or 0.0), rel=1e-5)
        assert "rescale" not in orders(kept.records[1])
        assert orders(kept.records[2])["rescale"].coefficient == 0.5
        training.step(**{"2__weight": math.nan})
        assert {order.action for order in kept.records[-1].decision.orders if order.rule == "nan"} == {
            "skip_step",
            "stop",
        }
    assert not any(record.decision.acts for record in kept.records)


# -- precedence --------------------------------------------------------------------------------------------

PARTS: dict[str, dict[str, Any]] = {
    "stop": {"stop": True},
    "skip": {"skip": True},
    "zero": {"zero": np.array([True, False])},
    "clip": {"coef": np.array([0.5, 0.25], np.float32), "max_norm": 1e9},
}


@pytest.mark.parametrize(
    "chosen", [one for size in (1, 2, 3, 4) for one in itertools.combinations(PARTS, size)], ids="+".join
)
def test_stop_over_skip_over_zero_over_clip(chosen: tuple[str, ...]) -> None:
    """Of all that is decided for a gradient only the strongest is carried out."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    decision = Decision()
    for name in chosen:
        decision |= Decision(**PARTS[name], orders=frozenset({Order("r", name)}))
    with Recorder(model) as recorder:
        recorder.decide = lambda snapshot: decision
        model(torch.ones(4, 3)).square().sum().backward()
        weight, bias = model.weight.grad, model.bias.grad
        assert weight is not None
        assert bias is not None
        weight[0, 0] = math.nan
        found = [weight.clone(), bias.clone()]
        before = [param.detach().clone() for param in model.parameters()]
        if "stop" in chosen:
            with pytest.raises(TrainingStopped):
                optimizer.step()
        else:
            optimizer.step()
    untouched = "stop" in chosen or "skip" in chosen
    zeroed, clipped = "zero" in chosen and not untouched, "clip" in chosen and not untouched
    expected = [
        torch.where(torch.isfinite(found[0]), found[0], 0.0) if zeroed else found[0],
        found[1],
    ]
    if clipped:
        expected[1] = expected[1] * 0.25
        expected[0] = expected[0] if zeroed else expected[0] * 0.5
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert param.grad is not None
        assert torch.equal(param.grad.nan_to_num(7.0), grad.nan_to_num(7.0))
    if untouched:
        for param, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(param, old)


def test_what_rules_ask_for_together_takes_the_strictest() -> None:
    """Four rules at once, in every order of the file: the same decision."""
    rules = [
        "a: {detect: {kind: above, threshold: 0.001}, do: [clip: {to: 0.0005}]}",
        "b: {detect: {kind: above, of: total_norm, threshold: 0.001}, do: [clip: {to: 0.01}]}",
        "c: {detect: {kind: nonfinite}, on_error: stop, do: [zero_nonfinite]}",
        "d: {detect: {kind: above, threshold: 0.002}, on_error: skip_step, do: [clip: {to: 0.001}]}",
    ]
    found = []
    for order in itertools.permutations(rules):
        training = Training()
        with watched(training, "rules:\n  " + "\n  ".join(order)) as (_, kept):
            training.step(**{"0__bias": math.nan})
            found.append(kept.records[0].decision)
    assert all(decision == found[0] for decision in found)
    assert found[0].on_error == "stop"


# -- on_error ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["pass", "skip_step", "stop"])
@pytest.mark.parametrize("error", [ValueError("broken"), MemoryError(), RuntimeError("device")])
def test_a_failed_action_does_what_its_rule_says(
    on_error: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient passes unchanged, the step is skipped, or training stops: and an incident says so."""
    training, plain = Training(), Training()
    text = f"""
rules:
  r: {{detect: {{kind: above, threshold: 5}}, on_error: {on_error}, do: [clip: {{to: 0.5}}]}}
"""
    with watched(training, text, strict=False) as (gw, kept):
        training.step()
        plain.step()
        before = training.weights()

        def broken(*args: Any) -> None:
            raise error

        monkeypatch.setattr(step_actions, "zero_and_clip", broken)
        training.backward(**{"2__weight": 1000.0})
        plain.backward(**{"2__weight": 1000.0})
        if on_error == "stop":
            with pytest.raises(TrainingStopped, match="step 1: rule r says stop"):
                training.optimizer.step()
        else:
            training.optimizer.step()
        plain.optimizer.step()
        expected = plain.weights() if on_error == "pass" else before
        for mine, other in zip(training.weights(), expected, strict=True):
            assert torch.equal(mine, other)
        record = kept.records[-1]
        failed = [event for event in record.verdict.events if event.kind == "failed"]
        assert [(event.rule, event.severity, event.actions) for event in failed] == [
            ("r", "critical", ("clip",))
        ]
        assert failed[0].sites == ("2.weight",)
        assert type(error).__name__ in failed[0].description
        assert record.decision.skip == (on_error == "skip_step")
        assert record.decision.stop == (on_error == "stop")
        assert (record.snapshot.coef == 1).all()  # what was really applied
        assert len(kept.records) == 2  # one Record a step, though it was corrected
        assert gw.health.errors() == {"action": 1}


# -- stop --------------------------------------------------------------------------------------------------


def test_stop_leaves_weights_and_state_and_comes_after_the_record() -> None:
    """`TrainingStopped` names the rule and the step; by then every sink has the Record and has been flushed."""
    training = Training(kind=torch.optim.AdamW)
    flushed = []
    text = "rules: {r: {detect: {kind: nonfinite}, do: [stop]}}"
    with watched(training, text) as (_, kept):
        kept.flush = lambda timeout: flushed.append(len(kept.records)) or True  # type: ignore[func-returns-value,method-assign]
        training.step()
        before = training.weights()
        with pytest.raises(TrainingStopped, match="step 1: rule r says stop"):
            training.step(**{"0__weight": math.inf})
        assert flushed == [2]
        for mine, old in zip(training.weights(), before, strict=True):
            assert torch.equal(mine, old)
        assert kept.records[-1].decision.stop


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (
            "{detect: {kind: loss_spike}, do: [clip: {to: baseline}]}",
            r"clip to the baseline needs one of gradient norms .* kind loss_spike on loss",
        ),
        ("{detect: {kind: spike, of: max_abs}, do: [clip]}", "kind spike on max_abs"),
        (
            "{detect: {kind: above, threshold: 1}, do: [escalate: {after: 2 in 3, to: clip}]}",
            "kind above on norm; clip to a number instead",
        ),
        ("{detect: {kind: spike}, do: [zero_nonfinite]}", "zero_nonfinite needs a rule about NaN and Inf"),
        ("{detect: {kind: rank_outlier}, do: [clip: {to: 1.0}]}", "clip cannot act on ranks"),
        (
            "{detect: {kind: above, of: activation_std, threshold: 1}, do: [rescale: {factor: 0.5}]}",
            "rescale at the step acts on parameters, and activation_std is measured on modules",
        ),
    ],
)
def test_what_would_mean_nothing_is_refused_at_attach(rule: str, said: str) -> None:
    """With the reason, before training starts."""
    training = Training()
    with pytest.raises(RuleFileError, match=said):
        gradwatch.watch(
            training.model,
            rules=parse_rules(f"version: 1\nmodules: {{tap: output}}\nrules: {{r: {rule}}}"),
            sinks=[],
        )
