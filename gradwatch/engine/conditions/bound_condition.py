"""A rule with a condition on other rules (`when:`), bound to sites; evaluated after the rules that it names.

What such a rule judges follows from the FiringStates of the rules it names, from which of those have judged anything so
far, and from the step alone. So on steps that change no other rule it changes only where a window closes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from gradwatch.engine.firing import NEVER, FiringState
from gradwatch.rules.condition import Condition


@dataclass(frozen=True, slots=True, eq=False)
class BoundCondition:
    """A rule with a condition: `number` is its own in the plan, `named` has those of the rules it names, by id.

    A rule that judges nothing among these sites has no number, and its value is never known. `of` are the numbers of
    the rules with a detector that it is about, through other conditions too.
    """

    number: int
    condition: Condition
    named: Mapping[str, int]
    of: frozenset[int]

    def value(
        self,
        tracks: Sequence[FiringState],
        unjudged: AbstractSet[int],
        others: Mapping[int, bool | None],
        step: int,
    ) -> bool | None:
        """True, False, or None if it is not known (Kleene's three-valued logic).

        `unjudged` are the numbers of the rules that have judged nothing so far; `others` the values of the conditions
        before this one, by number.
        """

        def of(rule: str, within: int) -> bool | None:
            number = self.named.get(rule)
            if number is None:
                return None
            if held(tracks[number], step, within):
                return True
            # One that is not firing because its own condition is not known says nothing.
            return None if number in unjudged or others.get(number, False) is None else False

        return self.condition.holds(of)

    def rules_that_hold(self, tracks: Sequence[FiringState], step: int) -> list[str]:
        """The ids of the rules that it names and that hold at this step."""
        bound = [(rule, within) for rule, within in self.condition.windows() if rule in self.named]
        found = [rule for rule, within in bound if held(tracks[self.named[rule]], step, within)]
        return list(dict.fromkeys(found))

    def unsettled(self, tracks: Sequence[FiringState], active: AbstractSet[int], step: int) -> bool:
        """True if its value may change at the next step although no rule begins to fire that is not in `active`."""
        return any(number in active for number in self.named.values()) or self.window_open(tracks, step)

    def window_open(self, tracks: Sequence[FiringState], step: int) -> bool:
        """True if a rule holds only by its window (`within`): it fires no longer, but did in the last steps.

        While no rule changes, False stays False.
        """
        windows = ((self.named.get(rule), within) for rule, within in self.condition.windows())
        return any(
            number is not None and was_firing(tracks[number], step, within) for number, within in windows
        )


def held(track: FiringState, step: int, within: int) -> bool:
    """True if a rule is firing after this step, or was firing at one of the last `within` optimizer steps."""
    return bool(track.firing.any()) or was_firing(track, step, within)


def was_firing(track: FiringState, step: int, within: int) -> bool:
    """True if a rule that is resolved was firing at one of the last `within` optimizer steps, this one included."""
    # For the last time at the step before that of its resolve.
    return track.resolved_at != NEVER and 0 <= step - track.resolved_at < within - 1
