"""The catalogue of columns: every number that is measured of a step, what it is of, and what it costs. Without numpy.

Every set of names that depends on a property of columns is made from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

Of = Literal["parameter", "module", "rank", "step"]
Grouped = Literal[
    "root sum of squares", "root mean square", "mean by elements", "sum", "largest", "smallest", ""
]
Reads = Literal[
    "",
    "gradient",
    "weight",
    "weight and a copy",
    "optimizer state",
    "optimizer state and gradient",
    "input",
    "output",
    "running statistics",
    "batch",
]
Ranks = Literal["sum of squares", "root mean square", "sum", "mean by elements", "mean", "same on all", ""]


class ColumnInfo(NamedTuple):
    """One column. `of` what it has one value of; `grouped` how a group or a total is made of its sites ("" = not).

    `sharded` how the value of a parameter that ranks hold parts of is made of theirs ("" = not: it is of this rank's
    part). `reads` the tensor that is read for it, on top of the read of every gradient for its norm ("" = nothing);
    `at_cadence`: not at each step, but as often as rules say. `always`: every step has it, or its absence means zero.
    `measured` names the module that does.
    """

    name: str
    of: Of
    unit: str
    means: str
    grouped: Grouped
    sharded: Ranks
    reads: Reads
    always: bool
    measured: str
    at_cadence: bool = False


CONFIRMED_JUMP, CONFIRMED_NORM = "confirmed_jump", "confirmed_norm"
"""Scalars of the step at which a check of the weights confirms that an earlier step ruined them: the factor by which
the total norm of that step jumped, and the norm."""
BATCH_HASH: Final = "batch_hash"
"""Scalar of steps whose batch is held, where a rule asks for it."""
NOISE_SCALE = "noise_scale"
"""Scalar of steps at which replicas have measured the norms of their own gradients, one backward each."""
OTHER_RULES: Final = "other rules"
"""Stands for a column where a rule judges the state of others (`when:`); no observed value can have such a name."""
UNOWNED = "unowned"
UNCLEARED, DISCARDED = "uncleared", "discarded"
IDLE_CLIPS, CLIPPED_SCALE, CLIP_RATIO = "idle_clips", "clipped_scale", "clip_ratio"
SCALED_BY: Final = "scaled_by"
"""Scalars of what the script's loop does with gradients, absent where there is nothing to report."""
OBSERVED_ONLY = "observed_only"
"""Scalar of a step that no optimizer takes."""

_VALUES, _WEIGHTS = "capture.columns.gradient_values", "capture.columns.update_ratio"
_ROOT: Grouped = "root sum of squares"


def _norms(
    name: str, unit: str, means: str, grouped: Grouped, sharded: Ranks = "sum of squares"
) -> ColumnInfo:
    return ColumnInfo(
        name, "parameter", unit, means, grouped, sharded, "", True, "capture.window.window_norms"
    )


def _local(name: str, unit: str, means: str) -> ColumnInfo:
    return ColumnInfo(
        name, "parameter", unit, means, _ROOT, "", "gradient", False, "capture.columns.norm_local"
    )


def _values(name: str, unit: str, means: str, grouped: Grouped, sharded: Ranks = "") -> ColumnInfo:
    return ColumnInfo(name, "parameter", unit, means, grouped, sharded, "gradient", False, _VALUES, True)


def _weights(
    name: str, unit: str, means: str, grouped: Grouped, reads: Reads, sharded: Ranks = "sum of squares"
) -> ColumnInfo:
    return ColumnInfo(name, "parameter", unit, means, grouped, sharded, reads, False, _WEIGHTS, True)


def _state(name: str, unit: str, means: str, grouped: Grouped, sharded: Ranks) -> ColumnInfo:
    measured = "capture.columns.optimizer_moments"
    return ColumnInfo(
        name, "parameter", unit, means, grouped, sharded, "optimizer state", False, measured, True
    )


def _modules(name: str, unit: str, means: str, grouped: Grouped) -> ColumnInfo:
    return ColumnInfo(
        name, "module", unit, means, grouped, "", "output", False, "capture.columns.module_taps"
    )


def _activation(name: str, unit: str, means: str, grouped: Grouped = "mean by elements") -> ColumnInfo:
    measured = "capture.columns.activation_reader"
    return _modules(name, unit, means, grouped)._replace(at_cadence=True, measured=measured)


