"""The cause in the loop's own code: the statements of the loss run again, where the models' calls do not show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import nn

from gradwatch.localise.diagnosis.diagnose import from_culprit, from_origin, warned
from gradwatch.localise.diagnosis.tensor_values import state, tensors
from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.held_calls.recorded_call import Call
from gradwatch.localise.loss.interpreter.effort_limits import Effort, TooMuchError
from gradwatch.localise.loss.loop_scope import LoopAtBackward, LoopScope
from gradwatch.localise.loss.loss_rerun import Whole, run_loss_again
from gradwatch.localise.loss.model_calls import Held
from gradwatch.localise.loss.nonfinite_constants import constant_origin
from gradwatch.localise.replay.first_nonfinite_in_backward import Culprit
from gradwatch.localise.replay.first_nonfinite_in_forward import Origin, key_of
from gradwatch.localise.replay.step_replay import Trace
from gradwatch.records.finding import Finding

COMPUTED = "what the loop computed of one module's outputs and gave to another was not finite"


def cause_in_loop(
    finding: Finding,
    loops: Sequence[LoopAtBackward],
    models: Sequence[nn.Module],
    held: Held,
    failed: Callable[[BaseException], None],
    max_bytes: int,
    whole: Whole,
) -> Finding:
    """A better Finding, or the same one with the reason why there is none.

    `loops` are those at the backwards of this step whose loss was not finite, and the one that takes the step. `whole`
    has the parameters of models that are sharded over ranks, by the id of the model.
    """
    runs = LossRuns(held, loops, models, failed, max_bytes, whole)
    for trace, scope, made in runs:
        found = _cause(trace, scope, failed, runs.effort)
        if found is not None:
            at_fault = _call_at_fault(trace, made)
            number = next(k for k, (_, call) in enumerate(held) if call is at_fault)
            return warned(found.amended(call=number), [trace])
    if finding.phase == "input" and _is_computed(finding, held):
        finding = Finding("unknown", "replay", frames=finding.frames, note=COMPUTED)
    return finding.noted(runs.refusal)


def _is_at(origin: Origin, culprit: Culprit) -> bool:
    """True if both are of the same operation on the same line."""
    return origin.frames[:1] == culprit.frames[:1] and origin.op == culprit.op


def _call_at_fault(trace: Trace, made: Sequence[Call]) -> Call:
    """The call that was given what is not finite, else the first that a gradient came back to which is not."""
    origin = trace.origin
    if origin is not None and origin.external:
        for call in made:
            if any(key_of(one) == origin.source for one in tensors((call.args, call.kwargs))):
                return call
    broken = (call for call in made if any(not state(one).finite for one in call.gradients.values()))
    return next(broken, made[0])


def _is_computed(finding: Finding, held: Held) -> bool:
    """True if what the call at fault was given came of another call: no batch holds it."""
    call = held[finding.call][1] if finding.call < len(held) else None
    if call is None or not call.computed:
        return False
    given = tensors((call.args, call.kwargs))
    return any(id(one) in call.computed and not state(one).finite for one in given)


class LossRuns:
    """The loss code of a step run again, for each way in which calls of models may have led to its backwards.

    Each gives the trace, the function with the loss in it, and the calls of models. `measures`: look at by how much
    each node of the backward multiplies. `refusal`, once all were run, is why some was not; "" where there is none.
    """

    def __init__(
        self,
        held: Held,
        loops: Sequence[LoopAtBackward],
        models: Sequence[nn.Module],
        failed: Callable[[BaseException], None],
        max_bytes: int,
        whole: Whole,
        measures: bool = False,
    ) -> None:
        self.effort = Effort()
        self.refusal = ""
        self._tried = _tried(held, loops)
        self._run = partial(
            run_loss_again, models=models, failed=failed, max_bytes=max_bytes, whole=whole, measures=measures
        )

    def __iter__(self) -> Iterator[tuple[Trace, LoopScope, Sequence[Call]]]:
        why = ""
        for calls, functions in self._tried:
            try:
                found = self._run(functions, held=calls, effort=self.effort)
            except TooMuchError as refusal:  # so would the others
                why = str(refusal)
                break
            except Refused as refusal:
                why = why or str(refusal)
                continue
            yield found
        self.refusal = f"the loop's code was not run again: {why}" if why else ""


def _tried(held: Held, loops: Sequence[LoopAtBackward]) -> Iterator[tuple[Held, list[LoopScope]]]:
    """The calls that may have led to each of the backwards, and the functions under way at it.

    First without those of micro-batches before it, which earlier backwards have reached: so has `autograd.grad`, for a
    gradient penalty, that is part of the loss.
    """
    for loop in loops:
        made = [(model, call) for model, call in held if call.order < loop.before]
        newest = max(made[-1][1].tasks, default=0) if made else 0
        latest = [(model, call) for model, call in made if max(call.tasks, default=0) >= newest]
        yield latest, loop.scopes
        if len(latest) < len(made):
            yield made, loop.scopes


def _cause(
    trace: Trace, scope: LoopScope, failed: Callable[[BaseException], None], effort: Effort
) -> Finding | None:
    """Cause, looked for in the forward first: a loss that is not finite has its cause there."""
    origin, note = trace.origin, ""
    if origin is None and trace.culprits:
        culprit = trace.culprits[0]
        infinite = culprit.infinity if trace.infinity is not None else None
        before = None if infinite is None else _computed_before(infinite, trace, scope, failed, effort)
        if before is not None:
            return before
        if infinite is not None and _is_at(infinite, culprit):
            infinite = None  # the culprit says it all
        origin = culprit.made or infinite
        if origin is None:
            return from_culprit(trace, "replay", 0)
        if not _is_at(origin, culprit):
            loss = "infinite" if trace.infinity is not None else "finite"
            note = f"the loss is {loss}; the backward of {culprit.op} multiplied what this left"
    if origin is None:
        return None
    before = _computed_before(origin, trace, scope, failed, effort)
    if before is not None:
        return before
    return from_origin(origin, trace, "replay", 0).noted(note)


def _computed_before(
    origin: Origin, trace: Trace, scope: LoopScope, failed: Callable[[BaseException], None], effort: Effort
) -> Finding | None:
    """The operation that made a tensor of the loop not finite, which no gradient flows to; None where none is known."""
    read = origin if origin.external else origin.given
    kind, name = trace.sources.get(read.source, ("", "")) if read is not None and read.external else ("", "")
    if kind != "tensor":
        return None
    defined, name = constant_origin(scope, name, failed, effort)
    if defined is None or defined.intended:
        return None
    return from_origin(defined, trace, "replay", 0).amended(note=f"`{name}` was computed there")
