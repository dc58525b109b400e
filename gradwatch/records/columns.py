"""The catalogue of columns: every number that is measured of a step, what it is of, and what it costs. Without numpy.

Whatever must know something of a column by its name asks here: which sites it has, how a group is made of them, whether
it is there on every step.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Of = Literal["parameter", "module", "rank", "step"]
Grouped = Literal["root sum of squares", "root mean square", "mean", "sum", "largest", "smallest", ""]
Reads = Literal["", "gradient", "weight", "weight and a copy", "output"]
Ranks = Literal["sum of squares", "sum", "mean by elements", "mean", "same on all", ""]


class ColumnInfo(NamedTuple):
    """One column. `of` what it has one value of; `grouped` how a group or a total is made of its sites ("" = not).

    `sharded` how the value of a parameter that ranks hold parts of is made of theirs ("" = not: it is of this rank's
    part). `reads` the tensor that is read for it, on top of the read of every gradient for its norm ("" = nothing).
    `always`: every step has it, or its absence says as much. `measured` names the module that does.
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


CONFIRMED_JUMP, CONFIRMED_NORM = "confirmed_jump", "confirmed_norm"
"""Scalars of the step at which a look at the weights has confirmed that an earlier one ruined them: by which factor
the total norm of that one jumped, and to what."""

_VALUES, _WEIGHTS = "capture.columns.gradient_values", "capture.columns.update_ratio"
_ROOT: Grouped = "root sum of squares"


def _norms(
    name: str, unit: str, means: str, grouped: Grouped, sharded: Ranks = "sum of squares"
) -> ColumnInfo:
    return ColumnInfo(name, "parameter", unit, means, grouped, sharded, "", True, "capture.window_norms")


def _local(name: str, unit: str, means: str) -> ColumnInfo:
    return ColumnInfo(
        name, "parameter", unit, means, _ROOT, "", "gradient", False, "capture.columns.norm_local"
    )


def _values(name: str, unit: str, means: str, grouped: Grouped, sharded: Ranks = "") -> ColumnInfo:
    return ColumnInfo(name, "parameter", unit, means, grouped, sharded, "gradient", False, _VALUES)


def _weights(
    name: str, unit: str, means: str, grouped: Grouped, reads: Reads, sharded: Ranks = "sum of squares"
) -> ColumnInfo:
    return ColumnInfo(name, "parameter", unit, means, grouped, sharded, reads, False, _WEIGHTS)


def _modules(name: str, unit: str, means: str, grouped: Grouped = "mean") -> ColumnInfo:
    return ColumnInfo(
        name, "module", unit, means, grouped, "", "output", False, "capture.columns.module_statistics"
    )


def _ranks(name: str, unit: str, means: str) -> ColumnInfo:
    return ColumnInfo(name, "rank", unit, means, "", "", "", False, "distributed.replica_divergence")


def _step(name: str, unit: str, means: str, sharded: Ranks, always: bool = False) -> ColumnInfo:
    return ColumnInfo(name, "step", unit, means, "", sharded, "", always, "session.extra_columns")


