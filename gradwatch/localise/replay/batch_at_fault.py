"""The batch of the call at fault, by the hash of its tensors."""

from __future__ import annotations

from torch import nn

from gradwatch.localise.hold.batch_hash import fingerprint
from gradwatch.localise.hold.inner_model import inner
from gradwatch.localise.hold.module_attributes import Refused
from gradwatch.localise.hold.recorded_call import Call
from gradwatch.localise.replay.step_replay import refuse, within
from gradwatch.records.finding import Batch, Finding


def batch_at_fault(
    finding: Finding, calls: list[tuple[nn.Module, Call]], models: list[nn.Module]
) -> Batch | None:
    """The batch of the call at fault; None where that is not held, or it is not known which call it was."""
    if finding.batch is not None:
        return finding.batch
    held = [(model, call, within(inner(model), models)) for model, call in calls]
    at = finding.call if finding.by == "replay" and finding.found else len(held) - 1
    # Of a criterion the batch is that of the model's call before it.
    given = [(model, call) for model, call, watched in held[: at + 1] if watched]
    if not given or (len(given) > 1 and not (finding.by == "replay" and finding.found)):
        return None
    model, call = given[-1]
    try:
        refuse(inner(model), call)
    except Refused:  # what is held is no longer what went in
        return None
    return fingerprint(call.args, call.kwargs, call.indices)
