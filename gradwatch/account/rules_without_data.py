"""Rules that never had data: what they read never came at a step of theirs, so that their silence says nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from gradwatch.records.columns import (
    BATCH_HASH,
    CATALOGUE,
    CLIP_RATIO,
    CLIPPED_SCALE,
    COSTLY_COLUMNS,
    IDLE_CLIPS,
    OBSERVED,
    OF_SCALER,
    SCALAR_COLUMNS,
    is_observed,
    scalar_name,
)
from gradwatch.records.snapshot import Snapshot

NO_MOMENT = "the optimizer has taken no step, or keeps no {} moment of these parameters"
NO_FIRST_MOMENT = (
    f"{NO_MOMENT.format('first')} (`exp_avg` as of Adam, or `momentum_buffer` as of SGD with momentum)"
)
NO_SECOND_MOMENT = f"{NO_MOMENT.format('second')} (`exp_avg_sq` as of Adam, or `square_avg` as of RMSprop)"
NO_STATISTICS = "none of the tapped modules keeps a running mean and variance (BatchNorm, InstanceNorm)"
NO_CALL = "no tapped {} was called in training mode and outside `torch.compile`"
NO_VALUES = NO_CALL.format("module") + "; {} of integers, quantized, or without values are not read"
NO_OUTPUT, NO_INPUT = NO_VALUES.format("outputs"), NO_VALUES.format("inputs")
NO_CLIP = "no clip was seen"  # of torch's own functions
NEVER_CAME = {
    CLIP_RATIO: "no clip by norm was seen",
    CLIPPED_SCALE: NO_CLIP,
    IDLE_CLIPS: NO_CLIP,
    "loss": "no loss was observed (a backward started from C++ exposes none: pass it with `gw.observe(loss=…)`)",
    "lr": "a parameter group of the optimizer has no learning rate that is one number",
    "loss_scale": "no GradScaler was seen",
    "scaler_skip": "no GradScaler was seen",
    "norm_local": "needs several ranks",
    BATCH_HASH: (
        "the arguments of watched models are not kept until the step (a rule with `localise` keeps them), "
        "or they are in arrays or objects that gradwatch does not look into"
    ),
    "noise_scale": (
        "needs several ranks that are replicas (DDP), steps of one backward, and less noise than hides the gradient"
    ),
    "moment_norm": NO_FIRST_MOMENT,
    "moment_cosine": NO_FIRST_MOMENT,
    "second_moment_rms": NO_SECOND_MOMENT,
    "second_moment_near_zero": NO_SECOND_MOMENT,
    "grad_output_norm": "no output of a tapped module got a gradient outside `torch.compile`",
    "activation_mean": NO_OUTPUT,
    "activation_std": NO_OUTPUT,
    "activation_min": NO_OUTPUT,
    "activation_max": NO_OUTPUT,
    "activation_near_zero": NO_OUTPUT,
    "activation_saturation": NO_CALL.format("Tanh, Sigmoid, Hardtanh, ReLU6 or Hardsigmoid"),
    **{one.name: NO_INPUT for one in CATALOGUE if one.reads == "input"},
    "running_mean_norm": NO_STATISTICS,
    "running_var_min": NO_STATISTICS,
    "running_var_max": NO_STATISTICS,
}
NEVER_MEASURED = "{} was never measured"
NO_STEP = "no step was taken"
BEFORE_ITS_STEP = "before its from_step: {:,} (the last step was {:,})"
NO_STEP_OF_ITS_OWN = "the optimizer at whose steps it is judged took none"
TURNS_TO_COME = "nothing that has had its turn has a value of {}, and not all had it yet (every: {})"
OFF_STEP = "no step at which it is evaluated was reached (every: {})"
NOT_LOOKED_AT = (
    "what happens between two steps is looked at where a torch optimizer steps after the backward, and {}"
)
NOT_COMPARED = "ranks are not compared where no torch optimizer steps"
NOT_READ = "columns of whole tensors are read just before the optimizer's step, and {}"
NO_OPTIMIZER = "no torch optimizer steps here"
INSIDE_BACKWARD = "here it steps inside the backward"
SHARDED_GRADIENTS = "what a loop does with gradients that are sharded over ranks is not looked at"
SHARDED = "parameters are sharded over ranks, and {} of the whole is not made of its parts'"
OFF_VALUE = "none was observed for a step at which it is evaluated (every: {})"
NOT_OBSERVED = "`gw.observe({}=…)` gave no number before a step"
OTHERS = "; observed: {}"
MOST_NAMES = 8
MOST_CAME = 512
"""Columns of which it is known that they came; names of observed values may be made up without end."""
NOT_JUDGED = "every step was rejected by a GradScaler, or provisional"
JOINED = "its condition is not known without {}"
NO_VALUE = "none of what it is about had a value of {}"


class Reads(NamedTuple):
    """The column that one rule reads in a Snapshot, and at which steps.

    `always`: each Snapshot has the column. `fact`: judged on provisional steps too, as NaN and Inf are. `why` it never
    comes, where that is known from the first. `due`: whether a step is one of those at which it is judged. `has_value`:
    whether a Snapshot has a value of what is judged on it, given the series in turn; None where nothing is judged.
    `valueless`: the reason where none ever had. `joined`: it reads no column, but is about these rules; `why` is then
    that of those which judge nothing here. `from_step` is the first step at which it is judged.
    """

    column: str
    every: int = 1
    always: bool = False
    fact: bool = False
    why: str = ""
    due: Callable[[int], bool] = lambda step: True
    has_value: Callable[[Snapshot, Mapping[str, Any]], bool | None] = lambda snapshot, in_turn: True
    valueless: str = ""
    joined: tuple[str, ...] = ()
    from_step: int = 0


class RulesWithoutData:
    """Rules of each optimizer that have had no data yet; a step costs one look at each of those that remain.

    Mappings are replaced and never written to, for `reasons` is asked by other threads.
    """

    def __init__(self) -> None:
        self._waiting: Mapping[int, Mapping[str, Reads]] = {}
        # The columns, by optimizer, where all that its rules wait for is that these come.
        self._missing: dict[int, frozenset[str]] = {}
        # The first step to come, by optimizer, from which more rules are judged (`from_step`).
        self._next: dict[int, int] = {}
        self._with_data: frozenset[str] = frozenset()
        # (optimizer, rule): evaluated, but nothing of it had a value.
        self._without_value: frozenset[tuple[int, str]] = frozenset()
        self._came: frozenset[str] = frozenset()
        self._scalars: frozenset[str] = frozenset()  # of what came, by their names in Snapshots
        self._steps: dict[int, tuple[int, int]] = {}  # the first and the last, by optimizer

    def bind(self, optimizer: int, rules: Mapping[str, Reads]) -> None:
        """The rules of one optimizer from now on; those that had data elsewhere or before are done."""
        waiting = {rule: reads for rule, reads in rules.items() if rule not in self._with_data}
        self._wait({**self._waiting, optimizer: waiting})

    def _wait(self, waiting: Mapping[int, Mapping[str, Reads]]) -> None:
        self._waiting, self._missing, self._next = waiting, {}, {}
        for optimizer, rules in waiting.items():
            coming = self._steps.get(optimizer, (0, -1))[1] + 1
            late = [reads for reads in rules.values() if reads.from_step > coming]
            self._next[optimizer] = min((reads.from_step for reads in late), default=sys.maxsize)
            came = [reads for reads in rules.values() if reads.always or reads.column in self._came]
            if all(reads.from_step > coming for reads in came):
                columns = frozenset(reads.column for reads in rules.values())
                self._missing[optimizer] = columns.difference(reads.column for reads in came)

    def observe(self, snapshot: Snapshot, in_turn: Mapping[str, Any]) -> None:
        """Strike off the rules that had data on this Snapshot; `in_turn`: the staggered series in turn at its step."""
        first, _ = self._steps.get(snapshot.optimizer, (snapshot.step, 0))
        self._steps[snapshot.optimizer] = first, snapshot.step
        missing = self._missing.get(snapshot.optimizer)
        if (
            missing is not None  # almost every step
            and snapshot.step < self._next[snapshot.optimizer]
            and snapshot.loss_scale is None
            and self._scalars.issuperset(snapshot.scalars)  # and so none of the missing is among them
            and missing.isdisjoint(snapshot.columns)
        ):
            return
        waiting = self._waiting.get(snapshot.optimizer, {})
        came = {*map(_column, snapshot.scalars), *snapshot.columns}
        if snapshot.loss_scale is not None:
            came.add("loss_scale")
        remembered = self._remembered(came)
        came_first = not self._came.issuperset(remembered)
        if came_first:
            self._came |= remembered
        self._scalars |= {name for name in snapshot.scalars if _column(name) in self._came}
        had = {
            rule: reads.has_value(snapshot, in_turn)
            for rule, reads in waiting.items()
            if _usable(reads, snapshot, came)
        }
        with_data = {rule for rule, one in had.items() if one}
        self._without_value |= {(snapshot.optimizer, rule) for rule, one in had.items() if one is False}
        if with_data:
            self._with_data |= with_data
        if with_data or came_first:
            self._wait(
                {
                    each: {rule: reads for rule, reads in left.items() if rule not in with_data}
                    for each, left in self._waiting.items()
                }
            )

    def observe_all(self, snapshots: Sequence[Snapshot], in_turn: Sequence[Mapping[str, Any]]) -> None:
        """As `observe` of each, of Snapshots of one optimizer without a loss scale."""
        optimizer, last = snapshots[0].optimizer, snapshots[-1].step
        first, _ = self._steps.get(optimizer, (snapshots[0].step, 0))
        for snapshot, turn in zip(snapshots, in_turn, strict=True):
            missing = self._missing.get(optimizer)
            if (
                missing is None
                or snapshot.step >= self._next[optimizer]
                or not self._scalars.issuperset(snapshot.scalars)
                or not missing.isdisjoint(snapshot.columns)
            ):
                self.observe(snapshot, turn)
        self._steps[optimizer] = first, last

    def _remembered(self, came: set[str]) -> set[str]:
        """Those of these columns that are to be known later: of observed values that no rule reads only so many."""
        if len(self._came) < MOST_CAME:
            return came
        wanted = {reads.column for rules in self._waiting.values() for reads in rules.values()}
        return {column for column in came if not is_observed(column) or column in wanted}

    def reasons(self) -> dict[str, str]:
        """The reason why a rule was never evaluated, by rule; of several optimizers, that of one that has stepped."""
        waiting, found = self._waiting, dict[str, str]()
        for optimizer, rules in sorted(waiting.items(), key=lambda one: one[0] in self._steps):
            found.update(
                (rule, self._why(rule, reads, optimizer)) for rule, reads in rules.items() if not reads.joined
            )
        found = {rule: why for rule, why in found.items() if rule not in self._with_data}
        for rules in waiting.values():
            for rule, reads in rules.items():
                without_data = [one for one in reads.joined if one in found]
                if without_data or (reads.joined and reads.why):
                    found[rule] = reads.why or of_condition(without_data, found)
                elif reads.joined and (before := self._before_its_step(rule, waiting)):
                    found[rule] = before
        return found

    def _before_its_step(self, rule: str, waiting: Mapping[int, Mapping[str, Reads]]) -> str:
        """The reason of a rule whose first step no optimizer has reached that it is bound to; "" of any other."""
        lasts = {
            one: self._steps[one][1] for one, rules in waiting.items() if one in self._steps and rule in rules
        }
        first = max((rules[rule].from_step for rules in waiting.values() if rule in rules), default=0)
        last = max(lasts.values(), default=first)
        return BEFORE_ITS_STEP.format(first, last) if last < first else ""

    def _why(self, rule: str, reads: Reads, optimizer: int) -> str:
        if reads.why:
            return reads.why
        if optimizer not in self._steps:
            return NO_STEP_OF_ITS_OWN if self._steps else NO_STEP
        if self._steps[optimizer][1] < reads.from_step:
            return BEFORE_ITS_STEP.format(reads.from_step, self._steps[optimizer][1])
        without_value = (optimizer, rule) in self._without_value
        never_came = not (reads.always or reads.column in self._came)
        first, last = self._steps[optimizer]
        first = max(first, reads.from_step)
        if (without_value or never_came) and _turns_to_come(reads, first, last):
            return TURNS_TO_COME.format(reads.column, reads.every)
        if without_value:
            return reads.valueless or NO_VALUE.format(reads.column)
        if never_came and is_observed(reads.column):
            return _not_observed(scalar_name(reads.column), self._came)
        if never_came and reads.column not in (
            *COSTLY_COLUMNS,
            BATCH_HASH,
        ):  # these are read at their steps alone
            return NEVER_CAME.get(reads.column, NEVER_MEASURED.format(reads.column))
        if not _reached(reads, first, last):
            return OFF_STEP.format(reads.every)
        if never_came:
            return NEVER_CAME.get(reads.column, NEVER_MEASURED.format(reads.column))
        return OFF_VALUE.format(reads.every) if is_observed(reads.column) and reads.every > 1 else NOT_JUDGED


def of_condition(rules: Sequence[str], reasons: Mapping[str, str]) -> str:
    """The reason why a condition is not known that is about these rules: they have had no data, for these reasons."""
    why = dict.fromkeys(reasons[rule] for rule in rules)
    return f"{JOINED.format(', '.join(f'`{rule}`' for rule in rules))} ({'; '.join(why)})"


def _reached(reads: Reads, first: int, last: int) -> bool:
    """True if there was a step at which it is due; the steps of a residue modulo `every` are alike."""
    return any(map(reads.due, range(first, min(last, first + reads.every) + 1)))


def _turns_to_come(reads: Reads, first: int, last: int) -> bool:
    """True if some of what it is about has had its turn, and some has not: parameters or modules take turns."""
    return _reached(reads, first, last) and any(map(reads.due, range(last + 1, first + reads.every)))


def _usable(reads: Reads, snapshot: Snapshot, came: Collection[str]) -> bool:
    """True if the engine asks such a rule on this Snapshot, if it is due; see `BoundEngine.evaluate`."""
    if snapshot.step < reads.from_step or not (reads.always or reads.column in came):
        return False
    if snapshot.scalars.get("scaler_skip"):
        of_loss = reads.fact and reads.column == "loss" and snapshot.loss_without_scale_known
        return of_loss or reads.column in OF_SCALER
    return reads.fact or not snapshot.provisional


def _not_observed(name: str, came: Collection[str]) -> str:
    """The reason of a rule on an observed value, with the names that the script did give: one may be meant."""
    observed = sorted(scalar_name(column) for column in came if is_observed(column))
    shown = ", ".join(observed[:MOST_NAMES])
    return NOT_OBSERVED.format(name) + (OTHERS.format(shown) if shown else "")


def _column(scalar: str) -> str:
    """The name that a rule has for a scalar of a Snapshot."""
    return scalar if scalar in SCALAR_COLUMNS else OBSERVED + scalar
