"""A test's series through the engine: what a Watch would publish of such steps, without a model and without torch.

What needs elements and not norms is not simulated: elementwise policies change nothing here, and a search for the cause
(`localise`) is an order that is not carried out.

Axes: S sites.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gradwatch.engine import Engine
from gradwatch.engine.actions.norms_after_actions import reshaped, unclipped, with_clip_order
from gradwatch.engine.actions.permissions import permitted
from gradwatch.policies.norm_bound import Bound, at_site, factor_of
from gradwatch.records.columns import scalar_name
from gradwatch.records.decision import Decision, Order
from gradwatch.records.event import Event
from gradwatch.records.snapshot import Column, Snapshot
from gradwatch.rule_tests.load_test_file import Case, Samples
from gradwatch.rules.rule_set import RuleSet

NORM_OF_THE_HEALTHY = 1.0
"""The norm of every parameter in a test that says nothing of norms."""


OF_SNAPSHOT = frozenset({"norm", "coef"})
"""Columns that are fields of a Snapshot."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """Result of the steps of a test: events, and `(step, order)` of every action."""

    events: tuple[Event, ...]
    actions: tuple[tuple[int, Order], ...]


def simulate(ruleset: RuleSet, case: Case) -> Simulation:
    """Judge every step of a test in turn, up to a stop. Raises `AttachError` where the rules do not fit its sites."""
    engine = Engine(ruleset)
    params = [kind == "param" for kind in case.sites.kinds]
    engine.check(case.sites, strict=True)  # a test of a rule that matches nothing would always pass
    bound = engine.bind(case.sites)
    inside = ruleset.clip is not None and bound.clipping.at == "backward"
    events: list[Event] = []
    actions: list[tuple[int, Order]] = []
    state = bound.init()
    for step in range(case.steps):
        found = clipped_in_backward(snapshot_of(case, step), bound.bounds(state, step), np.array(params))
        verdict, state = bound.evaluate(state, found)
        decision, state = bound.decide(state, verdict, found)
        decision = carried_out(decision, found, inside)
        events += verdict.events
        actions += [(step, order) for order in sorted(decision.orders, key=_place)]
        if decision.stop:
            break
    return Simulation(tuple(events), tuple(actions))


def _place(order: Order) -> tuple[str, str, str]:
    return order.rule, order.action, order.site


def carried_out(decision: Decision, found: Snapshot, inside: bool) -> Decision:
    """The part of a decision that is permitted, and the order of the `clip:` section (`inside` the backward or not)."""
    decision = permitted(
        decision,
        agreed=True,
        empty=False,
        inside_backward=False,
        scaled=found.loss_scale is not None,
        report=lambda component, error: None,  # it is told by an order in shadow
    )
    if not (decision.touches or inside):
        return decision
    after = reshaped(found, decision, found.total_norm_applied, {})
    return with_clip_order(decision, unclipped(found) if inside else found, after)


def clipped_in_backward(found: Snapshot, bounds: tuple[Bound, ...], params_S: NDArray[np.bool_]) -> Snapshot:
    """The Snapshot after tensor hooks have kept to the bounds that were published before this step."""
    coef = found.coef.copy()
    for k in map(int, np.flatnonzero((found.calls > 0) & params_S) if bounds else ()):
        coef[k] *= np.float32(factor_of(at_site(bounds, k), float(found.norm[k])))
    return _with_total(found, coef)


def _with_total(found: Snapshot, coef: NDArray[np.float32]) -> Snapshot:
    if (coef == found.coef).all():
        return found
    left = (found.norm.astype(np.float64) * coef)[found.calls > 0]
    return replace(found, coef=coef, total_norm_applied=math.sqrt(float(np.dot(left, left))))


def snapshot_of(case: Case, step: int) -> Snapshot:
    """The Snapshot that the capture would have measured at this step."""
    sites, params = case.sites, np.array([kind == "param" for kind in case.sites.kinds])
    healthy: dict[int, Samples] = dict.fromkeys(
        map(int, np.flatnonzero(params)), (NORM_OF_THE_HEALTHY,) * case.steps
    )
    norm = _column(case.columns.get("norm", healthy), len(sites), step, 0.0)
    coef = _column(case.columns.get("coef", {}), len(sites), step, 1.0).values
    norms, total = norm.values.astype(np.float64)[norm.present], _scalar(case, "total_norm", step)
    with np.errstate(all="ignore"):
        made = math.sqrt(float(np.dot(norms, norms)))
        left = norms * coef[norm.present]
        share = math.sqrt(float(np.dot(left, left))) / made if made > 0 and math.isfinite(made) else 1.0
    total = made if total is None else total
    return Snapshot(
        optimizer=0,
        step=step,
        sites=sites,
        norm=norm.values,
        calls=norm.present.astype(np.int32),
        coef=coef,
        total_norm=total,
        total_norm_applied=total * share,
        loss_scale=_scalar(case, "loss_scale", step),
        columns=dict(_others(case, step)),
        scalars={
            scalar_name(name): value
            for name in case.scalars.keys() - {"total_norm", "loss_scale"}
            if (value := _scalar(case, name, step)) is not None
        },
    )


def _others(case: Case, step: int) -> Iterator[tuple[str, Column]]:
    """The columns beside the norms that are measured on this step."""
    for name, by_site in case.columns.items():
        column = _column(by_site, len(case.sites), step, 0.0)
        if name not in OF_SNAPSHOT and column.present.any():
            yield name, column


def _column(by_site: Mapping[int, Samples], size: int, step: int, empty: float) -> Column:
    values, present = np.full(size, empty, np.float32), np.zeros(size, np.bool_)
    for k, samples in by_site.items():
        if step < len(samples) and samples[step] is not None:
            values[k], present[k] = samples[step], True
    return Column(values, present)


def _scalar(case: Case, name: str, step: int) -> float | None:
    samples = case.scalars.get(name, ())
    return samples[step] if step < len(samples) else None
