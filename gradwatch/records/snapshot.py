"""The nouns: what was measured, what was judged, what was decided. No torch, no behaviour beyond derivation.

Axes: S sites (parameters, then tapped modules). Every array here is immutable by convention: whoever builds
one of these objects hands it over and never writes to it again, so a sink may keep it without copying.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.records.finding import Finding

FloatArray = NDArray[np.floating[Any]]
BoolArray = NDArray[np.bool_]
Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True, slots=True, eq=False)
class Sites:
    """Places where gradients are measured: S parameters and tapped modules of one optimizer.

    Fields, all of length S: `names` torch FQN without wrapper prefixes; `kinds` "param", "module" or "rank"; `numels`
    elements; `ndims` dimensions of the tensor (0 for what is none); `depths` order of registration counted from
    the input (0 first); `groups` the label group each site was given by a rule file ("" before).
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    numels: NDArray[np.int64]
    ndims: NDArray[np.int64]
    depths: NDArray[np.int64]
    groups: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    def select(self, glob: str) -> BoolArray:
        """bool[S]: the sites whose name matches a case-sensitive shell glob (`*` crosses dots)."""
        matches = re.compile(fnmatch.translate(glob)).match
        return np.fromiter((matches(name) is not None for name in self.names), bool, len(self.names))

    def alike(self, other: Sites) -> bool:
        """True if these are the same sites, whatever groups a rule file gave them."""
        # By their bytes: `np.array_equal` is a dozen Python calls.
        return (
            self.names == other.names
            and self.kinds == other.kinds
            and self.numels.tobytes() == other.numels.tobytes()
            and self.ndims.tobytes() == other.ndims.tobytes()
            and self.depths.tobytes() == other.depths.tobytes()
        )

    def labelled(self, groups: tuple[str, ...]) -> Sites:
        """The same sites carrying the label groups of a rule file."""
        return replace(self, groups=groups)


class Column(NamedTuple):
    """One measured quantity over the sites: `values[S]`, and `present[S]` (False = not measured this step)."""

    values: FloatArray
    present: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Everything measured about one `optimizer.step()`.

    `norm[S]` float32 is the L2 norm of the gradient the optimizer is about to get, before anybody's clipping;
    it means something only where `calls[S] > 0` (how many times a gradient arrived; 0 = none this step). NaN
    and Inf there always mean "this gradient is not finite" (or its true norm exceeds float32).
    `coef[S]` is the smallest multiplier applied between `norm` and the optimizer (1 = untouched).
    `total_norm` is the root sum of squares over all parameters; `total_norm_applied` the same after clipping. All of
    `coef` and `total_norm_applied` are NaN where that is not known (`applied_known`), which a loop without an
    optimizer may leave so.
    `columns` holds only what rules asked for, and `nonfinite` (elements) / `norm_overflow` on suspicion.
    `loss_scale` is that of the GradScaler these gradients went through, None without one. `scalars` holds the
    other one-per-step values: `loss`, `lr`, `confirmed_jump` and `confirmed_norm` where an earlier step has ruined the
    weights, and under a GradScaler `scaler_skip`, 1 where it rejected the step (gradients overflowed, the optimizer
    did not move) and 0 where not. `provisional`: the numbers may be
    post-clip because the loop was not learned yet; exported, never learned. `coverage` is parameters
    measurable / expected, 0..1.
    """

    optimizer: int
    step: int
    sites: Sites
    norm: NDArray[np.float32]
    calls: NDArray[np.int32]
    coef: NDArray[np.float32]
    total_norm: float
    total_norm_applied: float
    loss_scale: float | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    micro: int = 1
    provisional: bool = False
    coverage: float = 1.0

    def column(self, name: str) -> Column | None:
        """The named per-site column, derived where it can be; None when it was not measured this step."""
        found = self.columns.get(name)
        if found is not None:
            return found
        present = self.calls > 0
        if name == "norm":
            return Column(self.norm, present)
        if name == "rms":
            sizes = np.sqrt(np.maximum(self.sites.numels, 1).astype(np.float32))
            return Column(self.norm / sizes, present)
        if name == "norm_applied":
            return Column(self.norm * self.coef, present & ~np.isnan(self.coef))
        if name == "coef":
            return Column(self.coef, present & ~np.isnan(self.coef))
        if name == "calls":
            return Column(self.calls.astype(np.float32), np.ones(len(self.sites), bool))
        if name in ("nonfinite", "norm_overflow"):
            # Absent columns mean that no norm was suspicious: every element is finite.
            return Column(np.zeros(len(self.sites), np.float32), present)
        return None

    @property
    def applied_known(self) -> bool:
        """True if it is known by which gradients the weights were moved."""
        return not (math.isnan(self.total_norm_applied) and len(self.coef) and np.isnan(self.coef).all())

    def wide_norm(self) -> NDArray[np.float64]:
        """float64[S]: `norm`; where it only overflowed float32 the total norm, which is finite and no smaller."""
        norms = self.norm.astype(np.float64)
        overflow = self.columns.get("norm_overflow")
        if overflow is not None and math.isfinite(self.total_norm):
            norms[(overflow.values > 0) & np.isinf(norms) & (self.calls > 0)] = self.total_norm
        return norms

    def nonfinite(self) -> BoolArray:
        """bool[S]: the gradients that hold a NaN or Inf; by their norms where elements were not counted."""
        found: BoolArray = ~np.isfinite(self.norm)
        counted = self.columns.get("nonfinite")
        if counted is not None:
            found = np.where(counted.present, counted.values > 0, found)
        return found & (self.calls > 0)

    def scalar(self, name: str) -> float | None:
        """A one-per-step value (`loss`, `lr`, `loss_scale`, `scaler_skip`, `total_norm`); None when not observed."""
        if name == "total_norm":
            return self.total_norm
        if name == "loss_scale":
            return self.loss_scale
        return self.scalars.get(name)


PARTLY = "some gradients had been changed when it failed"
"""Noted on the exception of an action that failed halfway."""

EventKind = Literal["pending", "firing", "resolved", "repeat", "escalated", "failed"]
OnError = Literal["pass", "skip_step", "stop"]
ON_ERROR: tuple[OnError, ...] = ("pass", "skip_step", "stop")
"""What a rule may ask for where an action fails, mildest first."""


@dataclass(frozen=True, slots=True)
class Event:
    """A transition of one rule: pending, firing, resolved; `repeat` = acted again while already firing;
    `escalated` = a rung of its ladder was reached; `failed` = its action could not be carried out.

    One per rule and transition, however many sites are involved: `sites` names the worst five (largest score
    first), `count` says how many there are, `first_cause` is the first of them in backward order (the
    deepest). `value` and `score` belong to `sites[0]`; `threshold` is what `score` was compared with.
    `incident` identifies the firing period (same id from firing to resolved, also over a re-fire within
    `cooldown`); `notify` is False where that re-fire must not alert again.
    """

    kind: EventKind
    rule: str
    detector: str
    severity: Severity
    optimizer: int
    step: int
    incident: str
    sites: tuple[str, ...] = ()
    count: int = 0
    first_cause: str = ""
    value: float = 0.0
    score: float = 0.0
    threshold: float = 0.0
    actions: tuple[str, ...] = ()
    notify: bool = True
    summary: str = ""
    description: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


CLIP_SECTION = "clip:"
"""What the policies of a file's `clip:` section are called where a rule is named; no rule can have such an id."""


