"""The batch of the call at fault, by the hash of its tensors, and which of its rows are at fault."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradwatch.localise.diagnosis.tensor_values import readable, tensors
from gradwatch.localise.hold.batch_hash import fingerprint
from gradwatch.localise.hold.inner_model import inner
from gradwatch.localise.hold.module_attributes import Refused
from gradwatch.localise.hold.recorded_call import Call
from gradwatch.localise.replay.step_replay import refuse, within
from gradwatch.reading.layouts import dense
from gradwatch.records.finding import Batch, Finding


def batch_at_fault(
    finding: Finding, calls: list[tuple[nn.Module, Call]], models: list[nn.Module]
) -> Batch | None:
    """The batch of the call at fault; None where that is not held, or it is not known which call it was."""
    if finding.batch is not None:
        return finding.batch
    call = _call_at_fault(finding, calls, models)
    return None if call is None else fingerprint(call.args, call.kwargs, call.indices)


def samples_at_fault(
    finding: Finding, calls: list[tuple[nn.Module, Call]], models: list[nn.Module]
) -> tuple[int, ...]:
    """The rows of that batch which carry what is not finite: in what went in, else in the gradients that came back.

    () where all rows do, as where the loss is NaN, or none.
    """
    call = _call_at_fault(finding, calls, models)
    if call is None:
        return ()
    given = [one for one in tensors((call.args, call.kwargs)) if one.dim()]
    size = given[0].shape[0] if given else 0
    if not size or (call.indices is not None and len(call.indices) != size):
        return ()
    data = [one for one in given if id(one) not in call.computed]
    for looked_at in (data, list(call.gradients.values())):
        rows = _rows([one for one in looked_at if one.dim() and one.shape[0] == size], size)
        if rows:
            return rows
    return ()


@torch.no_grad()
def _rows(of: list[Tensor], size: int) -> tuple[int, ...]:
    broken = torch.zeros(size, dtype=torch.bool)
    for tensor in filter(readable, of):
        broken |= ~torch.isfinite(dense(tensor)).reshape(size, -1).all(1).cpu()
    found = broken.nonzero().flatten().tolist()
    return tuple(found) if len(found) < size else ()


def _call_at_fault(
    finding: Finding, calls: list[tuple[nn.Module, Call]], models: list[nn.Module]
) -> Call | None:
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
    return call
