"""Rules that never had data: what they read never came at a step of theirs, so that their silence says nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from gradwatch.records.columns import OBSERVED, SCALAR_COLUMNS, is_observed, scalar_name
from gradwatch.records.snapshot import Snapshot

NO_MOMENT = "the optimizer has taken no step, or keeps no {} moment of these parameters"
NO_SECOND_MOMENT = f"{NO_MOMENT.format('second')} (`exp_avg_sq` as of Adam, or `square_avg` as of RMSprop)"
NO_STATISTICS = "none of the tapped modules keeps a running mean and variance (BatchNorm, InstanceNorm)"
NEVER_CAME = {
    "loss": "no loss was observed (a backward started from C++ exposes none: pass it with `gw.observe(loss=…)`)",
    "loss_scale": "no GradScaler was seen",
    "scaler_skip": "no GradScaler was seen",
    "norm_local": "needs several ranks",
    "moment_norm": f"{NO_MOMENT.format('first')} (`exp_avg` as of Adam, or `momentum_buffer` as of SGD with momentum)",
    "second_moment_rms": NO_SECOND_MOMENT,
    "second_moment_near_zero": NO_SECOND_MOMENT,
    "running_mean_norm": NO_STATISTICS,
    "running_var_min": NO_STATISTICS,
    "running_var_max": NO_STATISTICS,
}
OF_SCALER = frozenset({"loss_scale", "scaler_skip"})
OFF_STEP = "no step at which it is evaluated was reached (every: {})"
NOT_COMPARED = "ranks are not compared where no torch optimizer steps"
OFF_VALUE = "none was observed for a step at which it is evaluated (every: {})"
NOT_OBSERVED = "`gw.observe({}=…)` was not called before a step"
OTHERS = "; observed: {}"
MOST_NAMES = 8
NOT_JUDGED = "every step was rejected by a GradScaler, or provisional"


class Reads(NamedTuple):
    """The column that one rule reads in a Snapshot, at steps divisible by `every`; a staggered one where `judged` says.

    `judged`: whether any of its series is judged on a Snapshot that has the column. `always`: each Snapshot has it.
    `fact`: judged on provisional steps too, as NaN and Inf are. `why` it never comes, and why what comes is not judged
    (`unjudged`), where that is known from the first.
    """

    column: str
    every: int = 1
    always: bool = False
    fact: bool = False
    why: str = ""
    judged: Callable[[Snapshot], bool] | None = None
    unjudged: str = ""


class RulesWithoutData:
    """Rules of each optimizer that have had no data yet; a step costs one look at each of those that remain.

    Mappings are replaced and never written to, for `reasons` is asked by other threads.
    """

    def __init__(self) -> None:
        self._waiting: Mapping[int, Mapping[str, Reads]] = {}
        # The columns, by optimizer, where all that its rules wait for is that these come.
        self._missing: dict[int, frozenset[str]] = {}
        self._with_data: frozenset[str] = frozenset()
        self._came: frozenset[str] = frozenset()
        self._scalars: frozenset[str] = frozenset()  # of what came, by their names in Snapshots

    def bind(self, optimizer: int, rules: Mapping[str, Reads]) -> None:
        """The rules of one optimizer from now on; those that had data elsewhere or before are done."""
        waiting = {rule: reads for rule, reads in rules.items() if rule not in self._with_data}
        self._wait({**self._waiting, optimizer: waiting})

    def _wait(self, waiting: Mapping[int, Mapping[str, Reads]]) -> None:
        self._waiting = waiting
        self._missing = {
            optimizer: frozenset(reads.column for reads in rules.values())
            for optimizer, rules in waiting.items()
            if not any(reads.always or reads.column in self._came for reads in rules.values())
        }

    def observe(self, snapshot: Snapshot) -> None:
        """Strike off the rules that were evaluated on this Snapshot."""
        missing = self._missing.get(snapshot.optimizer)
        if (
            missing is not None  # almost every step
            and snapshot.loss_scale is None
            and self._scalars.issuperset(snapshot.scalars)  # and so none of the missing is among them
            and missing.isdisjoint(snapshot.columns)
        ):
            return
        waiting = self._waiting.get(snapshot.optimizer, {})
        self._scalars |= snapshot.scalars.keys()
        came = {*map(_column, snapshot.scalars), *snapshot.columns}
        if snapshot.loss_scale is not None:
            came.add("loss_scale")
        came_first = not self._came.issuperset(came)
        if came_first:
            self._came |= came
        evaluated = {rule for rule, reads in waiting.items() if _evaluated(reads, snapshot, came)}
        if evaluated:
            self._with_data |= evaluated
        if evaluated or came_first:
            self._wait(
                {
                    each: {rule: reads for rule, reads in left.items() if rule not in evaluated}
                    for each, left in self._waiting.items()
                }
            )

    def reasons(self) -> dict[str, str]:
        """The reason why a rule was never evaluated, by rule."""
        waiting = self._waiting
        return {
            rule: _why(reads, self._came)
            for rule, reads in _joined(waiting.values())
            if rule not in self._with_data
        }


def _joined(found: Iterable[Mapping[str, Reads]]) -> Iterable[tuple[str, Reads]]:
    return {rule: reads for each in found for rule, reads in each.items()}.items()


def _evaluated(reads: Reads, snapshot: Snapshot, came: Collection[str]) -> bool:
    """True if the engine evaluates such a rule on this Snapshot; see `BoundEngine.evaluate`."""
    if not (reads.always or reads.column in came):
        return False
    if snapshot.scalars.get("scaler_skip"):
        usable = reads.column in OF_SCALER
    else:
        usable = reads.fact or not snapshot.provisional
    if not usable or reads.judged is None:
        return usable and snapshot.step % reads.every == 0
    return reads.judged(snapshot)


def _why(reads: Reads, came: Collection[str]) -> str:
    if not (reads.always or reads.column in came):
        if is_observed(reads.column):
            return _not_observed(scalar_name(reads.column), came)
        return reads.why or NEVER_CAME.get(reads.column, f"{reads.column} was never measured")
    if reads.unjudged:
        return reads.unjudged
    off = OFF_VALUE if is_observed(reads.column) else OFF_STEP
    return off.format(reads.every) if reads.every > 1 else NOT_JUDGED


def _not_observed(name: str, came: Collection[str]) -> str:
    """The reason of a rule on an observed value, with the names that the script did give: one may be meant."""
    observed = sorted(scalar_name(column) for column in came if is_observed(column))
    shown = ", ".join(observed[:MOST_NAMES])
    return NOT_OBSERVED.format(name) + (OTHERS.format(shown) if shown else "")


def _column(scalar: str) -> str:
    """The name that a rule has for a scalar of a Snapshot."""
    return scalar if scalar in SCALAR_COLUMNS else OBSERVED + scalar
