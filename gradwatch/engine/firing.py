"""Pending, firing, resolved: how breaching samples become the state of a rule.

Axes: K series. Counts of `for` are samples; `keep_firing_for` and `cooldown` are optimizer steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.records.snapshot import BoolArray

NEVER = -1


class FiringState(NamedTuple):
    """State of a rule over time. The arrays are empty while it is idle (nothing pending, nothing firing).

    `streak[K]` breaching samples in a row (int32, counted up to `for`); `firing[K]`; `quiet_since[K]` the
    step of the first quiet sample since the last breach, -1 = none; `incident` the id of the present or
    last firing period; `resolved_at` the step it resolved, -1 = not yet. `acted` are the last steps on which its
    actions were due, as many as its ladder (`escalate:`) looks back on.
    """

    streak: NDArray[np.int32]
    firing: BoolArray
    quiet_since: NDArray[np.int64]
    incident: str = ""
    resolved_at: int = NEVER
    idle: bool = True
    acted: tuple[int, ...] = ()


class Moved(NamedTuple):
    """The FiringState after a sample; `fired[K]` and `resolved[K]` are the series that began or ceased to fire."""

    track: FiringState
    fired: BoolArray
    resolved: BoolArray


IDLE = FiringState(np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(0, np.int64))
"""A rule that has never breached."""


def at_rest(track: FiringState) -> FiringState:
    """The idle FiringState that keeps the last incident of `track`, and the steps on which it acted."""
    return IDLE._replace(incident=track.incident, resolved_at=track.resolved_at, acted=track.acted)


def awake(track: FiringState, size: int) -> FiringState:
    """`track` with its K arrays, which an idle FiringState does not have."""
    if not track.idle:
        return track
    return track._replace(
        streak=np.zeros(size, np.int32),
        firing=np.zeros(size, np.bool_),
        quiet_since=np.full(size, NEVER, np.int64),
        idle=False,
    )


def unchanged_by(track: FiringState, breach: BoolArray, judged: BoolArray, for_: int) -> bool:
    """True if this sample changes nothing: series that fire breach, and no other judged series does.

    A series that was not judged stays as it is. `for_` is the number of breaching samples in a row that make it fire.
    """
    if track.idle:
        return False
    still = (breach == track.firing) & (track.streak == breach * np.int32(for_)) & (track.quiet_since < 0)
    return bool((still | ~(judged | breach)).all())


def move(
    track: FiringState,
    breach: BoolArray,
    clear: BoolArray,
    judged: BoolArray,
    step: int,
    for_: int,
    keep: int,
) -> Moved:
    """Take K series through one sample: count, fire, count quiet steps, resolve.

    A series fires after `for_` breaching samples in a row. A sample with `clear` starts the count of quiet steps, a
    breach ends it, and at the first sample `keep` or more optimizer steps later the series resolves. A sample that was
    not judged (missing, warming up) changes nothing.
    """
    track = awake(track, len(breach))
    more = np.minimum(track.streak + 1, for_).astype(np.int32)
    streak = np.where(breach, more, np.where(judged, np.int32(0), track.streak))
    fired = breach & ~track.firing & (streak >= for_)
    started = np.where(clear & track.firing & (track.quiet_since < 0), step, track.quiet_since)
    quiet_since = np.where(breach, NEVER, started)
    rested = judged & ~breach & (quiet_since >= 0) & (step - quiet_since >= keep)
    resolved = track.firing & rested
    firing = (track.firing & ~resolved) | fired
    quiet_since = np.where(firing, quiet_since, NEVER)
    moved = track._replace(streak=streak, firing=firing, quiet_since=quiet_since)
    return Moved(moved, fired, resolved)
