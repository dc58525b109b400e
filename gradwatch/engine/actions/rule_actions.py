"""From a verdict to orders: what each due rule does to the gradients of this step.

`ORDERS` has a function for each action that is decided here.

Factors apply to the gradients as found at the boundary, after the user's own clip; a rule is judged by `norm`, which is
measured before that clip. Per parameter the smallest factor holds. A factor above 1 (`rescale` may have one) gives way
to any clip in force.

Axes: S sites, K series of one rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.engine.actions.escalation import due_actions
from gradwatch.engine.rule_plan import Plan, RulePlan
from gradwatch.policies.norm import clip_coefficient, clip_coefficients
from gradwatch.records.columns import MODULE_COLUMNS, RANK_COLUMNS
from gradwatch.records.decision import Decision, Order
from gradwatch.records.snapshot import BoolArray, Snapshot
from gradwatch.records.verdict import Due
from gradwatch.rules.action_kinds import ACTIONS, changing_gradients
from gradwatch.rules.rule_set import Action

Array32 = NDArray[np.float32]
NO_ORDER = np.float32(np.inf)
"""The factor of a site for which none was ordered: of two factors the smaller holds."""

ESCALATED_CLIP = Action("clip", {"to": "baseline", "at": "step", "local": False})
"""What `escalate: {to: clip}` clips to."""


def orders(one: RulePlan, due: Due, acted: int, snapshot: Snapshot, plan: Plan) -> Decision:
    """The orders of one rule that acted on `acted` steps in a row; in shadow mode they are reported only."""
    decision = Decision()
    for name in due_actions(one, acted, due.climbed):
        if name in ORDERS:
            decision |= ORDERS[name](one, due, snapshot, plan)
        elif not ACTIONS[name].later:
            decision |= Decision(orders=frozenset({_plain(one, name, due, snapshot)}))
    decision = replace(decision, on_error=one.rule.on_error)
    return decision.shadowed() if one.rule.mode == "shadow" else decision


def rescaled(one: RulePlan, firing_K: BoolArray, snapshot: Snapshot) -> Decision:
    """The factor of a `rescale` rule that was firing before this step: this action takes effect one step late.

    `firing_K` bool[K] are the series that were firing.
    """
    action = one.action("rescale")
    assert action is not None  # only such rules have one
    factor = np.float32(action.params["factor"])
    found = _owned(one, np.full(len(firing_K), factor), members(one, firing_K, snapshot), snapshot)
    decision = _multiplying(one, "rescale", found, snapshot)
    return decision.shadowed() if one.rule.mode == "shadow" else decision


def without_overridden(decision: Decision) -> Decision:
    """The decision as it will be carried out: without orders that another order makes void.

    Factors are 1 where none was ordered.
    """
    if decision.skip or decision.stop:
        # Stop over skip over what changes gradients, which the step never uses. No step is taken, which is no skip.
        overridden = changing_gradients() | ({"skip_step"} if decision.stop else set())
        kept = (order for order in decision.orders if order.shadow or order.action not in overridden)
        decision = replace(decision, orders=frozenset(kept))
    if decision.coef is None:
        return decision
    coef = np.where(np.isfinite(decision.coef), decision.coef, np.float32(1)).astype(np.float32)
    return replace(decision, coef=None if (coef == 1).all() else coef)


# -- clip ------------------------------------------------------------------------------------------------


def _clip(one: RulePlan, due: Due, snapshot: Snapshot, plan: Plan) -> Decision:
    """A bound on the total where the rule judges a scalar, else a factor for each site of a breaching series."""
    action = one.action("clip") or ESCALATED_CLIP
    to = action.params.get("to", "baseline")
    if action.params.get("at", "step") == "backward" and one.rule.mode == "act":
        return _done_by_hook(one, due, snapshot)
    if one.series.column in MODULE_COLUMNS:  # in shadow mode, or there is no clip of it
        return _bound_of_modules(one, to, due, snapshot)
    if one.series.scope == "scalar":
        target = float(due.usual[0]) if to == "baseline" and due.usual is not None else math.inf
        return _bound_total(one, target if to == "baseline" else float(to), snapshot)
    here = members(one, due.breach, snapshot)
    applied_K, elements_K = _applied(one, here, snapshot)
    if to != "baseline":
        target_K: Any = np.full(len(applied_K), float(to))
    elif due.usual is None:
        return Decision()
    else:
        target_K = due.usual * np.sqrt(elements_K) if one.series.column == "rms" else due.usual
    return _multiplying(one, "clip", _owned(one, _bounded(applied_K, target_K), here, snapshot), snapshot)


def _done_by_hook(one: RulePlan, due: Due, snapshot: Snapshot) -> Decision:
    """A hook has clipped it already, in its own backward; what it did is in `coef`."""
    here = members(one, due.breach, snapshot)
    norms = snapshot.norm
    if one.series.column in MODULE_COLUMNS:
        here, norms = _modules(one, due, snapshot)
    if not here.any():
        return Decision()
    k = int(np.flatnonzero(here)[np.argmin(snapshot.coef[here])])
    norm, coef = float(norms[k]), float(snapshot.coef[k])
    if coef == 1:
        return Decision()  # it has not: nothing is claimed
    own = Order(
        one.rule.id,
        "clip",
        site=snapshot.sites.names[k],
        count=int(here.sum()),
        before=_finite(norm),
        after=_finite(norm * coef),
        coefficient=coef,
    )
    return Decision(orders=frozenset({own}))


def _bound_of_modules(one: RulePlan, to: object, due: Due, snapshot: Snapshot) -> Decision:
    """Factor that module hooks would have applied, for the worst module."""
    here, norms = _modules(one, due, snapshot)
    if to == "baseline" or not here.any():
        return Decision()
    target = float(str(to))
    coef = np.where(here, _bounded(norms.astype(np.float64), np.full(len(norms), target)), np.float32(1))
    k = int(np.argmin(coef))
    if coef[k] == 1:
        return Decision()
    own = Order(
        one.rule.id,
        "clip",
        site=snapshot.sites.names[k],
        count=int(here.sum()),
        before=_finite(norms[k]),
        after=_finite(norms[k] * coef[k]),
        coefficient=float(coef[k]),
    )
    return Decision(orders=frozenset({own}))


def _modules(one: RulePlan, due: Due, snapshot: Snapshot) -> tuple[BoolArray, Array32]:
    """bool[S] the breaching modules, and float32[S] the norms of what they would have passed on."""
    index, owners = _places(one, snapshot)
    here = np.zeros(len(snapshot.sites), np.bool_)
    here[index[due.breach[owners]]] = True
    column = snapshot.column(one.series.column)
    assert column is not None  # it has been judged
    return here, column.values.astype(np.float32)


def _bound_total(one: RulePlan, target: float, snapshot: Snapshot) -> Decision:
    """The total norm is kept at or below `target`, as `torch.nn.utils.clip_grad_norm_` does."""
    if not math.isfinite(target):
        return Decision()  # warming up
    before = snapshot.total_norm_applied
    coefficient = float(clip_coefficient(before, target))
    if coefficient == 1:
        return Decision()  # the user's own clip has done it, or the norm is not finite
    own = Order(
        one.rule.id,
        "clip",
        count=int((snapshot.calls > 0).sum()),
        before=_finite(before),
        after=_finite(before * coefficient),
        coefficient=coefficient,
    )
    return Decision(max_norm=target, orders=frozenset({own}))


def _bounded(applied_K: NDArray[np.float64], target_K: NDArray[np.float64]) -> Array32:
    """float32[K] min(1, target / (norm + 1e-6)), as torch computes it; 1 where the norm is not finite."""
    with np.errstate(over="ignore"):
        return clip_coefficients(applied_K, target_K, np.isfinite(target_K))


def _applied(
    one: RulePlan, here: BoolArray, snapshot: Snapshot
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """float64[K] each: the norm of what the optimizer is about to get of each series, and its elements."""
    index, owners = _places(one, snapshot)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.square(snapshot.wide_norm() * snapshot.coef)
    parts = np.where(here, squares, 0.0)[index]
    numels = np.where(here, np.maximum(snapshot.sites.numels, 1), 0).astype(np.float64)[index]
    size = len(one.shown)
    total: NDArray[np.float64] = np.bincount(owners, parts, size).astype(np.float64, copy=False)
    return np.sqrt(total), np.bincount(owners, numels, size).astype(np.float64, copy=False)


# -- where -----------------------------------------------------------------------------------------------


def _places(one: RulePlan, snapshot: Snapshot) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The sites a rule is about (`index[I]`), and the series that each belongs to (`owners[I]`)."""
    series = one.series
    if series.scope == "scalar":
        index = np.flatnonzero(np.array([kind == "param" for kind in snapshot.sites.kinds]))
    else:
        index = np.arange(len(snapshot.sites)) if series.index is None else series.index
    if series.scope == "param" and not one.detector.in_depth_order:
        return index, np.arange(len(index))
    return index, np.zeros(len(index), np.intp) if series.owners is None else series.owners


