"""Finding, the one sentence that is wanted, of what was seen of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradwatch.localise.replay.first_nonfinite_in_backward import Culprit
from gradwatch.localise.replay.first_nonfinite_in_forward import Origin
from gradwatch.localise.replay.step_replay import Trace
from gradwatch.records.finding import LOSS_SIDE as LOSS_SIDE_PHASES
from gradwatch.records.finding import By, Finding, Phase

LOSS_SIDE = (
    "the model's outputs are finite and the gradient that reached them is not: look at the code between the "
    "model's call and `backward()`"
)
INFINITE = (
    "the model's outputs hold infinities of {whence}, and the gradient that reached them is not finite: they are a "
    "mistake, or the code between the model's call and `backward()` does not leave them out"
)
UNNAMED = "that is no parameter, buffer or attribute of the model"
NOT_AGAIN = (
    "run again, the step gives finite gradients: they became non-finite after autograd (in a hook on a "
    "parameter, or in code between backward and step), or the step is not deterministic"
)
DERIVATIVE = (
    "the gradients are finite, also when the step is run again: the loss is not finite where its derivative is, as of "
    "a constant that was added to it, the log of a negative number, a clamp or an absolute value"
)
MAYBE = "the gradients are finite: the loss may leave out what is not finite here, and another cause have made it so"
DOUBLE = "this is a double backward: a backward made the operation, and its gradient was differentiated again"

STRAY = (
    "{stray} wrote in place into a tensor that is no parameter, buffer or attribute of the model: running the "
    "step again wrote to it a second time, which may have changed the training (make it a buffer, or use `by: "
    "record`)"
)


def diagnose(traces: Sequence[Trace], by: By = "replay") -> Finding:
    """The first cause among the calls of a step."""
    return warned(_cause(traces, by), traces)


def of_loss_alone(finding: Finding) -> Finding:
    """The Finding of a step whose gradients were finite from the start, and whose loss was not."""
    if finding.found and finding.phase not in LOSS_SIDE_PHASES:
        return finding.noted(MAYBE)
    return finding.amended(note=finding.note.replace(NOT_AGAIN, DERIVATIVE))


def warned(finding: Finding, traces: Sequence[Trace]) -> Finding:
    """The Finding, and whether looking for it wrote where the old values are not restored."""
    stray = next((trace.stray for trace in traces if trace.stray), "")
    if not stray:
        return finding
    return finding.noted(STRAY.format(stray=stray))


def _cause(traces: Sequence[Trace], by: By) -> Finding:
    """First cause in the order of the forward, then of the backward."""
    for number, trace in enumerate(traces):
        if trace.left_out:
            continue
        if trace.origin is not None and (trace.has_nan or not trace.incoming or _same_line(trace)):
            return from_origin(trace.origin, trace, by, number)
    for number, trace in reversed(list(enumerate(traces))):
        if trace.culprits:
            return from_culprit(trace, by, number)
    for number, trace in reversed(list(enumerate(traces))):
        if not trace.incoming:
            return _from_loss_side(trace, by, number)
        if trace.origin is not None:
            return from_origin(trace.origin, trace, by, number)
    return Finding("unknown", by, note=NOT_AGAIN)


def _same_line(trace: Trace) -> bool:
    """True if an infinite output comes from the line whose backward is at fault, and not from a harmless one."""
    origin, culprit = trace.origin, trace.culprits[0] if trace.culprits else None
    return origin is not None and culprit is not None and origin.frames[:1] == culprit.frames[:1]


def _from_loss_side(trace: Trace, by: By, number: int) -> Finding:
    """Finding of a gradient that came so to the outputs, which are finite, or infinite on purpose as it seems."""
    if trace.infinity is None:
        return Finding("loss", by, frames=trace.caller, result=trace.gradient, call=number, note=LOSS_SIDE)
    found = from_origin(trace.infinity, trace, by, number)
    note = INFINITE.format(whence=_whence(trace.infinity, trace))
    found = found.amended(phase="outputs", result=trace.gradient, note=note)
    if trace.infinity.external and not trace.infinity.number:
        # What read it first may have nothing to do with the outputs.
        return found.amended(op="", function="", module="", module_type="", frames=trace.caller)
    return found


def from_origin(origin: Origin, trace: Trace, by: By, number: int) -> Finding:
    """An operation of the forward, or the tensor that was not finite before it."""
    phase: Phase = "forward"
    note = ""
    if origin.number:
        phase = "number"
        if origin.given is not None:
            note = f"it may have been computed from that of {_place(origin.given)}, not finite before it"
    elif origin.external:
        phase, name = _source(origin, trace)
        note = f"the {phase} {name} was not finite before this operation read it"
        origin = replace(origin, operands=tuple(replace(one, name=name) for one in origin.operands))
    elif origin.given is not None:
        note = f"it was given an infinity of {_whence(origin.given, trace)}"
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


def _source(origin: Origin, trace: Trace) -> tuple[Phase, str]:
    """Kind and name of a tensor that was not finite before it was read."""
    kind, name = trace.sources.get(origin.source, ("tensor", UNNAMED))
    return kind, name  # type: ignore[return-value]


def _whence(origin: Origin, trace: Trace) -> str:
    """`a number given to full in Net at train.py:12`, `the buffer scale`."""
    if origin.number or not origin.external:
        return f"a number given to {_place(origin)}"
    return f"the {' '.join(_source(origin, trace))}"


def _place(origin: Origin) -> str:
    module, frame = origin.module[0], next(iter(origin.frames), None)
    said = f"{origin.op} in {module}" if module else origin.op
    return said if frame is None else f"{said} at {frame.where}"


def from_culprit(trace: Trace, by: By, number: int) -> Finding:
    """A node of the backward; inside a custom Function, the operation of its `backward`."""
    culprit: Culprit = trace.culprits[0]
    within = trace.inside
    note = ""
    if culprit.infinity is not None:
        note = f"what the forward left it is infinite, of {_whence(culprit.infinity, trace)}"
    if culprit.double:
        note = "; ".join(filter(None, (DOUBLE, note)))
    return Finding(
        "number" if culprit.number else "backward",
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
        note=note,
    )
