"""The recorded calls of a step run again, with parameters that ranks share put together, and the cause they show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from gradwatch.localise.diagnosis.diagnose import diagnose, warned
from gradwatch.localise.diagnosis.module_gain import Profile, suspect
from gradwatch.localise.hold.inner_model import inner
from gradwatch.localise.hold.module_attributes import Refused
from gradwatch.localise.hold.recorded_call import Call
from gradwatch.localise.replay.cause_among_ranks import RankAgreement
from gradwatch.localise.replay.fsdp2_all_gather import gather, is_spread, refuse_gathering
from gradwatch.localise.replay.step_replay import Trace, replay
from gradwatch.records.finding import Finding


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

    def nonfinite(self) -> Finding:
        """The operation that made the first NaN or Inf. Raises Refused."""
        return _unless_skipped(self._run(None))

    def growing(self, exploding: bool) -> Finding:
        """The module at which gradients grow, or vanish; a NaN before that. Raises Refused."""
        profile = Profile(self.models, self.fault)
        traces = self._run(profile)
        finding = diagnose(traces)
        found = None if finding.found else suspect(profile.layers(), exploding)
        return finding if found is None else warned(found, traces)

    def _run(self, profile: Profile | None) -> list[Trace]:
        whole = self._gathered()
        return replay(self.held, self.models, self.fault, profile, self.max_bytes, whole)

    def _gathered(self) -> dict[int, dict[str, Tensor]]:
        """The whole parameters of models that are spread over ranks, if all ranks can run their step again."""
        spread = [model for model in self.models if is_spread(model)]
        if not spread:
            self._check()
            return {}
        if self.agreement is None:
            raise Refused(
                "its parameters are sharded over ranks, and the ranks do not evaluate this step together"
            )
        refusal = ""
        try:
            self._check()
            if any(is_spread(model) and inner(model) not in spread for model, _ in self.held):
                raise Refused("the loop calls parts of a model that is sharded over ranks")
            refuse_gathering(spread)
        except Refused as refused:
            refusal = str(refused)
        self.agreement.agree(refusal)
        return {id(model): gather(model) for model in spread}

    def _check(self) -> None:
        if self.refusal:
            raise Refused(self.refusal)


def _unless_skipped(traces: list[Trace]) -> Finding:
    """The cause among the calls that were run again; raises Refused where only the others can hold it."""
    skipped = [trace.skipped for trace in traces if trace.skipped]
    finding = diagnose(traces)
    if skipped and not finding.found:
        raise Refused(skipped[0])
    if not skipped:
        return finding
    more = f"{len(skipped)} of {len(traces)} calls not run again: {skipped[0]}"
    return finding.amended(note="; ".join(filter(None, (finding.note, more))))