def members(one: RulePlan, chosen_K: BoolArray, snapshot: Snapshot) -> BoolArray:
    """bool[S]: the gradients of this step that the chosen series are made of; for a scalar, all of them."""
    mask = np.zeros(len(snapshot.sites), np.bool_)
    if one.series.column in MODULE_COLUMNS or one.series.column in RANK_COLUMNS:
        return mask
    index, owners = _places(one, snapshot)
    mask[index[chosen_K[owners]]] = True
    return mask & (snapshot.calls > 0)


def _owned(one: RulePlan, coef_K: Array32, here: BoolArray, snapshot: Snapshot) -> Array32:
    """float32[S]: each site's factor is that of its series; inf where it has no part in this."""
    index, owners = _places(one, snapshot)
    out = np.full(len(snapshot.sites), NO_ORDER, np.float32)
    out[index] = coef_K[owners]
    return np.where(here, out, NO_ORDER).astype(np.float32)


# -- what is said ----------------------------------------------------------------------------------------


def _multiplying(one: RulePlan, name: str, coef_S: Array32, snapshot: Snapshot) -> Decision:
    """A Decision to multiply, reported by the site that changes most; none where nothing changes."""
    ordered = np.flatnonzero(np.isfinite(coef_S) & (coef_S != 1))
    if not len(ordered):
        return Decision()
    k = int(ordered[np.argmax(np.abs(np.log(np.maximum(coef_S[ordered], 1e-45))))])
    coefficient, total = float(coef_S[k]), one.series.scope != "param"
    found = snapshot.wide_norm() * snapshot.coef
    before = float(found[k])
    if total:  # one factor for a group or a total: its norm says more than that of any of its parameters
        group = np.flatnonzero(coef_S == coef_S[k])
        with np.errstate(over="ignore", invalid="ignore"):
            norms = found[group]
            before = float(np.sqrt(np.dot(norms, norms)))
    own = Order(
        one.rule.id,
        name,
        site=_site(one, k, snapshot),
        count=len(ordered),
        before=_finite(before),
        after=_finite(before * coefficient),
        coefficient=coefficient,
    )
    return Decision(coef=coef_S, orders=frozenset({own}))


