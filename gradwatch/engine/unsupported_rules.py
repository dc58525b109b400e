"""Parts of a rule file that cannot be carried out here, item by item, and the rule file without it.

One refusal is of the actions of one rule, or of one place of `clip:`. It either refuses the whole file, with every
reason at once, or switches just those actions off, so that all else protects (`disarmed`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from gradwatch.account import NOT_ARMED
from gradwatch.errors import UnfitRulesError
from gradwatch.rules.impossible_actions import TOTAL, clip_places
from gradwatch.rules.rule_set import Action, Clip, RuleSet

CLIP = "clip:"
"""Before a place of `clip:`, where rules that are off are listed: no rule id holds a colon."""


class Refusal(NamedTuple):
    """The reason why actions of rule `rule` are not carried out, or, where `clip` is not "", the clip there.

    `clip` is "total" or "groups.NAME". `actions` are the actions refused (empty = all of the rule). `reason` says what
    stands in the way, without the name of the rule, and `advice` what to do about it.
    """

    reason: str
    advice: str = ""
    rule: str = ""
    clip: str = ""
    actions: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """The rule's id, or `CLIP` and the place."""
        return self.rule or CLIP + self.clip

    def sentence(self, ruleset: RuleSet) -> str:
        """The refusal as one sentence, with its position in the file."""
        where = ruleset.origins.get(f"{self.rule}.do" if self.rule else "clip", "")
        what = f"rule {self.rule!r}" if self.rule else f"clip.{self.clip}"
        place = f" ({where})" if where and where != "default" else ""
        return f"{what}: {self.reason}{f'; {self.advice}' if self.advice else ''}{place}"


def refuse(refusals: Iterable[Refusal], ruleset: RuleSet) -> None:
    """Raise one `UnfitRulesError` that lists every refusal, if there are any."""
    listed = dict.fromkeys(f"  - {one.sentence(ruleset)}" for one in refusals)
    if listed:
        raise UnfitRulesError("\n".join(("the rules do not fit this model:", *listed)))


def disarmed(refusals: Iterable[Refusal], ruleset: RuleSet) -> RuleSet:
    """The rule file without what is refused: those rules go on judging, with the actions that are left to them."""
    found = list(refusals)
    rules = tuple(
        replace(rule, do=tuple(action for action in rule.do if not _refused(action, rule.id, found)))
        for rule in ruleset.rules
    )
    return replace(ruleset, rules=rules, clip=_clip_without(ruleset.clip, {one.clip for one in found}))


def not_armed(refusals: Iterable[Refusal]) -> dict[str, str]:
    """By `Refusal.key`, the reason why actions are off; every reason begins with `NOT_ARMED`."""
    reasons: dict[str, dict[str, None]] = {}
    for one in refusals:
        reasons.setdefault(one.key, {})[one.reason] = None
    return {key: NOT_ARMED + "; ".join(listed) for key, listed in reasons.items()}


def _refused(action: Action, rule: str, refusals: Iterable[Refusal]) -> bool:
    return any(one.rule == rule and (not one.actions or action.name in one.actions) for one in refusals)


def _clip_without(clip: Clip | None, places: set[str]) -> Clip | None:
    if clip is None:
        return None
    groups = {name: said for name, said in clip.groups.items() if f"groups.{name}" not in places}
    total = None if TOTAL in places else clip.total
    return replace(clip, total=total, groups=groups) if total is not None or groups else None


def only_at(clip: Clip | None, place: str) -> Clip | None:
    """`clip:` restricted to what it says at one place."""
    return _clip_without(clip, set(clip_places(clip)) - {place})
