"""Engine: a rule file ready to be bound to models."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from functools import cached_property

from gradwatch.engine.actions.backward_clips import only_in_backward
from gradwatch.engine.bound_engine import BoundEngine, on_gradients
from gradwatch.engine.clipping.bind_clip_section import clips_only_total, needs_host
from gradwatch.engine.columns_needed import Needs, needs_of
from gradwatch.engine.rule_plan import make_plan
from gradwatch.engine.selected_parameters import labels
from gradwatch.engine.unmatched_rules import admit, may_miss, refusals, unmatched
from gradwatch.engine.unsupported_rules import Refusal
from gradwatch.records.run_info import RuleInfo
from gradwatch.records.snapshot import Sites
from gradwatch.rules.impossible_actions import by_what_acts
from gradwatch.rules.rule_set import Rule, RuleSet


class Engine:
    """A rule file ready to be bound to models. Immutable: everything that is learned is in `EngineState`s.

    `rank` is used for annotations only (`{rank}`).
    """

    def __init__(self, ruleset: RuleSet, rank: int = 0) -> None:
        self.ruleset = ruleset
        self._clip_needs_host = needs_host(ruleset.clip)
        self.may_miss = may_miss(ruleset)  # whether `unmatched` could ever list anything
        self.rank = rank

    @property
    def rule_infos(self) -> tuple[RuleInfo, ...]:
        """Descriptions of the enabled rules for sinks, sorted by id."""
        return tuple(
            RuleInfo(rule.id, rule.kind, rule.severity, _named(rule), getattr(rule.detect, "of", ""))
            for rule in self._enabled()
        )

    @property
    def columns(self) -> frozenset[str]:
        """Every column that an enabled rule reads, norms included."""
        return frozenset(name for rule in self._enabled() for name in rule.detect.columns)

    def cadences_of(self, columns: AbstractSet[str]) -> frozenset[int]:
        """The cadences, in optimizer steps, of the enabled rules that read any of these columns."""
        return frozenset(
            rule.every for rule in self._enabled() if not columns.isdisjoint(rule.detect.columns)
        )

    @property
    def needs(self) -> Needs:
        """Columns that the enabled rules need, whatever the model."""
        return needs_of(self._enabled())

    @cached_property
    def skips_nonfinite(self) -> bool:
        """True if some rule skips steps with non-finite gradients, as a fused optimizer can on the device."""
        return any(_skips_on_device(rule) for rule in self._enabled())

    @cached_property
    def skips_from(self) -> int:
        """The first step at which some rule skips steps with non-finite gradients on the device, if any does."""
        return min((rule.from_step for rule in self._enabled() if _skips_on_device(rule)), default=0)

    @cached_property
    def acts_on_host(self) -> bool:
        """True if a rule or policy does more than skip non-finite steps, so that it needs the norms before the step."""
        rules = any(
            rule.acts and not (_skips_on_device(rule) or only_in_backward(self.ruleset, rule.id))
            for rule in self._enabled()
        )
        return rules or self._clip_needs_host

    def acts_by(self, kind: str) -> bool:
        """True if an action depends on a rule of this kind: its own action, or one of a rule with a condition on it."""
        acting = by_what_acts(self.ruleset)
        return any(rule.kind == kind and rule.id in acting for rule in self._enabled())

    @cached_property
    def clips_only_total(self) -> bool:
        """True if `clip:` asks for nothing, or for nothing but a bound on the total norm at the step."""
        return clips_only_total(self.ruleset.clip)

    def _enabled(self) -> list[Rule]:
        return sorted((rule for rule in self.ruleset.rules if rule.enabled), key=lambda rule: rule.id)

    def check(self, sites: Sites, strict: bool = False) -> None:
        """Raise `UnfitRulesError` if something that the rules ask for cannot be carried out on these sites.

        `sites` are those of all models. With `strict`, rules and groups that match nothing raise `UnmatchedRulesError`;
        see `unmatched`.
        """
        admit(self.ruleset, sites, strict)

    def refusals(self, sites: Sites) -> list[Refusal]:
        """Everything that cannot be carried out on these sites, item by item; `check` raises if there is any."""
        return list(refusals(self.ruleset, sites.labelled(labels(self.ruleset.groups, sites))))

    def unmatched(self, sites: Sites) -> dict[str, str]:
        """By rule id or group (`group:NAME`), the reason why it matches no site; `optional` ones are left out."""
        return unmatched(self.ruleset, sites.labelled(labels(self.ruleset.groups, sites)))

    def bind(self, sites: Sites) -> BoundEngine:
        """The engine for the sites of one optimizer; a rule that matches none of them is inactive, with a reason."""
        labelled = sites.labelled(labels(self.ruleset.groups, sites))
        return BoundEngine(make_plan(self.ruleset, labelled), self.rank)


def _named(rule: Rule) -> tuple[str, ...]:
    """The actions a rule may carry out, those of its ladder included."""
    return tuple(dict.fromkeys(action.does for action in rule.do))


def _skips_on_device(rule: Rule) -> bool:
    """True if a rule only skips non-finite gradients, for ever: `found_inf` does that without the host."""
    done = [
        action for action in rule.do if action.name != "localise"
    ]  # it changes nothing, and may come late
    skips = [action for action in done if action.name == "skip_step"]
    forever = all(
        action.params.get("max_consecutive") is None or action.params.get("then") != "stop"
        for action in skips
    )
    return rule.acts and on_gradients(rule) and 0 < len(skips) == len(done) and forever
