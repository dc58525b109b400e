"""A failed action: the gradients restored, and what the rule's `on_error` asks for in its place."""

from __future__ import annotations

from torch import Tensor

from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.records.decision import CLIP_SECTION, Decision, Order


def by_rule(decision: Decision) -> bool:
    """True if a rule has a part in this, and not only the file's own clip."""
    return any(not order.shadow and order.rule != CLIP_SECTION for order in decision.orders)


def put_aside(captured: OptimizerCapture) -> dict[int, Tensor]:
    """Copies of the gradients, by position, for `put_back`; none where there is no memory for them.

    To divide again would not restore the same bits. Only on the CPU, where what touches many gradients may stop
    halfway: a device is handed all of them in one launch.
    """
    try:
        return {k: grad.detach().clone() for k, grad in enumerate(captured.grads()) if grad is not None}
    except Exception:
        return {}


def put_back(captured: OptimizerCapture, aside: dict[int, Tensor]) -> bool:
    """Give the gradients their bits again; whether all of them have."""
    grads = captured.grads()
    if len(aside) != sum(grad is not None for grad in grads):
        return False
    try:
        for k, before in aside.items():
            grads[k].copy_(before)  # type: ignore[union-attr]  # there are no fewer than before
    except Exception:
        return False
    return True


def in_place_of(decision: Decision, max_norm: float | None) -> Decision:
    """Fallback for a Decision that was not carried out: nothing, a skip or a stop, as its rules ask.

    The file's own bound on the total, `max_norm`, holds all the same, unless it was that which failed.
    """
    instead = decision.on_error
    if instead == "pass":
        return Decision(max_norm=max_norm if by_rule(decision) else None)
    rules = {order.rule for order in decision.orders if not order.shadow}
    orders = frozenset(Order(rule, instead) for rule in rules)
    return Decision(skip=instead == "skip_step", stop=instead == "stop", orders=orders)
