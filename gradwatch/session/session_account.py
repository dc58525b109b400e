"""The account of a session: while it runs, and once, at its end, to the sinks and for the process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from gradwatch.account import Account, Ending, Taken, merged
from gradwatch.account.session_counts import SessionCounts
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.process_identity import group_rank
from gradwatch.session.settings import told_by
from gradwatch.taps.process_totals import TOTALS

PAUSED = "watching was paused {} × after internal errors"

_concluded: list[Account] = []  # of the sessions closed so far, put together in one


@dataclass(slots=True, frozen=True)
class Counted:
    """Optimizer steps, backwards, optimizers and pauses after internal errors of a session, and what rules wait for.

    `uncalled` are steps for which a GradScaler has not called the optimizer, which are none of the `steps`;
    `parameters` is the most that the optimizers have held together, `warming_up` why a rule has had no data yet,
    `replaced` windows without an optimizer whose parameters made way for others unlike them; `waiting` steps
    that are measured and not judged yet. `optimizers_before` and `parameters_before` are those of them that the session
    before has counted, and `unrecorded` the steps that it has watched without a journal.
    """

    steps: int = 0
    uncalled: int = 0
    backwards: int = 0
    optimizers: int = 0
    pauses: int = 0
    parameters: int = 0
    warming_up: Mapping[str, str] = field(default_factory=dict)
    replaced: int = 0
    waiting: int = 0
    optimizers_before: int = 0
    parameters_before: int = 0
    unrecorded: int = 0


class Accounting:
    """The account of one session; `before` is what the process had done when it was attached."""

    def __init__(
        self,
        run: RunInfo,
        totals: SessionCounts,
        inactive: Callable[[], dict[str, str]],
        counted: Callable[[], Counted],
        before: Taken,
        elsewhere: Callable[[], int],
    ) -> None:
        """`elsewhere` gives the optimizer steps that other sessions of this process have watched."""
        self._run = run
        self._totals = totals
        self._inactive = inactive
        self._counted = counted
        self._before = before
        self._elsewhere = elsewhere
        self._steps_elsewhere = elsewhere()
        self.final: Account | None = None

    def now(self, ended: Ending) -> Account:
        """Account since the attach: what the process did, and what was watched of it."""
        if self.final is not None:
            return self.final
        totals, counted, after = self._totals, self._counted(), TOTALS.taken()
        warming_up = counted.warming_up if totals.judged else {}
        return Account(
            taken=after.since(self._before, self._elsewhere() - self._steps_elsewhere),
            before=self._before,
            after=after,
            watched=replace(
                totals.watched(
                    counted.steps,
                    counted.backwards,
                    counted.optimizers,
                    counted.parameters,
                    counted.replaced,
                    counted.waiting,
                    counted.uncalled,
                ),
                optimizers_before=counted.optimizers_before,
                parameters_before=counted.parameters_before,
            ),
            unrecorded=counted.unrecorded,
            ended="stopped" if totals.stopped else ended,
            fired=dict(totals.fired),
            actions=dict(totals.actions),
            rebaselined=dict(totals.rebaselined),
            replaced_unfit=dict(totals.replaced_unfit),
            inactive=self._inactive(),
            never_judged=totals.never_judged.by_rule(),
            # A condition may hold though a part of it is not known.
            no_data={
                rule: why
                for rule, why in {**warming_up, **self.without_data()}.items()
                if rule not in totals.fired
            },
            rules=len(self._run.rules),
            reasons=(PAUSED.format(counted.pauses),) if counted.pauses else (),
            directory=self._run.directory if os.path.isdir(self._run.directory) else "",
            rank=self._run.rank,
            ranks=self._run.world_size,
            in_group=group_rank() is not None,
            told_by=self._run.told_by,
        )

    def without_data(self) -> dict[str, str]:
        """The reason why a rule has had no data so far; also asked by the endpoint's thread."""
        return self._totals.without_data.reasons() if self._totals.judged else {}

    def conclude(self, account: Account) -> None:
        """Keep the account as the last one of this session, and as a part of the process's."""
        self.final = account
        _concluded[:] = [merged([*_concluded, account])]


def steps_concluded() -> int:
    """Optimizer steps that the sessions closed so far have watched."""
    return sum(one.watched.steps for one in _concluded)


def of_process(live: Iterable[Account]) -> Account:
    """Account of this process: what it did, and what all its sessions watched: those `live`, and those closed."""
    found = [*_concluded, *live]
    if not found:
        return Account(TOTALS.taken(), told_by=told_by())
    return replace(
        merged(found, TOTALS.taken()), unrecorded=0
    )  # here they are known, with or without a journal


def _discard() -> None:
    """In a forked child: what the parent watched belongs to the parent's account."""
    _concluded.clear()


os.register_at_fork(after_in_child=_discard)
