"""The operation of the loop's own code that multiplies a gradient which explodes: the loss run again, and measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from gradwatch.localise.diagnosis.multiplying_operation import naming, only_multiplier
from gradwatch.localise.loss.loop_scope import LoopAtBackward
from gradwatch.localise.loss.loss_cause import LossRuns
from gradwatch.localise.loss.loss_rerun import Whole
from gradwatch.localise.loss.model_calls import Held
from gradwatch.records.finding import Finding


def multiplier_in_loop(
    finding: Finding,
    loops: Sequence[LoopAtBackward],
    models: Sequence[nn.Module],
    held: Held,
    failed: Callable[[BaseException], None],
    max_bytes: int,
    whole: Whole,
    factor: float,
) -> Finding:
    """The finding with the operation of the loop at fault, or the same one with the reason why none is named.

    `factor` is by how much the gradients are off their usual levels.
    """
    runs = LossRuns(held, loops, models, failed, max_bytes, whole, measures=True)
    for trace, _, _ in runs:
        found = only_multiplier(trace.multipliers, factor, trace.came)
        return finding if found is None else naming(finding, found, (), factor)
    return finding.noted(runs.refusal)
