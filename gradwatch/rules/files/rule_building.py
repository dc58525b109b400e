"""Merged document -> rules: defaults filled in, words looked up, contradictions found, origins noted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cached_property
from typing import Any

from gradwatch.detectors.detector import Detector, rule_keys
from gradwatch.records.columns import MODULE_COLUMNS, RANK_COLUMNS, UNGROUPED
from gradwatch.rules.action_kinds import ACTIONS
from gradwatch.rules.condition import OF_DETECTOR, Condition, When
from gradwatch.rules.files.annotations import check_annotations, check_labels
from gradwatch.rules.files.clip_section import unknown_group
from gradwatch.rules.files.detect_section import Found, build_detector, find_kind
from gradwatch.rules.files.do_and_sinks_sections import actions
from gradwatch.rules.files.key_validation import check, keys_of, right_part
from gradwatch.rules.files.pydantic_models import Defaults, GroupEntry, RuleEntry
from gradwatch.rules.files.rule_references import UNLESS, check_named_rules
from gradwatch.rules.files.when_section import check_circle, named, when_section
from gradwatch.rules.rule_set import COSTLY_EVERY, Action, Group, Rule, is_costly, whole_optimizer
from gradwatch.rules.yaml.nodes import Map, Mark, Node, Scalar, Seq
from gradwatch.rules.yaml.problems import Problems, quoted

BUILT_IN: Mapping[str, Any] = {
    "every": 1,
    "from_step": 0,
    "keep_firing_for": 0,
    "cooldown": 20,
    "severity": "warning",
    "mode": "act",
    "on_error": "pass",
}
"""What applies where neither the rule nor `defaults` nor the kind says anything."""
WITHOUT_BASELINE: Mapping[str, str] = {
    "warmup": "delete the key; `from_step: N` begins to judge at step N",
    "half_life": "delete the key",
}
"""Advice on keys that belong to kinds with a baseline, where a kind has none."""
_BASELINE_KEYS = tuple(WITHOUT_BASELINE)


def groups(document: Map, problems: Problems) -> tuple[Group, ...]:
    """The groups, in the order in which the first match wins."""
    section = document.get("groups")
    result = []
    for name, (mark, node) in section.entries.items() if isinstance(section, Map) else ():
        if not isinstance(node, Map):
            continue
        entry = check(node, GroupEntry, problems, mark, f"group {quoted(name)}")
        if "params" not in node.entries and "params" not in node.dropped:
            problems.add(
                mark,
                "GW102",
                f"group {quoted(name)} lacks the key 'params'",
                'params: ["*"] is every parameter',
            )
        elif entry is not None and entry.params is not None:
            result.append(Group(name, tuple(entry.params), entry.min_ndim, bool(entry.optional)))
    return tuple(result)


class Resolver:
    """Resolves the rules of one merged document; `names` are those of its groups, whole or not."""

    def __init__(
        self, document: Map, names: frozenset[str], groups: Iterable[Group], problems: Problems
    ) -> None:
        self.problems, self.group_names = problems, names
        self.globs = {group.name: group.params for group in groups}
        self.origins: dict[str, str] = {}
        self.inactive: dict[str, str] = {}
        section = document.get("rules")
        self.section = section if isinstance(section, Map) else Map(document.mark)
        node = document.get("defaults")
        self.defaults_node = node if isinstance(node, Map) else Map(document.mark)
        defaults = check(self.defaults_node, Defaults, problems, self.defaults_node.mark, "`defaults`")
        self.defaults = defaults or right_part(self.defaults_node, Defaults)

    def all(self) -> tuple[Rule, ...]:
        """Every rule that can be had; what is wrong is reported and left out."""
        rules = (self.one(rule_id) for rule_id in self.section.entries)
        found = tuple(rule for rule in rules if rule is not None)
        check_named_rules(self.section, self.problems)
        return found

    def one(self, rule_id: str) -> Rule | None:
        """One rule, or None (wrong, or inactive in this version).

        Of keys that are wrong the rest is checked as if they were left out, so that all is reported at once.
        """
        mark, node = self.section.entries[rule_id]
        if not isinstance(node, Map):
            return None
        entry = check(node, RuleEntry, self.problems, mark, f"rule {quoted(rule_id)}")
        entry = entry or right_part(node, RuleEntry)
        if isinstance(node.get("when"), Map):
            return self._joining(rule_id, node, mark, entry)
        found = self._detect(rule_id, node, mark)
        do = self._lists(node)
        if found is None:
            return None
        if found.cls is None:
            self._not_built(rule_id, node, entry, found)
            return None
        return self._build(rule_id, node, mark, entry, found, do)

    def _lists(self, node: Map) -> tuple[Action, ...]:
        """The actions of a rule, after checking its groups and texts."""
        do = actions(node.get("do"), self.problems)
        self._known_groups(node.get("groups"))
        self._excluded_groups(node.get("exclude"))
        check_annotations(node.get("annotations"), self.problems)
        check_labels(node.get("labels"), self.problems)
        return do

    def _detect(self, rule_id: str, node: Map, mark: Mark) -> Found | None:
        detect = node.get("detect")
        if detect is None:
            if "when" not in node.entries:  # else it is no map, and reported
                self._no_detect(rule_id, node, mark)
            return None
        if not isinstance(detect, Map):
            return None
        return find_kind(detect, node.key_mark("detect"), f"rule {quoted(rule_id)}", self.problems)

    def _no_detect(self, rule_id: str, node: Map, mark: Mark) -> None:
        unknown = [key for key in node.entries if key not in keys_of(RuleEntry)]
        known = ["detect", "when"]
        if node.dropped.intersection(known) or any(self.problems.closest(key, known) for key in unknown):
            return  # refused or misspelt, and reported as that
        rules = {key: entry.node for key, entry in self.section.entries.items()}
        others = [key for key, other in rules.items() if isinstance(other, Map) and "detect" in other.entries]
        meant = self.problems.meant(rule_id, others)
        self.problems.add(mark, "GW102", f"rule {quoted(rule_id)} lacks the key 'detect'{meant}")

    def _known_groups(self, node: Node | None) -> None:
        for item in node.items if isinstance(node, Seq) else ():
            if isinstance(item, Scalar) and isinstance(item.value, str) and item.text not in self.group_names:
                unknown_group(item.text, item.mark, self.group_names, self.problems)

    def _excluded_groups(self, node: Node | None) -> None:
        """Report groups where globs on the names of parameters belong: they would match nothing, in silence."""
        for item in node.items if isinstance(node, Seq) else ():
            if isinstance(item, Scalar) and item.text in self.group_names:
                message = (
                    f"{quoted(item.text)} is a group, and 'exclude' takes globs on the names of parameters"
                )
                globs = ", ".join(f'"{glob}"' for glob in self.globs.get(item.text, ()))
                hint = f"write globs on names: [{globs}]" if globs else "write globs on names"
                self.problems.add(item.mark, "GW220", message, hint)

    def _not_built(self, rule_id: str, node: Map, entry: RuleEntry, found: Found) -> None:
        if entry.optional or entry.enabled is False:
            self.inactive[rule_id] = found.reason
            return
        detect = node.get("detect")
        assert isinstance(detect, Map)
        kind = detect.get("kind")
        assert kind is not None
        hint = "with `optional: true` the rule is kept, inactive"
        self.problems.add(kind.mark, "GW202", found.reason, hint)

    def _build(
        self, rule_id: str, node: Map, mark: Mark, entry: RuleEntry, found: Found, do: tuple[Action, ...]
    ) -> Rule | None:
        cls = found.cls
        assert cls is not None
        before = len(self.problems)
        timing = {key: self._timing(rule_id, key, node, entry, cls) for key in keys_of(Defaults)}
        detect = node.get("detect")
        assert isinstance(detect, Map)
        baseline = {key: timing[key] for key in _BASELINE_KEYS}
        detector = build_detector(found, detect, node.key_mark("detect"), baseline, self.problems)
        if detector is None:
            return None
        scope = self._scope(node, entry, detector)
        self._every(node, timing["every"], do, detector)
        if not do and is_costly(detector) and not self._says_every(node):
            timing["every"] = COSTLY_EVERY
        self._clip_baseline(node, do, cls)
        self._suspended(node, entry, cls)
        self._origins(rule_id, node, detect)
        if len(self.problems) != before:
            return None
        return _rule(rule_id, detector, scope, timing, entry, do)

    def _suspended(self, node: Map, entry: RuleEntry, cls: type[Detector]) -> None:
        """Report a rule on what is not finite that has `unless`."""
        if entry.unless and cls.finiteness:
            message = "what is not finite is a fault however far a training has come"
            self.problems.add(node.key_mark(UNLESS), "GW219", message, "delete `unless`")

    # -- conditions --------------------------------------------------------------------------------------

    def _joining(self, rule_id: str, node: Map, mark: Mark, entry: RuleEntry) -> Rule | None:
        """A rule with a condition on others, or None (wrong, or inactive)."""
        before, do = len(self.problems), self._lists(node)
        section = node.get("when")
        assert isinstance(section, Map)
        for key in OF_DETECTOR:
            if key in node.entries:
                message = (
                    f"rule {quoted(rule_id)} has 'when', which joins rules at every step, and {quoted(key)}"
                )
                self.problems.add(node.key_mark(key), "GW208", message, "keep one of them")
        when = when_section(section, node.key_mark("when"), f"rule {quoted(rule_id)}", self.problems)
        check_circle(rule_id, section, self._conditions, self.problems)
        off = self._named_off(rule_id, section, optional=bool(entry.optional))
        if when is None:
            return None
        self.origins |= {f"{rule_id}.{key}": "default" for key in keys_of(Defaults)}
        keys = [key for key in keys_of(Defaults) if key not in OF_DETECTOR]
        timing = {key: self._timing(rule_id, key, node, entry, When) for key in keys}
        self._clip_baseline(node, do, When)
        self._origins(rule_id, node)
        if off:
            self.inactive[rule_id] = off
        return (
            None if off or len(self.problems) != before else _rule(rule_id, when, "total", timing, entry, do)
        )

    @cached_property
    def _conditions(self) -> dict[str, Condition]:
        """The conditions of all rules that have one, as far as they are right; what is wrong is reported elsewhere."""
        found = {}
        for rule_id, (mark, node) in self.section.entries.items():
            section = node.get("when") if isinstance(node, Map) else None
            when = when_section(section, mark, rule_id, Problems()) if isinstance(section, Map) else None
            if when is not None:
                found[rule_id] = when.condition
        return found

    def _named_off(self, rule_id: str, section: Map, optional: bool) -> str:
        """The reason why an optional condition is not evaluated, "" where it is; report rules that are not there."""
        off = ""
        for one in named(section):
            entry = self.section.entries.get(one.text)
            if entry is None:
                others = [each for each in self.section.entries if each != rule_id]
                message = f"the condition of rule {quoted(rule_id)} names {quoted(one.text)}, and there is no such rule"
                self.problems.add(one.mark, "GW216", message + self.problems.meant(one.text, others))
            elif isinstance(entry.node, Map) and _switched_off(entry.node):
                reason = f"its condition names {quoted(one.text)}, which is switched off"
                off = off or reason
                if not optional:
                    hint = "with `optional: true` the rule is kept, inactive"
                    self.problems.add(one.mark, "GW216", f"rule {quoted(rule_id)}: {reason}", hint)
        return off

    def _timing(self, rule_id: str, key: str, node: Map, entry: RuleEntry, cls: type[Detector]) -> Any:
        """The rule's own key, else `defaults` (where the kind has that notion), else the kind's default."""
        field = "for_" if key == "for" else key
        has = key not in _BASELINE_KEYS or key in rule_keys(cls)
        if key in node.entries:
            if not has:
                message = f"the detector '{cls.kind}' has no baseline, so it takes no {quoted(key)}"
                self.problems.add(node.key_mark(key), "GW207", message, WITHOUT_BASELINE[key])
            if (value := getattr(entry, field)) is not None:
                return value
        elif has and (value := getattr(self.defaults, field)) is not None:
            self.origins[f"{rule_id}.{key}"] = str(self.defaults_node.key_mark(key))
            return value
        self.origins[f"{rule_id}.{key}"] = "default"
        if key == "for":
            return cls.default_for
        if key in _BASELINE_KEYS:
            return _field_default(cls, key) if has else 0
        return BUILT_IN[key]

    def _scope(self, node: Map, entry: RuleEntry, detector: Detector) -> Any:
        """The scope, after checking that this kind and column can be used with it."""
        column = str(getattr(detector, "of", detector.columns[0]))
        if whole_optimizer(column):
            for key in ("scope", "groups", "exclude"):
                if key in node.entries and not (key == "scope" and entry.scope == "total"):
                    message = (
                        f"{quoted(column)} is one value for the whole optimizer and takes no {quoted(key)}"
                    )
                    self.problems.add(node.key_mark(key), "GW212", message, "delete the key")
            return "total"
        if detector.columns[0] in RANK_COLUMNS:
            for key in ("scope", "groups", "exclude"):
                if key in node.entries:
                    message = f"the detector '{detector.kind}' is about ranks and takes no {quoted(key)}"
                    self.problems.add(node.key_mark(key), "GW212", message, "delete the key")
            return detector.scopes[0]
        if entry.scope is None:
            return detector.scopes[0]
        if entry.scope == "module" and column in MODULE_COLUMNS:
            return "param"  # each site by itself, and its sites are modules
        if column in UNGROUPED and entry.scope in ("group", "total"):
            scope = node.get("scope")
            assert scope is not None
            message = f"{quoted(column)} of several parameters does not follow from that of each"
            self.problems.add(scope.mark, "GW212", message, "scope: param")
        if entry.scope not in detector.scopes:
            scope = node.get("scope")
            assert scope is not None
            message = f"the detector '{detector.kind}' cannot be used with scope '{entry.scope}'"
            self.problems.add(scope.mark, "GW212", message, f"one of: {', '.join(detector.scopes)}")
        return entry.scope

    def _says_every(self, node: Map) -> bool:
        """True if the rule or the defaults of its file say `every`."""
        return "every" in node.entries or "every" in self.defaults_node.entries

    def _every(self, node: Map, every: int, do: tuple[Action, ...], detector: Detector) -> None:
        # On ranks an action of any kind waits for what they exchange, so that this is exchanged at every step.
        of_ranks = detector.columns[0] in RANK_COLUMNS
        named = [action.does for action in do if of_ranks or ACTIONS[action.does].every_step]
        if every > 1 and named:
            place = node if "every" in node.entries else self.defaults_node
            mark, hint = place.key_mark("every"), f"write `every: 1`, or take '{named[0]}' out"
            if "do" in node.entries and node.key_mark("do").source is not mark.source:  # `every` is inherited
                mark, hint = node.key_mark("do"), f"write `every: 1` beside it, or take '{named[0]}' out"
            message = f"'every: {every}' with '{named[0]}': a step in between would go unjudged"
            self.problems.add(mark, "GW211", message, hint)

    def _clip_baseline(self, node: Map, do: tuple[Action, ...], cls: type[Detector]) -> None:
        learns = cls.has_baseline and cls.invertible
        if any(action.name == "clip" and action.params["to"] == "baseline" for action in do) and not learns:
            message = f"'clip' to the baseline: the detector '{cls.kind}' has no baseline that gives a limit"
            self.problems.add(node.key_mark("do"), "GW208", message, "use kind: spike, or clip to a number")

    def _origins(self, rule_id: str, node: Map, detect: Map | None = None) -> None:
        self.origins[rule_id] = str(self.section.key_mark(rule_id))
        for key, entry in node.entries.items():
            self.origins[f"{rule_id}.{key}"] = str(entry.key)
        for key, entry in () if detect is None else detect.entries.items():
            self.origins[f"{rule_id}.detect.{key}"] = str(entry.key)


def _rule(
    rule_id: str, detector: Any, scope: Any, timing: dict[str, Any], entry: RuleEntry, do: tuple[Action, ...]
) -> Rule:
    """The rule, with what is said of it whatever it judges."""
    return Rule(
        id=rule_id,
        detect=detector,
        scope=scope,
        groups=tuple(entry.groups or ()),
        exclude=tuple(entry.exclude or ()),
        for_=timing.pop("for"),
        **timing,
        labels=dict(entry.labels or {}),
        annotations=dict(entry.annotations or {}),
        do=do,
        enabled=entry.enabled is not False,
        optional=bool(entry.optional),
        inhibited_by=tuple(entry.inhibited_by or ()),
        unless=tuple(entry.unless or ()),
    )


def _switched_off(node: Map) -> bool:
    enabled = node.get("enabled")
    return isinstance(enabled, Scalar) and enabled.value is False


def _field_default(cls: type[Detector], key: str) -> Any:
    return next(each.default for each in fields(cls) if each.name == key)  # type: ignore[arg-type]
