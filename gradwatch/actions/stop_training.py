"""The action `stop`: `TrainingStopped` is raised at the step boundary, once all that is due of the step is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gradwatch.errors import TrainingStopped
from gradwatch.records.decision import Decision
from gradwatch.rules.rule_set import Rule


def stop_training(decision: Decision, step: int, rules: Callable[[], Iterable[Rule]] = tuple) -> None:
    """Raise `TrainingStopped` if a decision on this step says stop; `rules` gives those in force."""
    if decision.stop:
        raise TrainingStopped(f"gradwatch stopped training at step {step}: {_reason(decision, rules())}")


def _reason(decision: Decision, rules: Iterable[Rule]) -> str:
    stopping = sorted(
        {order.rule for order in decision.orders if order.action == "stop" and not order.shadow}
    )
    if not stopping:
        return "too many steps in a row were skipped"
    by_name = {rule.id: rule for rule in rules}
    said = [f"{name}{_condition(by_name[name]) if name in by_name else ''}" for name in stopping]
    return f"rule {', '.join(said)} says stop"


def _condition(rule: Rule) -> str:
    """The key of a rule by which it came to stop, in words; "" where its `do:` has stop itself."""
    if any(action.name == "stop" for action in rule.do):
        return ""
    found = []
    for action in rule.do:
        if action.name == "skip_step" and action.params.get("then") == "stop":
            found.append(f"{action.params['max_consecutive']} steps skipped in a row, then: stop")
        if action.name == "escalate" and action.params.get("to") == "stop":
            found.append(f"escalate: {action.params['after']}, to: stop")
    return f" ({' or '.join(found)})" if found else ""
