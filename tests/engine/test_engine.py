"""The engine, rule by rule: what fires when, on whom, what is decided, what is remembered."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gradwatch.detectors import (
    Above,
    Below,
    Dead,
    DepthRatio,
    Drift,
    LossNonFinite,
    LossSpike,
    Never,
    NonFinite,
    NormOverflow,
    ScaleCollapse,
    Spike,
    Stale,
    UpdateRatio,
)
from gradwatch.engine import Engine, EngineState
from gradwatch.errors import AttachError, GradwatchError
from gradwatch.records.decision import Order
from gradwatch.records.snapshot import Column
from gradwatch.rules.rule_set import Action, Clip, ClipPolicy, Group, Modules, RuleSet
from tests.engine.cases import GROUPS, SKIP, OptimizerRules, bound, default_like, everywhere, make_sites, rule

HEALTHY = [1.0, 1.0, 1.0, 1.0]
NAN_AT_2 = [1.0, 1.0, math.nan, 1.0]


def skip(limit: int | None = None, then: str = "continue") -> tuple[Action, ...]:
    """`do: [skip_step: {max_consecutive: limit, then: then}]`."""
    return (Action("skip_step", {"max_consecutive": limit, "then": then}),)


def test_a_nan_fires_names_the_parameter_and_skips_at_once() -> None:
    """One bad element: critical, skipped on the very step, resolved on the next healthy one."""
    bound_rules = OptimizerRules(bound([rule("nan", NonFinite(), do=SKIP, severity="critical")]))
    bound_rules.step(0, HEALTHY)
    counts = everywhere([0, 0, 3, 0])
    verdict = bound_rules.step(1, NAN_AT_2, columns={"nonfinite": counts})
    event = verdict.events[0]
    assert (event.kind, event.sites, event.count, event.value) == ("firing", ("layers.1.weight",), 1, 3.0)
    assert event.first_cause == "layers.1.weight"
    assert event.actions == ("skip_step",)
    assert bound_rules.decision.skip
    assert verdict.breaching["nan"].tolist() == [False, False, True, False]
    bound_rules.step(2, HEALTHY)
    assert not bound_rules.decision.skip
    assert bound_rules.kinds == [(1, "firing", "nan"), (2, "resolved", "nan")]


def test_a_nan_norm_without_counts_is_still_a_nan() -> None:
    """The capture may not have counted elements; the norm itself tells."""
    for values, seen in (
        (("nan", "inf"), [True, True]),
        (("nan",), [True, False]),
        (("inf",), [False, True]),
    ):
        engine = bound([rule("bad", NonFinite(values=values))], size=2)
        verdict = OptimizerRules(engine).step(0, [math.nan, math.inf])
        assert verdict.breaching["bad"].tolist() == seen


def test_a_nan_norm_that_was_not_counted_beside_others_is_still_a_nan() -> None:
    """Counts may cover only some sites; a site without one is judged by its norm."""
    counts = Column(np.array([4.0, 0.0], np.float32), np.array([True, False]))
    verdict = OptimizerRules(bound([rule("bad", NonFinite())], size=2)).step(
        0, [math.nan, math.nan], columns={"nonfinite": counts}
    )
    assert verdict.breaching["bad"].tolist() == [True, True]


def test_an_overflow_is_not_a_nan() -> None:
    """Finite gradients whose norm exceeds float32 trip `norm_overflow`, never `nonfinite`."""
    bound_rules = OptimizerRules(bound([rule("nan", NonFinite()), rule("over", NormOverflow())]))
    columns = {"nonfinite": everywhere([0, 0, 0, 0]), "norm_overflow": everywhere([0, 1, 0, 0])}
    verdict = bound_rules.step(0, [1.0, math.inf, 1.0, 1.0], columns=columns)
    assert list(verdict.firing) == ["over"]


def test_for_counts_breaching_samples_in_a_row() -> None:
    """Pending at the first, firing at the third, back to nothing when one sample is fine."""
    bound_rules = OptimizerRules(bound([rule("big", Above(threshold=10, of="total_norm"), for_=3)]))
    for step, total in enumerate([99, 99, 1, 99, 99, 99, 99, 1]):
        bound_rules.step(step, HEALTHY, total_norm=float(total))
    assert bound_rules.kinds == [
        (0, "pending", "big"),
        (3, "pending", "big"),
        (5, "firing", "big"),
        (7, "resolved", "big"),
    ]


def test_hysteresis_and_quiet_steps_before_it_resolves() -> None:
    """Quiet starts at clear_below, not at the threshold; a breach ends it; then keep_firing_for steps."""
    big = rule("big", Above(threshold=10, of="total_norm", clear_below=5), keep_firing_for=3)
    bound_rules = OptimizerRules(bound([big]))
    for step, total in enumerate([20, 7, 7, 4, 7, 20, 4, 7, 7, 7]):
        bound_rules.step(step, HEALTHY, total_norm=float(total))
    assert bound_rules.kinds == [(0, "firing", "big"), (9, "resolved", "big")]


def test_a_missing_sample_changes_nothing() -> None:
    """Neither the streak, nor the quiet count, nor the state of the rule."""
    bound_rules = OptimizerRules(bound([rule("big", Above(threshold=10), for_=2, keep_firing_for=1)], size=1))
    for step, norm in enumerate([99.0, None, 99.0, None, None, 1.0, None, 1.0]):
        bound_rules.step(step, [norm])
    assert bound_rules.kinds == [(0, "pending", "big"), (2, "firing", "big"), (7, "resolved", "big")]


def test_a_refire_within_cooldown_is_the_same_incident_and_alerts_nobody() -> None:
    """After the cooldown it is a new one."""
    bound_rules = OptimizerRules(bound([rule("big", Above(threshold=10, of="total_norm"), cooldown=3)]))
    for step, total in enumerate([99, 1, 1, 99, 1, 1, 1, 1, 1, 99]):
        bound_rules.step(step, HEALTHY, total_norm=float(total))
    firing = [event for event in bound_rules.events if event.kind == "firing"]
    assert [(event.step, event.incident, event.notify) for event in firing] == [
        (0, "big-0-0", True),
        (3, "big-0-0", False),
        (9, "big-0-9", True),
    ]


def test_for_and_cooldown_never_delay_an_action_on_a_nonfinite_gradient() -> None:
    """`for: 3` delays the alert; the skip is immediate, also for a rail that a NaN climbs."""
    rules = [rule("nan", NonFinite(), for_=3, do=SKIP), rule("rail", Above(threshold=10), for_=3, do=SKIP)]
    bound_rules = OptimizerRules(bound(rules))
    verdict = bound_rules.step(0, NAN_AT_2)
    assert verdict.acting == {"nan", "rail"}
    assert bound_rules.decision.skip
    assert [event.kind for event in bound_rules.events] == ["pending", "pending"]
    bound_rules.step(1, [99.0, 1.0, 1.0, 1.0])
    assert not bound_rules.decision.skip, "a finite breach waits for its `for`"


def test_an_action_is_taken_on_every_breach_while_firing() -> None:
    """Each time loudly: a `repeat` that is told but does not alert again."""
    bound_rules = OptimizerRules(bound([rule("nan", NonFinite(), do=SKIP, cooldown=50)]))
    decisions = []
    for step in range(3):
        bound_rules.step(step, NAN_AT_2)
        decisions.append(bound_rules.decision.skip)
    assert decisions == [True, True, True]
    assert [(event.kind, event.notify) for event in bound_rules.events] == [
        ("firing", True),
        ("repeat", False),
        ("repeat", False),
    ]


def test_max_consecutive_then_stop() -> None:
    """Three skips, then the run is stopped, and that step is not taken either."""
    bound_rules = OptimizerRules(bound([rule("nan", NonFinite(), do=skip(3, "stop"))]))
    found = []
    for step in range(4):
        bound_rules.step(step, NAN_AT_2)
        found.append((bound_rules.decision.skip, bound_rules.decision.stop))
    assert found == [(True, False)] * 3 + [(True, True)]
    alarm = bound_rules.events[-1]
    assert (alarm.kind, alarm.severity, alarm.notify, alarm.actions) == (
        "repeat",
        "critical",
        True,
        ("skip_step", "stop"),
    )


def test_max_consecutive_then_continue_alarms_and_goes_on() -> None:
    """A second critical alert after every 2 skips in a row; a healthy step resets the count."""
    bound_rules = OptimizerRules(bound([rule("nan", NonFinite(), do=skip(2))]))
    for step in range(5):
        bound_rules.step(step, NAN_AT_2)
        assert bound_rules.decision.skip
        assert not bound_rules.decision.stop
    bound_rules.step(5, HEALTHY)
    bound_rules.step(6, NAN_AT_2)
    alarms = [event.step for event in bound_rules.events if event.kind == "repeat" and event.notify]
    assert alarms == [2, 4]


def test_shadow_mode_says_and_does_nothing() -> None:
    """The orders are recorded as shadow; nothing is skipped, and the step is learned from."""
    bound_rules = OptimizerRules(bound([rule("nan", NonFinite(), do=skip(1, "stop"), mode="shadow")]))
    bound_rules.step(0, NAN_AT_2)
    bound_rules.step(1, NAN_AT_2)
    assert not bound_rules.decision.skip
    assert not bound_rules.decision.stop
    told = {"site": "layers.1.weight", "count": 1}
    assert bound_rules.decision.orders == {
        Order("nan", "skip_step", True, **told),
        Order("nan", "stop", True, **told),
    }
    assert all(event.actions == () for event in bound_rules.events)


def test_stop_stops_once_for_is_met() -> None:
    """`do: [stop]` on a rail."""
    bound_rules = OptimizerRules(
        bound([rule("rail", Above(threshold=10), for_=2, do=(Action("stop"),))], size=1)
    )
    stops = []
    for step in range(3):
        bound_rules.step(step, [99.0])
        stops.append(bound_rules.decision.stop)
    assert stops == [False, True, True]


def test_a_standing_clip_is_on_every_decision() -> None:
    """clip.total norm is a bound, whatever the rules say."""
    clip = Clip(total=ClipPolicy("norm", {"max_norm": 0.5}))
    bound_rules = OptimizerRules(bound([rule("nan", NonFinite(), do=SKIP)], clip=clip))
    bound_rules.step(0, HEALTHY)
    assert bound_rules.decision.max_norm == 0.5
    bound_rules.step(1, NAN_AT_2)
    assert (bound_rules.decision.max_norm, bound_rules.decision.skip) == (0.5, True)


def test_a_step_skipped_for_nan_is_learned_by_nobody() -> None:
    """Neither by the site, nor by the total, nor by its healthy neighbours."""
    rules = [rule("nan", NonFinite(), do=SKIP), rule("spike", Spike()), rule("total", Spike(of="total_norm"))]
    bound_rules, control = OptimizerRules(bound(rules)), OptimizerRules(bound(rules))
    for step in range(60):
        if step % 7 == 3:
            bound_rules.step(step, [math.nan, 1e4, 1e4, 1e4])
        bound_rules.step(step, HEALTHY)
        control.step(step, HEALTHY)
    assert bound_rules.state.to_dict()["baselines"] == control.state.to_dict()["baselines"]


def test_an_unskipped_nan_is_not_learned_by_its_site_or_the_total() -> None:
    """Under observe-only the other sites go on learning; those that hold NaN keep their baseline."""
    bound_rules = OptimizerRules(bound([rule("s", Spike()), rule("t", Spike(of="total_norm"))]))
    for step in range(30):
        bound_rules.step(step, HEALTHY)
    before = bound_rules.state.to_dict()["baselines"]
    bound_rules.step(30, NAN_AT_2)
    after = bound_rules.state.to_dict()["baselines"]
    for key, rows in after.items():
        counts = dict(zip(rows["names"], rows["fields"]["n"], strict=True))
        earlier = dict(zip(before[key]["names"], before[key]["fields"]["n"], strict=True))
        grown = {name: counts[name] - earlier[name] for name in counts}
        held = {"layers.1.weight": 0, "": 0}
        assert grown == {name: held.get(name, 1) for name in counts}


def test_a_provisional_snapshot_is_judged_for_nan_only() -> None:
    """Not learned, no other rule moves; a NaN in it still fires and still acts."""
    bound_rules = OptimizerRules(
        bound([rule("nan", NonFinite(), do=SKIP), rule("rail", Above(threshold=10)), rule("s", Spike())])
    )
    before = bound_rules.state.to_dict()
    verdict = bound_rules.step(0, [99.0, 99.0, 99.0, 99.0], provisional=True)
    assert verdict.events == ()
    assert bound_rules.state.to_dict() == before
    bound_rules.step(1, NAN_AT_2, provisional=True)
    assert bound_rules.kinds == [(1, "firing", "nan")]
    assert bound_rules.decision.skip


def test_a_step_the_grad_scaler_rejected_changes_nothing() -> None:
    """Its Inf is the scaler's own affair: no event, no action, not counted."""
    bound_rules = OptimizerRules(bound([rule("nan", NonFinite(), do=skip(1, "stop"))]))
    for step in range(5):
        assert bound_rules.step(step, NAN_AT_2, scalars={"scaler_skip": 1.0}).events == ()
        assert not bound_rules.decision.skip