CATALOGUE: tuple[ColumnInfo, ...] = (
    _norms("norm", "‖g‖", "L2 norm of the gradient, before any clip", _ROOT),
    _norms("rms", "‖g‖/√n", "the norm by the root of the number of elements", "root mean square"),
    _norms("norm_applied", "‖g‖", "the norm that the optimizer gets, after every clip", _ROOT),
    _norms("coef", "1", "the factor between the two", "smallest", "same on all"),
    _norms("calls", "backwards", "gradients that arrived in this step; 0 = none", "sum", "same on all"),
    _norms(
        "nonfinite", "elements", "elements that are NaN or Inf; counted on suspicion, else 0", "sum", "sum"
    ),
    _norms("nan_count", "elements", "those that are NaN", "sum", "sum"),
    _norms("inf_count", "elements", "those that are infinite", "sum", "sum"),
    _norms(
        "norm_overflow", "0 or 1", "the norm exceeds float32 though every element is finite", "sum", "sum"
    ),
    _local("norm_local", "‖g‖", "the largest norm of one backward on this rank, before any reduction"),
    _values("zero_fraction", "0 to 1", "elements that are exactly zero", "mean", "mean by elements"),
    _values("max_abs", "|g|", "the largest magnitude of an element", "largest"),
    _values("min", "g", "the smallest element", "smallest"),
    _values("max", "g", "the largest element", "largest"),
    _values("mean", "g", "the mean of the elements", "mean", "mean by elements"),
    _values("std", "g", "the standard deviation of the elements (divided by n)", ""),
    _weights("weight_norm", "‖w‖", "L2 norm of the weight, before the step", _ROOT, "weight"),
    _weights("weight_mean", "w", "the mean of the weight's elements", "mean", "weight", "mean by elements"),
    _weights("weight_std", "w", "the standard deviation of the weight's elements", "", "weight", ""),
    _weights(
        "update_norm", "‖Δw‖", "L2 norm of what the step before has changed", _ROOT, "weight and a copy"
    ),
    _weights(
        "update_ratio",
        "‖Δw‖/‖w‖",
        "the same by the weight's norm, at least 0.1",
        "largest",
        "weight and a copy",
    ),
    _modules("grad_output_norm", "‖g‖", "L2 norm of the gradient of a module's outputs", _ROOT),
    _modules("grad_input_norm", "‖g‖", "L2 norm of the gradient of a module's inputs", _ROOT),
    _modules("activation_mean", "a", "the mean of a module's output"),
    _modules("activation_std", "a", "the standard deviation of a module's output (divided by n)"),
    _modules("activation_near_zero", "0 to 1", "elements of a module's output with a magnitude below 1e-6"),
    _ranks("rank_norm", "‖g‖", "the norm of a rank's own gradient, before the reduction"),
    _ranks("rank_mismatch", "parameters", "reduced norms that are not those of the other ranks"),
    _step("total_norm", "‖g‖", "L2 norm of all gradients of the optimizer together", "sum of squares", True),
    _step("loss", "", "the value that backward was called on, or that was observed", "mean"),
    _step("lr", "", "learning rate of the first parameter group", "same on all"),
    _step("loss_scale", "", "the GradScaler's scale, which is divided out of everything else", "same on all"),
    _step("scaler_skip", "0 or 1", "the GradScaler rejected the step", "same on all"),
    _step(CONFIRMED_JUMP, "1", "the factor by which an earlier step jumped that has ruined weights", ""),
    _step(CONFIRMED_NORM, "‖g‖", "the total norm to which it jumped", ""),
)
"""Every column, in the order in which they are listed to users."""


def _of(of: Of) -> frozenset[str]:
    return frozenset(one.name for one in CATALOGUE if one.of == of)


def _grouped(grouped: Grouped) -> frozenset[str]:
    return frozenset(one.name for one in CATALOGUE if one.grouped == grouped)


SCALAR_COLUMNS = tuple(one.name for one in CATALOGUE if one.of == "step")
"""Columns with one value per step rather than one per site."""

MODULE_COLUMNS = _of("module")
"""Columns measured on tapped modules."""

RANK_COLUMNS = _of("rank")
"""Columns with one value per rank, on sites of kind "rank" (see `gradwatch.distributed.replica_divergence`)."""

COUNT_COLUMNS = frozenset({"nonfinite", "nan_count", "inf_count", "norm_overflow"})
"""Columns filled on suspicion only: when absent and the norms are finite, they are zero."""

ALWAYS = frozenset(one.name for one in CATALOGUE if one.always)
"""Columns that every step has, so that a rule on one of them is never without data."""

FREE_COLUMNS = ALWAYS - {"nan_count", "inf_count"} | frozenset(SCALAR_COLUMNS)
"""Columns that are always there, or come by themselves when a norm is suspicious: not to be asked for."""

COSTLY_COLUMNS = frozenset(
    one.name for one in CATALOGUE if one.measured in (_VALUES, _WEIGHTS) or one.name.startswith("activation_")
)
"""Columns that cost a read of whole tensors, and so are read at a cadence (`Rule.staggered`)."""

LARGEST, SMALLEST = _grouped("largest"), _grouped("smallest")
SUMMED, AVERAGED = _grouped("sum"), _grouped("mean")
UNGROUPED = _grouped("") - frozenset(SCALAR_COLUMNS) - RANK_COLUMNS
"""Columns of which no group or total is made: `scope: param` is all they can be judged by."""
