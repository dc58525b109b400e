"""One watched training: what is attached to it, the sinks its Records go to, its account and its state."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.account import NOTHING_TAKEN, Account, Ending
from gradwatch.account.exit_reason import printed_at_exit
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.checkpoint.health_tracker import joined
from gradwatch.distributed.run_identity import placed
from gradwatch.engine import Engine
from gradwatch.errors import AttachError, GradwatchError
from gradwatch.localise.held_calls.calls_before_attach import PreAttachRecorder
from gradwatch.records.event import Event
from gradwatch.records.record import CheckpointHealth, Record
from gradwatch.records.run_info import RunInfo
from gradwatch.rules.rule_set import RuleSet
from gradwatch.runtime.internal_errors import Health
from gradwatch.runtime.process_identity import here
from gradwatch.runtime.spelling import did_you_mean
from gradwatch.runtime.weak_references import died
from gradwatch.session import saved_state
from gradwatch.session.active_or_paused import Activity
from gradwatch.session.attachments import Attached, Rules, Services
from gradwatch.session.binding.refused_rules import Fitting
from gradwatch.session.live_sessions import LIVE
from gradwatch.session.logged_once import Notices
from gradwatch.session.pipeline.record_publishing import Publishing
from gradwatch.session.process_place import ProcessPlace
from gradwatch.session.session_account import Accounting, Counted, of_process, steps_concluded
from gradwatch.session.session_sinks import SessionSinks, chosen_sinks
from gradwatch.session.settings import Settings, quiet_asked, run_info
from gradwatch.session.succession import Handover
from gradwatch.session.watched_optimizers import Ownership
from gradwatch.sinks import Sink
from gradwatch.taps import step_hooks
from gradwatch.taps.backward_entry import count_backwards
from gradwatch.taps.clip_functions import Clip
from gradwatch.taps.process_totals import TOTALS, ended_by_exceptions, steps_under_way


@dataclass(frozen=True, slots=True)
class Left:
    """State that a closed session still answers from, as of its last step."""

    state: Mapping[str, Any] = field(default_factory=lambda: saved_state.NOTHING_SAVED)
    records: Sequence[Record] = ()
    checkpoint: CheckpointHealth = field(default_factory=lambda: joined(()))
    counted: Counted = field(default_factory=Counted)


def _steps_of_process() -> dict[str, int]:
    """Totals of this process, and of its steps those watched; asked from any thread.

    In this order: what is watched is read last, so that no step that begins meanwhile seems to be taken and not seen.
    """
    taken, under_way = TOTALS.taken(), steps_under_way()
    own = [one for one in LIVE.all() if one.run.pid == here[0]]
    deferred = sum(one.deferred for one in own)
    watched = steps_concluded() + sum(one.steps for one in own)
    return {**asdict(taken), "under_way": under_way, "watched": watched, "waiting": deferred}


def _nothing() -> None:
    """No-op: no listener has been added."""


_ordinal = itertools.count()  # of sessions: ranks that run one script count alike


class Session:
    """Everything that watches one training; see `gradwatch.watch`. Users have it as a `Watch`.

    `run` is its identity, `health` counts internal errors; `active` False: nothing is attached, nothing is written.
    """

    def __init__(
        self,
        models: list[nn.Module],
        optimizers: list[Optimizer],
        ruleset: RuleSet,
        settings: Settings,
        sinks: Sequence[Sink] | None,
        origin: str,
        active: bool = True,
        on_escalate: Callable[[Event], object] | None = None,
        loose: Sequence[tuple[str, nn.Parameter]] = (),
        before: Handover | None = None,
    ) -> None:
        """`before` is what another session, whose place this one takes, hands over."""
        self.origin = origin
        self._unrecorded = 0 if before is None else before.unrecorded
        self.ended: Ending = ""
        self._ownership = Ownership(optimizers)
        self.attached: Attached | None = None  # until `close`
        self._closed = not active
        self._publishing = Publishing()
        self.health = Health(on_first=lambda component, error: self._notices.say(component, error))
        self._notices = Notices(self._publishing.sinks, self.health)
        self._sinks = SessionSinks(self._publishing.sinks, self.health)
        self._place = ProcessPlace() if before is None else before.place
        self._activity = Activity(self.health, settings.strict, self._resumed)
        self._accounting: Accounting | None = None
        self._concluding = False
        self._left = Left()
        self.ruleset = ruleset
        run = run_info(ruleset, Engine(ruleset).rule_infos, settings)
        self.run: RunInfo = placed(run, named=settings.run_id is not None) if active else run
        self._uncount: Callable[[], None] = _nothing
        number = next(_ordinal)
        if active:
            fitting = Fitting(origin == "launcher" and not settings.strict_rules)
            self._services = Services(self._activity, self._notices, self._publishing, fitting)
            self._rules = Rules(ruleset, self.run, fitting)
            chosen = chosen_sinks(sinks, self._rules.ruleset, settings)
            name = f"{self.run.attempt}/{number}"
            strict_rules = settings.strict_rules
            attached = Attached(
                models, self._ownership, loose, self._rules, self._services, strict_rules, name, before
            )
            try:
                self.ruleset, self.attached = self._rules.ruleset, attached
                every = [*chosen, *attached.own_sinks]
                self.run = self._place.claim(self._rules.run, every)
                self._sinks.open(every, self.run, settings.strict, self._notices.say)
                if self._place.refusal:
                    self.health.notice("place", self._place.refusal)
                attached.start(on_escalate, None if before is None else before.counted)
                self._activity.begin(self.run.pid)
                self._go_live(attached, models, before is not None)
            except BaseException:
                if before is not None:
                    self._place = ProcessPlace()  # who hands over keeps the other one, for the next attempt
                self._abandon(attached)
                raise

    # -- attaching ---------------------------------------------------------------------------------------

    def count_attaching(self, seconds: float) -> None:
        """Count the time that it took to attach to models and optimizers, as whoever has done so measured it."""
        self._publishing.totals.count_attaching(seconds)

    def _go_live(self, attached: Attached, models: list[nn.Module], succeeds: bool) -> None:
        """Count from here on: everything is attached."""
        # A launcher's session answers for all that the process does, any other one, and one that takes its place, from
        # here on. A step that raised before it, and was not noticed yet, is none of this one's.
        ended_by_exceptions(step_hooks.under_way())
        first = self.origin == "launcher" and not succeeds
        before = NOTHING_TAKEN if first else TOTALS.taken()
        self._accounting = accounting = Accounting(
            self.run if self._sinks.recorded else replace(self.run, directory=""),
            self._publishing.totals,
            self.health.inactive,
            self._counted,
            before,
            lambda: steps_concluded() + sum(one.steps for one in LIVE.all() if one is not self),
        )
        self.health.counts(_steps_of_process, accounting.without_data)
        LIVE.close_orphans()
        LIVE.add(self)
        # After: the backward that finds the models gone is none of this session's.
        self._uncount = count_backwards()
        if self.origin != "launcher":  # which finds models of the script, and lives on without them
            attached.keep_containers(models)
        attached.bind_before_backward()

    def _abandon(self, attached: Attached) -> None:
        """Leave no hook, no thread and no address of a session that could not be made whole, or that Ctrl-C ended."""
        attached.close()
        self.attached, self._closed = None, True
        self._uncount()
        self._activity.end()
        self.close_sinks()
        LIVE.discard(self)

    def _resumed(self) -> None:
        if self.attached is not None:
            self.attached.resumed()

    # -- state -------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True if nothing is attached."""
        return self._closed

    def idle(self) -> bool:
        """True if nothing is watched now: closed, not attached yet, a forked child, a pause after internal errors."""
        return self._activity.idle()

    def failed(self, component: str, error: BaseException) -> None:
        """Count an internal error. Raises it if `strict`."""
        self._activity.failed(component, error)

    def models(self) -> list[nn.Module]:
        """The watched models that are still alive; none once it is closed."""
        return [] if self.attached is None else self.attached.capture.slots.models()

    def owns(self, optimizer: Optimizer) -> bool:
        """True if this optimizer is watched now."""
        return self.attached is not None and self.attached.owns(optimizer)

    def optimizers(self) -> list[Optimizer]:
        """Optimizers named at the attach, in that order, then those adopted since."""
        return self._ownership.given(self.captures())

    def captures(self) -> list[OptimizerCapture]:
        """Captures of all optimizers watched, those that are gone included."""
        return [] if self.attached is None else list(self.attached.capture.captures)

    def capture_of(self, optimizer: Optimizer) -> OptimizerCapture | None:
        """The capture of this optimizer, None where it is not watched yet."""
        return None if self.attached is None else self.attached.capture.capture_of(optimizer)

    def knows(self, identity: int) -> bool:
        """True if the parameter with this `id()` is watched here."""
        self.release_freed()
        return self.attached is not None and self.attached.capture.slots.covers_id(identity)

    def knows_any(self, identities: Iterable[int]) -> bool:
        """True if some parameter of these, given by `id()`, is watched here."""
        return self.attached is not None and self.attached.capture.slots.covers_any(identities)

    def knows_all(self, identities: Iterable[int]) -> bool:
        """True if all parameters of these, given by `id()`, are watched here."""
        return self.attached is not None and self.attached.capture.slots.covers_all(identities)

    @property
    def backwards(self) -> int:
        """Number of backwards that have reached a parameter that is watched here."""
        attached = self.attached  # one look: an endpoint's thread may ask while another closes
        return self._left.counted.backwards if attached is None else attached.capture.backwards

    @property
    def steps(self) -> int:
        """Optimizer steps watched that no concluded account holds yet."""
        attached = self.attached
        return 0 if self._concluding or attached is None else attached.boundary.steps

    @property
    def deferred(self) -> int:
        """Those of them that wait to be judged."""
        attached = self.attached
        return 0 if self._concluding or attached is None else attached.boundary.deferred

    @property
    def missing_sinks(self) -> tuple[str, ...]:
        """The default sinks that it does not write to."""
        return self._sinks.missing

    @property
    def url(self) -> str | None:
        """URL of /metrics, None without an endpoint."""
        return self._sinks.url

    @property
    def coverage(self) -> float:
        """Parameters that can be measured over parameters that want a gradient, 0..1."""
        self.catch_up()
        return 0.0 if self.attached is None else self.attached.capture.count_coverage()

    def records(self) -> list[Record]:
        """The latest Record of every optimizer."""
        attached = self.attached
        if attached is None:
            return list(self._left.records)
        return [
            bound_rules.record for bound_rules in attached.rule_bindings if bound_rules.record is not None
        ]

    def checkpoint(self) -> CheckpointHealth:
        """The health of a checkpoint saved now; looks at the weights. After `close()`: as of the last step."""
        if self.attached is None:
            return self._left.checkpoint
        self.catch_up()
        found = self.attached.checkpoints.check()
        if self._activity.paused():
            why = (*found.reasons, "watching is paused after internal errors")
            return replace(found, healthy=False, reasons=why)
        return found

    def before_another_optimizer(self) -> None:
        """Look at the weights, if they were not seen for long: those of the optimizer that comes may replace them."""
        attached, activity = self.attached, self._activity
        if attached is None or activity.idle() or not activity.is_step_thread():
            return
        try:
            if attached.checkpoints.unseen:
                self.checkpoint()
        except Exception as error:
            activity.failed("checkpoint", error)

    def account(self) -> Account:
        """Account since the attach: what the process did and what was watched. After `close()`: as it was then."""
        if self._accounting is None:
            return Account()
        if self._accounting.final is None:
            self.catch_up()
        return self._accounting.now(self.ended)

    def _counted(self) -> Counted:
        attached = self.attached
        if attached is None:
            return self._left.counted
        boundary, rule_bindings = attached.boundary, attached.rule_bindings
        return Counted(
            boundary.steps,
            boundary.uncalled,
            self.backwards,
            boundary.optimizers.count,
            self._activity.pauses,
            rule_bindings.most_parameters,
            rule_bindings.warming_up(),
            boundary.windows_replaced,
            boundary.waiting,
            boundary.optimizers_before,
            rule_bindings.parameters_before,
            self._unrecorded,
        )

    def observed_only(self) -> list[int]:
        """Indices of the loops without an optimizer."""
        return [captured.index for captured in self.captures() if captured.without_optimizer]

    # -- what the script or its launcher asks for --------------------------------------------------------

    def observe(self, scalars: Mapping[str, float | Tensor]) -> None:
        """Keep one-per-step values for the next step of every optimizer; raises nothing."""
        if self.attached is None:
            return
        for name, value in scalars.items():
            try:
                self.attached.extra_columns.observe(name, value)
            except AttachError as error:  # the value is not used
                self.health.notice("observe", str(error))
            except Exception as error:
                self._activity.failed("observe", error)

    def batch(self, indices: Iterable[int] | Tensor) -> None:
        """Note which samples of the dataset make the forward calls that follow; raises nothing."""
        if self.attached is None or self.attached.causes is None:
            return
        try:
            self.attached.causes.set_indices(indices)
        except Exception as error:
            self._activity.failed("localise", error)

    def closure(self, run: Callable[[], Any]) -> AbstractContextManager[None]:
        """Localise what `run` computes, while this is entered."""
        causes = None if self.attached is None else self.attached.causes
        return nullcontext() if causes is None else causes.closure(run)

    def read_before_clip(self, grads: list[Tensor] | None = None) -> None:
        """Read the gradients now, before code of the script clips these (None: any)."""
        if self.attached is not None:
            self.attached.before_clip.read(None if grads is None else Clip(grads, None))

    def rebaseline(self, reason: str, params: str, rules: Sequence[str]) -> None:
        """Start the baselines of parameters whose names match `params` afresh, in every optimizer; see `Watch`."""
        attached = self.attached
        if attached is None:
            return
        known = {rule.id for rule in self.ruleset.rules}
        unknown = [rule for rule in rules if rule not in known]
        if unknown:  # the others begin anew all the same: a misspelt name is no reason to stop a training
            wrong = f"no rule {unknown[0]!r}{did_you_mean(unknown[0], known)}"
            self.failed("rebaseline", GradwatchError(f"rebaseline: {wrong}"))
        if unknown and len(unknown) == len(rules):
            return
        self.catch_up()
        attached.rule_bindings.rebaseline(reason, params, rules)
        if params == "*" and not rules:
            attached.checkpoints.begin_anew()

    def add(self, models: Iterable[nn.Module]) -> None:
        """Watch further models in the same run; their optimizers are adopted at their first step."""
        if self.attached is not None:
            self.attached.keep_containers(self.attached.add(models))

    def join(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        loose: Sequence[tuple[str, nn.Parameter]] = (),
    ) -> None:
        """Watch further optimizers, from the next backward on; `models` name their parameters, all but the `loose`."""
        attached = self.attached
        if attached is None:
            return
        capture = attached.capture
        mark = capture.spent.begin()
        if models:
            attached.add(models)
        capture.join(optimizers, loose)
        self._ownership.join(optimizers)
        capture.spent.end(mark)

    @property
    def records_calls(self) -> bool:
        """True if calls of models are recorded, to be run again."""
        return self.attached is not None and self.attached.causes is not None and self.attached.causes.records

    def inherit(self, pre_attach: PreAttachRecorder, joining: Iterable[nn.Module] = ()) -> None:
        """Localise this step too, by calls held before its models were watched, or `join`."""
        if self.attached is not None and self.attached.causes is not None:
            self.attached.causes.inherit(pre_attach, joining)

    def drop_dead(self) -> None:
        """Hold no parameter of optimizers and models that are gone: a backward is about to run, or others join."""
        if self.attached is not None and self.attached.capture.has_dead():
            self.attached.capture.drop_dead()

    def release_freed(self) -> None:
        """No parameter that is gone is taken for another at its address from now on."""
        if self.attached is not None and died and self._activity.is_step_thread():
            self.attached.capture.release_freed()

    def orphaned(self) -> bool:
        """True if all models are gone that it was to watch; a launcher's session watches what comes, too."""
        return (
            self.origin != "launcher"
            and self.attached is not None
            and self.attached.capture.slots.watched.childless
        )

    def ends(self, ending: Ending) -> None:
        """Keep how it ends, for its account; "" = not known."""
        self.ended = ending

    def catch_up(self) -> None:
        """Judge what was put off; not in a forked child, nor in a thread that may race the one that trains."""
        if self.attached is not None and here[0] == self.run.pid and self._activity.is_step_thread():
            self.attached.boundary.flush()

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until everything seen so far is where it belongs (journal on disk); False if it is not."""
        if self._closed:
            return True
        self.catch_up()
        return self._sinks.flush(timeout)

    def take_state(self) -> None:
        """Note that the script takes the state of this watch, as for a checkpoint; raises nothing."""
        try:
            if self.attached is not None:
                self.attached.taken_states.take()
        except Exception as error:
            self._activity.failed("checkpoint", error)

    def state_dict(self) -> dict[str, Any]:
        """Baselines, streaks and step counts."""
        if self.attached is None:
            return dict(self._left.state)
        self.catch_up()
        return saved_state.saved(self.attached)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`; raises AttachError for a state of another version."""
        saved_state.check_version(state)
        if self.attached is not None:
            self.catch_up()
            saved_state.load(self.attached, state)

    # -- another session in its place --------------------------------------------------------------------

    def check(self, ruleset: RuleSet, settings: Settings) -> None:
        """Raise where a session by these rules could not take the place of this one, which stays as it is."""
        if self.attached is not None:
            chosen_sinks(None, ruleset, settings)
            fitting = Fitting(self.origin == "launcher" and not settings.strict_rules)
            self.attached.check(ruleset, fitting, settings.strict_rules)

    def between_windows(self) -> bool:
        """True if it watches loops without an optimizer, and no gradient of theirs waits for a step."""
        if self.attached is None or not self.observed_only():  # to catch up may wait for a device
            return False
        self.catch_up()
        return self.attached.between_windows

    def hand_over(self) -> Handover | None:
        """Close it, and give everything that another session goes on with; None where it was closed before."""
        self.catch_up()
        attached = self.attached
        if attached is None:
            return None
        recorded = self._sinks.recorded
        unrecorded = 0 if recorded else self._unrecorded + attached.boundary.steps
        given = attached.hand_over(self._place, unrecorded)
        self._place = ProcessPlace()  # the other one is kept until the next session is there
        self.close()
        return given

    # -- the end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove every hook, flush and close every sink; model and optimizer are as found. Idempotent."""
        if self._closed:
            return
        if os.getpid() != self.run.pid:  # forked: what is open is the parent's
            self._sinks.forked()
        try:
            state = self.state_dict()
        except Exception as error:  # a session that cannot tell its state must still release its parts
            self.health.report("close", error)
            state = dict(saved_state.NOTHING_SAVED)
        self.conclude()
        self._detach(state)
        self._uncount()
        self._closed = True
        self._activity.end()
        self.close_sinks()
        LIVE.discard(self)

    def _detach(self, state: dict[str, Any]) -> None:
        """Close all parts; keep what is asked after `close()` and no parameter, gradient or optimizer."""
        attached = self.attached
        if attached is None:
            return
        attached.close()
        self._left = Left(state, self.records(), attached.checkpoints.now(), self._counted())
        self.attached = None

    def conclude(self) -> None:
        """Tell the sinks what this session comes to; once."""
        # Forked: the account is the parent's.
        if self._concluding or self.run.pid != here[0] or self._accounting is None:
            return
        self._concluding = True
        unfit = self._last_look()  # before the account: another thread may train on meanwhile
        try:
            account = replace(self.account(), unfit=unfit)
        except Exception as error:
            self.health.report("close", error)
            return
        self._accounting.conclude(account)
        quiet = not account.trained_or_watched or printed_at_exit[0] or quiet_asked()
        self._sinks.conclude(account, quiet)

    def _last_look(self) -> tuple[str, ...]:
        """Have the sinks know how the weights are at the end; the reasons why they are not healthy."""
        try:
            weights = self.checkpoint()
            self._sinks.judge_weights(weights)
        except Exception as error:  # the account is given all the same
            self.health.report("close", error)
            return ()
        return () if weights.healthy else weights.reasons

    @property
    def concluding(self) -> bool:
        """True if its account is a part of the process's already."""
        return self._concluding

    def close_sinks(self) -> None:
        """Close the sinks, once, at `close` or at exit; never in a forked child, where they are the parent's."""
        self._sinks.close()
        if os.getpid() == self.run.pid:
            self._place.release()


def live_sessions() -> list[Session]:
    """Every session of this process that has not been closed."""
    LIVE.close_orphans()
    return list(LIVE.all())


def account_of_process() -> Account:
    """Account of this process: what it did, and what all its sessions, closed or not, watched of it."""
    here_now = [one for one in LIVE.all() if one.run.pid == here[0]]
    return of_process([one.account() for one in here_now if not one.concluding])