def test_a_rejected_step_reaches_the_rules_on_the_scaler() -> None:
    """It fires `scaler_skip`, teaches `scale_collapse`, and is no sample of any other baseline."""
    rules = [
        rule("skip", Above(threshold=0, of="scaler_skip"), severity="info"),
        rule("collapse", ScaleCollapse(settle=0, halvings=3), severity="critical"),
        rule("spike", Spike(of="total_norm", warmup=5)),
        rule("nan", NonFinite(), do=skip(1, "stop")),
    ]
    bound_rules = OptimizerRules(bound(rules))
    scale = 65536.0
    for step in range(12):
        rejected = step in (8, 9, 10)
        norms = NAN_AT_2 if rejected else [1.0, 1.0, 1.0, 1.0]
        bound_rules.step(step, norms, scalars={"scaler_skip": float(rejected)}, loss_scale=scale)
        assert not bound_rules.decision.skip
        scale *= 0.5 if rejected else 1.0
    assert bound_rules.kinds == [(8, "firing", "skip"), (11, "firing", "collapse"), (11, "resolved", "skip")]
    assert bound_rules.state.consecutive == (0, 0, 0, 0)
    baselines = bound_rules.state.to_dict()["baselines"]
    (n,) = [rows["fields"]["n"] for key, rows in baselines.items() if key.startswith("spike")]
    assert n == [9]


