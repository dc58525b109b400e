"""The recorded calls of a step run again, with parameters that ranks share put together, and the cause they show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from gradwatch.distributed.process_group import place
from gradwatch.localise.diagnosis.deviation import Deviation
from gradwatch.localise.diagnosis.diagnose import diagnose, warned
from gradwatch.localise.diagnosis.module_gain import Profile
from gradwatch.localise.diagnosis.multiplying_operation import with_operation
from gradwatch.localise.diagnosis.tensor_values import tensors
from gradwatch.localise.diagnosis.usual_layer_norms import suspect
from gradwatch.localise.held_calls.inner_model import inner
from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.held_calls.recorded_call import Call
from gradwatch.localise.replay.cause_among_ranks import RankAgreement
from gradwatch.localise.replay.nonfinite_rows import batch_size
from gradwatch.localise.replay.reproducibility import (
    COMPILED,
    NOT_KNOWN,
    SHARDED,
    Outputs,
    Reproduction,
    WithOutputs,
    of_one_run,
)
from gradwatch.localise.replay.rows_with_large_gradients import (
    CARRIED,
    OF_FEW,
    STANDS_OUT,
    Directions,
    PartsOfCalls,
    RowsOfCall,
)
from gradwatch.localise.replay.step_replay import CallListener, Trace, replay
from gradwatch.localise.sharded.whole_parameters import (
    are_spread,
    computes_apart,
    gather,
    gather_gradients,
    gradients_to_gather,
    is_spread,
    refuse_gathering,
)
from gradwatch.records.finding import GAINS, Finding
from gradwatch.runtime.interruption import not_ours
from gradwatch.taps.dynamo import anything_compiled

NO_GAIN = "no gradient passed through a module, so it is not known by how much any multiplies it"


@dataclass(frozen=True, slots=True)
class DiagnosedReplay:
    """Runs the calls of one step again; `refusal` is why they cannot be ("" = they can).

    `agreement`: the ranks, where all of them localise this step; `fault` counts an internal error.
    """

    models: list[nn.Module]
    held: list[tuple[nn.Module, Call]]
    refusal: str
    agreement: RankAgreement | None
    fault: Callable[[BaseException], None]
    max_bytes: int
    whole: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    """The parameters of models that are sharded over ranks, once gathered, by the id of the model."""

    def nonfinite(self) -> Finding:
        """The operation that made the first NaN or Inf, or an output that is irreproducible. Raises Refused."""
        outputs = Outputs()
        self._gather()
        traces = self._run(None, outputs)
        return self._reproduced(_unless_skipped(traces), outputs, traces)

    def growing(self, exploding: bool, off: Deviation) -> tuple[Finding, float | None]:
        """The module at which gradients grow, or vanish; a NaN before that. Raises Refused.

        No place is told where a gradient is differentiated again, which comes to layers past the model's outputs. Where
        they explode also the operation, if one alone explains it, the rows of the batch that carry them, and how
        much of the gradient this rank's calls made (`PartsOfCalls`), None where that is not known.
        """
        profile, parts = Profile(self.models, self.fault), None
        gradients = self._gather(gradients=exploding)
        if gradients is not None:
            parts = PartsOfCalls(Directions(gradients))
        outputs = Outputs() if parts is None else WithOutputs(parts)
        traces = self._run(profile, outputs, measures=True)
        if any(call.twice for _, call in self.held):
            finding = Finding("exploding" if exploding else "vanishing", "replay")
        else:
            finding = diagnosed_gain(traces, profile, exploding, off)
        finding = _noting_skipped(finding, traces)
        finding = self._reproduced(finding, outputs, traces)
        unsure = finding.phase not in GAINS and finding.found
        if parts is None or unsure or not parts.directions.usable or any(trace.skipped for trace in traces):
            return finding, None
        return self._carried(finding, parts), parts.whole

    def _reproduced(self, finding: Finding, outputs: Outputs, traces: list[Trace]) -> Finding:
        """The finding, and whether the step comes again, or why that is not known."""
        if anything_compiled():
            return of_one_run(finding, outputs, COMPILED)
        if any(map(computes_apart, self.models)) and not outputs.alike:
            raise Refused("run again on whole parameters, its outputs are others, or they were not kept")
        if any(map(is_spread, self.models)):
            return of_one_run(finding, outputs, SHARDED)
        stray = next((trace.stray for trace in traces if trace.stray), "")
        try:
            return Reproduction(outputs, self.models, self.held, self._once_more, stray).of(finding)
        except Exception as error:
            if not_ours(error):
                raise
            return finding.noted(NOT_KNOWN.format(why=f"{type(error).__name__}: {error}"))

    def _once_more(self, listener: CallListener) -> None:
        replay(self.held, self.models, self.fault, None, self.max_bytes, None, listener)

    def _carried(self, finding: Finding, parts: PartsOfCalls) -> Finding:
        """The finding with the call that carries the gradient, and the rows of its batch, where they are few."""
        if parts.whole <= 0:
            return finding
        calls = parts.carriers([call for _, call in self.held])
        numbers = [n for n, (_, call) in enumerate(self.held) if call in calls]
        if not self._are_of_one_batch(numbers) or not parts.are_whole(calls):
            return finding
        share = sum(map(parts.of, calls)) / parts.whole
        finding = finding.amended(phase="exploding", call=numbers[0], share=share)
        size, total = batch_size(calls[0]), self._rows()
        if not size or total < 2:
            return finding
        times = max(STANDS_OUT, OF_FEW * len(calls) / total)
        others = parts.largest_but(calls)
        try:
            rows = [
                self._rows_of(
                    n, RowsOfCall(parts.directions, call, size, parts.of(call) / share, others, times)
                )
                for n, call in zip(numbers, calls, strict=True)
            ]
        except Exception as error:  # such as of a graph that cannot be gone through twice
            if not_ours(error):
                raise
            note = f"which rows of the batch carry the gradient is not known: {type(error).__name__}: {error}"
            return finding.noted(note)
        part, length = sum(one.part for one in rows), math.hypot(*(one.length for one in rows))
        alike = all(one.rows == rows[0].rows for one in rows)
        if (
            not alike
            or not rows[0].rows
            or part < CARRIED * max(parts.whole, length * parts.directions.length)
        ):
            return finding
        return finding.amended(samples=rows[0].rows, share=part / parts.whole)

    def _are_of_one_batch(self, numbers: list[int]) -> bool:
        """True for one call, and for those of several models (an encoder, a decoder) on the same samples."""
        calls, models = [self.held[n][1] for n in numbers], {id(inner(self.held[n][0])) for n in numbers}
        sizes, indices = {batch_size(one) for one in calls}, {id(one.indices) for one in calls}
        return len(calls) == 1 or (len(models) == len(calls) and len(sizes) == len(indices) == 1)

    def _rows_of(self, number: int, rows: RowsOfCall) -> RowsOfCall:
        """Run a call once more, to divide its gradient."""
        running = any(call.buffers for _, call in self.held)  # which the calls before it have changed
        again = self.held[0 if running else number : number + 1]
        replay(again, self.models, self.fault, None, self.max_bytes, self.whole, rows)
        return rows

    def _rows(self) -> int:
        """The rows of all calls on this rank; 0 where other ranks made some of the gradient, and cannot be asked."""
        alone = place()[1] == 1 or self.agreement is not None
        return sum(batch_size(call) for _, call in self.held) if alone else 0

    def _run(
        self, profile: Profile | None, listener: CallListener | None = None, measures: bool = False
    ) -> list[Trace]:
        return replay(
            self.held, self.models, self.fault, profile, self.max_bytes, self.whole, listener, measures
        )

    def _gather(self, gradients: bool = False) -> list[tuple[Tensor, Tensor]] | None:
        """Gather the parameters of models that are spread over ranks, if all ranks can run their step again.

        With `gradients` (parameter, gradient) of all models, whole; None without, or where they cannot be had on every
        rank. Raises Refused.
        """
        spread = [model for model in self.models if is_spread(model)]
        held = [model for model in self.models if model not in spread] if gradients else []
        params = [param for model in held for param in model.parameters()]
        found: list[tuple[Tensor, Tensor]] = [(one, one.grad) for one in params if one.grad is not None]
        if not spread:
            self._check()
            return found if gradients else None
        if self.agreement is None:
            raise Refused(
                "its parameters are sharded over ranks, and the ranks do not evaluate this step together"
            )
        refusal = ""
        try:
            self._check()
            if any(is_spread(model) and inner(model) not in spread for model, _ in self.held):
                raise Refused("the loop calls parts of a model that is sharded over ranks")
            given = (one for _, call in self.held for one in (call.args, call.kwargs, call.gradients))
            if any(are_spread(tensors(one)) for one in given):
                raise Refused("its inputs or its outputs are DTensors")
            refuse_gathering(spread)
        except Refused as refused:
            refusal = str(refused)
        whole = [*map(gradients_to_gather, spread)] if gradients and not refusal else []
        alike = self.agreement.agree(refusal, whole)
        self.whole.update((id(model), gather(model)) for model in spread)
        if not (alike and whole and all(whole)):
            return None
        for model in spread:
            own = self.whole[id(model)]
            found += [(own[name], grad) for name, grad in gather_gradients(model).items()]
        return found

    def _check(self) -> None:
        if self.refusal:
            raise Refused(self.refusal)


def diagnosed_gain(traces: list[Trace], profile: Profile, exploding: bool, off: Deviation) -> Finding:
    """The module at which gradients grow, or vanish; a NaN before that."""
    finding = diagnose(traces)
    if finding.found:
        return finding
    layers = profile.layers()
    found = suspect(layers, exploding, off.norms)
    if found is None:
        return Finding("unknown", "replay", note=NO_GAIN)
    return warned(with_operation(found, layers, traces, off), traces)


def _unless_skipped(traces: list[Trace]) -> Finding:
    """The cause among the calls that were run again; raises Refused where only the others can hold it."""
    skipped = next((trace.skipped for trace in traces if trace.skipped), "")
    finding = diagnose(traces)
    if skipped and not finding.found:
        raise Refused(skipped)
    return _noting_skipped(finding, traces)


def _noting_skipped(finding: Finding, traces: list[Trace]) -> Finding:
    """The finding with a note of the calls that were not run again, if there are any."""
    skipped = [trace.skipped for trace in traces if trace.skipped]
    if not skipped:
        return finding
    more = f"{len(skipped)} of {len(traces)} calls not run again: {skipped[0]}"
    return finding.amended(note="; ".join(filter(None, (finding.note, more))))
