"""The action `stop`: `TrainingStopped` is raised at the step boundary, once all that is due of the step is done."""

from __future__ import annotations

from gradwatch.errors import TrainingStopped
from gradwatch.records.decision import Decision


def stop_training(decision: Decision, step: int) -> None:
    """Raise `TrainingStopped` if a decision on this step says stop."""
    if decision.stop:
        raise TrainingStopped(f"gradwatch stopped training at step {step}: {_reason(decision)}")


def _reason(decision: Decision) -> str:
    rules = sorted({order.rule for order in decision.orders if order.action == "stop" and not order.shadow})
    return f"rule {', '.join(rules)} says stop" if rules else "too many steps in a row were skipped"