def _site(one: RulePlan, k: int, snapshot: Snapshot) -> str:
    """Name of the series of site k: the parameter, the group, or "" for a total."""
    index, owners = _places(one, snapshot)
    found = np.flatnonzero(index == k)
    return one.shown.names[int(owners[found[0]])] if len(found) else ""


def _skip(one: RulePlan, due: Due, snapshot: Snapshot, plan: Plan) -> Decision:
    return Decision(skip=True, orders=frozenset({_plain(one, "skip_step", due, snapshot)}))


def _stop(one: RulePlan, due: Due, snapshot: Snapshot, plan: Plan) -> Decision:
    return Decision(stop=True, orders=frozenset({_plain(one, "stop", due, snapshot)}))


def _zero(one: RulePlan, due: Due, snapshot: Snapshot, plan: Plan) -> Decision:
    """The non-finite elements of the breaching gradients become 0."""
    zero = members(one, due.breach, snapshot) & snapshot.nonfinite()
    if not zero.any():
        return Decision()
    own = Order(one.rule.id, "zero_nonfinite", site=_worst(one, due), count=int(zero.sum()))
    return Decision(zero=zero, orders=frozenset({own}))


def _plain(one: RulePlan, name: str, due: Due, snapshot: Snapshot) -> Order:
    """An action on the whole step."""
    site, count = _worst(one, due), int(due.breach.sum())
    before = _finite(snapshot.total_norm_applied)
    return Order(one.rule.id, name, site=site, count=count if site else 0, before=before)


def _worst(one: RulePlan, due: Due) -> str:
    return one.shown.names[due.worst] if due.worst < len(one.shown) else ""


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def by_rule(plan: Plan, wanted: Any) -> Iterator[tuple[int, RulePlan]]:
    """(number, rule) for each rule whose id is in `wanted`."""
    if not wanted:  # almost every step
        return iter(())
    return ((number, one) for number, one in enumerate(plan.rules) if one.rule.id in wanted)


ORDERS: dict[str, Callable[[RulePlan, Due, Snapshot, Plan], Decision]] = {
    "clip": _clip,
    "zero_nonfinite": _zero,
    "skip_step": _skip,
    "stop": _stop,
}
"""What an action orders of the step at hand; those without an entry are carried out elsewhere, and only said."""
