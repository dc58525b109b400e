"""Columns by what they are measured on: the step, a module, a rank, else a parameter. Names alone, without numpy."""

from __future__ import annotations

CONFIRMED_JUMP, CONFIRMED_NORM = "confirmed_jump", "confirmed_norm"
"""Scalars of the step at which a look at the weights has confirmed that an earlier one ruined them: by which factor
the total norm of that one jumped, and to what."""

SCALAR_COLUMNS = ("loss", "lr", "loss_scale", "scaler_skip", "total_norm", CONFIRMED_JUMP, CONFIRMED_NORM)
"""Columns with one value per step rather than one per site."""

MODULE_COLUMNS = frozenset(
    {"grad_output_norm", "grad_input_norm", "activation_mean", "activation_std", "activation_near_zero"}
)
"""Columns measured on tapped modules; every other per-site column is measured on parameters."""

RANK_COLUMNS = frozenset({"rank_norm", "rank_mismatch"})
"""Columns with one value per rank, on sites of kind "rank" (see `gradwatch.distributed.replica_divergence`)."""
