"""Health of a checkpoint, judged at every step of one optimizer; the folder says when one is healthy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite
from typing import Any, NamedTuple

from gradwatch.records.columns import CONFIRMED_JUMP, CONFIRMED_NORM
from gradwatch.records.decision import Decision
from gradwatch.records.loss_comparison import LossComparison
from gradwatch.records.record import CheckpointHealth
from gradwatch.records.snapshot import Snapshot
from gradwatch.records.verdict import Verdict

JUMP = 100.0
"""A total norm of this many times the largest so far may have ruined the weights: they are looked at."""
SURGE = 10.0
"""One of this many times may have, where its step made a parameter LEAP times as large."""
LEAP = 2.0
STEPS_TO_SHOW = 100
"""Steps after such a leap before weights are vouched for again."""

NOT_LOOKED_AT = "the weights could not be looked at"
"""Begins the reason where a look was not possible: nothing was found by it, and the weights are not vouched for."""

MOST_REPLACED = 8
"""Sets of weights whose reasons are kept when others have replaced them: the latest."""


class Growth(NamedTuple):
    """Since an earlier look a parameter became `factor` times the larger of its own and the model's weights then."""

    factor: float
    name: str


NO_GROWTH = Growth(0.0, "")


class CheckpointHealthTracker:
    """Follows one optimizer's steps; `critical` are the rules whose firing makes a checkpoint unfit."""

    __slots__ = (
        "_found",
        "_jump",
        "_largest",
        "_last",
        "_looked_at",
        "_step",
        "confirmed",
        "critical",
        "leapt",
        "looked",
        "loss",
        "nonfinite_statistics",
        "now",
        "outgrown",
        "poisoned_at",
        "replaced",
        "ruin",
        "surge_from",
        "surged",
        "suspected",
    )

    def __init__(self, critical: frozenset[str]) -> None:
        self.critical = critical
        self.now = CheckpointHealth()
        self.poisoned_at: int | None = None
        # Running statistics that were not finite as they were read last.
        self.nonfinite_statistics: tuple[str, ...] = ()
        # Why weights that others have replaced were not healthy, in one string for each replacement.
        self.replaced: tuple[str, ...] = ()
        self.ruin: tuple[str, ...] = ()  # what the latest look at the weights found
        # Weights that have grown since watching began, for a loss that is no lower: the reason in words.
        self.outgrown = ""
        self.loss = LossComparison()
        self.looked: int | None = None  # the last step after which a look found nothing
        self.suspected: int | None = (
            None  # a step that jumped, and was taken, and the weights were not looked at since
        )
        self.surged: int | None = None  # as `suspected`, of a lesser jump, which by itself says nothing
        # The step from which on weights are vouched for again, and why not before it.
        self.leapt: tuple[int, str] | None = None
        self._looked_at: int | None = None  # the step before the last look
        # Of the suspected step: how many times the largest before it its total norm was, and that norm.
        self._jump = 0.0, 0.0
        # The jump that a look at the weights has confirmed, as scalars of a Snapshot.
        self.confirmed: Mapping[str, float] = {}
        self._largest = 0.0
        # A total norm from which on a parameter may leap: what they were before is to be known.
        self.surge_from = inf
        self._found: tuple[str, ...] = ()  # what the last step by itself has against it
        self._last: int | None = None
        self._step: int | None = None

    def after(
        self, snapshot: Snapshot, verdict: Verdict, decision: Decision, judged: bool = True
    ) -> CheckpointHealth:
        """The health of a checkpoint saved after this step, which is also kept as `now`.

        `judged` False: an internal error left it without a verdict.
        """
        if snapshot.scalars.get("scaler_skip"):
            return self.now
        self._step = snapshot.step
        if not (decision.skip or decision.stop):
            self._note_size(snapshot)
            self.loss.add((snapshot.scalars.get("loss"),))
        if self.leapt is not None and snapshot.step >= self.leapt[0]:
            self.leapt = None
        if (
            judged
            and self.poisoned_at is None
            and self.suspected is None
            and self.leapt is None
            and not (
                verdict.firing or decision.stop or self.nonfinite_statistics or self.ruin or self.outgrown
            )
            and isfinite(snapshot.total_norm)
        ):
            self._found, self._last = (), snapshot.step
            # What follows, on a healthy step.
            self.now = CheckpointHealth(True, snapshot.step, (), self.looked, self.replaced)
            return self.now
        broken = snapshot.nonfinite()
        passed = broken if decision.zero is None else broken & ~decision.zero
        if passed.any() and not (decision.skip or decision.stop):
            self.poisoned_at = snapshot.step if self.poisoned_at is None else self.poisoned_at
        reasons = [f"rule {rule} is firing" for rule in sorted(self.critical.intersection(verdict.firing))]
        if broken.any():
            reasons.append(f"a gradient was not finite at step {snapshot.step}")
        if decision.stop:
            reasons.append("training was stopped")
        if not judged:
            reasons.append(f"step {snapshot.step} could not be judged")
        self._found = tuple(reasons)
        return self._renew()

    @property
    def untroubled(self) -> bool:
        """True if nothing of what was before speaks against a checkpoint; a step as usual leaves it so."""
        return not (
            self.confirmed
            or self.ruin
            or self.outgrown
            or self.nonfinite_statistics
            or self.suspected is not None
            or self.surged is not None
            or self.leapt is not None
            or self.poisoned_at is not None
        )

    def after_all(self, snapshots: Sequence[Snapshot], verdict: Verdict) -> list[CheckpointHealth]:
        """Health after each of these steps in turn, which had `verdict`, or one that fires the same, and were taken."""
        largest = max(snapshot.total_norm for snapshot in snapshots)
        if verdict.firing or not self.untroubled or not (self._largest and largest < self.surge_from):
            decision = Decision()
            return [self.after(snapshot, verdict, decision) for snapshot in snapshots]
        self._grows_to(max(self._largest, largest))
        self.loss.add([snapshot.scalars.get("loss") for snapshot in snapshots])
        self._found, self._last = (), snapshots[-1].step
        self._step = self._last
        found = [
            CheckpointHealth(True, snapshot.step, (), self.looked, self.replaced) for snapshot in snapshots
        ]
        self.now = found[-1]
        return found

    def unjudged(self, step: int) -> None:
        """Note that an internal error kept this step from being judged: it cannot be called healthy."""
        self._step, self._found = step, (f"step {step} could not be judged",)
        self._renew()

    def seen(
        self,
        ruin: tuple[str, ...],
        step: int,
        growth: Growth = NO_GROWTH,
        outgrown: Growth = NO_GROWTH,
    ) -> None:
        """Note a look at the weights as they were after `step` (-1 = before any); `ruin` is what was found.

        `growth` is that of the weights since the look before, `outgrown` that of this optimizer's since watching began
        where it is beyond what is usual.
        """
        self.outgrown = (
            f"{outgrown.name} is {outgrown.factor:.3g} times as large as when watching began, and the loss is no lower"
            " than then"
            if outgrown.name and self.loss.no_better and not ruin
            else ""
        )
        if (ruin or self.outgrown) and not self.ruin and self.now.healthy:
            self._last = self.looked  # no step since is suspected
        if self.surged is not None and step >= self.surged:
            if growth.factor >= LEAP and self._looked_at == self.surged - 1:
                self._leapt(self.surged, growth)
            self.surged = None
        self._looked_at = step
        self.ruin = ruin
        if not (ruin or self.outgrown or self.nonfinite_statistics):
            self.looked = step if step >= 0 else None
        if self.suspected is not None and step >= self.suspected:
            self.suspected = None
            if ruin:
                self.confirmed = dict(zip((CONFIRMED_JUMP, CONFIRMED_NORM), self._jump, strict=True))
        self._renew()

    def _leapt(self, step: int, growth: Growth) -> None:
        if self._last is not None and self._last >= step:
            self._last = step - 1 if step else None  # it was vouched for until the look
        self.leapt = (
            step + STEPS_TO_SHOW,
            f"at step {step} the total norm jumped, and {growth.name} became {growth.factor:.3g} times as large: less"
            f" than {STEPS_TO_SHOW} steps have shown what became of it",
        )

    def take_confirmed(self) -> Mapping[str, float]:
        """`confirmed`, which is told once."""
        found, self.confirmed = self.confirmed, {}
        return found

    def carry_on(self, before: CheckpointHealthTracker) -> None:
        """Go on from the tracker of the same optimizer under other sites or rules."""
        self.load(before.to_dict())
        self.suspected, self.surged, self.looked = before.suspected, before.surged, before.looked
        self._looked_at = before._looked_at
        self._jump, self.confirmed = before._jump, before.confirmed
        self.replaced = before.replaced

    def _note_size(self, snapshot: Snapshot) -> None:
        total = snapshot.total_norm
        if total <= self._largest or not isfinite(total):
            return
        if total >= self.surge_from:
            self.surged = snapshot.step
        if self._largest and total >= JUMP * self._largest:
            self._jump = total / self._largest, total
            self.suspected, total = snapshot.step, JUMP * self._largest
        self._grows_to(total)

    def begin_anew(self) -> None:
        """Norms of what comes are not compared with those of before: they were changed on purpose."""
        self._grows_to(0.0)

    def compare_loss_anew(self) -> None:
        """Compare later losses with that of the next step: the weights were changed on purpose."""
        self.loss = LossComparison()

    def begin_with_other_weights(self, resumed: bool) -> None:
        """Forget what was found of the weights so far: others are trained now.

        `resumed`: by an optimizer with a state of before, which a non-finite gradient may have reached.
        """
        if not self.now.healthy:
            said = dict.fromkeys((*self.replaced, "; ".join(self.now.reasons)))
            self.replaced = tuple(said)[-MOST_REPLACED:]
        self.poisoned_at = self.poisoned_at if resumed else None
        self.ruin, self.outgrown, self.nonfinite_statistics, self._found = (), "", (), ()
        self.suspected = self.surged = self.leapt = self.looked = self._looked_at = None
        self.confirmed, self.loss = {}, LossComparison()
        self._step = None  # that of the weights before vouches for nothing
        self._renew()

    def discard_poison(self) -> None:
        """No optimizer that a non-finite gradient has reached is at work any more: only weights may hold it."""
        self.poisoned_at = None
        self._renew()

    def steps_unseen(self, step: int) -> int:
        """The number of steps up to `step` since the last look at the weights."""
        return step - (-1 if self._looked_at is None else self._looked_at)

    def _grows_to(self, largest: float) -> None:
        self._largest, self.surge_from = largest, SURGE * largest or inf

    def statistics_read(self, nonfinite: tuple[str, ...], by_this_step: bool = False) -> None:
        """Keep the names of the running statistics that are not finite, of those that were just read.

        `by_this_step`: its gradients are not finite either, so its batch did that, and no step before is suspected.
        """
        if nonfinite and not self.nonfinite_statistics and self.now.healthy and not by_this_step:
            self._last = self.looked
        self.nonfinite_statistics = nonfinite

    def _renew(self) -> CheckpointHealth:
        reasons = [*self._found, *self.ruin]
        if self.nonfinite_statistics:
            reasons.append(of_statistics(self.nonfinite_statistics))
        if self.outgrown:
            reasons.append(self.outgrown)
        if self.suspected is not None and not self.ruin:
            jumped = f"the total norm jumped at step {self.suspected}"
            reasons.append(f"{jumped}, and the weights have not been checked since")
        if self.leapt is not None:
            reasons.append(self.leapt[1])
        if self.poisoned_at is not None:
            reasons.append(f"a non-finite gradient reached the optimizer at step {self.poisoned_at}")
        self._last = self._last if reasons or self._step is None else self._step
        self.now = CheckpointHealth(not reasons, self._last, tuple(reasons), self.looked, self.replaced)
        return self.now

    def to_dict(self) -> dict[str, Any]:
        """The state saved in a checkpoint, JSON-safe."""
        return {
            "last_healthy_step": self.now.last_healthy_step,
            "poisoned_at": self.poisoned_at,
            "ruin": list(self.ruin),
            "outgrown": self.outgrown,
            "loss": self.loss.to_dict(),
            "largest": self._largest,
            "leapt": None if self.leapt is None else list(self.leapt),
        }

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from `to_dict()`; None (an earlier version wrote it) starts afresh."""
        saved = saved or {}
        last, poisoned = saved.get("last_healthy_step"), saved.get("poisoned_at")
        self.poisoned_at = None if poisoned is None else int(poisoned)
        self.ruin = tuple(map(str, saved.get("ruin", ())))  # until the next look
        self.outgrown, self.loss = str(saved.get("outgrown", "")), LossComparison(saved.get("loss"))
        self.suspected, self.surged, self.looked, self._looked_at, self._found = None, None, None, None, ()
        leapt = saved.get("leapt")
        self.leapt = None if leapt is None else (int(leapt[0]), str(leapt[1]))
        self._grows_to(float(saved.get("largest", 0.0)))
        self._last = self._step = None if last is None else int(last)
        self._renew()


def as_of(saved: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Of `CheckpointHealthTracker.to_dict()`, all that holds of weights as they were after `step`, an earlier one.

    What is found by looking at weights is left: the next look is at these.
    """
    poisoned, leapt = saved.get("poisoned_at"), saved.get("leapt")
    if poisoned is not None and int(poisoned) > step:
        poisoned = None
    if leapt is not None and int(leapt[0]) - STEPS_TO_SHOW > step:
        leapt = None
    return {**saved, "poisoned_at": poisoned, "leapt": leapt}


def joined(parts: Iterable[CheckpointHealth]) -> CheckpointHealth:
    """The health of several optimizers or ranks together: that of the worst, at the step all had reached."""
    found = list(parts)
    return CheckpointHealth(
        all(one.healthy for one in found),
        least([one.last_healthy_step for one in found]),
        tuple(dict.fromkeys(reason for one in found for reason in one.reasons)),
        least([one.weights_step for one in found]),
        tuple(dict.fromkeys(reason for one in found for reason in one.replaced)),
    )


def of_statistics(names: Sequence[str]) -> str:
    """The reason where running statistics of these names hold NaN or Inf."""
    return f"running statistics are not finite: {', '.join(names[:3])}"


def resumed(saved: Iterable[Mapping[str, Any] | None]) -> CheckpointHealth:
    """The health of optimizers that have not stepped since these states were loaded, but for what a look finds."""
    found = []
    for state in saved:
        tracker = CheckpointHealthTracker(frozenset())
        tracker.load({**(state or {}), "ruin": ()})
        found.append(tracker.now)
    return joined(found)


def least(steps: list[int | None]) -> int | None:
    """The smallest of them; None where one is not known, or there is none."""
    known = [step for step in steps if step is not None]
    return min(known) if known and len(known) == len(steps) else None
