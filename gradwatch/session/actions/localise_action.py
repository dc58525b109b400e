"""Orders to `localise`, carried out: which rule of a verdict asks, and what was found for it.

Steps are held for orders to `snapshot` too (`gradwatch.session.actions.snapshot_action`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gradwatch.incidents.bundle.snapshot_rules import snapshots
from gradwatch.localise.diagnosis.deviation import Deviation
from gradwatch.localise.diagnosis.tensor_values import all_readable, tensors
from gradwatch.localise.held_calls.calls_before_attach import PreAttachRecorder
from gradwatch.localise.held_calls.recorded_call import Call
from gradwatch.localise.localiser import Ask, Localiser, Suspicion
from gradwatch.records.columns import OTHER_RULES, is_observed
from gradwatch.records.decision import Decision
from gradwatch.records.event import Event
from gradwatch.records.finding import Finding
from gradwatch.records.snapshot import Snapshot
from gradwatch.records.verdict import Verdict
from gradwatch.rules.rule_set import Action, RuleSet

LOCALISE = "localise"
KEPT = "the cause of {count} incidents of this rule was sought before (keep: {count})"
Usual = Callable[[], Mapping[str, float]]

SUSPICIONS: dict[str, Suspicion] = {
    **dict.fromkeys(
        (
            "spike",
            "above",
            "above_recent_max",
            "above_usual",
            "drift",
            "exploded",
            "jump",
            "norm_overflow",
            "rise",
            "update_ratio",
        ),
        "exploding",
    ),
    **dict.fromkeys(("below", "below_recent_min", "below_usual", "depth_ratio", "drop", "fade"), "vanishing"),
}
"""What a kind of detector fires for, where it is not a number that is not finite."""


FEW = 3
"""Elements of a bias below which its gradient may cancel to a tenth of what it is."""

ROUNDING = 1e-5
"""Norm of a bias over that of the weight beside it below which it is rounding: float32 leaves some 1e-7 of a sum."""


class Causes:
    """The causes of a watch's incidents; holds the steps of `models` so that they can be run again.

    `owns` says whether an optimizer is watched; `failed` counts an internal error.
    """

    def __init__(
        self,
        ruleset: RuleSet,
        models: Iterable[nn.Module],
        owns: Callable[[Optimizer], bool],
        failed: Callable[[str, BaseException], None],
        rank: int,
    ) -> None:
        self._asked = localising(ruleset)
        self._of_nonfinite = _of_nonfinite_gradients(ruleset, self._asked)
        self._of_own_values = _of_own_values(ruleset)
        self._rank = rank
        self._searched: dict[str, set[str]] = {}  # incidents, by the rule, where it has `keep`
        self._followed: frozenset[str] = frozenset()  # rules whose search was made on the step at hand
        actions, keeps = list(self._asked.values()), list(snapshots(ruleset).values())
        self._localiser = Localiser(
            models,
            owns,
            failed,
            max_bytes=max(int(action.params["max_bytes"]) for action in (*actions, *keeps)),
            hold=bool(keeps) or any(action.params["by"] == "replay" for action in actions),
            rank=rank,
        )

    def add(self, models: Iterable[nn.Module]) -> None:
        """Hold the steps of further models too."""
        self._localiser.add(models)

    def inherit(self, pre_attach: PreAttachRecorder, joining: Iterable[nn.Module]) -> None:
        """Take over what was held of the models, and of those `joining` next, before they were watched."""
        self._localiser.inherit(pre_attach, joining)

    def loss_not_finite(self) -> None:
        """Hold the loop as it is, before a backward whose loss is not finite."""
        self._localiser.loss_not_finite()

    def set_indices(self, indices: Any) -> None:
        """Set the dataset indices of the forward calls that follow, until a step is taken."""
        self._localiser.set_indices(indices if hasattr(indices, "__len__") else tuple(indices))

    @property
    def differentiates_twice(self) -> bool:
        """True if some step has differentiated a gradient of these models again, as far as their calls are recorded."""
        return self._localiser.differentiates_twice

    @property
    def records(self) -> bool:
        """True if the calls of a step are recorded."""
        return self._localiser.records

    def held(self) -> list[tuple[nn.Module, Call]]:
        """The forward calls of the present step, in their order."""
        return self._localiser.held()

    def batch(self) -> list[Tensor] | None:
        """The tensors that the calls of the present step were given, but for parameters and what is computed from them.

        None where some are not held, have been written to since, or came beside objects that cannot be looked into:
        what is left might be the same at each step, as a mask is.
        """
        found: list[Tensor] = []
        if self.dropped:
            return None
        for _, call in self.held():
            given = tensors((call.args, call.kwargs))
            if call.reason or [tensor._version for tensor in given] != call.versions:
                return None
            if not all_readable((call.args, call.kwargs)):
                return None
            found += [one for one in given if id(one) not in call.computed and not isinstance(one, Parameter)]
        return found

    def models(self) -> list[nn.Module]:
        """The watched models that are still alive."""
        return self._localiser.models()

    @property
    def dropped(self) -> int:
        """Forward calls of the present step that were released to stay within `max_bytes`."""
        return self._localiser.dropped

    def refusal(self, held: list[tuple[nn.Module, Call]]) -> str:
        """Reason why the step cannot be run again, as far as its recorded calls show it; "" where there is none."""
        return self._localiser.refusal(held)

    def closure(self, run: Callable[[], Any]) -> AbstractContextManager[None]:
        """Localise what `run` computes, while this is entered."""
        return self._localiser.closure(run)

    def discard(self) -> None:
        """Discard the recorded calls, as after an evaluation of a closure that another one follows."""
        self._localiser.discard()

    def cleared(self, optimizer: Optimizer | None) -> None:
        """Note that the loop has thrown away the gradients that this optimizer (None = not known) was to step by."""
        self._localiser.cleared(optimizer)

    def close(self) -> None:
        """Remove every hook, and release the recorded calls."""
        self._localiser.close()

    def recorded(self) -> tuple[Finding, ...]:
        """Causes that were found of late, of steps that have been taken."""
        return self._localiser.recorded(None)

    def of(
        self,
        verdict: Verdict,
        decision: Decision,
        snapshot: Snapshot,
        step_taken: bool,
        usual: Usual = dict,
        usual_loss: Callable[[], float] = lambda: math.nan,
        together: Callable[[bool], str] = lambda of_own_values: "",
    ) -> tuple[Finding, ...]:
        """Causes of this step's incidents; `step_taken`: the step has been taken already.

        `usual` gives the usual norm of each parameter's gradient that is known, by its name, `usual_loss` the usual
        loss, NaN where it is not known. `together` gives a name under which all ranks may meet over this step, "" where
        they do not judge it alike; it is given whether that is by the loss, or by an observed value.
        """
        off = partial(deviation, snapshot, usual, usual_loss)
        if snapshot.scalars.get("scaler_skip"):
            found = self._of_nonfinite_loss(verdict, snapshot, step_taken, off, together)
            self._localiser.discard()  # no step was taken: what led to it must not be taken for a part of the next
            return tuple(found)
        found = (
            self._ordered(verdict, decision, snapshot, step_taken, off, together) if decision.orders else []
        )
        if not found and verdict.events and math.isfinite(snapshot.total_norm):
            found = self._of_nonfinite_loss(verdict, snapshot, step_taken, off, together)
        return (*found, *self._localiser.recorded(None if step_taken else snapshot.step))

    def carried_out(self, decision: Decision) -> Decision:
        """The decision without orders to `localise` that no search has followed on its step, which `of` was asked of.

        A rule orders one on every step it acts on, and an incident whose cause is known is not searched again.
        """
        followed, self._followed = self._followed, frozenset()
        kept = frozenset(
            one for one in decision.orders if one.action != LOCALISE or one.shadow or one.rule in followed
        )
        return decision if len(kept) == len(decision.orders) else replace(decision, orders=kept)

    def _ordered(
        self,
        verdict: Verdict,
        decision: Decision,
        snapshot: Snapshot,
        step_taken: bool,
        off: Callable[[], Deviation],
        together: Callable[[bool], str],
    ) -> list[Finding]:
        """The findings for the rules that order a search on this step."""
        orders = {one.rule for one in decision.orders if one.action == LOCALISE and not one.shadow}
        events = ((incident_of(verdict, rule), rule) for rule in sorted(orders & self._asked.keys()))
        asked = [(self._asked[rule], event) for event, rule in events if event is not None]
        return self._found(asked, snapshot, step_taken, off, together)

    def _of_nonfinite_loss(
        self,
        verdict: Verdict,
        snapshot: Snapshot,
        step_taken: bool,
        off: Callable[[], Deviation],
        together: Callable[[bool], str],
    ) -> list[Finding]:
        """The findings of a step whose loss was NaN, and on which rules on gradients order no search for it.

        A GradScaler rejected it, so that they do not judge it, or its gradients are finite: what is NaN was added to
        the loss. The search that one of them orders for NaN is made for the rule on the loss.
        """
        if self._of_nonfinite is None:
            return []
        events = (event for event in verdict.events if event.detector == "loss_nonfinite" and event.incident)
        asked = [(self._of_nonfinite, event) for event in events if event.kind == "firing"]
        return self._found(asked, snapshot, step_taken, off, together) if asked else []

    def _found(
        self,
        asked: Iterable[tuple[Action, Event]],
        snapshot: Snapshot,
        step_taken: bool,
        off: Callable[[], Deviation],
        together: Callable[[bool], str],
    ) -> list[Finding]:
        """The findings for these events, of those whose incident is still to be localised."""
        from gradwatch.localise.replay.cause_among_ranks import RankAgreement  # a healthy run has no causes

        found, graded = [], torch.is_grad_enabled()
        try:
            for action, event in asked:
                if self._localiser.due(event.incident):
                    ranks = together(event.rule in self._of_own_values)
                    name = f"{ranks}/{event.rule}/{snapshot.step}"
                    agreement = RankAgreement(name, self._rank) if ranks else None
                    ask = _ask(action, event, snapshot, off)
                    if why := self._beyond(action, event):
                        found.append(self._localiser.leave(ask, why))
                        continue
                    self._followed |= {event.rule}
                    found.append(self._localiser.localise(ask, step_taken, agreement))
            return found
        finally:
            torch.set_grad_enabled(graded)  # Ctrl-C may come while some `no_grad` is being left

    def _beyond(self, action: Action, event: Event) -> str:
        """The reason why this incident is not searched, where the rule has a `keep` that is used up; else ""."""
        keep = action.params["keep"]
        if keep is None:
            return ""
        searched = self._searched.setdefault(event.rule, set())
        if event.incident not in searched and len(searched) >= keep:
            return KEPT.format(count=keep)
        searched.add(event.incident)
        return ""


def localising(ruleset: RuleSet) -> dict[str, Action]:
    """The `localise` of every rule that may order it, by rule id."""
    found: dict[str, Action] = {}
    for rule in ruleset.rules:
        if rule.enabled and rule.mode == "act":
            for action in filter(None, map(_localise, rule.do)):
                found.setdefault(rule.id, action)
    return found


def _of_nonfinite_gradients(ruleset: RuleSet, asked: Mapping[str, Action]) -> Action | None:
    """The `localise` of the first rule on gradients that are not finite; None where none has it."""
    rules = (rule.id for rule in ruleset.rules if rule.detect.kind == "nonfinite")
    return next((asked[rule] for rule in rules if rule in asked), None)


def _of_own_values(ruleset: RuleSet) -> frozenset[str]:
    """Rules on the loss or on observed values, which differ from rank to rank, and on such rules."""
    columns = {rule.id: rule.detect.columns[0] for rule in ruleset.rules}
    own = {rule for rule, column in columns.items() if column == "loss" or is_observed(column)}
    return frozenset(own | {rule for rule, column in columns.items() if own and column == OTHER_RULES})


def _localise(action: Action) -> Action | None:
    if action.name == LOCALISE:
        return action
    if action.does == LOCALISE:
        return Action(LOCALISE, DEFAULTS)
    return None


DEFAULTS = {"by": "replay", "else_record_steps": 2, "max_bytes": 64 << 20, "keep": None}
"""As a rule file that says nothing gets them (`gradwatch.rules.files.pydantic_models.Localise`)."""


def incident_of(verdict: Verdict, rule: str) -> Event | None:
    """The transition of a rule on this step that belongs to an incident; None where there is none."""
    events = (event for event in verdict.events if event.rule == rule and event.incident)
    return next((event for event in events if event.kind != "resolved"), None)


def _suspicion(event: Event, snapshot: Snapshot) -> Suspicion:
    if event.detector == "when":  # a condition may be on rules of any kind
        return "exploding" if math.isfinite(snapshot.total_norm) else "nonfinite"
    return SUSPICIONS.get(event.detector, "nonfinite")


def factors_of_usual(snapshot: Snapshot, usual: Mapping[str, float]) -> dict[str, float]:
    """The factor by which the norm of each gradient is off its usual one, by the name of the parameter."""
    norms = zip(snapshot.sites.names, snapshot.norm, snapshot.calls, strict=True)
    return {
        name: float(norm) / usual[name]
        for name, norm, calls in norms
        if calls and name in usual and not _is_rounding(name, usual)
    }


def deviation(snapshot: Snapshot, usual: Usual, usual_loss: Callable[[], float]) -> Deviation:
    """Deviation of a step from its usual levels, as far as they are known."""
    sites = snapshot.sites
    order = sites.depths.argsort(kind="stable").tolist()  # sync: numpy
    names = [sites.names[k] for k in order if sites.kinds[k] == "param"]
    numels = sites.numels.tolist()  # sync: numpy
    few = {name for name, numel in zip(sites.names, numels, strict=True) if numel < FEW}
    loss = snapshot.scalars.get("loss", math.nan) / usual_loss()
    return Deviation(factors_of_usual(snapshot, usual()), loss if 0 < loss < math.inf else None, names, few)


def _is_rounding(name: str, usual: Mapping[str, float]) -> bool:
    """True for a bias whose true gradient is 0, as before a BatchNorm: what is left of it is rounding."""
    module, _, own = name.rpartition(".")
    return own == "bias" and usual[name] < ROUNDING * usual.get(f"{module}.weight", 0.0)


def _became_nonfinite(snapshot: Snapshot) -> bool:
    """True if the norms at the end of the backward were finite, and those that the optimizer gets are not."""
    was = math.isfinite(snapshot.total_norm) and bool(np.isfinite(snapshot.norm[snapshot.calls > 0]).all())
    return was and not snapshot.provisional and not math.isfinite(snapshot.total_norm_applied)


def _ask(action: Action, event: Event, snapshot: Snapshot, off: Callable[[], Deviation]) -> Ask:
    suspicion = _suspicion(event, snapshot)
    return Ask(
        way=action.params["by"],
        record_steps=int(action.params["else_record_steps"]),
        rule=event.rule,
        incident=event.incident,
        step=snapshot.step,
        first_parameter=event.first_cause,
        suspicion=suspicion,
        off=Deviation() if suspicion == "nonfinite" else off(),
        after_backward=suspicion == "nonfinite" and _became_nonfinite(snapshot),
        of_loss=event.detector == "loss_nonfinite" and math.isfinite(snapshot.total_norm),
    )
