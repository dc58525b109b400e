"""Names of alerts: one name per kind of trouble, the same from Prometheus and sent directly.

A rule file may hold any number of rules; people route, silence and look up runbooks by a handful of names. The
rule that fired is the label `rule`.
"""

from __future__ import annotations

from gradwatch.records.columns import RUNNING_STATISTICS, is_observed

FALLBACK = "GradwatchRuleFiring"
"""For kinds of third parties, and for thresholds on quantities that mean nothing in particular to gradwatch."""

_BY_KIND = {
    "nonfinite": "GradwatchNonFiniteGradients",
    "norm_overflow": "GradwatchNonFiniteGradients",
    "loss_nonfinite": "GradwatchLossAbnormal",
    "loss_spike": "GradwatchLossAbnormal",
    "diverged": "GradwatchLossAbnormal",
    "plateau": "GradwatchLossAbnormal",
    "scale_collapse": "GradwatchLossScale",
    "spike": "GradwatchExplodingGradients",
    "drift": "GradwatchExplodingGradients",
    "jump": "GradwatchExplodingGradients",
    "above_recent_max": "GradwatchExplodingGradients",
    "below_recent_min": "GradwatchVanishingGradients",
    "above_usual": "GradwatchExplodingGradients",
    "below_usual": "GradwatchVanishingGradients",
    "update_ratio": "GradwatchUpdateTooLarge",
    "lr_jump": "GradwatchUpdateTooLarge",
    "above": "GradwatchExplodingGradients",
    "below": "GradwatchVanishingGradients",
    "depth_ratio": "GradwatchVanishingGradients",
    "drop": "GradwatchVanishingGradients",
    "exploded": "GradwatchExplodingGradients",
    "fade": "GradwatchVanishingGradients",
    "rise": "GradwatchExplodingGradients",
    "dead": "GradwatchDeadParameters",
    "all_zero": "GradwatchDeadParameters",
    "stale": "GradwatchDeadParameters",
    "never": "GradwatchDeadParameters",
    "stuck": "GradwatchDeadParameters",
    "grown": "GradwatchExplodingGradients",
    "scaled": "GradwatchVanishingGradients",
    "same_batch": "GradwatchSameBatch",
    "rank_outlier": "GradwatchRanksDiverge",
    "rank_mismatch": "GradwatchRanksDiverge",
}
_OF_ANY_COLUMN = (
    "above",
    "below",
    "spike",
    "drift",
    "above_recent_max",
    "below_recent_min",
    "above_usual",
    "below_usual",
)
_BY_COLUMN = {
    "loss": "GradwatchLossAbnormal",
    "scaler_skip": "GradwatchLossScale",
    "loss_scale": "GradwatchLossScale",
    "update_ratio": "GradwatchUpdateTooLarge",
}
_NORMS = ("norm", "rms", "total_norm", "norm_local")

RULE_ALERTS = tuple(sorted({FALLBACK, *_BY_KIND.values(), *_BY_COLUMN.values()}))
"""Every name `alert_name` can give: each has a runbook."""


def alert_name(kind: str, of: str = "") -> str:
    """The name of the alert of a rule whose detector is `kind` and reads the column `of` ("" = not known)."""
    if is_observed(of) or of in RUNNING_STATISTICS:  # no runbook on gradients is about them
        return FALLBACK
    if kind in _OF_ANY_COLUMN:
        if of in _BY_COLUMN:
            return _BY_COLUMN[of]
        if of not in ("", *_NORMS):
            return FALLBACK
    return _BY_KIND.get(kind, FALLBACK)
