"""The plan of a selftest, gone through step by step: when a fault begins, what it causes, when it ends."""

from __future__ import annotations

import atexit
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradwatch.errors import TrainingStopped
from gradwatch.launch.fault_injection.faulty_gradients import FaultyGradients, parameter_to_break
from gradwatch.launch.fault_injection.followed_optimizer import FollowedOptimizer
from gradwatch.launch.fault_injection.loss_scale import LossScale
from gradwatch.launch.fault_injection.result_files import plan_of_process, write_document
from gradwatch.launch.fault_injection.served_firings import newly_served, served_firings
from gradwatch.launch.fault_injection.state_before_fault import SavedState
from gradwatch.launch.selftest_faults import FAULTS, Document, Fault, Plan, Result
from gradwatch.runtime.interruption import not_ours
from gradwatch.taps.hook_ids import own_ids

if TYPE_CHECKING:
    from gradwatch.session.session import Session

BEFORE_NEXT = 4
"""Steps between the end of a fault and the next one, at least: until no rule is firing any more, at most MOST_QUIET."""
MOST_QUIET = 60
_WRITTEN_EVERY = 1.0


def begin(session: Session) -> None:
    """Inject the faults of the environment's plan into this process; called once its watch has begun.

    Where that fails the process ends, and its document says so: the failure is none of the script's.
    """
    plan = plan_of_process()
    try:
        Injection(session, plan)
    except Exception as error:
        if not_ours(error):
            raise
        write_document(plan, session.run.rank, Document(broke=_in_words(error)))
        os._exit(1)


@dataclass(frozen=True, slots=True)
class _Active:
    """The fault that is in the gradients now, and what there was before it."""

    fault: Fault
    result: Result
    gradients: FaultyGradients
    saved: SavedState
    fired: Mapping[str, int]
    actions: Mapping[str, int]
    served: Mapping[str, float] | None


