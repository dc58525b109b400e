"""Effect of a Decision on the norms of its step: arithmetic on norms, before any gradient is touched. No torch.

Axes: S sites, K parameters of a capture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gradwatch.policies.norm import clip_coefficient
from gradwatch.records.decision import CLIP_SECTION, Decision, Order
from gradwatch.records.snapshot import Snapshot

ROUNDING = 1e-6  # of float32 norms, relative


def uniform_factor(decision: Decision, total: float) -> np.float32:
    """float32 factor for all gradients that a decision's bound on the total norm gives; 1 without a bound.

    `total` is the total norm of the gradients. The formula is that of `torch.nn.utils.clip_grad_norm_`: max_norm /
    (total + 1e-6), at most 1 (`gradwatch.policies.norm`).
    """
    return np.float32(1) if decision.max_norm is None else clip_coefficient(total, decision.max_norm)


def factors_of(decision: Decision, total: float, count: int) -> NDArray[np.float32]:
    """float32[K]: the factor by which each parameter's gradient is multiplied; `total` is the norm of all of them."""
    uniform = uniform_factor(decision, total)
    if decision.coef is None:
        return np.full(count, uniform, np.float32)
    # A bound on the total, reached or not, allows no factor above 1: else what it bounds could grow beyond it.
    return decision.coef if decision.max_norm is None else np.minimum(decision.coef, uniform)


def reshaped(
    snapshot: Snapshot,
    decision: Decision,
    total: float,
    left: Mapping[int, float],
    zeroed: Mapping[int, float] | None = None,
) -> Snapshot:
    """The Snapshot with gradwatch's own clip in `coef` and `total_norm_applied`, as it is about to be applied.

    `total` is the norm of everything the optimizer will use. As in torch's clip that includes a gradient which no
    backward renewed; this is no gradient of the step, and so not in `total_norm`. `left` are the norms that elementwise
    policies will leave, by site; `zeroed` those that zeroing leaves, before the bound on the total.
    """
    if not decision.touches or decision.skip or decision.stop:
        return snapshot
    uniform = uniform_factor(decision, total)
    if decision.coef is None and not left and not zeroed:
        if uniform == 1:
            return snapshot
        applied = snapshot.total_norm_applied * float(uniform)
        coef = np.where(snapshot.sites.numels > 0, uniform, np.float32(1))  # modules and ranks have none
        return replace(snapshot, coef=snapshot.coef * coef, total_norm_applied=applied)
    coef = factors_of(decision, total, len(snapshot.norm))
    coef = np.where(snapshot.sites.numels > 0, coef, np.float32(1))
    if decision.zero is not None:
        coef = np.where(decision.zero, uniform, coef)
    if (coef == 1).all() and not left and not zeroed:
        return snapshot
    after = snapshot.coef * coef
    for site, norm in left.items():
        before = float(snapshot.norm[site])
        if 0 < before < math.inf and math.isfinite(norm):
            after[site] = norm / before
    norms = snapshot.wide_norm() * after
    for site, norm in (zeroed or {}).items():
        norms[site] = norm * uniform
    norms = norms[snapshot.calls > 0]
    return replace(snapshot, coef=after, total_norm_applied=math.sqrt(np.dot(norms, norms)))


def with_clip_order(decision: Decision, before: Snapshot, after: Snapshot) -> Decision:
    """The decision with an order for the policies of `clip:`, if they make gradients smaller.

    `before` is the Snapshot as measured, `after` as the optimizer gets it. If a rule has changed gradients of single
    parameters on the same step, the two changes cannot be separated, and the rule's own order stands for both. A
    relative difference below `ROUNDING` is no change: one norm added up in two ways differs by that much.
    """
    total = before.total_norm_applied
    if decision.skip or decision.stop or not after.total_norm_applied < total or _by_rules(decision, before):
        return decision
    changed = np.flatnonzero(after.coef < before.coef * (1 - ROUNDING))
    if not len(changed) and not after.total_norm_applied < total * (1 - ROUNDING):
        return decision
    spread = after.coef[changed] / before.coef[changed]
    site, norms, coefficient = "", (total, after.total_norm_applied), after.total_norm_applied / total
    if len(changed) and not (
        len(changed) == (after.calls > 0).sum() and np.allclose(spread, spread[0], rtol=1e-5)
    ):
        worst = int(changed[np.argmin(spread)])
        site, coefficient = after.sites.names[worst], float(spread.min())
        norms = (float((before.norm * before.coef)[worst]), float((after.norm * after.coef)[worst]))
    order = Order(CLIP_SECTION, "clip", False, site, len(changed), *norms, coefficient)
    return replace(decision, orders=decision.orders | {order})


def _by_rules(decision: Decision, snapshot: Snapshot) -> bool:
    """True if a rule has multiplied gradients of parameters, at the step or in the backward."""
    places = {order.site for order in decision.orders if order.coefficient is not None and not order.shadow}
    if not places:
        return False
    sites = snapshot.sites
    modules = (name for name, kind in zip(sites.names, sites.kinds, strict=True) if kind == "module")
    return not places.issubset(modules)


def unclipped(snapshot: Snapshot) -> Snapshot:
    """The Snapshot before any clip by gradwatch: what the hooks inside the backward were given."""
    coef = np.where(snapshot.calls > 0, np.float32(1), snapshot.coef)  # a module's is a rule's doing
    return replace(snapshot, coef=coef, total_norm_applied=snapshot.total_norm)
