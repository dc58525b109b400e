"""The cause in the loop's own code: the statements of the loss run again, where the models' calls do not show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from torch import nn

from gradwatch.localise.diagnosis.diagnose import from_culprit, from_origin, warned
from gradwatch.localise.hold.module_attributes import Refused
from gradwatch.localise.loss.constants import constant_origin
from gradwatch.localise.loss.loop_scope import LoopScope, scopes
from gradwatch.localise.loss.loss_rerun import Held, run_loss_again
from gradwatch.localise.replay.step_replay import Trace
from gradwatch.records.finding import Finding


def cause_in_loop(
    finding: Finding,
    known: Sequence[list[LoopScope]],
    models: Sequence[nn.Module],
    held: Held,
    failed: Callable[[BaseException], None],
    max_bytes: int,
) -> Finding:
    """A better Finding, or the same one with the reason why there is none.

    `known` are the loops at those backwards of this step whose loss was not finite.
    """
    why = ""
    for loop in chain(known, (scopes(exact=False),)):
        try:
            trace, scope = run_loss_again(loop, models, held, failed, max_bytes)
        except Refused as refusal:
            why = why or str(refusal)
            continue
        found = _cause(trace, scope, failed)
        if found is not None:
            return warned(found, [trace])
    if not why:
        return finding
    note = f"the loop's code was not run again: {why}"
    return finding.amended(note="; ".join(filter(None, (finding.note, note))))


def _cause(trace: Trace, scope: LoopScope, failed: Callable[[BaseException], None]) -> Finding | None:
    """The forward comes before the backward: a loss that is not finite has its cause there."""
    origin, note = trace.origin, ""
    if origin is None and trace.culprits:
        culprit = trace.culprits[0]
        origin = culprit.made
        if origin is None:
            return from_culprit(trace, "replay", 0)
        if origin.frames[:1] != culprit.frames[:1] or origin.op != culprit.op:
            note = f"the loss is finite; the backward of {culprit.op} multiplied what this left"
    if origin is None:
        return None
    read = origin if origin.external else origin.given
    kind, name = trace.sources.get(read.source, ("", "")) if read is not None and read.external else ("", "")
    if kind == "tensor":
        defined, name = constant_origin(scope, name, failed)
        if defined is not None and not defined.intended:
            return from_origin(defined, trace, "replay", 0).amended(note=f"`{name}` was computed there")
    found = from_origin(origin, trace, "replay", 0)
    return found.amended(note="; ".join(filter(None, (found.note, note))))