class Injection:
    """Goes through the plan, step by step of one optimizer; ends the process after the last fault."""

    def __init__(self, session: Session, plan: Plan) -> None:
        self._session, self._plan = session, plan
        self._faults = [fault for fault in FAULTS if fault.name in plan.faults]
        self._results: list[Result] = []
        self._rejected = 0  # steps, while no fault was active
        self._broke = ""
        self._time_up = False
        self._followed = FollowedOptimizer()
        self._changes = 0
        self._pid = os.getpid()
        self._began: float | None = None
        self._written = -math.inf
        self._due = 0
        self._active: _Active | None = None
        self._loss_scale = LossScale(self._step_rejected)
        with own_ids:
            register_optimizer_step_post_hook(self._step_taken)
        self._write()
        atexit.register(self._write)  # where the script ends before the plan does

    # -- called by torch -------------------------------------------------------------------------------------

    def _step_taken(self, optimizer: Optimizer, *_: Any) -> None:
        self._guarded(optimizer, rejected=False)

    def _step_rejected(self, optimizer: Optimizer) -> None:
        self._guarded(optimizer, rejected=True)

    def _guarded(self, optimizer: Optimizer, rejected: bool) -> None:
        try:
            self._stepped(optimizer, rejected)
        except Exception as error:
            if isinstance(error, TrainingStopped) or not_ours(error):
                raise
            self._end_for(error)

    # -- after a step ----------------------------------------------------------------------------------------

    def _stepped(self, optimizer: Optimizer, rejected: bool) -> None:
        if not (self._session.owns(optimizer) and self._followed.steps_of(optimizer)):
            return
        self._count(rejected)
        if self._changes != self._followed.changes:
            self._changes = self._followed.changes
            self._begin_again()
        if self._active is not None:
            self._during(self._active, rejected or self._skipped(optimizer))
        elif not self._faults:
            self._leave()
        elif not rejected and self._may_begin(self._faults[0]):
            self._inject(optimizer)
        if self._time_is_up():
            self._time_up = True
            self._leave()

    def _count(self, rejected: bool) -> None:
        if rejected:
            self._rejected += self._active is None
        else:
            self._followed.count()
        now = time.monotonic()
        if self._began is None:
            self._began, self._written = now, -math.inf
        if now > self._written + _WRITTEN_EVERY:  # what is told of a process that is ended from outside
            self._write()

    def _begin_again(self) -> None:
        """Another optimizer is followed: a fault in the steps of the one before has seen its last."""
        self._due = 0
        if self._active is not None:
            self._active.gradients.remove()
            self._active.saved.restore()
            self._loss_scale.put_back()
            self._faults.insert(0, self._active.fault)
            self._results.remove(self._active.result)
            self._active = None

    def _time_is_up(self) -> bool:
        """Never with ranks, which have to agree: there the command that started them looks at the clock."""
        if self._session.run.world_size > 1 or self._began is None:
            return False
        return time.monotonic() - self._began > self._plan.seconds

    def _may_begin(self, fault: Fault) -> bool:
        steps = self._followed.steps
        if steps < self._due or steps < fault.warmup * self._plan.warmup:
            return False
        quiet = not any(record.verdict.firing for record in self._session.records())
        return quiet or steps >= self._due + MOST_QUIET

    def _skipped(self, optimizer: Optimizer) -> bool:
        """True if the optimizer was called and has left out the step for its scaler, as fused ones do."""
        captured = self._session.capture_of(optimizer)
        return captured is not None and any(
            record.snapshot.optimizer == captured.index and record.snapshot.scalars.get("scaler_skip")
            for record in self._session.records()
        )

    def _inject(self, optimizer: Optimizer) -> None:
        params = [
            param for group in optimizer.param_groups for param in group["params"] if param.requires_grad
        ]
        if not params:
            return
        fault = self._faults.pop(0)
        if fault.rank is not None and self._session.run.world_size < 2:
            return
        broken = params if fault.everywhere else [parameter_to_break(params)]
        captured, account = self._session.capture_of(optimizer), self._session.account()
        step = self._followed.steps if captured is None else captured.step
        result = Result(fault.name, step, "" if fault.everywhere else self._name_of(broken[0]))
        here = fault.rank in (None, self._session.run.rank)
        saved = SavedState(self._session, optimizer)
        self._loss_scale.keep()
        self._active = _Active(
            fault,
            result,
            FaultyGradients(fault, broken if here else (), self._end_for),
            saved,
            dict(account.fired),
            dict(account.actions),
            served_firings(self._session.url),
        )
        self._results.append(result)
        self._write()

    def _name_of(self, param: Tensor) -> str:
        names = (pair for model in self._session.models() for pair in model.named_parameters())
        return next((name for name, one in names if one is param), "?")

    def _during(self, active: _Active, rejected: bool) -> None:
        account, result = self._session.account(), active.result
        fired, actions = _more(account.fired, active.fired), _more(account.actions, active.actions)
        result.go_on(fired, actions, active.gradients.entered, rejected)
        # Every rank goes on for as many steps; alone, until a rule has fired.
        found = bool(result.fired) and self._session.run.world_size == 1
        if found or result.lasted >= active.fault.lasts(self._plan.warmup):
            self._end(active)

    def _end(self, active: _Active) -> None:
        active.gradients.remove()
        active.saved.restore()
        self._loss_scale.put_back()
        active.result.end(newly_served(self._session.url, active.served, active.result.fired))
        self._active = None
        self._due = self._followed.steps + BEFORE_NEXT
        self._write()

    # -- the end of the process ------------------------------------------------------------------------------

    def _write(self) -> None:
        if os.getpid() == self._pid:  # a forked child has this object, and its exit handler, too
            self._written = time.monotonic()
            write_document(self._plan, self._session.run.rank, self._document())

    def _document(self) -> Document:
        return Document(
            steps=self._followed.total,
            most_steps=self._followed.most,
            rejected=self._rejected,
            world_size=self._session.run.world_size,
            broke=self._broke,
            time_up=self._time_up,
            results=self._results,
        )

    def _end_for(self, error: Exception) -> None:
        """End the process for a fault of this code: it is none of the script's, which must not meet it."""
        self._broke = _in_words(error)
        self._leave(status=1)

    def _leave(self, status: int = 0) -> None:
        """End the process here: none of the script's code runs on what the faults have left, nothing is saved."""
        try:
            self._write()
            self._session.flush()
        finally:
            os._exit(status)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _more(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in now.items() if count > before.get(name, 0)}
