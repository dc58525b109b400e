"""Requirements of a rule file on the ranks of a distributed training, and refusals there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradwatch.capture.columns.column_reader import COLUMNS as READER_COLUMNS
from gradwatch.capture.columns.module_taps import COLUMNS as MODULE_COLUMNS
from gradwatch.distributed.handshake import RankRequirements
from gradwatch.distributed.replica_divergence import RANK_MISMATCH
from gradwatch.engine import Engine
from gradwatch.engine.clipping.clip_section_factors import Clipping
from gradwatch.engine.unsupported_rules import Refusal, only_at
from gradwatch.records.columns import BATCH_HASH, COMPARING_RANKS, is_observed, scalar_name
from gradwatch.records.snapshot import Sites
from gradwatch.rules.impossible_actions import by_what_acts, clip_places, rules_joined
from gradwatch.rules.rule_set import Rule, RuleSet

LOCAL_COLUMNS = MODULE_COLUMNS | {"norm_local", BATCH_HASH}
"""Columns that differ from rank to rank and are not reduced: an action on them would part the ranks."""
REPLICA_DIVERGENCE = (
    "which differs from rank to rank, so that an action on it would make the replicas diverge"
)
SHADOW = "use `mode: shadow`, take `do:` out, or judge `norm` or `total_norm`, which are reduced"
NEVER_WHOLE = (
    "acts on max_abs, which cannot be computed from a parameter's shards, so that it would never act"
)
WHOLE_ROWS = (
    "take these parameters out of its groups, or use a method that multiplies (norm, baseline, block_rms)"
)


def rank_requirements(engine: Engine) -> RankRequirements:
    """Collectives that a watch with these rules needs."""
    rules = engine.ruleset.rules
    clip = engine.ruleset.clip
    acting = by_what_acts(engine.ruleset)
    on_facts = [rule for rule in rules if rule.enabled and any(map(_reduced, rule.detect.columns))]
    return RankRequirements(
        rules=(engine.ruleset.digest or repr(sorted(rule.id for rule in rules))) + _armed(engine),
        acts=clip is not None or any(rule.acts for rule in rules),
        facts=any(
            rule.id in acting or COMPARING_RANKS.intersection(rule.detect.columns) for rule in on_facts
        ),
        ranked=bool(COMPARING_RANKS & engine.columns),
        averaged=("loss", *sorted(scalar_name(name) for name in filter(is_observed, engine.columns))),
        costly=tuple(sorted(engine.needs.only(READER_COLUMNS).columns)),
        refused="\n".join(one.sentence(engine.ruleset) for one in _on_local(engine)),
        # What a rule acts by is known in its step.
        cadences=tuple(
            sorted(
                {
                    1 if rule.id in acting else rule.every
                    for rule in on_facts
                    if rule.id in acting or COMPARING_RANKS.intersection(rule.detect.columns)
                }
            )
        ),
        compared=tuple(sorted({rule.every for rule in on_facts if RANK_MISMATCH in rule.detect.columns})),
    )


def _reduced(column: str) -> bool:
    """True of a column that differs from rank to rank and is judged after a reduction; scalars are averaged."""
    return column in COMPARING_RANKS or column == "loss" or is_observed(column)


def refused_on_ranks(engine: Engine, world_size: int) -> list[Refusal]:
    """The rules that act on a number that only this rank knows, where there are several."""
    return _on_local(engine) if world_size > 1 else []


def refused_on_shards(engine: Engine, sites: Sites, sharded: Sequence[int]) -> list[Refusal]:
    """The clips and acting rules that need the whole of parameters of which this rank holds a part.

    `sharded` are the positions of such parameters. Factors made of norms are right there: norms are reduced.
    """
    if not sharded:
        return []
    ruleset, found = engine.ruleset, []
    for place in clip_places(ruleset.clip):
        alone = Engine(replace(ruleset, clip=only_at(ruleset.clip, place)))
        reason = sharded_rows(alone.bind(sites).clipping, sites, sharded)
        if reason:
            found.append(Refusal(reason, WHOLE_ROWS, clip=place))
    return found + [
        Refusal(NEVER_WHOLE, "judge `norm` or `rms`, or use `mode: shadow`", rule=rule.id)
        for rule in ruleset.rules
        if rule.acts and "max_abs" in _columns_behind(rule, ruleset)
    ]


def _columns_behind(rule: Rule, ruleset: RuleSet) -> frozenset[str]:
    """The columns that a rule reads, or those that its condition is about."""
    return frozenset(name for one in (rule, *rules_joined(rule, ruleset)) for name in one.detect.columns)


def sharded_rows(clipping: Clipping, sites: Sites, sharded: Sequence[int]) -> str:
    """The reason why a policy on whole rows cannot be carried out on these parameters; "" when it can."""
    for policy, mask in clipping.elementwise:
        names = [sites.names[k] for k in sharded if mask[k]]
        if policy.rowwise and names:
            return (
                f"clip method {policy.method!r} looks at whole rows, and {names[0]!r} is sharded over the ranks "
                f"({len(names)} parameters are): each rank would see only parts of rows"
            )
    return ""


def _on_local(engine: Engine) -> list[Refusal]:
    """The rules that act on what differs from rank to rank."""
    local = {
        rule.id: sorted(LOCAL_COLUMNS & _columns_behind(rule, engine.ruleset))
        for rule in engine.ruleset.rules
        if rule.acts
    }
    return [
        Refusal(f"acts on {', '.join(names)}, {REPLICA_DIVERGENCE}", SHADOW, rule=rule)
        for rule, names in local.items()
        if names
    ]


def _armed(engine: Engine) -> str:
    """Digest of the active actions: ranks of which some have switched one off must not act together."""
    acting = sorted(f"{rule.id}:{action.name}" for rule in engine.ruleset.rules for action in rule.do)
    return repr([acting, sorted(clip_places(engine.ruleset.clip))])
