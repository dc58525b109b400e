"""The state of every rule of a run: fired, was silent, or never had data, with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gradwatch.account import Account
from gradwatch.account.account_line import never_evaluated, not_armed
from gradwatch.records.event import severity_rank
from gradwatch.records.run_info import RuleInfo
from gradwatch.report.fired_rules import FiredOn
from gradwatch.report.run_report import RuleOutcome, RuleState

_ORDER: tuple[RuleOutcome, ...] = ("fired", "not armed", "no data", "not known", "silent")


def rule_states(
    rules: Iterable[RuleInfo], fired: Mapping[str, FiredOn], account: Account | None
) -> tuple[RuleState, ...]:
    """All rules: those that fired first, the most severe of them before others, then those without data.

    `account` None: the process left none, so that silence says nothing. Parts of the rule file that had no data and
    are no rules (groups, `histograms:`) come too.
    """
    found = list(_states(rules, fired, account))
    return tuple(sorted(found, key=_rank))


def _rank(one: RuleState) -> tuple[int, int, bool, int]:
    first = one.fired.first_step if one.fired else 0
    return _ORDER.index(one.state), severity_rank(one.severity), first < 0, first


def _states(
    rules: Iterable[RuleInfo], fired: Mapping[str, FiredOn], account: Account | None
) -> Iterator[RuleState]:
    without_data = {} if account is None else never_evaluated(account)
    off = {} if account is None else not_armed(account)
    known = set()
    for rule in rules:
        known.add(rule.id)
        about = rule.kind, rule.severity, rule.of, rule.actions
        if rule.id in fired:
            one = fired[rule.id]
            yield RuleState(rule.id, "fired", *about, one.fired, off.get(rule.id, ""), one.rank)
        elif rule.id in without_data:
            yield RuleState(rule.id, "no data", *about, why=without_data[rule.id])
        elif rule.id in off:
            yield RuleState(rule.id, "not armed", *about, why=off[rule.id])
        else:
            yield RuleState(rule.id, "not known" if account is None else "silent", *about)
    for name, one in fired.items():
        if name not in known:
            yield RuleState(name, "fired", severity=one.fired.severity, fired=one.fired, rank=one.rank)
    for state, reasons in (("no data", without_data), ("not armed", off)):
        for name, why in reasons.items():
            if name not in known:
                yield RuleState(name, "no data" if state == "no data" else "not armed", why=why)
