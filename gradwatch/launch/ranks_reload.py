"""`gradwatch run --reload` in a job of several ranks: all of them take up a changed rule file after the same step.

Rank 0 looks at the file, and gives the others what it says; every rank answers whether these rules fit. One that
refuses them refuses them for all. What is agreed, and when, goes through the store of the process group, by a thread
of each rank (`distributed.all_ranks_or_none`): training waits for nothing.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from gradwatch.distributed.all_ranks_or_none import CommonStep
from gradwatch.errors import GradwatchError
from gradwatch.launch.rules_reload import LOOK_SECONDS, RulesReload
from gradwatch.rules.resolved_packs import rule_set
from gradwatch.runtime.interruption import not_ours
from gradwatch.session.settings import Settings

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from gradwatch.rules.rule_set import RuleSet
    from gradwatch.session.session import Session

T = TypeVar("T")

PAUSE_SECONDS = 0.1
ANSWER_SECONDS = 600.0
"""How long rank 0 waits for the answers: each takes one step of the training."""
END_SECONDS = 2.0
"""How long the exit of the process waits for a question to the store that is under way."""
ROUNDS = 6
MARGIN_SECONDS = 1.0
"""How far ahead the common step lies at first; twice as far in each further round."""


def _no_optimizer() -> Optimizer | None:
    """None: it is gone."""
    return None


class _EndedError(GradwatchError):
    """The training has ended, or its watch."""


class RanksReload(RulesReload):
    """The part of one rank; `new_rules` is to be asked after every step of an optimizer."""

    def __init__(self, session: Session, source: str) -> None:
        super().__init__(session, source)
        self._step = CommonStep(session.run)
        # The first that is watched, on every rank; once that is gone, the next that steps.
        self._optimizer = next((one.optimizer for one in session.captures() if one.optimizer), _no_optimizer)
        self._round = 0
        self._to_check: RuleSet | None = None
        self._refusal: str | None = None  # of the training thread, once it has looked
        self._planned: RuleSet | None = None
        self._changing = False  # of sessions
        self._tried = threading.Event()  # the rules agreed on were taken up, or refused after all
        self._exiting = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="gradwatch-reload", daemon=True)
        self._thread.start()
        # A thread that comes back from C++ while Python ends aborts the process.
        atexit.register(self._end)

    # -- the training thread -----------------------------------------------------------------------------

    def due(self) -> bool:
        """False: loops without an optimizer have no step that ranks could agree on."""
        return False

    def new_rules(self, stepped: Optimizer | None = None) -> RuleSet | None:
        """Count a step; the rules to be taken up after it, on every rank."""
        if not self._counts(stepped):
            return None
        to_check, self._to_check = self._to_check, None
        if to_check is not None:
            self._refusal = self._objection(to_check)
        try:
            return self._planned if self._step.stepped() else None
        except Exception as error:  # the store is gone, and the decision with it
            if not_ours(error):
                raise
            self.refused(f"what the ranks have agreed on is not known: {error!r}")
            return None

    def _counts(self, stepped: Optimizer | None) -> bool:
        """True for the steps of one optimizer: a rank may have others, which the rest does not."""
        if self._optimizer() is None and stepped is not None:
            self._optimizer = weakref.ref(stepped)
        return stepped is self._optimizer()

    def take_up(self, ruleset: RuleSet) -> Session | None:
        """As for one rank."""
        self._changing = True
        try:
            return super().take_up(ruleset)
        finally:
            self._changing = False
            self._tried.set()

    def _objection(self, ruleset: RuleSet) -> str:
        try:
            self.session.check(ruleset, Settings.resolve())
        except Exception as error:
            if not_ours(error):
                raise
            return str(error) or repr(error)
        return ""

    def _end(self) -> None:
        self._exiting.set()
        self._thread.join(END_SECONDS)

    # -- the thread of this rank -------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            while not self._over:
                if self._step.rank == 0:
                    self._look()
                elif (proposal := self._step.read(f"{self._round}/proposal")) is not None:
                    self._answer(proposal)
                self._exiting.wait(LOOK_SECONDS)
        except _EndedError:
            self.refused("the training has ended before all ranks had agreed")
        except Exception as error:
            if not_ours(error):
                raise
            if not self._over and self._step.rank == 0:  # else rank 0 has ended, and its store
                self.refused(f"the ranks cannot be asked, and later changes are not looked at: {error!r}")

    @property
    def _over(self) -> bool:
        return self._exiting.is_set() or (self.session.closed and not self._changing)

    def _look(self) -> None:
        """Propose what has changed (rank 0)."""
        if not self._changed():
            return
        found = self._loaded()
        proposal = {"error": found} if isinstance(found, str) else _document(found)
        for number in range(ROUNDS):
            self._step.post(f"{self._round}/proposal", proposal)
            if self._answer(proposal, 2**number * MARGIN_SECONDS):
                return
        proposal = {"error": "the ranks found no step that still lay ahead of all"}
        self._step.post(f"{self._round}/proposal", proposal)
        self._answer(proposal)

    def _answer(self, proposal: dict[str, Any], margin: float = 0.0) -> bool:
        """Take part in one round; False where the step had passed on some rank, and another round may do better."""
        name, self._round = str(self._round), self._round + 1
        if proposal.get("error"):
            self.refused(proposal["error"])
            return True
        if proposal["digest"] == self.ruleset.digest:
            self.session.health.reloaded(True)
            return True
        step, found = self._step, None
        try:
            found = rule_set(**proposal)
            objection = self._checked(found)
        except (LookupError, TypeError, ValueError) as error:
            objection = str(error)
        step.post(f"{name}/answer/{step.rank}", {"objection": objection, "steps": step.steps})
        if step.rank == 0:
            step.post(f"{name}/plan", self._plan(name, margin))
        plan = self._awaited(lambda: step.read(f"{name}/plan"), 2 * ANSWER_SECONDS)
        if plan is None or "objection" in plan:
            self.refused(plan["objection"] if plan else "rank 0 has not said when")
            return True
        self._planned = found  # one that has none has objected
        self._tried.clear()
        step.post(f"{name}/ready/{step.rank}", step.plan(f"{name}/decision", plan["step"]))
        if step.rank == 0:
            ready = self._awaited(lambda: step.read_all(f"{name}/ready"), ANSWER_SECONDS)
            if ready is not None and all(ready):
                step.decide_for(f"{name}/decision")
            else:
                step.decide_against(f"{name}/decision")
        if not self._awaited(lambda: step.decision(f"{name}/decision"), ANSWER_SECONDS):
            return False
        # The next round begins with what is in force then.
        self._awaited(lambda: self._tried.is_set() or None, ANSWER_SECONDS)
        return True

    def _plan(self, name: str, margin: float) -> dict[str, Any]:
        """The common step, or why there is none (rank 0)."""
        answers = self._awaited(lambda: self._step.read_all(f"{name}/answer"), ANSWER_SECONDS)
        if answers is None:
            return {"objection": "some rank has not answered; it takes no step, or does not watch"}
        refusing: dict[str, int] = {}  # the first rank that says so
        for rank, one in enumerate(answers):
            refusing.setdefault(one["objection"], rank)
        refusing.pop("", None)
        if refusing:
            return {"objection": "; ".join(f"rank {rank}: {why}" for why, rank in list(refusing.items())[:3])}
        return {"step": self._step.ahead([one["steps"] for one in answers], margin)}

    def _checked(self, ruleset: RuleSet) -> str:
        """Objection of the training thread to these rules, after its next step; "" for none."""
        if not self._step.steps and self.session.observed_only():
            return "a loop without a torch optimizer has no step that ranks could agree on"
        self._refusal, self._to_check = None, ruleset
        found = self._awaited(lambda: self._refusal, ANSWER_SECONDS)
        return "it has taken no step since" if found is None else found

    def _awaited(self, asked: Callable[[], T | None], seconds: float) -> T | None:
        """The answer once there is one; None after so many seconds. Raises `_EndedError`."""
        deadline = time.monotonic() + seconds
        while (found := asked()) is None:
            if time.monotonic() >= deadline:
                return None
            if self._over:
                raise _EndedError
            self._exiting.wait(PAUSE_SECONDS)
        return found


def _document(ruleset: RuleSet) -> dict[str, Any]:
    from gradwatch.rules.files import canonical  # pydantic and ruamel, which a pack does not need

    return {"rules": canonical(ruleset), "origins": dict(ruleset.origins), "digest": ruleset.digest}
