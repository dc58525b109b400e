"""Causes in the loop's own code, of a step that a Localiser looks at: what runs it again is imported when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from gradwatch.localise.diagnosis.deviation import TWICE, Deviation
from gradwatch.localise.held_calls.nonfinite_losses import NonFiniteLosses
from gradwatch.localise.held_calls.recorded_call import Call
from gradwatch.records.finding import GAINS, Finding

Held = Sequence[tuple[nn.Module, Call]]
Whole = Mapping[int, Mapping[str, Tensor]]


class LoopCauses:
    """Runs loss code again where calls of the models do not show a cause. Never raises.

    `losses` are the backwards of this step whose loss was not finite, None where nothing is held. `failed` counts an
    internal error, `max_bytes` caps copies.
    """

    def __init__(
        self, losses: NonFiniteLosses | None, failed: Callable[[str, BaseException], None], max_bytes: int
    ) -> None:
        self._losses = losses
        self._failed = failed
        self._max_bytes = max_bytes

    def of_nonfinite(
        self, finding: Finding, models: Sequence[nn.Module], held: Held, whole: Whole
    ) -> Finding:
        """The operation that made a NaN or Inf; `whole` has parameters of sharded models, by the id of the model."""
        try:
            from gradwatch.localise.loss.loss_cause import cause_in_loop

            loops = [] if self._losses is None else [*self._losses.found, self._losses.at_step()]
            return cause_in_loop(finding, loops, models, held, self._fault, self._max_bytes, whole)
        except Exception as error:
            self._fault(error)
            return finding

    def of_multiplied(
        self, finding: Finding, models: Sequence[nn.Module], held: Held, whole: Whole, off: Deviation
    ) -> Finding:
        """The operation that made a finite gradient too large, where a backward in the loop did, and not the loss."""
        twice = finding.phase in GAINS and any(call.twice for _, call in held)
        if finding.phase == "exploding" and (finding.at_outputs or twice) and off.loss_is_as_usual:
            try:  # a loss that is too large has large gradients
                from gradwatch.localise.loss.loss_gain import multiplier_in_loop

                loops = [] if self._losses is None else [self._losses.at_step()]
                finding = multiplier_in_loop(
                    finding, loops, models, held, self._fault, self._max_bytes, whole, off.furthest
                )
            except Exception as error:
                self._fault(error)
        return finding.noted(TWICE) if twice and not finding.op else finding

    def written_at(self) -> str:
        """The lines of the loop between its last backward and here that write to gradients."""
        try:
            from gradwatch.localise.loss.lines_writing_gradients import written_at

            return written_at()
        except Exception as error:
            self._fault(error)
            return ""

    def _fault(self, error: BaseException) -> None:
        self._failed("localise", error)
