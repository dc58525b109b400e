"""Conditions that join rules (`when:`): `all`, `any` and `not` over rules by id, within a window of steps.

A rule holds at a step where it is firing, or was at one of the last `within` steps, this one included; one that is
about many parameters holds where it fires on any of them. A part may have a window of its own, such as a longer one for
what would explain the others and came before them. A rule that has judged nothing so far neither holds nor does not:
that is unknown (None), and joined as Kleene's logic has it, so that what fires would fire with any value of what is
unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from gradwatch.detectors import Detector, Scope
from gradwatch.detectors.detector import Comparison
from gradwatch.records.columns import OTHER_RULES

Join = Literal["rule", "all", "any", "not"]
JOINS: tuple[Join, ...] = ("all", "any", "not")
"""The keys that join conditions in a rule file."""
OF_DETECTOR = ("detect", "scope", "groups", "exclude", "every", "warmup", "half_life", "unless")
"""Keys of a rule that say what its detector judges, and that a rule with `when:` does not take."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One rule (`rule` its id), or `parts` joined: by `all`, by `any`, or, of a single one, by `not`.

    `within` is the window of the rule, or of the parts that have no other.
    """

    join: Join
    rule: str = ""
    parts: tuple[Condition, ...] = ()
    within: int = 1

    def rules(self) -> tuple[str, ...]:
        """The ids it names, each once, in the order in which they stand."""
        return tuple(dict.fromkeys(rule for rule, _ in self.windows()))

    def windows(self) -> Iterator[tuple[str, int]]:
        """The ids it names with the windows that they are named with."""
        if self.join == "rule":
            yield self.rule, self.within
        for part in self.parts:
            yield from part.windows()

    def holds(self, of: Callable[[str, int], bool | None]) -> bool | None:
        """True or False, or None where that depends on a rule of which `of(id, window)` is None."""
        if self.join == "rule":
            return of(self.rule, self.within)
        values = [part.holds(of) for part in self.parts]
        if self.join == "not":
            return None if values[0] is None else not values[0]
        decisive = self.join == "any"  # one that holds decides `any`, one that does not decides `all`
        if decisive in values:
            return decisive
        return None if None in values else not decisive

    def possible(self, known: Callable[[str], bool], value: bool = True) -> bool:
        """True if it could ever be `value`, where rules of which `known(id)` is False stay unknown for ever."""
        if self.join == "rule":
            return known(self.rule)
        if self.join == "not":
            return self.parts[0].possible(known, not value)
        every = all if (self.join == "all") == value else any
        return every(part.possible(known, value) for part in self.parts)

    def spelled(self, around: int = 0) -> Any:
        """As a rule file spells it inside a condition with the window `around`."""
        if self.join == "rule":
            return self.rule
        parts = [part.spelled(self.within) for part in self.parts]
        own = {} if self.within == around else {"within": self.within}
        return {self.join: parts[0] if self.join == "not" else parts, **own}


@dataclass(frozen=True)
class When(Detector):
    """Stands for a detector in a rule with `when:`, whose score is 1 where the condition holds, and else 0.

    No file can name it in `detect:`, and it scores no samples: the engine asks the rules that `condition` names.
    """

    kind: ClassVar[str] = "when"
    scopes: ClassVar[tuple[Scope, ...]] = ("total",)

    condition: Condition

    @property
    def columns(self) -> tuple[str, ...]:
        """No column of a Snapshot."""
        return (OTHER_RULES,)

    @property
    def comparison(self) -> Comparison:
        """It fires at 1."""
        return "at_least"

    @property
    def fires_at(self) -> float:
        """1."""
        return 1.0

    def spelled(self) -> dict[str, Any]:
        """`when:` as a rule file spells it."""
        spelled: dict[str, Any] = self.condition.spelled()
        return spelled


def when_of(given: Mapping[str, Any]) -> When:
    """A `When` of its fields as plain data (`gradwatch.rules.files.rules_digest`)."""
    return When(_condition(given["condition"]))


def _condition(given: Mapping[str, Any]) -> Condition:
    return Condition(given["join"], given["rule"], tuple(map(_condition, given["parts"])), given["within"])


def rules_below(conditions: Mapping[str, Condition], rule: str) -> tuple[str, ...]:
    """The rules with a detector that the condition of `rule` is about, through other conditions too.

    `conditions` are those of all rules that have one, by id; none of them is circular.
    """
    found, seen, left = dict[str, None](), {rule}, [rule]
    while left:
        for named in conditions[left.pop()].rules():
            if named not in conditions:
                found[named] = None
            elif named not in seen:
                seen.add(named)
                left.append(named)
    return tuple(found)


def circle(conditions: Mapping[str, Condition], start: str) -> tuple[str, ...]:
    """The ids from `start` back to it, each in the condition of the one before; empty where there is no such way."""
    ways: list[tuple[str, ...]] = [(start,)]
    seen: set[str] = set()
    while ways:
        way = ways.pop()
        for named in conditions[way[-1]].rules():
            if named == start:
                return (*way, start)
            if named in conditions and named not in seen:
                seen.add(named)
                ways.append((*way, named))
    return ()


def in_order(conditions: Mapping[str, Condition]) -> list[str]:
    """The ids so that each comes after those that its condition names; none of them is circular."""
    done: dict[str, None] = {}

    def visit(ids: Iterable[str]) -> None:
        for rule in ids:
            if rule in conditions and rule not in done:
                visit(conditions[rule].rules())
                done[rule] = None

    visit(conditions)
    return list(done)
