"""Filter of a decision: the actions permitted on this step, and the reason why others are not."""

from __future__ import annotations

from collections.abc import Callable

from gradwatch.errors import AttachError
from gradwatch.records.decision import Decision

OBSERVED = (
    "an action was not carried out: the optimizer steps inside backward, so the weights are updated before the "
    "rules are evaluated"
)
WITHOUT_OPTIMIZER = (
    "actions are not carried out here: no torch optimizer steps these weights, the script updates them itself"
)
SCALED = (
    "zero_nonfinite was not carried out under a GradScaler: it would hide the overflow that makes the scaler "
    "lower its scale; the scaler skips such steps by itself"
)
NOT_ALONE = (
    "an action was not carried out: the ranks did not agree on this step, and acting on one rank only would make "
    "the replicas diverge"
)


def permitted(
    decision: Decision,
    *,
    agreed: bool,
    empty: bool,
    inside_backward: bool,
    without_optimizer: bool = False,
    scaled: bool,
    report: Callable[[str, BaseException], None],
) -> Decision:
    """The part of a decision that is carried out; what is refused is reported as in `mode: shadow`.

    `agreed`: every rank decides the same. `empty`: the step has no gradient left, and is skipped. `inside_backward`:
    the optimizer steps there. `without_optimizer`: there is no torch optimizer. `scaled`: the gradients still carry a
    GradScaler's scale. `report` is called with a component and an error for each action that is refused.
    """
    if without_optimizer and decision.acts:  # first: the ranks of such a loop are not asked at all
        report("action", AttachError(WITHOUT_OPTIMIZER))
        decision = decision.shadowed()
    if not agreed and (decision.skip or decision.touches):
        report("action", AttachError(NOT_ALONE))
        decision = decision.shadowed()
    if empty and not without_optimizer:
        decision |= Decision(skip=True)
    if inside_backward and decision.acts:
        report("action", AttachError(OBSERVED))
        decision = decision.shadowed()
    if decision.zero is not None and scaled:
        report("action", AttachError(SCALED))
        decision = decision.without_zero()
    return decision
