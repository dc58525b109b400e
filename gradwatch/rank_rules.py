"""What a rule file asks of the ranks of a distributed training, and what it may not ask there."""

from __future__ import annotations

from gradwatch.engine import Engine
from gradwatch.errors import AttachError
from gradwatch.hooks.modules import COLUMNS as MODULE_COLUMNS
from gradwatch.hooks.ranks import Wants
from gradwatch.hooks.sampling import COLUMNS as SAMPLED_COLUMNS
from gradwatch.snapshot import RANK_COLUMNS

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
        sampled=tuple(sorted(SAMPLED_COLUMNS & engine.columns)),
        refused=_refusal(engine),
    )


def check_ranks(engine: Engine, world_size: int) -> None:
    """Raise `AttachError` where a rule acts on a number that only this rank knows, and there are several."""
    refused = _refusal(engine)
    if refused and world_size > 1:
        raise AttachError(refused)


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