def _input(name: str, unit: str, means: str, grouped: Grouped = "mean by elements") -> ColumnInfo:
    return _activation(name, unit, means, grouped)._replace(reads="input")


def _running(name: str, unit: str, means: str, grouped: Grouped) -> ColumnInfo:
    measured = "capture.columns.running_statistics"
    return ColumnInfo(name, "module", unit, means, grouped, "", "running statistics", False, measured, True)


def _ranks(name: str, unit: str, means: str) -> ColumnInfo:
    return ColumnInfo(name, "rank", unit, means, "", "", "", False, "distributed.replica_divergence")


def _step(name: str, unit: str, means: str, sharded: Ranks, always: bool = False) -> ColumnInfo:
    return ColumnInfo(name, "step", unit, means, "", sharded, "", always, "session.pipeline.extra_columns")


def _loop(name: str, unit: str, means: str, always: bool = True) -> ColumnInfo:
    return _step(name, unit, means, "", always)._replace(measured="capture.loop_faults.loop_events")


CATALOGUE: tuple[ColumnInfo, ...] = (
    _norms("norm", "‖g‖", "L2 norm of the gradient, before any clip", _ROOT),
    _norms("rms", "‖g‖/√n", "the norm by the root of the number of elements", "root mean square"),
    _norms("norm_applied", "‖g‖", "the norm that the optimizer gets, after every clip", _ROOT),
    _norms("coef", "1", "`norm_applied` ÷ `norm`", "smallest", "same on all"),
    _norms("calls", "backwards", "gradients that arrived in this step; 0 = none", "sum", "same on all"),
    _norms(
        "nonfinite", "elements", "elements that are NaN or Inf; counted on suspicion, else 0", "sum", "sum"
    ),
    _norms("nan_count", "elements", "elements that are NaN; counted on suspicion, else 0", "sum", "sum"),
    _norms("inf_count", "elements", "elements that are infinite; counted on suspicion, else 0", "sum", "sum"),
    _norms(
        "norm_overflow", "0 or 1", "the norm exceeds float32 though every element is finite", "sum", "sum"
    ),
    _local("norm_local", "‖g‖", "the largest norm of one backward on this rank, before any reduction"),
    _values(
        "zero_fraction", "0 to 1", "elements that are exactly zero", "mean by elements", "mean by elements"
    ),
    _values("max_abs", "|g|", "the largest magnitude of an element", "largest"),
    _values("min", "g", "the smallest element", "smallest"),
    _values("max", "g", "the largest element", "largest"),
    _values("mean", "g", "the mean of the elements", "mean by elements", "mean by elements"),
    _values("std", "g", "the standard deviation of the elements (divided by n)", ""),
    _weights("weight_norm", "‖w‖", "L2 norm of the weight, before the step", _ROOT, "weight"),
    _weights(
        "weight_mean",
        "w",
        "the mean of the weight's elements",
        "mean by elements",
        "weight",
        "mean by elements",
    ),
    _weights("weight_std", "w", "the standard deviation of the weight's elements", "", "weight", ""),
    _weights(
        "update_norm", "‖Δw‖", "L2 norm of what the step before has changed", _ROOT, "weight and a copy"
    ),
    _weights(
        "update_ratio",
        "‖Δw‖/‖w‖",
        "`update_norm` ÷ the weight's norm before the update, at least 0.1",
        "largest",
        "weight and a copy",
    ),
    _state(
        "moment_norm",
        "‖m‖",
        "L2 norm of the optimizer's first moment, before the step",
        _ROOT,
        "sum of squares",
    ),
    _state(
        "second_moment_rms",
        "v",
        "root mean square of the optimizer's second moment, before the step",
        "root mean square",
        "root mean square",
    ),
    _state(
        "second_moment_near_zero",
        "0 to 1",
        "elements of the second moment below 1.1e-16, where Adam divides by its eps of 1e-8",
        "mean by elements",
        "mean by elements",
    ),
    _state(
        "moment_cosine",
        "−1 to 1",
        "cosine of the angle between the gradient and the first moment, an average of those before it",
        "",
        "",
    )._replace(reads="optimizer state and gradient"),
    _modules("grad_output_norm", "‖g‖", "L2 norm of the gradient of a module's outputs", _ROOT),
    _modules("grad_input_norm", "‖g‖", "L2 norm of the gradient of a module's inputs", _ROOT),
    _activation("activation_mean", "a", "the mean of a module's output"),
    _activation("activation_std", "a", "the standard deviation of a module's output (divided by n)"),
    _activation("activation_min", "a", "the smallest element of a module's output", "smallest"),
    _activation("activation_max", "a", "the largest element of a module's output", "largest"),
    _activation(
        "activation_near_zero", "0 to 1", "elements of a module's output with a magnitude below 1e-6"
    ),
    _activation(
        "activation_saturation",
        "0 to 1",
        "elements of the output of Tanh, Sigmoid and others (below) where the slope is below 5 % of its largest",
    ),
    _input("input_mean", "a", "the mean of a module's input"),
    _input("input_std", "a", "the standard deviation of a module's input (divided by n)"),
    _input("input_min", "a", "the smallest element of a module's input", "smallest"),
    _input("input_max", "a", "the largest element of a module's input", "largest"),
    _input("input_near_zero", "0 to 1", "elements of a module's input with a magnitude below 1e-6"),
    _running("running_mean_norm", "‖a‖", "L2 norm of a normalisation layer's running mean", _ROOT),
    _running("running_var_min", "a²", "the smallest element of its running variance", "smallest"),
    _running("running_var_max", "a²", "the largest element of its running variance", "largest"),
    _ranks("rank_norm", "‖g‖", "the norm of a rank's own gradient, before the reduction"),
    _ranks("rank_mismatch", "parameters", "reduced norms that are not those of the other ranks"),
    _step("total_norm", "‖g‖", "L2 norm of all gradients of the optimizer together", "sum of squares", True),
    _step("loss", "", "the value that backward was called on, or that was observed", "mean"),
    _step("lr", "", "largest learning rate of the parameter groups that are trained", "same on all"),
    _step(BATCH_HASH, "", "a hash of what the model was called with", "")._replace(reads="batch"),
    _step("loss_scale", "", "the GradScaler's scale, which is divided out of everything else", "same on all"),
    _step(
        NOISE_SCALE,
        "local batches",
        "gradient noise scale of one step, by the norms of the ranks' own gradients and of their mean",
        "same on all",
    ),
    _step("scaler_skip", "0 or 1", "the GradScaler rejected the step", "same on all"),
    _step(
        CONFIRMED_JUMP,
        "1",
        "the factor by which the total norm jumped at an earlier step that ruined weights",
        "",
    ),
    _step(CONFIRMED_NORM, "‖g‖", "the total norm to which it jumped", ""),
    _step(
        UNOWNED,
        "parameters",
        "that have received gradients, have not moved, and belong to no optimizer; absent where there are none",
        "",
        True,
    ),
    _loop(
        UNCLEARED,
        "parameters",
        "whose gradients the last step used, and this one's backward has added to; absent before there were any",
    ),
    _loop(
        DISCARDED,
        "parameters",
        "whose gradients arrived and were gone at the step, where none was left; absent before there were any",
    ),
    _loop(
        IDLE_CLIPS,
        "clips",
        "of the script's own, in a step with no other, before any gradient had arrived; absent before the first clip",
        always=False,
    ),
    _loop(
        CLIPPED_SCALE,
        "1",
        "the loss scale in the gradients that the script has clipped; absent before the first clip of any",
        always=False,
    ),
    _loop(
        SCALED_BY,
        "1",
        "the factor that all gradients have in common, changed by no clip of torch's; absent where that did not begin "
        "after steps without",
    ),
    _loop(
        CLIP_RATIO,
        "1",
        "the total norm ÷ `max_norm` of the script's own clip; above 1 it bites",
        always=False,
    ),
    _step(OBSERVED_ONLY, "1", "no optimizer takes the step: it is observed, and never acted on", ""),
)
"""Every column, in the order in which they are listed to users."""