def test_a_loss_of_nan_is_told_of_a_rejected_step_too() -> None:
    """No scale makes a finite loss NaN; Inf can be the scaled loss beyond its dtype, and is the scaler's own affair."""
    rules = [rule("loss", LossNonFinite(), severity="critical"), rule("nan", NonFinite())]
    bound_rules = OptimizerRules(bound(rules))
    rejected = {"scaler_skip": 1.0}
    for step, loss in enumerate((math.inf, math.nan, 1.0, -math.inf)):
        bound_rules.step(step, NAN_AT_2, scalars=rejected | {"loss": loss})
    bound_rules.step(4, NAN_AT_2, scalars=rejected)
    assert bound_rules.kinds == [(1, "firing", "loss"), (2, "resolved", "loss")]


def test_one_fault_is_one_incident_with_the_deepest_as_first_cause() -> None:
    """Worst five by score, the rest counted, and who was reached first by backward."""
    bound_rules = OptimizerRules(bound([rule("big", Above(threshold=10))], size=8))
    bound_rules.step(0, [11, 12, 13, 14, 15, 16, 17, 1])
    (event,) = bound_rules.events
    assert event.sites == tuple(f"layers.{i // 2}.{'bias' if i % 2 else 'weight'}" for i in (6, 5, 4, 3, 2))
    assert (event.count, event.first_cause, event.value) == (7, "layers.3.weight", 17.0)


