"""Identity of a run: which process of which launch, and its rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradwatch.records.event import Severity


@dataclass(frozen=True, slots=True)
class RuleInfo:
    """Description of a rule for sinks: enough to create its series at 0 before anything happened.

    `of` is the column the rule reads ("" = not said): the journal records it at every step the rule is firing.
    """

    id: str
    kind: str
    severity: Severity
    actions: tuple[str, ...] = ()
    of: str = ""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Identity of a run, fixed at attach. `directory` is the run's own folder (it may not exist yet).

    `told_by` is the process whose account, printed at its end, includes this one's (0 = this process prints its own);
    `launch` is the same in all processes whose accounts are printed as one ("" = not known).
    `place` tells apart what has the same run and rank and is at work at the same time: several watches in one process,
    forked children that train, trials of a sweep. 0 is the first, and the only one where nothing needs a name.
    """

    run_id: str
    directory: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    attempt: int = 0
    pid: int = 0
    host: str = ""
    start_time: float = 0.0
    script: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    rules: tuple[RuleInfo, ...] = ()
    rules_digest: str = ""
    told_by: int = 0
    launch: str = ""
    place: int = 0

    @property
    def rank_and_place(self) -> str:
        """Part of file names that is this process alone: `3`, or `3-1` for the second of rank 3."""
        return f"{self.rank}-{self.place}" if self.place else str(self.rank)
