"""Result of a selftest: for each fault the rule that found it, what was done, what /metrics and an alert say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwatch.cli.selftest.script_run import START_SECONDS, ScriptRun
from gradwatch.journal import JournalReader
from gradwatch.journal.entries import EventsEntry
from gradwatch.launch.selftest_faults import FAULTS, NO_OPTIMIZER, Result
from gradwatch.rules.rule_set import RuleSet
from gradwatch.runtime.printable import plural

ONE_RANK = "one rank only"
"""Why a fault of another rank is not injected."""
REJECTED = "the GradScaler rejected the step, and no rule speaks of that"
"""Why a fault that no rule found is not called missed: it has not reached the weights."""
NO_FAULT_OF_RULES = frozenset({ONE_RANK, REJECTED})


@dataclass(frozen=True, slots=True)
class Proof:
    """One fault. `why` says why rules had nothing to find ("" = they had); `rules` fired, and `actions` were done.

    `metric`: /metrics shows the firings; None where it was not looked at. `late` is how many steps the first rule took.
    """

    fault: str
    why: str = ""
    parameter: str = ""
    step: int = -1
    late: int = 0
    rules: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    metric: bool | None = None
    stopped: bool = False

    @property
    def found(self) -> bool:
        """True if a rule has fired."""
        return bool(self.rules)


def proofs(runs: Sequence[ScriptRun], ruleset: RuleSet, seconds: float) -> list[Proof]:
    """One for each of FAULTS, by all runs of the script that took part; `seconds` is the time that each had."""
    by_fault = {
        one.fault: (one, run) for run in runs if run.document is not None for one in run.document.results
    }
    world = max((run.document.world_size for run in runs if run.document is not None), default=1)
    found = []
    for fault in FAULTS:
        if fault.rank is not None and world < 2:
            found.append(Proof(fault.name, why=ONE_RANK))
        elif fault.name not in by_fault:
            found.append(Proof(fault.name, why=not_reached(runs[-1], seconds)))
        else:
            one, run = by_fault[fault.name]
            found.append(_measured(one, fault.rank) if one.ended else _unended(one, ruleset, run, seconds))
    return found


def _measured(one: Result, rank: int | None) -> Proof:
    why = _nothing_to_find(one, rank)
    if why:  # what fired meanwhile has other reasons
        return Proof(one.fault, why, one.parameter, one.step)
    rules = tuple(one.fired)
    return Proof(
        one.fault,
        parameter=one.parameter,
        step=one.step,
        late=one.late or 0,
        rules=rules,
        actions=tuple(sorted(one.actions)),
        metric=None if one.scraped is None or not rules else set(rules) <= set(one.scraped),
    )


def _nothing_to_find(one: Result, rank: int | None) -> str:
    """The reason why rules had nothing to find in a fault; "" where they had."""
    if not one.entered and rank is None:  # of another rank this process knows nothing
        return f"no gradient of {one.parameter or 'any parameter'} came by its tensor hook"
    return REJECTED if one.rejected == one.lasted and not one.fired else ""


def _unended(one: Result, ruleset: RuleSet, run: ScriptRun, seconds: float) -> Proof:
    """A fault during which the process ended: what its journal has of it, as where a rule says stop."""
    fired: dict[str, int] = {}
    for path in sorted(run.folder.glob("rank0-*.gwj"))[-1:]:
        for entry in JournalReader(path).entries():
            if isinstance(entry, EventsEntry):
                for event in entry.events:
                    if event.kind == "firing" and event.step >= one.step:
                        fired.setdefault(event.rule, event.step)
    if not fired:
        return Proof(one.fault, why=_ended_meanwhile(run, seconds))
    does = {action.name for rule in fired for action in ruleset.rule(rule).do}
    late = min(fired.values()) - one.step
    return Proof(one.fault, "", one.parameter, one.step, late, tuple(fired), tuple(sorted(does)), None, True)


def _ended_meanwhile(run: ScriptRun, seconds: float) -> str:
    if run.document is not None and run.document.broke:
        return _own_fault(run.document.broke)
    if run.time_up:
        return f"the {seconds:g} s there were ended while it lasted: give more, --seconds {4 * seconds:.0f}"
    return f"the script ended{_with_status(run)} while it lasted{'' if run.status else '; let it take more steps'}"


def _with_status(run: ScriptRun) -> str:
    return f" with exit status {run.status}" if run.status else ""


def _own_fault(broke: str) -> str:
    return f"gradwatch itself failed ({broke}), not the script: please report it"


def not_reached(run: ScriptRun, seconds: float) -> str:
    """Reason why the faults that are left were not injected in the last run of the script."""
    document = run.document
    if document is None:
        return f"no step was taken in {START_SECONDS:.0f} s" if run.status is None else "no step was taken"
    if document.broke:
        return _own_fault(document.broke)
    if document.why:
        return document.why
    if not document.steps:
        rejected = plural(document.rejected, "step")
        return f"the GradScaler rejected all of {rejected}" if document.rejected else NO_OPTIMIZER
    steps = plural(document.steps, "step")
    if run.time_up:
        about = "about " if run.status is None else ""  # written once a second
        return (
            f"the {seconds:g} s there were ended after {about}{steps}: give more, --seconds {4 * seconds:.0f}"
        )
    most = document.most_steps
    each = f", at most {most:,} of one optimizer" if most < document.steps else ""
    return (
        f"the script ended{_with_status(run)} after {steps}{each}{'' if run.status else '; let it take more'}"
    )
