"""`gradwatch rules list`: what a rule file resolves to: its rules, what it clips, which modules it taps, its sinks."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from gradwatch.cli.rules.shown_options import shown_options
from gradwatch.cli.terminal import paint, table
from gradwatch.errors import GradwatchError
from gradwatch.rules.clip_order import clip_groups

if TYPE_CHECKING:
    from gradwatch.rules.rule_set import ClipPolicy, Rule, RuleSet

FIRST_WINS = (
    "a parameter has the policy of the first of these groups that it matches, in the order of `groups:`"
)
WITH_TOTAL = "; the total's holds beside it, and the stricter of both wins"
NO_SINKS = "the file does not say: prometheus, journal and log"


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch rules list` to argparse."""
    listing = verbs.add_parser(
        "list",
        help="the rules of a file and what it resolves to",
        description="List the rules of a file after `extends:` and defaults: what each detects, on which column, "
        "after how many samples it fires, and what it does; then what the file clips, in the order in which groups are "
        "tried, and its sinks, without their secrets.",
    )
    listing.add_argument("file", metavar="FILE", nargs="?", help="rule file or pack (default: default)")
    listing.add_argument("--rules", metavar="FILE", help="the same")
    listing.add_argument(
        "--resolved", action="store_true", help="every setting of every rule, defaults filled in"
    )
    listing.add_argument(
        "--origin", action="store_true", help="the same, with the file and line that set each"
    )
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Print the rules; RuleFileError (exit 2) where the file is refused."""
    from gradwatch.rules.files import load_rules

    if arguments.file and arguments.rules:
        raise GradwatchError("give one file: as an argument or by --rules")
    ruleset = load_rules(arguments.file or arguments.rules or "default")
    if arguments.json:
        print(json.dumps(document(ruleset, arguments.origin), indent=2, default=str))
        return 0
    in_full = arguments.resolved or arguments.origin
    parts = [_resolved(rule, ruleset, arguments.origin) for rule in ruleset.rules] if in_full else []
    if ruleset.rules and not in_full:
        header = ("rule", "detects", "of", "for", "scope", "severity", "does")
        parts = [table(header, [_summary(rule) for rule in ruleset.rules])]
    parts += [] if ruleset.rules else ["no rules"]
    parts += _sections(ruleset, arguments.origin, in_full)
    print("\n\n".join(parts))
    return 0


def document(ruleset: RuleSet, origin: bool) -> dict[str, Any]:
    """The rule set for a machine; `clip_order` lists the groups of `clip:` in the order in which they are tried."""
    order = [group.name for group in clip_groups(ruleset)]
    report: dict[str, Any] = {
        "digest": ruleset.digest,
        "rules": {rule.id: settings(rule) for rule in ruleset.rules},
        "groups": {group.name: {**asdict(group), "params": list(group.params)} for group in ruleset.groups},
        "clip": None if ruleset.clip is None else asdict(ruleset.clip),
        "clip_order": order,
        "modules": None if ruleset.modules is None else asdict(ruleset.modules),
        "histograms": None if ruleset.histograms is None else asdict(ruleset.histograms),
        "sinks": None if ruleset.sinks is None else [{one.kind: shown_options(one)} for one in ruleset.sinks],
        "inactive": dict(ruleset.inactive),
    }
    return report | ({"origins": dict(ruleset.origins)} if origin else {})


def settings(rule: Rule) -> dict[str, Any]:
    """A rule as the file would spell it in full: `detect.*` flattened, `for` without its underscore."""
    from gradwatch.rules.condition import OF_DETECTOR, When  # not at the top: it needs numpy

    if isinstance(rule.detect, When):
        return {"when": rule.detect.spelled()} | _beside(rule, OF_DETECTOR)
    flat: dict[str, Any] = {"detect.kind": rule.kind}
    own = (
        {each.name for each in fields(rule.detect)} - {"warmup", "half_life"}
        if is_dataclass(rule.detect)
        else set()
    )
    flat |= {f"detect.{name}": getattr(rule.detect, name) for name in sorted(own)}
    return flat | _beside(rule, ("detect",))


def placed(origin: str) -> str:
    """An origin as one would type it: relative to here where that is shorter."""
    path, colon, line = origin.rpartition(":")
    if not colon:
        return origin
    near = os.path.relpath(path)
    return f"{near if len(near) < len(path) else path}:{line}"


# -- rules ---------------------------------------------------------------------------------------------------


def _summary(rule: Rule) -> tuple[str, ...]:
    """One line of the listing."""
    styles = {"critical": "red", "warning": "yellow", "info": "cyan"}
    does = ", ".join(action.name for action in rule.do) or "alert"
    does = "off" if not rule.enabled else f"would {does}" if rule.mode == "shadow" else does
    column = str(getattr(rule.detect, "of", "–")) + (f" (every {rule.every})" if rule.every > 1 else "")
    column += f" (from step {rule.from_step:,})" if rule.from_step else ""
    severity = paint(rule.severity, styles[rule.severity])
    return rule.id, rule.kind, column, str(rule.for_), rule.scope, severity, does


def _resolved(rule: Rule, ruleset: RuleSet, origin: bool) -> str:
    """Every setting of one rule, one to a line, with where it was set if asked for."""
    rows = []
    for key, value in settings(rule).items():
        setting = json.dumps(value, default=str, ensure_ascii=False)
        rows.append((key, setting + (_place(ruleset, f"{rule.id}.{key}") if origin else "")))
    return f"{paint(rule.id, 'bold')}\n{table((), rows, indent='  ')}"


def _beside(rule: Rule, without: Collection[str]) -> dict[str, Any]:
    """The settings of a rule beside what it judges."""
    flat: dict[str, Any] = {}
    for each in fields(rule):
        if each.name != "id" and each.name not in without:
            value = getattr(rule, each.name)
            if each.name == "do":
                value = [
                    {action.name: dict(action.params)} if action.params else action.name for action in value
                ]
            flat[each.name.rstrip("_")] = dict(value) if isinstance(value, Mapping) else value
    return flat


def _place(ruleset: RuleSet, key: str) -> str:
    return "  " + paint(placed(ruleset.origins.get(key, "default")), "dim")


# -- the other sections --------------------------------------------------------------------------------------


def _sections(ruleset: RuleSet, origin: bool, in_full: bool) -> Iterator[str]:
    """Everything that the file has beside its rules; `in_full`: also that it says nothing of sinks."""
    if ruleset.clip is not None:
        yield _clip(ruleset, origin)
    for name in ("modules", "histograms"):
        section = getattr(ruleset, name)
        if section is not None:
            rows = [(key, json.dumps(value)) for key, value in asdict(section).items()]
            yield f"{paint(name, 'bold')}\n{table((), rows, indent='  ')}"
    if ruleset.sinks is not None:
        rows = [
            (
                spec.kind,
                _spelled(shown_options(spec)) + (_place(ruleset, f"sinks:{spec.kind}") if origin else ""),
            )
            for spec in ruleset.sinks
        ]
        yield f"{paint('sinks', 'bold')}\n{table((), rows, indent='  ') if rows else '  none'}"
    elif in_full:
        yield f"{paint('sinks', 'bold')}\n  {NO_SINKS}"
    if ruleset.inactive:
        reasons = "\n".join(f"  {rule}: {reason}" for rule, reason in ruleset.inactive.items())
        yield f"{paint('inactive', 'bold')}\n{reasons}"


def _clip(ruleset: RuleSet, origin: bool) -> str:
    """The policies of `clip:`: those of groups in the order in which a parameter is tried on them, then the total's."""
    clip = ruleset.clip
    assert clip is not None
    rows = []
    for number, group in enumerate(clip_groups(ruleset), 1):
        place = _place(ruleset, f"clip:groups.{group.name}") if origin else ""
        of = json.dumps(list(group.params), ensure_ascii=False)
        of += f" of {group.min_ndim} dimensions at least" if group.min_ndim else ""
        rows.append((f"{number}. {group.name}", of, *_policy(clip.groups[group.name], place)))
    if clip.total is not None:
        rows.append(("total", "all", *_policy(clip.total, _place(ruleset, "clip:total") if origin else "")))
    local = ", also where gradients are sharded or accumulated (local)" if clip.local else ""
    begins = f", from step {clip.from_step:,} on" if clip.from_step else ""
    head = f"{paint('clip', 'bold')} at: {clip.at}{local}{begins}"
    if clip.groups:
        head += f"\n  {FIRST_WINS}{WITH_TOTAL if clip.total is not None else ''}"
    return f"{head}\n{table(('group', 'of', 'method', 'keys'), rows, indent='  ')}" if rows else head


def _policy(policy: ClipPolicy, place: str) -> tuple[str, str]:
    return policy.method, _spelled(policy.params) + place


def _spelled(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())