def test_of_equally_bad_sites_the_deepest_is_named_first() -> None:
    """NaN reaches everything below; the first cause leads the list."""
    bound_rules = OptimizerRules(bound([rule("nan", NonFinite())]))
    bound_rules.step(0, [math.nan, math.nan, math.nan, 1.0])
    assert bound_rules.events[0].sites == ("layers.1.weight", "layers.0.bias", "layers.0.weight")


def test_annotations_are_filled_from_the_facts() -> None:
    """Every placeholder; braces that are none stay; a format trick is only text."""
    text = (
        "{param} {group} {nonfinite}/{numel} {value} {threshold} {step} {rank} {count} {param.__class__} {0}"
    )
    nan = rule("nan", NonFinite(), annotations={"summary": "NaN in {param}", "description": text})
    engine = Engine(RuleSet(groups=GROUPS, rules=(nan,)), rank=3).bind(make_sites(4))
    bound_rules = OptimizerRules(engine)
    bound_rules.step(7, NAN_AT_2, columns={"nonfinite": everywhere([0, 0, 5, 0])})
    (event,) = bound_rules.events
    assert event.summary == "NaN in layers.1.weight"
    assert event.description == "layers.1.weight matrices 5/64 5 0 7 3 1 {param.__class__} {0}"


def test_scopes_aggregate_as_the_language_says() -> None:
    """Root sum of squares per group and over all; label groups by first match."""
    rules = [
        rule("group", Above(threshold=4.5), scope="group"),
        rule("total", Above(threshold=6.9), scope="total"),
        rule("listed", Above(threshold=4.5), scope="group", groups=("rest",)),
    ]
    bound_rules = OptimizerRules(bound(rules, groups=GROUPS))
    verdict = bound_rules.step(0, [3.0, 2.0, 4.0, 4.0])
    found = {event.rule: (event.sites, round(event.value, 4)) for event in verdict.events}
    assert found == {
        "group": (("matrices",), 5.0),
        "listed": (("rest",), round(math.sqrt(45), 4)),
    }
    assert verdict.breaching["group"].tolist() == [True, False, True, False]
    verdict = bound_rules.step(1, [3.0, 4.0, 4.0, 4.0])
    assert [event.rule for event in verdict.events if event.kind == "firing"] == ["total"]
    assert not verdict.breaching["total"].any()


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("max_abs", [1, 9, 2, 3], 9.0),
        ("nonfinite", [1, 2, 0, 3], 6.0),
        ("coef", [0.5, 0.25, 1, 1], 0.25),
        ("zero_fraction", [1, 0, 0, 0], 64 / 144),
        ("rms", [1, 1, 1, 1], 1.0),
        ("weight_norm", [3, 4, 0, 0], 5.0),
    ],
)
def test_every_column_is_aggregated_by_its_nature(column: Any, values: list[float], expected: float) -> None:
    """Extremes, sums, means weighted by elements, roots of sums of squares."""
    bound_rules = OptimizerRules(bound([rule("r", Above(threshold=-1.0, of=column), scope="total")]))
    (event,) = bound_rules.step(0, HEALTHY, columns={column: everywhere(values)}).events
    assert event.value == pytest.approx(expected)


