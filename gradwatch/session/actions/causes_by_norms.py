"""Causes of incidents whose rules order no search, by the norms that their step was judged by."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

from gradwatch.engine import BoundEngine, EngineState
from gradwatch.localise.diagnosis.loss_levels import of_loss
from gradwatch.localise.diagnosis.norm_levels import of_norms
from gradwatch.records.event import Event
from gradwatch.records.finding import Finding
from gradwatch.records.snapshot import Snapshot
from gradwatch.records.verdict import Verdict
from gradwatch.session.actions.localise_action import SUSPICIONS, factors_of_usual

OF_GRADIENTS = frozenset({"norm", "rms", "total_norm"})
"""Columns whose rules are about how large the gradients are that backward made."""

FEW = 3
"""Elements of a bias below which its gradient may cancel to a tenth of what it is."""

BEFORE = 100
"""Steps in which what moved before the gradients did is looked for."""


def causes_by_norms(
    bound: BoundEngine,
    state: EngineState,
    usual: Callable[[], Mapping[str, float]],
    verdict: Verdict,
    snapshot: Snapshot,
    known: Collection[Finding],
    only_optimizer: bool,
) -> Iterator[Finding]:
    """Findings for the incidents that begin with this step, but for those of which one is `known`.

    Where it is not the `only_optimizer` layers of others may lie between and behind those of this one: no place is told
    of gradients. `usual` gives the usual norm of each parameter's gradient, by its name, of those that have one.
    """
    begun = [event for event in verdict.events if event.kind == "firing" and event.notify]
    if snapshot.provisional or not begun:
        return
    columns = {one.rule.id: one.series.column for one in bound.plan.rules}
    caused = {finding.rule for finding in known}
    asked = [one for one in begun if one.rule not in caused and columns[one.rule] in (*OF_GRADIENTS, "loss")]
    moved = factors_of_usual(snapshot, usual()) if asked else {}
    for event in asked:
        is_loss = columns[event.rule] == "loss"
        found = _of_loss(event, snapshot, moved) if is_loss else _found(event, snapshot, moved)
        if found is not None:
            if not only_optimizer and found.phase != "activations":
                found = found.amended(at_outputs=False, module="")
            yield found.amended(
                step=snapshot.step,
                rank=bound.rank,
                rule=event.rule,
                incident=event.incident,
                first_parameter=event.first_cause,
            ).noted(moved_before(bound, state, snapshot.step, {"loss"} if is_loss else OF_GRADIENTS))


def moved_before(bound: BoundEngine, state: EngineState, step: int, besides: Collection[str]) -> str:
    """`before it: lr-jump at step 300`: the rules on other columns than these that began to fire shortly before."""
    found = []
    for one, track in zip(bound.plan.rules, state.tracks, strict=True):
        name, _, began = track.incident.rpartition("-")
        own = (
            name.rpartition("-")[0] == one.rule.id
        )  # RULE-OPTIMIZER-STEP; else it is part of another's incident
        if own and one.series.column not in besides and one.rule.severity != "info":
            found.append((int(began), one.rule.id))
    shown = [f"{rule} at step {began}" for began, rule in sorted(found) if step - BEFORE <= began < step]
    return f"before it: {', '.join(shown)}" if shown else ""


def _found(event: Event, snapshot: Snapshot, moved: Mapping[str, float]) -> Finding | None:
    suspicion = SUSPICIONS.get(event.detector)
    if suspicion is None:
        return None
    names, few = _parameters(snapshot)
    return of_norms(names, moved, suspicion == "exploding", few)


def _of_loss(event: Event, snapshot: Snapshot, moved: Mapping[str, float]) -> Finding | None:
    """None where the loss is not too large, or not finite: that has other causes."""
    too_large = event.detector == "loss_spike" or SUSPICIONS.get(event.detector) == "exploding"
    if not too_large or not math.isfinite(snapshot.scalars.get("loss", math.nan)):
        return None
    names, few = _parameters(snapshot)
    return of_loss(names, moved, few)


def _parameters(snapshot: Snapshot) -> tuple[list[str], set[str]]:
    """Names in the order of the forward, and those with too few elements."""
    sites = snapshot.sites
    order = sites.depths.argsort(kind="stable").tolist()  # sync: numpy
    names = [sites.names[k] for k in order if sites.kinds[k] == "param"]
    numels = sites.numels.tolist()  # sync: numpy
    return names, {name for name, numel in zip(sites.names, numels, strict=True) if numel < FEW}
