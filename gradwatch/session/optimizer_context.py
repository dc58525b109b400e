"""Everything that gradwatch keeps of one optimizer from one of its steps to the next, in one object."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradwatch.actions.lbfgs_and_sam import ClosureCalls
from gradwatch.actions.step_actions import StepActions
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.unused_gradients import UnusedGradients
from gradwatch.distributed.rank_membership import RankMembership
from gradwatch.rules.rule_set import Rule
from gradwatch.session.binding.optimizer_rules import OptimizerRules
from gradwatch.session.pipeline.deferred_steps import Deferral

if TYPE_CHECKING:
    from gradwatch.session.pipeline.extra_columns import Measurement


@dataclass(slots=True, eq=False)
class OptimizerContext:
    """One optimizer, all those that step inside the backward, or one loop without an optimizer.

    `captured` is what was captured since its last step; made anew when the parameters change; the context stays.
    A new optimizer takes over the context of one that is gone. `bound_rules` are bound to it (None = not yet),
    `membership` its place among the ranks (None = it has not met them).
    """

    captured: OptimizerCapture
    acting: StepActions  # what was set aside or set for the step under way
    deferral: Deferral[Measurement]  # steps measured and not judged yet
    bound_rules: OptimizerRules | None = None
    membership: RankMembership | None = None
    nested: int = 0  # calls of the optimizer's `step` under way
    closure_calls: ClosureCalls | None = None  # of the `step(closure)` under way, or of one that raised
    unused_gradients: UnusedGradients = field(default_factory=UnusedGradients)
    needs_no_ranks: bool = False  # no rank and no micro-batch is waited for at its boundaries

    @property
    def rules(self) -> OptimizerRules:
        """The rules bound to it. Raises LookupError before they are."""
        if self.bound_rules is None:
            raise LookupError(f"no rules are bound to optimizer {self.captured.index} yet")
        return self.bound_rules

    def rules_in_force(self) -> list[Rule]:
        """The rules that judge something of this optimizer."""
        return [] if self.bound_rules is None else [one.rule for one in self.bound_rules.bound.plan.rules]

    def bind(self, bound_rules: OptimizerRules) -> None:
        """Judge by these rules from now on; the parameters may be others, and the ranks have to meet again."""
        self.bound_rules, self.needs_no_ranks = bound_rules, False

    def meet(self, membership: RankMembership) -> None:
        """Note the place among the ranks that have met."""
        self.membership = membership

    def step_begins(self, outer: int = 0) -> None:
        """Note that a call of the optimizer's `step` begins, with `outer` calls of the same step around it."""
        self.nested = outer + 1

    def nested_step_begins(self) -> None:
        """Note that a `super().step()` of the step under way begins."""
        self.nested += 1

    def nested_step_ends(self) -> None:
        """Note that a `super().step()` has returned; the step around it is still under way."""
        if self.nested:
            self.nested = max(1, self.nested - 1)

    def step_ends(self) -> bool:
        """Note that a call of the optimizer's `step` has returned; True if it was the outermost.

        Then what was set aside for the step is restored, and the next window opened.
        """
        if not self.nested:
            return False
        self.nested -= 1
        if self.nested:
            return False
        if self.acting.held:
            self.acting.release(finished=True)
        captured = self.captured
        captured.advance()
        if captured.loop_events.uncleared.suspected:
            captured.loop_events.uncleared.step_taken()
        return True

    def no_step_is_under_way(self) -> None:
        """Discard the calls of `step` counted so far: they raised, or what comes next is a step of its own."""
        self.nested = 0

    def closure_step_begins(self, depth: int) -> ClosureCalls:
        """The calls of the closure in a `step(closure)` that begins, inside the one under way if there is any.

        `depth` is how many calls of the optimizer's `step` are under way, this one included.
        """
        self.closure_calls = ClosureCalls(None, self.closure_calls, depth)
        return self.closure_calls

    def closure_step_ends(self, calls: ClosureCalls) -> None:
        """Go back to the `step(closure)` around the one that has returned."""
        self.closure_calls = calls.outer

    def discard_closures(self) -> None:
        """Discard the calls of closures: the steps that they are of have raised."""
        self.closure_calls = None

    def capture_with(self, captured: OptimizerCapture) -> None:
        """Go on with a capture that was made anew; it may have to wait for ranks again."""
        self.captured, self.needs_no_ranks = captured, False

    def wait_for_ranks(self, waits: bool) -> None:
        """Wait at boundaries from now on, for ranks or for micro-batches, or no longer."""
        self.needs_no_ranks = not waits

    @property
    def exchanges(self) -> bool:
        """True if the ranks exchange the facts of each of its steps, and so wait for them."""
        return self.membership is not None and self.membership.exchanges

    @property
    def owes_ranks(self) -> bool:
        """True if the facts of the step under way are still to be sent to the other ranks."""
        membership = self.membership
        return membership is not None and membership.owes and bool(membership.cadences)

    @property
    def pooled(self) -> bool:
        """True if a rank's norms are only a part of those over all ranks: not where DDP has averaged them."""
        return self.membership is not None and self.membership.pooled

    @property
    def clips_at_step_instead(self) -> bool:
        """True if hooks that were to clip inside the backward have switched themselves off."""
        clipper = None if self.bound_rules is None else self.bound_rules.clipper
        return clipper is not None and bool(clipper.disabled_reason)


class Contexts:
    """The contexts of one session, by the index of their optimizer in Records."""

    def __init__(self, failed: Callable[[str, BaseException], None]) -> None:
        self._failed = failed
        self._by_index: dict[int, OptimizerContext] = {}

    def __iter__(self) -> Iterator[OptimizerContext]:
        return iter(list(self._by_index.values()))

    def __bool__(self) -> bool:
        return bool(self._by_index)

    def bound(self) -> list[OptimizerRules]:
        """The rules of every optimizer that has some bound to it."""
        found = []
        for ctx in list(self._by_index.values()):
            if ctx.bound_rules is not None:
                found.append(ctx.bound_rules)
        return found

    def rules_of(self, captured: OptimizerCapture) -> OptimizerRules | None:
        """The rules bound to a capture's optimizer; None where none are yet."""
        ctx = self._by_index.get(captured.index)
        return None if ctx is None else ctx.bound_rules

    def find(self, captured: OptimizerCapture) -> OptimizerContext | None:
        """The context of a capture; None where there is none yet."""
        return self._by_index.get(captured.index)

    def of(self, captured: OptimizerCapture) -> OptimizerContext:
        """The context of a capture, made where there is none; `captured` is what it captures from now on."""
        found = self._by_index.get(captured.index)
        if found is None:
            acting = StepActions(self._failed)
            found = self._by_index[captured.index] = OptimizerContext(captured, acting, Deferral())
        elif found.captured is not captured:
            found.capture_with(captured)
        return found