@pytest.mark.parametrize("column", ["max_abs", "min", "weight_norm", "mean", "second_moment_rms"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e200])
def test_what_is_no_number_is_grouped_without_a_warning(column: Any, value: float) -> None:
    """Where a script has made warnings errors, the verdict on such a step would be lost."""
    bound_rules = OptimizerRules(bound([rule("r", Above(threshold=1e9, of=column), for_=1, scope="total")]))
    values = np.array([1.0, value, math.nan, -math.inf])
    bound_rules.step(0, HEALTHY, columns={column: Column(values, np.ones(4, np.bool_))})


def test_groups_exclude_and_dimensions_select() -> None:
    """`groups` take every site that matches, `exclude` takes away, `min_ndim` leaves vectors out."""
    rules = [
        rule("in", Above(threshold=0), groups=("matrices",), exclude=("layers.0.*",)),
        rule("ratio", UpdateRatio(), for_=1),
    ]
    bound_rules = OptimizerRules(bound(rules, groups=GROUPS))
    columns = {"update_ratio": everywhere([1, 1, 1, 1]), "weight_norm": everywhere([1, 1, 1, 1])}
    verdict = bound_rules.step(0, HEALTHY, columns=columns)
    assert verdict.breaching["in"].tolist() == [False, False, True, False]
    assert verdict.breaching["ratio"].tolist() == [True, False, True, False]


def test_modules_carry_their_own_columns_only() -> None:
    """A tapped module has no calls: it is never stale, never without a gradient, never in a norm."""
    rules = [
        rule("stale", Stale(), for_=1),
        rule("never", Never(within=1)),
        rule("small", Below(threshold=0.5)),
        rule("tap", Above(threshold=3, of="grad_output_norm")),
    ]
    ruleset = RuleSet(rules=tuple(rules), modules=Modules())
    bound_rules = OptimizerRules(Engine(ruleset).bind(make_sites(2, modules=2)))
    tapped = Column(np.array([9, 9, 1, 4], np.float32), np.array([False, False, True, True]))
    for step in range(3):
        verdict = bound_rules.step(step, [1.0, 1.0, None, None], columns={"grad_output_norm": tapped})
    assert {name: mask.tolist() for name, mask in verdict.firing.items()} == {
        "tap": [False, False, False, True]
    }


def test_stale_and_never() -> None:
    """A gradient that stops coming, and one that never came."""
    bound_rules = OptimizerRules(bound([rule("stale", Stale()), rule("never", Never(within=5))], size=3))
    for step in range(8):
        bound_rules.step(step, [1.0, 1.0 if step < 2 else None, None])
    found = [(event.step, event.rule, event.sites) for event in bound_rules.events if event.kind == "firing"]
    assert found == [(4, "never", ("layers.1.weight",)), (4, "stale", ("layers.0.bias",))]


def test_depth_ratio_names_the_first_layer() -> None:
    """The series is one; the site it is about is the first matrix."""
    bound_rules = OptimizerRules(bound([rule("fade", DepthRatio(), for_=2)]))
    bound_rules.step(0, [1e-5, 1.0, 1.0, 1.0])
    bound_rules.step(1, [1e-5, 1.0, 1.0, 1.0])
    assert bound_rules.events[-1].sites == ("layers.0.weight",)
    assert bound_rules.events[-1].score == pytest.approx(1e-5)


