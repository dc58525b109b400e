"""The data of a report: what happened in a run, as plain data that every form of the report is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gradwatch.journal.audit import Fired, Line
from gradwatch.records.record import CheckpointHealth
from gradwatch.records.run_info import RunInfo
from gradwatch.report.explained import Explained
from gradwatch.report.firing_periods import Period
from gradwatch.report.saved_states import NO_SAVED_STATES, SavedStates
from gradwatch.report.track import Track

State = Literal["healthy", "warning", "critical", "broken off", "running", "nothing"]
"""What a run is at a glance: healthy; "warning": a rule of severity warning or info fired, something was not watched,
was not written or cannot be read, or the training ended with an exception; a critical rule fired; the process was
killed and no rule had fired; it still runs; or "nothing": no step was recorded, or too little was seen to call it
healthy."""
RuleOutcome = Literal["fired", "silent", "no data", "not armed", "not known"]
"""What a rule did: it "fired" on any rank; "silent" rules were evaluated and did not fire; "not known": the process
left no account."""


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The run in one sentence."""

    state: State
    sentence: str


@dataclass(frozen=True, slots=True)
class RuleState:
    """One rule of the run, or a part of its rule file that had no data. `why` is the reason of "no data".

    `rank` is the one on which it fired, where it did on another than the one that is shown alone.
    """

    rule: str
    state: RuleOutcome
    kind: str = ""
    severity: str = ""
    of: str = ""
    actions: tuple[str, ...] = ()
    fired: Fired | None = None
    why: str = ""
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """gradwatch's own time in the training: `own_seconds` of `seconds` of the loop, over `steps` recorded.

    `largest` is the most that one step took, in seconds; `share` is None where the time of the loop is not known.
    """

    own_seconds: float
    seconds: float
    steps: int
    largest: float

    @property
    def share(self) -> float | None:
        """gradwatch's share of the time of the loop, 0..1."""
        return self.own_seconds / self.seconds if self.seconds > 0 else None

    @property
    def per_step(self) -> float | None:
        """Seconds of gradwatch a step, on average."""
        return self.own_seconds / self.steps if self.steps else None


@dataclass(frozen=True, slots=True, eq=False)
class RunReport:
    """A run as one rank recorded it; causes are those that any rank found.

    `accounts` are the lines of the last launches; `notes` what is missing or damaged; `actions` what rules did;
    `incidents_left_out` counts those beyond the first; `periods` are those in which rules were firing; `checkpoint` is
    the health of the weights after `checkpoint_step`, by the tags in the folder. `saved` are the states that the script
    took of its optimizers.
    """

    folder: str
    rank: int
    ranks: Sequence[int]
    run: RunInfo | None
    verdict: RunVerdict
    accounts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tracks: tuple[Track, ...] = ()
    incidents: tuple[Explained, ...] = ()
    incidents_left_out: int = 0
    periods: tuple[Period, ...] = ()
    rules: tuple[RuleState, ...] = ()
    actions: tuple[Line, ...] = ()
    steps: int = 0
    cost: Cost | None = None
    checkpoint: CheckpointHealth | None = None
    checkpoint_step: int | None = None
    saved: SavedStates = NO_SAVED_STATES

    @property
    def name(self) -> str:
        """The id of the run, the name of its folder where that is not known."""
        return (self.run.run_id if self.run else "") or self.folder.rstrip("/").rpartition("/")[2]

    @property
    def fired(self) -> tuple[RuleState, ...]:
        """The rules that fired."""
        return tuple(rule for rule in self.rules if rule.state == "fired")

    def _repr_html_(self) -> str:
        """The page in a frame of its own, for notebooks."""
        from gradwatch.report.html_page import frame

        return frame(self)
