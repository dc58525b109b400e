"""The text of a rule file to begin with: groups of this model, and examples in comments, each right as it stands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from gradwatch.rules.proposed_groups import ProposedGroup, why_none
from gradwatch.rules.rule_set import RuleSet

_KNOWN_RULE = "total-norm-spike"
_LONGER = 100
_FIRST = "A parameter that several of them match has the first for its label; `clip:` clips it by the first it names."
_HEAD = """\
# Rules of a training, begun by `gradwatch init`. What is commented out works as it stands: take `# ` away.
#   gradwatch rules check {file}              everything wrong with it, with its place
#   gradwatch rules list --rules {file}       all rules, those of the pack included
#   gradwatch rules kinds | columns | actions | policies | sinks     the words, with their keys and defaults
#   gradwatch run --rules {file} -- python train.py
version: 1
"""
_EXTENDS = """
# What is not said here is as in this pack: it observes, skips steps with NaN or Inf, and finds causes.
extends: [{pack}]
"""
_RULES = """
rules:
  # A rule of the pack, by its name: what is given here changes, the rest stays. Here: what fires again within so many
  # steps of its end is one incident with what fired before, not {cooldown} steps as in the pack.
  {rule}:
    cooldown: {longer}

  # A rule of your own. kind: how it judges; of: what; above: from which score on; for: after how many samples.
  # norms-of-one-group:
  #   detect: {{kind: spike, of: norm, above: 10, clear_below: 3}}
  #   groups: [{group}]
  #   for: 2
  #   severity: warning
  #   annotations: {{summary: "{{param}} is {{score}} deviations above its usual gradient norm."}}

  # One that acts, in the same step and before the optimizer sees the gradients.
  # total-norm-too-large:
  #   detect: {{kind: above, of: total_norm, threshold: 1000}}
  #   severity: critical
  #   do: [skip_step]

  # The same without acting: it only logs what it would have done.
  # learning-rate-too-large:
  #   detect: {{kind: above, of: lr, threshold: 0.1}}
  #   do: [skip_step]
  #   mode: shadow

  # A rule of the pack that you do not want.
  # {off}: {{enabled: false}}
"""
_CLIP = """
# Clipping at each step, instead of torch's clip_grad_norm_ in the script: the same bits.
# clip:
#   total: {method: norm, max_norm: 1.0}
"""
_SINKS = """
# Where all of it goes. By default: journal, log, and /metrics. Slack's address: export SLACK_WEBHOOK_URL=…
# sinks:
#   - journal
#   - log
#   - prometheus
#   - slack
"""


def starter_text(
    file: str, source: str, names: Sequence[str], groups: Sequence[ProposedGroup], pack: str, base: RuleSet
) -> str:
    """The rule file. `source` says whose parameters have the `names`, of which the groups are; `base` is `pack`."""
    in_pack = {group.name for group in base.groups}
    own = [group for group in groups if group.name not in in_pack]
    there = [group for group in groups if group.name in in_pack]
    group = own[0].name if own else there[0].name if there else "matrices"
    rule = next((one for one in base.rules if one.id == _KNOWN_RULE), base.rules[0])
    off = next((one.id for one in reversed(base.rules) if one.enabled and one.id != rule.id), rule.id)
    cooldowns = {
        "cooldown": rule.cooldown,
        "longer": _LONGER if rule.cooldown < _LONGER else 2 * rule.cooldown,
    }
    return "".join(
        [
            _HEAD.format(file=file),
            _EXTENDS.format(pack=pack),
            *_groups(source, names, own, there),
            _RULES.format(group=group, rule=rule.id, off=off, **cooldowns),
            _CLIP,
            _SINKS,
        ]
    )


def _groups(
    source: str, names: Sequence[str], own: Sequence[ProposedGroup], there: Sequence[ProposedGroup]
) -> Iterator[str]:
    if names and (own or there):
        yield f"\n# Groups by the names of the {len(names):,} parameters of {source}. {_FIRST}\n"
    elif names:
        yield f"\n# No groups by the names of the {len(names):,} parameters of {source}: {why_none(names)}.\n"
    if not own and not there:
        yield (
            f"\n# Groups of parameters by their names: * crosses dots. {_FIRST}\n"
            '# groups:\n#   head: {params: ["*head*", "*classifier*"], optional: true}\n'
        )
    for group in there:
        yield f"# `{group.name}` ({_counted(group)}) is a group of the pack already.\n"
    if own:
        yield "groups:\n"
    for group in own:
        yield f"  # {_counted(group)}\n  {group.name}: {{params: {json.dumps(list(group.globs))}}}\n"


def _counted(group: ProposedGroup) -> str:
    more = ", …" if group.count > len(group.examples) else ""
    plural = "" if group.count == 1 else "s"
    return f"{group.count:,} parameter{plural}: {', '.join(group.examples)}{more}"