def test_loss_rules_wait_for_a_loss() -> None:
    """No loss observed: nothing happens; a NaN loss fires, and is never learned."""
    bound_rules = OptimizerRules(bound([rule("nan", LossNonFinite()), rule("jump", LossSpike())]))
    for step in range(60):
        bound_rules.step(step, HEALTHY, scalars={"loss": 2.0 + 0.01 * (step % 5)} if step % 2 else {})
    assert bound_rules.events == []
    bound_rules.step(60, HEALTHY, scalars={"loss": math.nan})
    bound_rules.step(61, HEALTHY, scalars={"loss": 60.0})
    assert bound_rules.kinds == [(60, "firing", "nan"), (61, "resolved", "nan"), (61, "firing", "jump")]


def test_every_n_evaluates_and_learns_at_its_own_steps() -> None:
    """Samples between are not the rule's samples."""
    rules = [rule("rare", Above(threshold=10), every=3), rule("s", Spike(), every=5)]
    bound_rules = OptimizerRules(bound(rules, size=1))
    for step in range(1, 8):
        bound_rules.step(step, [99.0 if step in (1, 2, 4, 6) else 1.0])
    assert bound_rules.kinds == [(6, "firing", "rare")]
    assert bound_rules.state.baselines[0][0].tolist() == [1], "one sample: step 5"


def test_a_learning_rate_jump_rebaselines_without_going_blind() -> None:
    """A level that moves with the rate is learned in 20 samples; a fault at the jump is still seen."""
    bound_rules = OptimizerRules(bound([rule("spike", Spike()), rule("loss", LossSpike())], size=1))
    for step in range(200):
        bound_rules.step(step, [1.0], scalars={"lr": 1e-3, "loss": 1.0})
    bound_rules.step(200, [1e5], scalars={"lr": 1e-2, "loss": 1.0})
    assert bound_rules.kinds == [(200, "firing", "spike")]
    for step in range(201, 230):
        bound_rules.step(step, [30.0], scalars={"lr": 1e-2, "loss": 1.0})
    assert bound_rules.kinds[1:] == [(220, "resolved", "spike")], (
        "20 samples after the jump: steps 200 to 219"
    )
    rows = bound_rules.state.to_dict()["baselines"]
    assert rows["spike(100,20)|norm/param"]["fields"]["n"] == [30]
    assert rows["loss_spike(100,20)|loss"]["fields"]["n"] == [145], "the loss is not made of gradients"


def test_rebaseline_forgets_what_it_is_told_to() -> None:
    """By glob; a total is touched when any of its parts is."""
    rules = [rule("s", Spike()), rule("t", Spike(of="total_norm")), rule("d", Drift())]
    bound_rules = OptimizerRules(bound(rules))
    for step in range(50):
        bound_rules.step(step, HEALTHY)
    state = bound_rules.engine.restarts.rebaseline(bound_rules.state, "layers.0.*")
    rows = state.to_dict()["baselines"]
    assert rows["spike(100,20)|norm/param"]["fields"]["n"] == [0, 0, 50, 50]
    assert rows["spike(100,20)|total_norm"]["fields"]["n"] == [0]
    same = bound_rules.engine.restarts.rebaseline(bound_rules.state, "nothing")
    assert same.to_dict() == bound_rules.state.to_dict()


def test_state_survives_a_changed_parameter_set() -> None:
    """Known by name: what stayed keeps its baseline and its incident, what is new starts empty."""
    rules = [rule("s", Spike(of="norm")), rule("big", Above(threshold=10), keep_firing_for=9)]
    small, large = bound(rules, size=4), bound(rules, size=6)
    bound_rules = OptimizerRules(small)
    for step in range(30):
        bound_rules.step(step, [1.0, 2.0, 3.0, 99.0 if step == 29 else 4.0])
    moved = large.adopt(bound_rules.state, small)
    rows = moved.to_dict()["baselines"]["spike(100,20)|norm/param"]
    assert rows["fields"]["n"] == [30, 30, 30, 30, 0, 0]
    grown = OptimizerRules(large, moved)
    verdict = grown.step(30, [1.0, 2.0, 3.0, 4.0, 5.0, 5.0])
    assert verdict.firing["big"].tolist() == [False, False, False, True, False, False]
    back = small.adopt(grown.state, large)
    assert back.to_dict()["baselines"]["spike(100,20)|norm/param"]["names"] == list(small.sites.names)


def test_a_foreign_state_is_refused() -> None:
    """With an error of ours that says so, whatever it holds."""
    engine = bound([rule("s", Spike())])
    for wrong in ({}, {"format": 99}, {"format": 1}, {"format": 1, "lr": None, "rules": 3, "baselines": {}}):
        with pytest.raises(GradwatchError):
            EngineState.from_dict(wrong, engine)
    broken = engine.init().to_dict()
    broken["baselines"]["spike(100,20)|norm/param"]["fields"]["n"] = ["a", "b", "c", "d"]
    with pytest.raises(GradwatchError, match="not an engine state"):
        EngineState.from_dict(broken, engine)
    with pytest.raises(GradwatchError, match="other sites"):
        engine.evaluate(bound([rule("s", Spike())], size=3).init(), None)  # type: ignore[arg-type]


