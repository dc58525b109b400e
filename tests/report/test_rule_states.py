"""What each rule of a run did, and which say nothing by their silence."""

from __future__ import annotations

from gradwatch.account import NOT_ARMED, Account
from gradwatch.journal.audit import Fired
from gradwatch.records.run_info import RuleInfo
from gradwatch.report.fired_rules import FiredOn
from gradwatch.report.rule_states import rule_states

RULES = [RuleInfo(name, "above", "warning", of="norm") for name in ("quiet", "blind", "off", "loud", "worse")]


def test_states_and_their_order() -> None:
    """Fired first, the most severe of them before others; then those without data; parts of the file too."""
    fired = [Fired("loud", "warning", 3, 1, 9), Fired("worse", "critical", 1, 5, 5)]
    rules = [rule if rule.id != "worse" else RuleInfo("worse", "above", "critical") for rule in RULES]
    account = Account(
        no_data={"blind": "no loss was observed"},
        inactive={"off": f"{NOT_ARMED}needs several ranks", "group:heads": "matches nothing"},
    )
    found = rule_states(rules, {one.rule: FiredOn(one) for one in fired}, account)
    assert [(one.rule, one.state, one.why) for one in found] == [
        ("worse", "fired", ""),
        ("loud", "fired", ""),
        ("off", "not armed", "needs several ranks"),
        ("blind", "no data", "no loss was observed"),
        ("group:heads", "no data", "matches nothing"),
        ("quiet", "silent", ""),
    ]


def test_without_an_account_silence_says_nothing() -> None:
    """A killed process did not say which of its rules had data."""
    assert {one.state for one in rule_states(RULES, {}, None)} == {"not known"}


def test_a_rule_that_the_run_does_not_list() -> None:
    """It fired all the same."""
    (found,) = rule_states([], {"gone": FiredOn(Fired("gone", "info", 1, 2, 2), 3)}, None)
    assert (found.rule, found.state, found.severity, found.rank) == ("gone", "fired", "info", 3)
