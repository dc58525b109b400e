"""Causes of incidents whose rules order no search, by the norms that their step was judged by."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

from gradwatch.engine import BoundEngine, EngineState
from gradwatch.localise.diagnosis.cause_of_large_loss import of_loss
from gradwatch.localise.diagnosis.deviation import Deviation
from gradwatch.localise.diagnosis.explosion_by_norms import beyond_the_rest, of_norms
from gradwatch.localise.diagnosis.usual_layer_norms import OFF
from gradwatch.records.event import Event
from gradwatch.records.finding import GAINS, Finding, Phase
from gradwatch.records.snapshot import Snapshot
from gradwatch.records.verdict import Verdict
from gradwatch.rules.rule_set import Rule
from gradwatch.session.actions.localise_action import SUSPICIONS, deviation

OF_GRADIENTS = frozenset({"norm", "rms", "total_norm"})
"""Columns whose rules are about how large the gradients are that backward made."""

DIFFERENTIATED_TWICE = (
    "gradients of this training are differentiated again (`create_graph=True`), and may come to a layer by two ways: "
    "where it began norms do not show"
)

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
    twice: bool,
) -> Iterator[Finding]:
    """Findings for the incidents that begin with this step, but for those of which one is `known`.

    What a search, by replay, has found for one rule is the finding of the others that it explains.

    Where it is not the `only_optimizer` layers of others may lie between and behind those of this one: no place is told
    of gradients, unless a single layer is off while those on both sides of it are as usual; nor is one where gradients
    are differentiated `twice`, as for a gradient penalty. `usual` gives the usual norm of each parameter's gradient, by
    its name, of those that have one.
    """
    begun = [event for event in verdict.events if event.kind == "firing" and event.notify]
    if snapshot.provisional or not begun:
        return
    columns = {one.rule.id: one.series.column for one in bound.plan.rules}
    caused = {finding.rule for finding in known}
    asked = [one for one in begun if one.rule not in caused and columns[one.rule] in (*OF_GRADIENTS, "loss")]
    if not asked:
        return
    off = deviation(snapshot, usual, partial(bound.usual_loss, state))
    searched = [one for one in known if one.phase in GAINS and one.step == snapshot.step]
    for event in asked:
        is_loss = columns[event.rule] == "loss"
        found = next((one for one in searched if _explains(one, event, is_loss)), None)
        shared = found is not None
        if found is None:
            found = _of_loss(event, snapshot, off, twice) if is_loss else _found(event, off, twice)
        if found is not None:
            if not (only_optimizer or shared or found.phase == "activations" or _is_alone(found)):
                found = found.amended(at_outputs=False, module="")
            yield found.amended(
                step=snapshot.step,
                rank=bound.rank,
                rule=event.rule,
                incident=event.incident,
                first_parameter=event.first_cause,
                lr_jumped_at=None if found.phase == "vanishing" else jump_of_lr(bound, state, snapshot.step),
            ).noted(moved_before(bound, state, snapshot.step, {"loss"} if is_loss else OF_GRADIENTS))


def jump_of_lr(bound: BoundEngine, state: EngineState, step: int) -> int | None:
    """The last step in the `BEFORE` steps before this one at which a rule on jumps of the learning rate fired."""
    found = [
        began
        for rule, began in _began(bound, state)
        if rule.detect.kind == "lr_jump" and step - BEFORE <= began < step
    ]
    return max(found, default=None)


def moved_before(bound: BoundEngine, state: EngineState, step: int, besides: Collection[str]) -> str:
    """`before it: lr-jump at step 300`: the rules on other columns than these that began to fire shortly before."""
    columns = {one.rule.id: one.series.column for one in bound.plan.rules}
    found = [
        (began, rule.id)
        for rule, began in _began(bound, state)
        if columns[rule.id] not in besides and rule.severity != "info"
    ]
    shown = [f"{rule} at step {began}" for began, rule in sorted(found) if step - BEFORE <= began < step]
    return f"before it: {', '.join(shown)}" if shown else ""


def _began(bound: BoundEngine, state: EngineState) -> Iterator[tuple[Rule, int]]:
    """The rules with an incident of their own, not part of another rule's, and the step at which it began."""
    for one, track in zip(bound.plan.rules, state.tracks, strict=True):
        name, _, began = track.incident.rpartition("-")
        if name.rpartition("-")[0] == one.rule.id:  # RULE-OPTIMIZER-STEP
            yield one.rule, int(began)


def _is_alone(found: Finding) -> bool:
    """True if the gradients of its module are off, and those of no other layer by a factor worth naming."""
    others = [
        factor
        for one in found.profile
        if one.module != found.module
        for factor in (one.moved, one.weights_moved)
    ]
    return bool(found.module) and all(1 / OFF < factor < OFF for factor in others if not math.isnan(factor))


def _explains(searched: Finding, event: Event, is_loss: bool) -> bool:
    """True if what was found by a search in this step, for another rule, is the cause of this incident as well.

    Of a loss that is too large where the gradients are so from the model's outputs on.
    """
    if SUSPICIONS.get(event.detector) == "vanishing":
        return searched.phase == "vanishing"
    return searched.phase != "vanishing" and (searched.at_outputs or not is_loss)


def _found(event: Event, off: Deviation, twice: bool) -> Finding | None:
    suspicion = SUSPICIONS.get(event.detector)
    if suspicion is None:
        return None
    found = of_norms(off.names, off.norms, suspicion == "exploding", off.few)
    if found is None:
        return None
    if twice:
        phase: Phase = "exploding" if suspicion == "exploding" else "vanishing"
        return Finding(phase, "norms", profile=found.profile, note=DIFFERENTIATED_TWICE)
    found = beyond_the_rest(found, event.first_cause, off, suspicion == "exploding")
    return found.amended(loss_moved=off.loss) if found.at_outputs else found


def _of_loss(event: Event, snapshot: Snapshot, off: Deviation, twice: bool) -> Finding | None:
    """None where the loss is not too large, or not finite: that has other causes."""
    too_large = event.detector == "loss_spike" or SUSPICIONS.get(event.detector) == "exploding"
    if not too_large or not math.isfinite(snapshot.scalars.get("loss", math.nan)):
        return None
    found = of_loss(off.names, off.norms, off.few)
    return Finding("unknown", "norms", note=DIFFERENTIATED_TWICE) if twice and found.found else found
