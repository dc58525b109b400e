"""One recorded run judged by rules: what fires, what would have been done, and on what each rule was judged."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from gradwatch.backtest.measured import TAPPED, Measured
from gradwatch.backtest.outcome import OutcomeTotals, RulesOutcome, RunBacktest
from gradwatch.backtest.recorded_run import MeasuredStep, RecordedRun
from gradwatch.backtest.rule_coverage import (
    AFTER_CLIPS,
    CLIPPED,
    GAP,
    STEPS_MISSING,
    OptimizerCoverage,
    has_baseline,
    joined,
    reads_sites,
    shown,
    skips_by_sites,
    with_dependents,
)
from gradwatch.backtest.rule_judge import Judged, RuleJudge
from gradwatch.engine import Engine
from gradwatch.errors import GradwatchError
from gradwatch.journal import JournalReader, RecordedStep
from gradwatch.journal.rank_journals import rank_journals, refuse_unread
from gradwatch.policies import ElementwisePolicy, find_policy
from gradwatch.records.decision import Decision
from gradwatch.rules.action_kinds import changing_gradients
from gradwatch.rules.rule_set import RuleSet
from gradwatch.runtime.printable import plural

CHANGING = changing_gradients()
UNKNOWN_SKIP = (
    "at step {} gradients were not finite and their norms were not recorded, so that it is not known whether a rule "
    "would have skipped the step"
)
Progress = Callable[[int], None]


def backtest_run(
    run: str | os.PathLike[str],
    ruleset: RuleSet,
    against: RuleSet | None = None,
    rank: int | None = None,
    progress: Progress = lambda steps: None,
) -> RunBacktest:
    """Judge a recorded run by rules, and by others that they are compared with, in one pass.

    The engine is the one that judges live, so that the Events are those that these rules would have given; what was
    recorded goes on as it was made, whatever they would have done. `run` is the folder of a run or one of its journal
    files, `rank` None the lowest there is. Raises `GradwatchError` where there is no journal of that rank.
    """
    where, journals = Path(run), rank_journals(run, rank)
    new = RulesOnRun(ruleset)
    old = None if against is None else RulesOnRun(against)
    recorded = RecordedRun()
    sides = [new] if old is None else [new, old]
    for journal in journals.own:
        for one in sides:
            one.begin(journal)
        for block in recorded.blocks(journal):
            for one in sides:
                one.take(block)
            progress(recorded.steps)
        for one in sides:
            one.end(recorded.measured)
    refuse_unread(where, journals)
    if not recorded.steps:
        raise GradwatchError(f"no step is recorded in {where}")
    tapped = frozenset[str]().union(*(one.tapped for one in sides))
    if tapped:
        recorded.notes.append(TAPPED.format(plural(len(tapped), "module")))
    return RunBacktest(
        recorded.run_id or where.name,
        str(where),
        journals.rank,
        journals.ranks,
        recorded.steps,
        new.outcome(),
        None if old is None else old.outcome(),
        recorded.outcome(),
        tuple(recorded.notes),
    )


class RulesOnRun:
    """The rules of one file on one run, process after process; `tapped` are the modules if these may lack some."""

    def __init__(self, ruleset: RuleSet) -> None:
        self._ruleset = ruleset
        self._totals = OutcomeTotals()
        self._coverage: list[OptimizerCoverage] = []
        self._process = 0
        self._judge = RuleJudge(ruleset)
        self._kept: dict[int, frozenset[str]] = {}  # by optimizer, the rules that still judge
        self._of: dict[int, OptimizerCoverage] = {}
        self._restarted: set[int] = set()
        self.tapped: frozenset[str] = frozenset()
        self._skips = any(map(skips_by_sites, ruleset.rules))

    def begin(self, journal: JournalReader) -> None:
        """Begin with a process: it had learned nothing."""
        self._process = journal.attempt
        self._judge = RuleJudge(self._ruleset, journal.rank)
        self._kept, self._of, self._restarted = {}, {}, set()

    def take(self, block: Sequence[MeasuredStep]) -> None:
        """Judge steps that go together."""
        first = block[0].recorded
        snapshot = first.record.snapshot
        optimizer = snapshot.optimizer
        if optimizer not in self._of:
            self._of[optimizer] = OptimizerCoverage(went_on=snapshot.step > 0)
            self._kept[optimizer] = frozenset(rule.id for rule in self._ruleset.rules if rule.enabled)
        if first.norms is None and len(snapshot.sites):
            self._drop(optimizer, self._of_sites(optimizer), GAP.format(f"{snapshot.step:,}"))
            if self._skips and not math.isfinite(snapshot.total_norm):
                self._drop(optimizer, self._kept[optimizer], UNKNOWN_SKIP.format(f"{snapshot.step:,}"))
        if block[0].follows_gap:
            learning = [rule.id for rule in self._ruleset.rules if has_baseline(rule)]
            self._drop(optimizer, learning, STEPS_MISSING.format(f"{snapshot.step:,}"))
        self._rebaseline(block[0])
        found = [one.found for one in block if one.found is not None]
        if not found:  # one step, whose norms after clipping hold what gradwatch did
            for column in AFTER_CLIPS:
                rules = [rule.id for rule in self._ruleset.rules if column in rule.detect.columns]
                self._drop(optimizer, rules, CLIPPED.format(f"{snapshot.step:,}", shown(column)))
            judged = self._judge.judge(snapshot, clipped=True)
            decision = without_factors(judged.decision)
            if decision.orders != judged.decision.orders or judged.decision.touches:
                self._totals.count_unknown()
            self._add(first, judged._replace(decision=decision))
            return
        for step, judged in zip(block, self._judge.judge_all(found), strict=True):
            self._add(step.recorded, judged)

    def _rebaseline(self, step: MeasuredStep) -> None:
        """Have the baselines begin anew that the script had begin anew before this step."""
        snapshot = step.recorded.record.snapshot
        for restart in step.restarts:
            self._judge.bind(snapshot)
            self._judge.rebaseline(snapshot.optimizer, *restart)

    def _of_sites(self, optimizer: int) -> list[str]:
        kept = self._kept[optimizer]
        return [rule.id for rule in self._ruleset.rules if rule.id in kept and reads_sites(rule)]

    def _drop(self, optimizer: int, rules: Iterable[str], why: str) -> None:
        """Judge no more by these rules of an optimizer, nor by what depends on them."""
        gone = with_dependents(self._ruleset, rules) & self._kept[optimizer]
        if not gone:
            return
        self._kept[optimizer] -= gone
        self._of[optimizer].drop(gone, why)
        rest = tuple(rule for rule in self._ruleset.rules if rule.id in self._kept[optimizer])
        keeps_clip = Engine(self._ruleset).clips_only_total
        clip = self._ruleset.clip if keeps_clip else None
        self._judge.restrict(optimizer, replace(self._ruleset, rules=rest, clip=clip))

    def _add(self, step: RecordedStep, judged: Judged) -> None:
        snapshot = step.record.snapshot
        self._totals.take(self._process, step.record, judged.verdict.events, judged.decision)
        skipped = step.record.decision.skip  # by the run: what it did is recorded, whatever these rules order
        self._of[snapshot.optimizer].take(snapshot, judged.engine, judged.in_turn, skipped)
        if any(event.kind == "rebaselined" for event in judged.verdict.events):
            self._restarted.add(snapshot.optimizer)

    def end(self, measured: Measured) -> None:
        """End with a process, which has `measured` what its own rules asked for.

        Rules that have not had the samples that they need are noted, unless the script had them begin anew.
        """
        for optimizer, coverage in self._of.items():
            restarted = optimizer in self._restarted
            coverage.process_ended(measured, {} if restarted else self._judge.warming_up(optimizer))
        self._coverage += self._of.values()
        self.tapped |= measured.tapped(self._ruleset)

    def outcome(self) -> RulesOutcome:
        """Outcome of these rules on the run."""
        return self._totals.outcome(joined(self._ruleset, self._coverage), on_elements(self._ruleset))


def without_factors(decision: Decision) -> Decision:
    """The part of a decision that does not depend on the norms after other clips: steps skipped, and a stop."""
    kept = frozenset(
        order for order in decision.orders if not (order.coefficient or order.action in CHANGING)
    )
    return Decision(skip=decision.skip, stop=decision.stop, orders=kept)


def on_elements(ruleset: RuleSet) -> list[str]:
    """The methods of `clip:` that work on elements or rows of a gradient."""
    clip = ruleset.clip
    policies = [] if clip is None else [*clip.groups.values(), *([] if clip.total is None else [clip.total])]
    classes = {one.method: find_policy(one.method) for one in policies}
    return [name for name, cls in classes.items() if cls is not None and issubclass(cls, ElementwisePolicy)]
