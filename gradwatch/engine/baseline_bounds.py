"""Bounds made of baselines: the norm above which a rule will breach, known before the backward that it clips.

A threshold detector's score is monotone, so `score(x) > above` is the same as `x > limit`, and the limit depends on
past steps only. A hook that clips at this bound clips a spike in the spike's own backward. The boundary then finds the
breach by the same number, and the rule fires.

Axes: S sites, K series of one rule.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors import Detector, State
from gradwatch.engine.engine_state import EngineState
from gradwatch.engine.rule_plan import NO_BANK, Plan, RulePlan
from gradwatch.policies.norm_bound import Bound
from gradwatch.rules.rule_set import Action

BASELINE_SIGMAS = 2.0
"""`clip: {to: baseline}` brings a spike down to exp(m + 2σ̂): what the parameter reached now and then."""

GRADIENT_NORMS = frozenset({"norm", "norm_local", "rms"})
"""Columns that hold one parameter's gradient norm, as a hook on it computes it."""


def bounds_of_rules(plan: Plan, state: EngineState, step: int) -> list[Bound]:
    """The bounds for the next backward that follow from what has been learned so far, one for each rule.

    The backward belongs to this `step` or a later one; rules whose first step is to come have none.
    """
    return [
        bound_of(one, own_state(one, state.baselines), action, plan)
        for one in plan.rules
        if (action := invertible_clip(one)) is not None
        and action.params.get("at") == "backward"
        and step >= one.rule.from_step
    ]


def invertible_clip(one: RulePlan) -> Action | None:
    """The `clip` action of a rule whose breach is known before the backward starts; None for any other rule.

    That takes a detector with an inverse, breached by the first sample above it (`for: 1`), per parameter.
    """
    rule, detector = one.rule, one.detector
    invertible = detector.invertible and detector.comparison == "above" and rule.for_ == 1
    judges_norm = one.series.scope == "param" and one.series.column in GRADIENT_NORMS
    return one.action("clip") if rule.acts and invertible and judges_norm else None


def bound_of(one: RulePlan, state: State, action: Action, plan: Plan) -> Bound:
    """A rule's bound on the gradient norm of its own sites; inf at other sites, and while the rule warms up.

    `high` may be above `target`: a spike beyond `high` is clipped down to the usual level `target`.
    """
    trigger = one.detector.limit(state)
    assert trigger is not None  # it is invertible
    to = action.params.get("to", "baseline")
    target = one.detector.usual(state, BASELINE_SIGMAS) if to == "baseline" else np.array([float(to)])
    assert target is not None  # refused when the rules were read
    per_norm = plan.roots if one.series.column == "rms" else None
    high = _at_sites(one, trigger, plan, per_norm)
    return Bound(np.full(len(plan.sites), -np.inf), high, _at_sites(one, target, plan, _unless(to, per_norm)))


def own_state(one: RulePlan, baselines: tuple[State, ...]) -> State:
    """The rule's share of its bank's state; nothing for a kind that learns nothing."""
    return () if one.bank == NO_BANK else part_of(one.detector, baselines[one.bank], one.part)


def part_of(detector: Detector, state: State, part: slice) -> State:
    """The state of the series in `part`."""
    return type(state)(*(array[..., part] for array in state))  # a NamedTuple


def _unless(to: object, per_norm: NDArray[np.floating] | None) -> NDArray[np.floating] | None:
    """A number in `clip: {to: …}` is a norm already, also of a rule that judges another column."""
    return per_norm if to == "baseline" else None


def _at_sites(
    one: RulePlan, values_K: NDArray[np.float64], plan: Plan, per_norm: NDArray[np.floating] | None
) -> NDArray[np.float64]:
    """The rule's values at its sites, times `per_norm[S]`; inf elsewhere. float64[S], rounded to float32 like norms."""
    out = np.full(len(plan.sites), np.inf, np.float64)
    out[slice(None) if one.series.index is None else one.series.index] = values_K
    with np.errstate(over="ignore"):
        return (out if per_norm is None else out * per_norm).astype(np.float32).astype(np.float64)
