"""The batch of the call at fault, by the hash of its tensors, and which of its rows are at fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gradwatch.localise.diagnosis.tensor_values import readable, tensors
from gradwatch.localise.held_calls.batch_identity import count_of, fingerprint
from gradwatch.localise.held_calls.inner_model import inner
from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.held_calls.recorded_call import Call
from gradwatch.localise.replay.rows_with_large_gradients import RowsMixed
from gradwatch.localise.replay.step_replay import CallListener, refuse, within
from gradwatch.reading.layouts import dense
from gradwatch.records.finding import GAINS, Batch, Finding
from gradwatch.runtime.interruption import not_ours


def nonfinite_rows(
    finding: Finding, calls: list[tuple[nn.Module, Call]], models: list[nn.Module]
) -> Batch | None:
    """The batch of the call at fault; None where that is not held, or it is not known which call it was."""
    if finding.batch is not None:
        return finding.batch
    at_fault = _call_at_fault(finding, calls, models)
    if at_fault is None:
        return None
    call = at_fault[1]
    return fingerprint(call.args, call.kwargs, call.indices)


def with_samples_at_fault(
    finding: Finding,
    calls: list[tuple[nn.Module, Call]],
    models: list[nn.Module],
    again: Callable[[nn.Module, Call, CallListener], None] | None,
) -> Finding:
    """Finding with the rows of the batch at fault: of the gradients that came back, and of an input its own too.

    Not where all rows are, as where the loss is NaN, or none. An input is asked only where it is the cause: a mask of
    -inf is none. Where its rows and those of the gradients differ, its first dimension is not that of the samples; nor
    is it where other rows of the batch lead to a row of the outputs: `again` runs the call for that (None = it cannot).
    """
    at_fault = _call_at_fault(finding, calls, models)
    size = 0 if at_fault is None else batch_size(at_fault[1])
    if at_fault is None or not size:
        return finding
    model, call = at_fault
    rows = _rows_at_fault(finding, call, size)
    if not rows or again is None:
        return finding.amended(samples=rows)
    mixed = RowsMixed(call, size, rows)
    try:
        again(model, call, mixed)
    except Exception as error:
        if not_ours(error):
            raise
        return finding.noted(
            f"which rows of the batch are at fault is not known: {type(error).__name__}: {error}"
        )
    return finding if mixed.found else finding.amended(samples=rows)


def _rows_at_fault(finding: Finding, call: Call, size: int) -> tuple[int, ...]:
    returned = [one for one in call.gradients.values() if one.dim()]
    came_back = _rows(returned, size, (_nonfinite,))
    if finding.phase != "input":
        return came_back
    if returned and not any(one.shape[0] == size for one in returned):
        return ()
    data = [one for one in tensors((call.args, call.kwargs)) if id(one) not in call.computed]
    went_in = _rows(data, size, (torch.isnan, torch.isinf))
    return went_in if not came_back or came_back == went_in else ()


def batch_size(call: Call) -> int:
    """The rows of what the model was given; 0 where it has none, or not as many as the samples it is said to hold."""
    given = [one for one in tensors((call.args, call.kwargs)) if one.dim()]
    size = given[0].shape[0] if given else 0
    return size if call.indices is None or count_of(call.indices) == size else 0


def _nonfinite(tensor: Tensor) -> Tensor:
    """NaN or Inf, number by number."""
    return ~torch.isfinite(tensor)


@torch.no_grad()
def _rows(of: list[Tensor], size: int, kinds: Sequence[Callable[[Tensor], Tensor]]) -> tuple[int, ...]:
    """Rows with numbers of the first of these kinds that there is; () for all of them."""
    numbers = [dense(one) for one in filter(readable, of) if one.dim() and one.shape[0] == size]
    for kind in kinds:
        broken = torch.zeros(size, dtype=torch.bool, device="cpu")
        for tensor in numbers:
            broken |= kind(tensor).reshape(size, -1).any(1).cpu()
        found = broken.nonzero().flatten().tolist()
        if found:
            return tuple(found) if len(found) < size else ()
    return ()


def _call_at_fault(
    finding: Finding, calls: list[tuple[nn.Module, Call]], models: list[nn.Module]
) -> tuple[nn.Module, Call] | None:
    held = [(model, call, within(inner(model), models)) for model, call in calls]
    known = finding.by == "replay" and finding.found and (finding.share > 0 or finding.phase not in GAINS)
    at = finding.call if known else len(held) - 1
    # Of a criterion the batch is that of the model's call before it.
    given = [(model, call) for model, call, watched in held[: at + 1] if watched]
    if not given or (len(given) > 1 and not known):
        return None
    model, call = given[-1]
    try:
        refuse(inner(model), call)
    except Refused:  # what is held is no longer what went in
        return None
    return model, call