@dataclass(frozen=True, slots=True)
class Order:
    """One action a rule asked for: `action` as spelled in `do:`; `shadow` = say so but do nothing.

    `site` is the worst site it is about ("" = the total), `count` how many. `before` and `after` are the norm there
    without and with this action, the user's own clip included in both, and `coefficient` the multiplier; None where
    there is no such number: a norm that is not finite, a step that was skipped. A rule in shadow mode tells what it
    would have done.
    """

    rule: str
    action: str
    shadow: bool = False
    site: str = ""
    count: int = 0
    before: float | None = None
    after: float | None = None
    coefficient: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """One-off orders at one step boundary; a join-semilattice under `|`, so rule order can never matter.

    `skip` leaves parameters and optimizer state bit-identical; `stop` raises `TrainingStopped`; `max_norm` is
    the strictest bound on the total norm (None = none). `coef[S]` float32 multiplies each site's gradient (None =
    1 everywhere); joined, the smallest holds. `zero[S]`: the non-finite elements of these sites' gradients become
    0, and they are not multiplied. `elementwise`: the standing policies that treat elements or rows apart are
    carried out too (`gradwatch.actions.elementwise`). `orders` says which rules asked for what. Where several are
    asked for: stop over skip over zero over `coef` and `max_norm`, of which the smaller factor is applied, once.
    `on_error`: what is done should carrying it out fail, the strictest of what those rules ask for.
    """

    skip: bool = False
    stop: bool = False
    max_norm: float | None = None
    orders: frozenset[Order] = frozenset()
    coef: NDArray[np.float32] | None = None
    zero: BoolArray | None = None
    elementwise: bool = False
    on_error: OnError = "pass"

    @property
    def touches(self) -> bool:
        """True if gradients are to be changed, not only kept from the optimizer."""
        factors = self.max_norm is not None or self.coef is not None
        return factors or self.zero is not None or self.elementwise

    @property
    def acts(self) -> bool:
        """True if anything is to be done at all."""
        return self.skip or self.stop or self.touches

    def at(self, own: Any) -> Decision:
        """The same orders for the sites that `own` (an index array or slice) picks."""
        if self.coef is None and self.zero is None:
            return self
        coef = None if self.coef is None else self.coef[own]
        return replace(self, coef=coef, zero=None if self.zero is None else self.zero[own])

    def without_zero(self) -> Decision:
        """The same orders but for the zeroing, which is reported as in shadow mode."""
        orders = frozenset(
            replace(order, shadow=True) if order.action == "zero_nonfinite" else order
            for order in self.orders
        )
        return replace(self, zero=None, orders=orders)

    def shadowed(self) -> Decision:
        """The same orders, none of them carried out: what would have been done, as in `mode: shadow`."""
        return Decision(orders=frozenset(replace(order, shadow=True) for order in self.orders))

    def __or__(self, other: Decision) -> Decision:
        bounds = [bound for bound in (self.max_norm, other.max_norm) if bound is not None]
        return Decision(
            skip=self.skip or other.skip,
            stop=self.stop or other.stop,
            max_norm=min(bounds) if bounds else None,
            orders=self.orders | other.orders,
            coef=_joined(np.minimum, self.coef, other.coef),
            zero=_joined(np.logical_or, self.zero, other.zero),
            elementwise=self.elementwise or other.elementwise,
            on_error=max(self.on_error, other.on_error, key=ON_ERROR.index),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Decision):
            return NotImplemented
        plain = (self.skip, self.stop, self.max_norm, self.orders, self.elementwise, self.on_error)
        its = (other.skip, other.stop, other.max_norm, other.orders, other.elementwise, other.on_error)
        return plain == its and _same(self.coef, other.coef) and _same(self.zero, other.zero)

    __hash__ = None  # type: ignore[assignment]  # it holds arrays


