"""Events of an action that could not be carried out: an incident of each rule that had ordered it."""

from __future__ import annotations

from dataclasses import replace

from gradwatch.records.decision import PARTLY, Decision, OnError
from gradwatch.records.event import Event
from gradwatch.records.record import Record
from gradwatch.records.snapshot import Snapshot
from gradwatch.rules.rule_set import Rule

INSTEAD = {
    "pass": "the gradient passed unchanged",
    "skip_step": "the optimizer step was skipped instead",
    "stop": "training was stopped instead",
}


def failed(
    record: Record, plain: Snapshot, done: Decision, error: Exception, rules: tuple[Rule, ...]
) -> Record:
    """The Record of a step whose actions failed: `plain` is what was measured, `done` what was done instead.

    It has one Event of kind "failed" for each rule that ordered an action. The policies of `clip:` belong to no rule:
    their failure is only counted as an internal error.
    """
    ordered = {order.rule for order in record.decision.orders if not order.shadow}
    events = tuple(_event(record, rule, error) for rule in rules if rule.id in ordered)
    verdict = replace(record.verdict, events=(*record.verdict.events, *events))
    return replace(record, snapshot=plain, verdict=verdict, decision=done)


def _instead(on_error: OnError, error: Exception) -> str:
    if PARTLY not in getattr(error, "__notes__", ()):
        return INSTEAD[on_error]
    passed = "the rest of the gradients passed unchanged" if on_error == "pass" else INSTEAD[on_error]
    return f"{PARTLY}, {passed}"


def _event(record: Record, rule: Rule, error: Exception) -> Event:
    snapshot, orders = record.snapshot, record.decision.orders
    named = tuple(sorted(order.action for order in orders if order.rule == rule.id and not order.shadow))
    sites = tuple(sorted({order.site for order in orders if order.rule == rule.id and order.site}))
    return Event(
        kind="failed",
        rule=rule.id,
        detector=rule.kind,
        severity="critical",
        optimizer=snapshot.optimizer,
        step=snapshot.step,
        incident=f"{rule.id}-{snapshot.optimizer}-{snapshot.step}-failed",
        sites=sites,
        count=len(sites),
        first_cause=sites[0] if sites else "",
        actions=named,
        summary=f"Action failed: {', '.join(named)}; {_instead(record.decision.on_error, error)}.",
        description=f"{type(error).__name__}: {error}",
        labels=rule.labels,
    )
