"""Reasons why a run in which no rule fired is not called healthy: too little was seen, or used, of it."""

from __future__ import annotations

from collections.abc import Mapping

from gradwatch.account import Account
from gradwatch.account.account_line import never_evaluated
from gradwatch.engine.baseline_restarts import WARMING_UP
from gradwatch.runtime.printable import plural

MOST_WARMING_UP = 0.1
"""Share of the rules that may still be learning at the end of a healthy run; those on slow changes learn long."""
FEWEST_UNUSED = 10
LEAST_UNUSED = 0.1
"""Gradients cleared after the last step, as a share of all: fewer are of an evaluation, or of the end of a loop."""


def reservations(account: Account, severities: Mapping[str, str]) -> list[str]:
    """These reasons as parts of a sentence; `severities` are those of the rules, by id."""
    found = []
    learning = [rule for rule, why in never_evaluated(account).items() if why.startswith(WARMING_UP)]
    critical = any(severities.get(rule) == "critical" for rule in learning)
    if critical or len(learning) > MOST_WARMING_UP * account.rules:
        found.append(f"{len(learning):,} of {plural(account.rules, 'rule')} had seen too few steps to judge")
    seen = account.watched
    if seen.cleared_last >= max(FEWEST_UNUSED, LEAST_UNUSED * (seen.steps + seen.cleared_last)):
        found.append(
            f"after the last step gradients were computed and cleared {seen.cleared_last:,} times, with no step taken"
        )
    return found
