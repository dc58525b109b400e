"""Rules that never had data: what they read never came, so that their silence says nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping

NEVER_CAME = {
    "loss": "no loss was observed",
    "loss_scale": "no GradScaler was seen",
    "scaler_skip": "no GradScaler was seen",
    "norm_local": "needs several ranks",
}


def unfed(reads: Mapping[str, str], came: Collection[str], judged: int) -> dict[str, str]:
    """Why a rule was never evaluated, by rule, of those that `reads` names with the column each reads.

    `came` are the columns that were measured at least once; `judged` how many steps rules could judge. Before the
    first of them nothing is said.
    """
    return {rule: _why(column) for rule, column in reads.items() if column not in came} if judged else {}


def _why(column: str) -> str:
    return NEVER_CAME.get(column, f"{column.partition(':')[0]} was never measured")