OBSERVED = "observed."
"""What stands before the name of an observed value in `of:`, so that no misspelt column is taken for one."""


_NEVER_NEGATIVE = (
    *("‖g‖", "‖g‖/√n", "|g|", "‖w‖", "‖Δw‖", "‖Δw‖/‖w‖", "‖m‖", "v", "‖a‖"),
    *("backwards", "elements", "parameters", "clips"),
)
_RANGES: Mapping[str, tuple[float, float]] = {
    "0 to 1": (0.0, 1.0),
    "0 or 1": (0.0, 1.0),
    "−1 to 1": (-1.0, 1.0),
    **dict.fromkeys(_NEVER_NEGATIVE, (0.0, math.inf)),
}
"""The least and the largest number of a column, by its unit."""
_UNITS = {one.name: one.unit for one in CATALOGUE if not (one.unit == "0 or 1" and one.grouped == "sum")}


def range_of(column: str) -> tuple[float, float]:
    """The least and the largest number that a column can hold, whatever is trained; infinite if that is not known."""
    return _RANGES.get(_UNITS.get(column, ""), (-math.inf, math.inf))


def _of(of: Of) -> frozenset[str]:
    return frozenset(one.name for one in CATALOGUE if one.of == of)


def _grouped(grouped: Grouped) -> frozenset[str]:
    return frozenset(one.name for one in CATALOGUE if one.grouped == grouped)


