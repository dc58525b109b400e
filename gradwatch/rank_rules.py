"""What a rule file asks of the ranks of a distributed training, and what it may not ask there."""

from __future__ import annotations

from collections.abc import Sequence

from gradwatch.engine import Engine
from gradwatch.engine.clipping import Clipping
from gradwatch.errors import AttachError
from gradwatch.hooks.modules import COLUMNS as MODULE_COLUMNS
from gradwatch.hooks.ranks import Wants
from gradwatch.hooks.sampling import COLUMNS as SAMPLED_COLUMNS
from gradwatch.snapshot import RANK_COLUMNS, Sites

LOCAL_COLUMNS = MODULE_COLUMNS | {"norm_local"}
"""Columns that differ from rank to rank and are not reduced: an action on them would part the ranks."""
REDUCED_COLUMNS = RANK_COLUMNS | {"loss"}
"""Columns that differ from rank to rank and are judged after a reduction; the loss is averaged."""


def wants(engine: Engine) -> Wants:
    """What a watch with these rules needs the other ranks for."""
    rules = engine.ruleset.rules
    clip = engine.ruleset.clip
    return Wants(
        rules=engine.ruleset.digest or repr(sorted(rule.id for rule in rules)),
        acts=clip is not None or any(rule.acts for rule in rules),
        facts=bool(RANK_COLUMNS & engine.columns)
        or any(rule.acts and REDUCED_COLUMNS.intersection(rule.detect.columns) for rule in rules),
        ranked=bool(RANK_COLUMNS & engine.columns),
        sampled=tuple(sorted(engine.needs.only(SAMPLED_COLUMNS).columns)),
        refused=_refusal(engine),
    )


def check_ranks(engine: Engine, world_size: int) -> None:
    """Raise `AttachError` where a rule acts on a number that only this rank knows, and there are several."""
    refused = _refusal(engine)
    if refused and world_size > 1:
        raise AttachError(refused)


def check_shards(engine: Engine, sites: Sites, torn: Sequence[int]) -> None:
    """Raise `AttachError` where a policy or an acting rule needs the whole of parameters this rank holds a part of.

    `torn` are the positions of such parameters. Factors made of norms are right there: norms are reduced.
    """
    refused = (torn_rows(engine.bind(sites).clipping, sites, torn) or _never_whole(engine)) if torn else ""
    if refused:
        raise AttachError(refused)


def _never_whole(engine: Engine) -> str:
    """Which rules act on what is not put together from shards, and so could never act; "" when none does."""
    named = [rule.id for rule in engine.ruleset.rules if rule.acts and "max_abs" in rule.detect.columns]
    if not named:
        return ""
    return (
        f"rules {', '.join(map(repr, named))} act on max_abs, which cannot be put together from a parameter's shards, "
        "so that they would never act; judge `norm` or `rms`, or use `mode: shadow`"
    )


def torn_rows(clipping: Clipping, sites: Sites, torn: Sequence[int]) -> str:
    """Why a policy on whole rows cannot be carried out on these parameters; "" when it can."""
    for policy, mask in clipping.elementwise:
        names = [sites.names[k] for k in torn if mask[k]]
        if policy.rowwise and names:
            return (
                f"clip method {policy.method!r} looks at whole rows, and {names[0]!r} is sharded over the ranks "
                f"({len(names)} parameters are): each rank would see rows of its own making; take these parameters "
                "out of its groups, or use a method that multiplies, such as norm, baseline or block_rms"
            )
    return ""


def _refusal(engine: Engine) -> str:
    """Which rules act on what differs from rank to rank; "" when none does."""
    found = {
        rule.id: sorted(LOCAL_COLUMNS.intersection(rule.detect.columns))
        for rule in engine.ruleset.rules
        if rule.acts
    }
    refused = [f"  - rule {rule!r} acts on {', '.join(names)}" for rule, names in found.items() if names]
    if not refused:
        return ""
    return (
        "these columns differ from rank to rank, so that an action on them would let the weights part:\n"
        + "\n".join(refused)
        + "\nuse `mode: shadow`, take `do:` out, or judge `norm` or `total_norm`, which are reduced"
    )