def _joined(join: Any, one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else join(one, other)


def _same(one: Any, other: Any) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


class Due(NamedTuple):
    """Series that a rule acts on at this step: `breach[K]` of its series, `worst` the index of the worst of them.

    `usual[K]` is what `clip: {to: baseline}` brings each down to, as known before this step; None without one.
    `climbed` are the actions of the rungs of its ladder that stand now.
    """

    breach: BoolArray
    worst: int = 0
    usual: FloatArray | None = None
    climbed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """The result of all rules on one Snapshot.

    `firing` maps each rule that is firing now to bool[S] (all False for a rule over a scalar or a total);
    `breaching` maps each rule whose condition held on this very step, likewise; `events` are transitions only.
    `acting` are the rules whose `do:` is due on this step, `due` what each of them acts on; `standing[K]` the series
    under a standing factor (`rescale`), those that were firing before this step.
    """

    firing: Mapping[str, BoolArray] = field(default_factory=dict)
    breaching: Mapping[str, BoolArray] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    acting: frozenset[str] = frozenset()
    due: Mapping[str, Due] = field(default_factory=dict)
    standing: Mapping[str, BoolArray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointHealth:
    """Health of a checkpoint saved after this step (`gradwatch.checkpoint` says when it is).

    `last_healthy_step` None = there was none; `reasons` say why not, for people, empty where it is healthy.
    `weights_step`: the last step after which the weights themselves were looked at and found fit, None = not yet. When
    that is done goes by the clock, so it is no part of what makes two of these equal.
    """

    healthy: bool = True
    last_healthy_step: int | None = None
    reasons: tuple[str, ...] = ()
    weights_step: int | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One step as every sink sees it.

    `overhead_seconds` is what gradwatch itself cost since the last Record; `step_seconds` the time since the
    last `optimizer.step()` (None on the first); `wall_time` seconds since the epoch. `checkpoint` is None in what a
    journal gives back. `findings` say what made the gradients of an incident non-finite, where a rule had it looked
    for.
    """

    snapshot: Snapshot
    verdict: Verdict
    decision: Decision
    overhead_seconds: float
    step_seconds: float | None
    wall_time: float
    checkpoint: CheckpointHealth | None = None
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class RuleInfo:
    """Description of a rule for sinks: enough to create its series at 0 before anything happened.

    `of` is the column the rule reads ("" = not said): the journal records it at every step the rule is firing.
    """

    id: str
    kind: str
    severity: Severity
    actions: tuple[str, ...] = ()
    of: str = ""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Identity of a run, fixed at attach. `directory` is the run's own folder (it may not exist yet).

    `told_by` is the process whose account, printed at its end, includes this one's (0 = this process prints its own);
    `launch` is the same in all processes whose accounts are printed as one ("" = not known).
    """

    run_id: str
    directory: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    attempt: int = 0
    pid: int = 0
    host: str = ""
    start_time: float = 0.0
    script: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    rules: tuple[RuleInfo, ...] = ()
    rules_digest: str = ""
    told_by: int = 0
    launch: str = ""