OF_THE_LOOP = tuple(one.name for one in CATALOGUE if one.measured == "capture.loop_faults.loop_events")
"""Columns of what the script's loop does between two steps of a torch optimizer."""

SCALAR_COLUMNS = tuple(one.name for one in CATALOGUE if one.of == "step")
"""Columns with one value per step rather than one per site."""

_SCALARS = frozenset(SCALAR_COLUMNS)
_ONE_A_STEP = _SCALARS | {OTHER_RULES}
OF_SCALER = frozenset({"loss_scale", "scaler_skip"})
"""Scalars that a GradScaler makes: their rules are judged on the steps it rejects too."""

RESERVED_NAMES = _SCALARS - {"loss"}
"""Names that no observed value may take: it would stand in the place of what is measured."""

MODULE_COLUMNS = _of("module")
"""Columns measured on tapped modules."""

OPTIMIZER_STATE = frozenset(one.name for one in CATALOGUE if one.reads.startswith("optimizer state"))
"""Columns of the moments that an optimizer keeps."""

RUNNING_STATISTICS = frozenset(one.name for one in CATALOGUE if one.reads == "running statistics")
"""Columns of what a layer keeps from step to step: a NaN there stays, whatever becomes of the gradients."""

RANK_COLUMNS = _of("rank")
"""Columns with one value per rank, on sites of kind "rank" (see `gradwatch.distributed.replica_divergence`)."""

COMPARING_RANKS = RANK_COLUMNS | {NOISE_SCALE}
"""Columns that are made of what ranks have before a reduction."""

COUNT_COLUMNS = frozenset({"nonfinite", "nan_count", "inf_count", "norm_overflow"})
"""Columns filled on suspicion only: when absent and the norms are finite, they are zero."""

ALWAYS = frozenset(one.name for one in CATALOGUE if one.always)
"""Columns that every step has, or whose absence says as much: a rule on one of them is never without data."""

FREE_COLUMNS = ALWAYS | _ONE_A_STEP
"""Columns that a step has without being asked for them."""


def is_observed(column: str) -> bool:
    """True of a value that the script gives to `observe`."""
    return column.startswith(OBSERVED)


def is_scalar(column: str) -> bool:
    """True of a column with one value per step."""
    return column in _ONE_A_STEP or is_observed(column)


def is_free(column: str) -> bool:
    """True of a column that is not to be asked for: one of `FREE_COLUMNS`, or observed."""
    return column in FREE_COLUMNS or is_observed(column)


def scalar_name(column: str) -> str:
    """The name in the scalars of a Snapshot: that of an observed value stands there by itself."""
    return column.removeprefix(OBSERVED)


COSTLY_COLUMNS = frozenset(one.name for one in CATALOGUE if one.at_cadence)
"""Columns that cost a read of whole tensors, and so are read at a cadence (`Rule.staggered`)."""

ROOT_MEAN_SQUARED = _grouped("root mean square")
LARGEST, SMALLEST = _grouped("largest"), _grouped("smallest")
SUMMED, AVERAGED = _grouped("sum"), _grouped("mean by elements")
UNGROUPED = _grouped("") - _SCALARS - RANK_COLUMNS
"""Columns of which no group or total is made: `scope: param` is all they can be judged by."""
