"""What a Watch keeps for one optimizer, and how a step's numbers become those its Record holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.checkpoint import Vitals
from gradwatch.engine import BoundEngine, EngineState
from gradwatch.engine.clipping import Clipping
from gradwatch.hooks.elementwise import Elementwise
from gradwatch.hooks.limiter import Limiter
from gradwatch.hooks.local import LocalNorms
from gradwatch.hooks.micro import MicroDrop
from gradwatch.hooks.sampling import Sampler
from gradwatch.hooks.standing import NormBound, StandingClips, factors_of
from gradwatch.policies import ClipByNorm
from gradwatch.policies.norm import clip_coefficient
from gradwatch.snapshot import STANDING_CLIP, Decision, Order, Record, Sites, Snapshot

ROUNDING = 1e-6  # of float32 norms, relative
CALM = 50  # such steps before judging may be put off; beyond every warm-up of the shipped rules


class Clock(NamedTuple):
    """When a step was: our own cost since the last Record, the time since the last step, seconds since the epoch."""

    overhead_seconds: float
    step_seconds: float | None
    wall_time: float


class Held(NamedTuple):
    """A Record that is not published yet: its actions are being carried out; `plain` is what was measured."""

    record: Record
    plain: Snapshot


@dataclass(slots=True)
class Course:
    """What a Watch keeps per lane: its bound rules and their state, its samplers, its clock."""

    bound: BoundEngine
    state: EngineState
    sites: Sites
    sampler: Sampler
    local: LocalNorms | None
    vitals: Vitals
    last_step: float | None = None
    observed: int = 0
    calm: int = 0  # judged steps in a row on which nothing was pending, firing or out of the usual
    record: Record | None = field(default=None)
    decided: Decision | None = None  # of the window at hand, should telling it fail
    held: Held | None = field(default=None)  # until what was decided has been carried out
    limiter: Limiter | None = None
    micro: MicroDrop | None = None
    own: NDArray[np.intp] | None = None  # the sites of the lane's own parameters


def reshaped(snapshot: Snapshot, decision: Decision, total: float, left: Mapping[int, float]) -> Snapshot:
    """The Snapshot with our own clip in `coef` and `total_norm_applied`, as the boundary is about to apply it.

    `total` is the norm of everything the optimizer will use; like torch's clip, it counts a gradient that
    nobody renewed, which is no gradient of this step and so not in `total_norm`. `left` are the norms that
    elementwise policies will leave, by site.
    """
    if not decision.touches or decision.skip or decision.stop:
        return snapshot
    uniform = 1 if decision.max_norm is None else clip_coefficient(total, decision.max_norm)
    if decision.coef is None and not left:
        if uniform == 1:
            return snapshot
        applied = snapshot.total_norm_applied * float(uniform)
        return replace(snapshot, coef=snapshot.coef * uniform, total_norm_applied=applied)
    coef = factors_of(decision, total, len(snapshot.norm))
    if decision.zero is not None:
        coef = np.where(decision.zero, np.float32(1), coef)
    if (coef == 1).all() and not left:
        return snapshot
    after = snapshot.coef * coef
    for site, norm in left.items():
        before = float(snapshot.norm[site])
        if 0 < before < math.inf and math.isfinite(norm):
            after[site] = norm / before
    norms = (snapshot.wide_norm() * after)[snapshot.calls > 0]
    return replace(snapshot, coef=after, total_norm_applied=math.sqrt(np.dot(norms, norms)))


def told(decision: Decision, before: Snapshot, after: Snapshot, rule_orders: bool) -> Decision:
    """The decision with a word for the policies of `clip:`, where gradients are smaller than what was found.

    `before` is what was found, `after` what the optimizer is given. Where a rule has changed gradients on the same step
    (`rule_orders`) the two cannot be told apart, and the rule's own word stands for both. What differs by less than
    `ROUNDING` is one norm added up in two ways.
    """
    total = before.total_norm_applied
    if decision.skip or decision.stop or rule_orders or not after.total_norm_applied < total:
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
    order = Order(STANDING_CLIP, "clip", False, site, len(changed), *norms, coefficient)
    return replace(decision, orders=decision.orders | {order})


def unclipped(snapshot: Snapshot) -> Snapshot:
    """The Snapshot as if nobody had clipped anything: what a hook in the backward was given."""
    ones = np.ones(len(snapshot.norm), np.float32)
    return replace(snapshot, coef=ones, total_norm_applied=snapshot.total_norm)


def standing_of(
    clipping: Clipping, own: Sequence[int], names: Sequence[str], torn: Sequence[int]
) -> StandingClips | None:
    """What `clip:` asks of a lane beside the total; None without any, or where it acts inside the backward.

    `own[K]` are the sites of its parameters, which have these `names[K]`; those at the positions `torn` are
    sharded, and left alone by policies on whole rows.
    """
    if clipping.at == "backward":
        return None
    bounds = tuple(
        NormBound(one.policy.max_norm, tuple(tuple(members) for members in one.members()))
        for one in clipping.policies
        if isinstance(one.policy, ClipByNorm)
    )
    elementwise = None
    if clipping.elementwise:
        whole = np.ones(len(own), np.bool_)
        whole[list(torn)] = False
        covered = [(policy, mask[list(own)]) for policy, mask in clipping.elementwise]
        elementwise = Elementwise(
            [(policy, mask & whole if policy.rowwise else mask) for policy, mask in covered], names
        )
    return StandingClips(elementwise, bounds) if bounds or elementwise is not None else None


def json_safe(value: float) -> float | str:
    """A number as JSON can hold it: NaN and the infinities as the strings "NaN", "Infinity", "-Infinity"."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
