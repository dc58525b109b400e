"""From what was seen of a step to the one sentence that is wanted: the Finding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradwatch.localise.replay.backward_nodes import Culprit
from gradwatch.localise.replay.forward_operations import Origin
from gradwatch.localise.replay.step_replay import Trace
from gradwatch.records.finding import By, Finding, Phase

LOSS_SIDE = (
    "the model's outputs are finite and the gradient that reached them is not: look at the code between the "
    "model's call and `backward()`"
)
NOT_AGAIN = (
    "run again, the step gives finite gradients: they became non-finite after autograd (in a hook on a "
    "parameter, or in code between backward and step), or the step is not deterministic"
)


STRAY = (
    "{stray} wrote in place into a tensor that is no parameter, buffer or attribute of the model: running the "
    "step again wrote to it a second time, which may have changed the training (make it a buffer, or use `by: "
    "record`)"
)


def diagnose(traces: Sequence[Trace], by: By = "replay") -> Finding:
    """The first cause among the calls of a step."""
    return warned(_cause(traces, by), traces)


def warned(finding: Finding, traces: Sequence[Trace]) -> Finding:
    """The Finding, and whether looking for it wrote where the old values are not restored."""
    stray = next((trace.stray for trace in traces if trace.stray), "")
    if not stray:
        return finding
    return finding.noted(STRAY.format(stray=stray))


def _cause(traces: Sequence[Trace], by: By) -> Finding:
    """In the order of the forward, then of the backward."""
    for number, trace in enumerate(traces):
        if trace.origin is not None and (trace.has_nan or not trace.incoming or _same_line(trace)):
            return from_origin(trace.origin, trace, by, number)
    for number, trace in reversed(list(enumerate(traces))):
        if trace.culprits:
            return from_culprit(trace, by, number)
    for number, trace in reversed(list(enumerate(traces))):
        if not trace.incoming:
            return Finding(
                "loss",
                by,
                frames=trace.caller,
                result=trace.gradient,
                call=number,
                note=LOSS_SIDE,
            )
        if trace.origin is not None:
            return from_origin(trace.origin, trace, by, number)
    return Finding("unknown", by, note=NOT_AGAIN)


def _same_line(trace: Trace) -> bool:
    """True if an infinite output comes from the line whose backward is at fault, and not from a harmless one."""
    origin, culprit = trace.origin, trace.culprits[0] if trace.culprits else None
    return origin is not None and culprit is not None and origin.frames[:1] == culprit.frames[:1]


def from_origin(origin: Origin, trace: Trace, by: By, number: int) -> Finding:
    """An operation of the forward, or the tensor that was not finite before it."""
    phase: Phase = "forward"
    note = ""
    if origin.external:
        kind, name = trace.sources.get(origin.source, ("forward", ""))
        if kind not in ("parameter", "buffer", "input", "tensor"):
            kind, name = "tensor", "made outside the model's forward"
        phase = kind  # type: ignore[assignment]
        note = f"{kind} {name} was not finite before this operation read it"
        origin = replace(origin, operands=tuple(replace(one, name=name) for one in origin.operands))
    return Finding(
        phase,
        by,
        module=origin.module[0],
        module_type=origin.module[1],
        op=origin.op,
        function=origin.function,
        frames=(*origin.frames, *trace.caller),
        operands=origin.operands,
        result=origin.result,
        call=number,
        note=note,
    )


def from_culprit(trace: Trace, by: By, number: int) -> Finding:
    """A node of the backward; inside a custom Function, the operation of its `backward`."""
    culprit: Culprit = trace.culprits[0]
    within = trace.inside
    return Finding(
        "backward",
        by,
        module=culprit.module[0],
        module_type=culprit.module[1],
        op=culprit.op if within is None else within.op,
        node=culprit.node,
        function=culprit.function if within is None else within.function,
        frames=(*(within.frames if within else ()), *culprit.frames, *trace.caller),
        operands=culprit.operands if within is None else within.operands,
        result=culprit.result,
        call=number,
        others=len(trace.culprits) - 1,
    )