def test_needs_are_what_the_rules_ask_for() -> None:
    """Free columns are not asked for; others at the steps of every rule that reads them, of all sites or staggered."""
    rules = [
        rule("a", Above(threshold=1, of="max_abs"), every=10, scope="total"),
        rule("b", Above(threshold=2, of="max_abs"), every=15, scope="group"),
        rule("c", Above(threshold=2, of="max_abs"), every=5),
        *default_like(),
    ]
    needs = bound(rules, groups=GROUPS).needs
    assert needs.columns == {"max_abs", "zero_fraction", "update_ratio", "weight_norm"}
    assert needs.whole["max_abs"] == {10, 15}
    assert needs.staggered["max_abs"] == {5}


def test_rules_that_share_a_baseline_share_its_state() -> None:
    """Two thresholds on one series cost one baseline; another half-life is another."""
    rules = [
        rule("a", Spike(above=6)),
        rule("b", Spike(above=10)),
        rule("c", Spike(of="total_norm")),
        rule("d", Spike(half_life=10)),
    ]
    plan = bound(rules).plan
    assert [(bank.key, bank.size) for bank in plan.banks] == [("spike(10,20)", 4), ("spike(100,20)", 5)]


def test_check_lists_everything_wrong_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups and rules without a match, actions and clips that are not built; optional ones are let off."""
    monkeypatch.setattr("gradwatch.rules.impossible_actions.NOT_BUILT", frozenset({"snapshot"}))
    ruleset = RuleSet(
        groups=(Group("ghosts", ("*.ghost",)), Group("experts", ("*.experts.*",), optional=True)),
        rules=(
            rule("typo", Above(threshold=1), exclude=("*",)),
            rule("moe", Above(threshold=1), groups=("experts",)),
            rule("fine", Above(threshold=1), exclude=("*",), optional=True),
            rule("tap", Above(threshold=1, of="grad_output_norm")),
            rule("bundle", NonFinite(), do=(Action("snapshot"), *SKIP)),
            rule("off", NonFinite(), do=(Action("rescale"),), enabled=False),
        ),
        clip=Clip(total=ClipPolicy("zclap"), groups={"ghosts": ClipPolicy("norm")}, at="backward"),
    )
    engine = Engine(ruleset)
    with pytest.raises(AttachError) as caught:
        engine.check(make_sites(4))
    lines = str(caught.value).splitlines()[1:]
    for words in ("'snapshot'", "'zclap'"):
        assert sum(words in line for line in lines) >= 1, words
    assert len(lines) == 2
    assert engine.unmatched(make_sites(4)).keys() == {"group:ghosts", "typo", "tap"}
    assert "module taps" in engine.bind(make_sites(4)).inactive["tap"]


def test_the_default_like_rules_fit_and_need_no_loss() -> None:
    """Eighteen rules on an ordinary model: all bound, none refused."""
    engine = Engine(RuleSet(groups=GROUPS, rules=default_like()))
    engine.check(make_sites(10))
    assert dict(engine.bind(make_sites(10)).inactive) == {}
    assert [info.id for info in engine.rule_infos] == sorted(info.id for info in engine.rule_infos)
    assert engine.skips_nonfinite
    assert not engine.acts_on_host


def test_acting_otherwise_needs_the_host() -> None:
    """A stop, a skip on a finite spike, a skip that ends in a stop: none can be left to found_inf."""
    for one in (
        rule("a", Above(threshold=1), do=(Action("stop"),)),
        rule("b", Spike(), do=SKIP),
        rule("c", NonFinite(), do=skip(3, "stop")),
    ):
        assert Engine(RuleSet(rules=(one,))).acts_on_host
    assert not Engine(RuleSet(rules=(rule("d", Spike(), do=SKIP, mode="shadow"),))).acts_on_host


def test_a_shared_bank_travels_whole() -> None:
    """Also the warm-up samples of series that are stacked with others: the median at 20 is the same."""
    rules = [rule("p", Spike()), rule("t", Spike(of="total_norm"))]
    rng = np.random.default_rng(0)
    bound_rules = OptimizerRules(bound(rules))
    for step in range(40):
        if step == 10:
            bound_rules = OptimizerRules(
                bound_rules.engine, EngineState.from_dict(bound_rules.state.to_dict(), bound_rules.engine)
            )
        if step == 0:
            control = OptimizerRules(bound_rules.engine)
        norms = np.exp(rng.normal(0, 1, 4)).tolist()
        bound_rules.step(step, norms)
        control.step(step, norms)
    assert bound_rules.state.to_dict() == control.state.to_dict()


def test_new_baselines_are_told_with_the_next_step_that_is_judged() -> None:
    """Once, with the reason, the sites and the rules; what fires by them is resolved where nothing else of it fires."""
    rules = [
        rule("s", Spike(warmup=5)),
        rule("t", Spike(of="total_norm", warmup=5)),
        rule("big", Above(threshold=50)),
        rule("turns", Dead(min_ndim=0), every=3),
    ]
    bound_rules = OptimizerRules(bound(rules))
    for step in range(20):
        bound_rules.step(step, [1.0, 1.0, 1.0, 1.0])
    bound_rules.step(20, [99.0, 99.0, 1.0, 1.0])
    engine = bound_rules.engine
    bound_rules.state = engine.restarts.rebaseline(bound_rules.state, "layers.0.weight", "some", ["s"])
    verdict = bound_rules.step(21, [99.0, 99.0, 1.0, 1.0], scalars={"scaler_skip": 1.0})
    assert verdict.events == ()
    verdict = bound_rules.step(22, [99.0, 99.0, 1.0, 1.0])
    assert [(event.kind, event.summary, event.sites, event.description) for event in verdict.events] == [
        ("rebaselined", "some", ("layers.0.weight",), "s")
    ]
    assert verdict.firing["s"].tolist() == [False, True, False, False]
    assert set(verdict.firing) == {"s", "t", "big"}
    bound_rules.state = engine.restarts.rebaseline(bound_rules.state, "*", "all")
    verdict = bound_rules.step(23, [99.0, 99.0, 1.0, 1.0])
    assert [(event.kind, event.rule) for event in verdict.events] == [
        ("resolved", "s"),
        ("resolved", "t"),
        ("rebaselined", ""),
    ]
    assert set(verdict.firing) == {"big"}
    assert bound_rules.step(24, [99.0, 99.0, 1.0, 1.0]).events == ()


def test_new_baselines_are_told_by_an_engine_that_takes_over() -> None:
    """The parameters may change before the step."""
    small, large = bound([rule("s", Spike())], size=2), bound([rule("s", Spike())], size=4)
    state = large.adopt(small.restarts.rebaseline(small.init(), reason="why"), small)
    assert [event.summary for event in OptimizerRules(large, state).step(0, [1.0] * 4).events] == ["why"]


def test_what_is_no_baseline_is_kept() -> None:
    """A parameter that never had a gradient, a scale that fell: facts of the run, whatever is usual."""
    bound_rules = OptimizerRules(bound([rule("stale", Stale(), for_=1)], size=2))
    for step in range(3):
        bound_rules.step(step, [1.0, None if step == 2 else 1.0])
    bound_rules.state = bound_rules.engine.restarts.rebaseline(bound_rules.state, reason="why")
    assert set(bound_rules.step(3, [1.0, None]).firing) == {"stale"}


def test_spikes_that_are_skipped_do_not_hide_later_ones() -> None:
    """What a rule keeps from the optimizer is not learned: each of five equal spikes is skipped."""
    skips = rule("spike", Spike(above=1000, factor=3.0, window=100, warmup=20), do=SKIP)
    judged = OptimizerRules(bound([skips], 1))
    rng, skipped = np.random.default_rng(0), []
    for step in range(160):
        judged.step(step, np.exp(rng.normal(0.0, 0.1, 1)) * (5.0 if step >= 40 and step % 25 == 0 else 1.0))
        skipped += [step] if judged.decision.skip else []
    assert skipped == [50, 75, 100, 125, 150]


@pytest.mark.parametrize("most", [4, None])
def test_a_level_that_stays_is_learned_after_as_many_skips_as_the_rule_allows(most: int | None) -> None:
    """Else no step would ever be taken again: after `max_consecutive` skips, or ten, the new level is learned."""
    skips = (Action("skip_step", {"max_consecutive": most, "then": "continue"}),)
    judged = OptimizerRules(bound([rule("spike", Spike(above=8, warmup=20), do=skips)], 1))
    rng, taken = np.random.default_rng(0), []
    for step in range(300):
        judged.step(step, np.exp(rng.normal(0.0, 0.1, 1)) * (1.0 if step < 40 else 50.0))
        if step >= 40 and not judged.decision.skip:
            taken.append(step)
    assert taken
    assert taken[0] >= 40 + (most or 10)
    assert len(taken) > 100
