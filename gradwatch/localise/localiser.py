"""Findings made of orders: by replay if the step can be run again, else by recording the next steps.

What runs a step again and finds its cause is imported when a cause is asked for: a healthy run has none.

The composition root makes one of these where a rule may order `localise`, asks `localise` at the boundary,
before the optimizer steps, and takes what recording came to from `recorded`.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.localise.diagnosis.deviation import Deviation
from gradwatch.localise.held_calls.calls_before_attach import PreAttachRecorder
from gradwatch.localise.held_calls.inner_model import inner
from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.held_calls.nonfinite_losses import NonFiniteLosses
from gradwatch.localise.held_calls.recorded_call import Call
from gradwatch.localise.held_calls.step_recorder import StepRecorder
from gradwatch.localise.loss.loop_causes import LoopCauses
from gradwatch.localise.sharded.whole_parameters import is_spread
from gradwatch.reading.training_threads import several_at_work
from gradwatch.records.finding import GAINS, LOSS_SIDE, Finding
from gradwatch.runtime.interruption import not_ours
from gradwatch.taps import backward_end, step_hooks

if TYPE_CHECKING:
    from gradwatch.localise.replay.cause_among_ranks import RankAgreement
    from gradwatch.localise.replay.closure_replay import ReplayableClosure
    from gradwatch.localise.replay.live_recording import Live
    from gradwatch.localise.replay.step_replay import CallListener
    from gradwatch.localise.replay.torch_anomaly_detection import Raising

Suspicion = Literal["nonfinite", "exploding", "vanishing"]
Way = Literal["replay", "record", "detect_anomaly"]
LEFT_BEHIND = ("parameter", "buffer")
OWN_DOING = "{note}; that was a later step: this incident may itself have made it so"
IN_LOOP = ("unknown", *LOSS_SIDE, "input")
"""Where what the calls of the models show may have begun in the loop itself."""
TRIES = 3  # localisations of one incident that found nothing, before it is left alone
NOT_AGAIN = f"not searched again in this incident: {TRIES} searches have found nothing"
NOT_SEARCHED = "not searched: {why}"
NOT_KEPT = "{count} earlier micro-batches were not kept (max_bytes)"
NOT_SEEN = "no call of the model, as `model(...)`, was seen whose outputs got a gradient since the last step"


@dataclass(frozen=True, slots=True)
class Ask:
    """The order of a rule: the `way`, and how many steps to record where a replay is refused or finds nothing.

    `suspicion` is what the rule fired for: of gradients that are finite the profile by depth is looked at, and by how
    much the step is `off` its usual levels.
    `after_backward`: gradients that are not finite were when the backward had ended. `of_loss`: the loss is not finite,
    and the gradients are.
    """

    way: Way = "replay"
    record_steps: int = 2
    rule: str = ""
    incident: str = ""
    step: int = 0
    first_parameter: str = ""
    suspicion: Suspicion = "nonfinite"
    off: Deviation = field(default_factory=Deviation)
    after_backward: bool = False
    of_loss: bool = False


class Localiser:
    """Holds the calls of `models` from step to step, and localises when asked.

    `owns` says whether an optimizer is watched, `failed` counts an internal error, `max_bytes` caps what is held
    per model. `hold` False: no rule replays, so nothing is held.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        owns: Callable[[Optimizer], bool],
        failed: Callable[[str, BaseException], None],
        *,
        max_bytes: int,
        hold: bool = True,
        rank: int = 0,
    ) -> None:
        self._owns = owns
        self._failed = failed
        self._max_bytes = max_bytes
        self.records = hold
        self._rank = rank
        self._models: list[weakref.ref[nn.Module]] = []
        self._recordings = StepRecorder(failed, max_bytes)
        self._losses = NonFiniteLosses(failed) if hold else None
        self._loop = LoopCauses(self._losses, failed, max_bytes)
        self._live: list[Live | Raising] = []  # the recording of coming steps, if there is one
        self._ask = Ask()
        self._recorded: list[tuple[int, Finding]] = []  # steps taken when the recording ended
        self._closure: ReplayableClosure | None = None
        self._made: float | None = (
            None  # of the gradient, by the calls of this rank (`DiagnosedReplay.growing`)
        )
        self._last: tuple[int, Finding] | None = None
        self._incidents: dict[str, int] = {}
        self._agreement: RankAgreement | None = None
        # Parameters of models that are sharded over ranks, by the id of the model, while a cause is sought.
        self._whole: dict[int, Mapping[str, Tensor]] = {}
        self.add(models)
        self._removes = [
            step_hooks.listen(after=self._recordings.step_taken),
            step_hooks.listen(self._before_step, self._after_step, only_if=self._live),
        ]

    def add(self, models: Iterable[nn.Module]) -> None:
        """Hold the calls of further models."""
        self._models = [ref for ref in self._models if ref() is not None]
        for model in models:
            self._models.append(weakref.ref(model))
            if self.records:
                self._recordings.add(model)

    def inherit(self, pre_attach: PreAttachRecorder, joining: Iterable[nn.Module] = ()) -> None:
        """Take over what was held of the models, those included that are about to be added.

        Both know from then on which kinds of models are called whole.
        """
        self._recordings.share_kinds(pre_attach)
        inherited = (
            pre_attach.handed_over(joining, self.models) if self.records else pre_attach.handed_over(())
        )
        self._recordings.inherit(inherited)

    def close(self) -> None:
        """Remove every hook; stop recording."""
        for remove in self._removes:
            remove()
        self._recordings.close()
        if self._losses is not None:
            self._losses.close()
        while self._live:
            self._live.pop().close()

    def discard(self) -> None:
        """Release the calls that were held: they belong to no step."""
        self._recordings.drop()
        if self._losses is not None:
            self._losses.drop()

    def cleared(self, optimizer: Optimizer | None) -> None:
        """Release what led to gradients that the loop has thrown away: it is part of no step."""
        try:
            self._recordings.cleared(optimizer)
        except Exception as error:
            self._failed("localise", error)

    @contextlib.contextmanager
    def closure(self, run: Callable[[], Any]) -> Iterator[None]:
        """Localise what `run` computes, while this is entered."""
        try:
            from gradwatch.localise.replay.closure_replay import ReplayableClosure

            self._closure = ReplayableClosure(run, self.models())
        except Exception as error:
            self._failed("localise", error)
        try:
            yield
        finally:
            self._closure = None

    # -- asked by the composition root -------------------------------------------------------------------

    def models(self) -> list[nn.Module]:
        """The watched models that are still alive, without what DDP and torch.compile wrap around them."""
        return [inner(model) for ref in self._models if (model := ref()) is not None]

    def loss_not_finite(self) -> None:
        """Hold the loop as it is, before a backward whose loss is not finite."""
        if self._losses is not None:
            self._losses.add()

    def set_indices(self, indices: Any) -> None:
        """Set the dataset indices of the calls that follow, until a step is taken."""
        for recording in self._recordings:
            recording.set_indices(indices)

    def held(self) -> list[tuple[nn.Module, Call]]:
        """(module, call) of those of this step that a gradient has reached, in the order they were made."""
        return self._recordings.calls()

    @property
    def dropped(self) -> int:
        """Calls of this step that were released to stay within `max_bytes`."""
        return self._recordings.dropped

    @property
    def differentiates_twice(self) -> bool:
        """True if some step has differentiated a gradient again (`create_graph=True`)."""
        return self._recordings.twice

    def refusal(self, held: list[tuple[nn.Module, Call]]) -> str:
        """Reason why the step cannot be run again, as far as its recorded calls show it; "" where there is none."""
        if several_at_work():
            from gradwatch.localise.replay.state_restored import OTHER_THREADS

            return OTHER_THREADS
        return self._recordings.refused or ("" if held else NOT_SEEN)

    def due(self, incident: str) -> bool:
        """True if an incident is to be localised: until its cause is known, and not for ever."""
        return self._incidents.get(incident, 0) < TRIES

    def localise(self, ask: Ask, step_taken: bool = False, agreement: RankAgreement | None = None) -> Finding:
        """The cause of the step that is about to be taken; `step_taken`: it has been taken already. Never raises.

        `agreement`: the ranks, where all of them localise this step. Then they report the cause of the rank that has
        it.
        """
        self._agreement, self._made = agreement, None
        newest = self._newest()
        known = self._known(newest, ask)
        if known is not None:
            self._incidents[ask.incident] = TRIES
            return self._signed(known, ask)
        try:
            finding = self._localised(ask, step_taken)
        except Exception as error:
            self._failed("localise", error)
            finding = Finding("unknown", "replay", note=f"localising failed: {type(error).__name__}: {error}")
        finding = self._with_batch(finding)  # this rank's own, before all are told of one
        self._whole.clear()
        if agreement is not None:
            finding = self._agreed(agreement, finding)
        if finding.found and finding.phase not in LOSS_SIDE:
            self._last = (newest, finding)
        tries = TRIES if finding.found else self._incidents.get(ask.incident, 0) + 1
        self._tried(ask.incident, tries)
        if tries == TRIES and not finding.found:
            finding = finding.noted(NOT_AGAIN)
        return self._signed(finding, ask)

    def leave(self, ask: Ask, why: str) -> Finding:
        """Leave an incident alone, for this reason, and report that."""
        self._agreement = None
        self._tried(ask.incident, TRIES)
        return self._signed(Finding("unknown", "replay", note=NOT_SEARCHED.format(why=why)), ask)

    def _tried(self, incident: str, tries: int) -> None:
        self._incidents[incident] = tries
        while len(self._incidents) > 1024:
            self._incidents.pop(next(iter(self._incidents)))

    def recorded(self, step: int | None) -> tuple[Finding, ...]:
        """Findings of recorded steps since the last call.

        `step` is the number of the step that is about to be taken, None where that is not known: a recording that has
        just ended is of that step, and not of the one whose incident asked for it.
        """
        if not self._recorded:
            return ()
        found, self._recorded = self._recorded, []
        return tuple(
            finding
            if not finding.found
            else _of_step(finding, step if ended == self._recordings.steps else None)
            for ended, finding in found
        )

    def _known(self, newest: int, ask: Ask) -> Finding | None:
        """The cause found in the same calls for another rule or optimizer, where it answers `ask` too; else None."""
        if self._last is None or not self._last[0] == newest >= 0 or ask.way != "replay":
            return None
        known = self._last[
            1
        ]  # of finite gradients those that explode have other causes than those that vanish
        return known if known.phase not in GAINS or known.phase == ask.suspicion else None

    # -- inside ------------------------------------------------------------------------------------------

    def _localised(self, ask: Ask, step_taken: bool) -> Finding:
        independent = self._agreement is None or not any(map(is_spread, self.models()))
        # Else the others wait for this rank to agree.
        if self._recorded and ask.way != "detect_anomaly" and independent:
            return self._recorded.pop()[1]  # the step under judgement is one that was recorded
        if ask.after_backward:
            return Finding("after_backward", "norms", note=self._loop.written_at())
        if ask.way != "replay":
            return self._later(ask, "")
        started = time.perf_counter()
        held = self._recordings.calls()
        try:
            if step_taken:
                raise Refused("its norms were copied from the device after the step was taken")
            finding = self._of_closure() or self._of_calls(held, ask)
        except Refused as refusal:
            return self._later(ask, f"no replay: {refusal}")
        except Exception as error:
            if not_ours(error):
                raise
            return self._later(ask, f"no replay: the step run again raised {type(error).__name__}: {error}")
        if ask.of_loss:
            from gradwatch.localise.diagnosis.diagnose import of_loss_alone

            finding = of_loss_alone(finding)
        if finding.phase in IN_LOOP and ask.suspicion == "nonfinite":
            finding = self._loop.of_nonfinite(finding, self.models(), held, self._whole)
        if finding.phase in ("unknown", *LOSS_SIDE) and ask.suspicion == "nonfinite":
            dropped = self._recordings.dropped
            more = NOT_KEPT.format(count=dropped) if dropped else ""
            return self._later(ask, more, finding)
        if ask.suspicion != "nonfinite" and self._recordings.dropped:
            finding = finding.noted(NOT_KEPT.format(count=self._recordings.dropped))
        spent = time.perf_counter() - started
        return finding.noted(f"the replay took {spent:.2f} s")

    def _of_closure(self) -> Finding | None:
        """The exact path, if the step is one; None where it is not, or finds nothing."""
        if self._closure is None:
            return None
        from gradwatch.localise.diagnosis.diagnose import diagnose
        from gradwatch.localise.replay.closure_replay import run_again
        from gradwatch.localise.replay.reproducibility import CLOSURE, NOT_KNOWN

        try:
            finding = diagnose([run_again(self._closure, self._fault, self._max_bytes)], by="closure")
        except Refused:
            return None
        return finding.noted(NOT_KNOWN.format(why=CLOSURE)) if finding.found else None

    def _of_calls(self, held: list[tuple[nn.Module, Call]], ask: Ask) -> Finding:
        from gradwatch.localise.diagnosis.explosion_by_norms import with_activations
        from gradwatch.localise.replay.diagnosed_replay import DiagnosedReplay

        refusal = self.refusal(held)
        step = DiagnosedReplay(
            self.models(), held, refusal, self._agreement, self._fault, self._max_bytes, self._whole
        )
        if ask.suspicion == "nonfinite":
            return step.nonfinite()
        exploding = ask.suspicion == "exploding"
        finding, self._made = step.growing(exploding, ask.off)
        if not any(call.twice for _, call in held):
            finding = with_activations(finding, ask.off, exploding)
        return self._loop.of_multiplied(finding, self.models(), held, self._whole, ask.off)

    def _agreed(self, agreement: RankAgreement, own: Finding) -> Finding:
        """The Finding that the ranks agree on; where one knows the cause, the next steps need not be recorded."""
        from gradwatch.localise.replay.live_recording import Live

        try:
            finding = agreement.share(own, self._made)
        except Exception as error:
            self._failed("localise", error)
            return own
        if (
            finding.found
            and finding.phase not in LOSS_SIDE
            and any(isinstance(live, Live) and not live.under_way for live in self._live)
        ):
            self._live.clear()
        return finding

    def _newest(self) -> int:
        """The order of the last call held; -1 where none is."""
        held = self._recordings.calls()
        return held[-1][1].order if held else -1

    def _later(self, ask: Ask, why: str, finding: Finding | None = None) -> Finding:
        """Record the next steps, and report that."""
        found = (
            Finding("unknown", "record" if ask.way == "record" else "replay") if finding is None else finding
        )
        if several_at_work():  # what is switched on for a recording is switched on for all of them
            return found.noted(why)
        if ask.record_steps and not self._live:
            self._ask = ask
            if ask.way == "detect_anomaly":
                from gradwatch.localise.replay.torch_anomaly_detection import Raising

                self._live.append(Raising(ask.record_steps))
            else:
                from gradwatch.localise.replay.live_recording import Live

                self._live.append(Live(self.models(), ask.record_steps, self._fault))
            return found.noted(why, f"the next {ask.record_steps} steps are recorded")
        return found.noted(why)

    def _with_batch(self, finding: Finding) -> Finding:
        """The finding with the batch at fault, and the rows of it, as far as they are known."""
        try:
            from gradwatch.localise.replay.nonfinite_rows import nonfinite_rows, with_samples_at_fault

            held, models = self.held(), self.models()
            finding = finding.amended(batch=nonfinite_rows(finding, held, models))
            if finding.phase in GAINS or not finding.found:
                return finding
            return with_samples_at_fault(finding, held, models, self._again(finding))
        except Exception as error:
            self._failed("localise", error)
            return finding

    def _again(self, finding: Finding) -> Callable[[nn.Module, Call, CallListener], None] | None:
        """A call of this step run again with a listener; None where it cannot be, or other ranks would have to help."""
        from gradwatch.localise.replay.step_replay import replay

        models = self.models()
        gathered = all(id(model) in self._whole for model in models if is_spread(model))
        if finding.by != "replay" or self._recordings.refused or not gathered:
            return None
        whole = dict(self._whole)

        def again(model: nn.Module, call: Call, listener: CallListener) -> None:
            replay([(model, call)], models, self._fault, None, self._max_bytes, whole, listener)

        return again

    def _signed(self, finding: Finding, ask: Ask) -> Finding:
        return finding.amended(
            rule=ask.rule,
            incident=ask.incident,
            step=ask.step,
            rank=self._rank if self._agreement is None else finding.rank,
            first_parameter=ask.first_parameter,
        )

    def _fault(self, error: BaseException) -> None:
        self._failed("localise", error)

    # -- around every step while some are recorded -------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """End the recording of this step."""
        try:
            if not _in_backward() and self._owns(optimizer):
                self._ends(self._live[0])
        except Exception as error:
            self._failed("localise", error)

    def _ends(self, live: Live | Raising) -> None:
        trace = live.end()
        if trace is not None and trace.blamed:
            from gradwatch.localise.diagnosis.diagnose import diagnose

            finding = diagnose([trace], by="record")
            said = f"found in a recorded step, which took {live.seconds:.2f} s"
            finding = self._with_batch(finding.noted(said))
            if finding.phase in LEFT_BEHIND:
                finding = Finding("unknown", "record", note=OWN_DOING.format(note=finding.note))
            self._recorded.append((self._recordings.steps, self._signed(finding, self._ask)))
            if self._agreement is None:  # else the others would not know that it is
                self._incidents[self._ask.incident] = TRIES
            live.record_no_more()
        if live.left <= 0:
            self._live.clear()

    def _after_step(self, optimizer: Optimizer) -> None:
        """Begin the recording of the next step."""
        try:
            if not _in_backward() and self._owns(optimizer):
                self._live[0].begin()
        except Refused as refusal:
            self._live.clear()
            finding = Finding("unknown", "record", note=f"not recorded: {refusal}")
            self._recorded.append((self._recordings.steps, self._signed(finding, self._ask)))
        except Exception as error:
            self._live.clear()
            self._failed("localise", error)


def _of_step(finding: Finding, step: int | None) -> Finding:
    """A recorded finding with the number of its own step, or with a note that this is not known."""
    if step is not None:
        return finding.amended(step=step)
    return finding.noted("in a later step, whose number is not known")


def _in_backward() -> bool:
    """True if an optimizer steps inside a backward: there nothing may be entered or left."""
    return backward_end.current() != backward_end.NONE
