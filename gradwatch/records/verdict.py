"""Result of all rules on one Snapshot: those that fire, those that breach, those that act.

Axes: S sites, K series of a rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gradwatch.records.event import Event
from gradwatch.records.snapshot import BoolArray, FloatArray


class Due(NamedTuple):
    """Series that a rule acts on at this step: `breach[K]` of its series, `worst` the index of the worst of them.

    `usual[K]` is what `clip: {to: baseline}` brings each down to, as known before this step; None without one.
    `climbed` are the actions of the rungs of its ladder that stand now.
    """

    breach: BoolArray
    worst: int = 0
    usual: FloatArray | None = None
    climbed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """The result of all rules on one Snapshot.

    `firing` maps each rule that is firing now to bool[S] (all False for a rule over a scalar or a total);
    `breaching` maps each rule whose condition held on this very step, likewise; `events` are transitions only.
    `acting` are the rules whose `do:` is due on this step, `due` what each of them acts on; `standing[K]` the series
    under a standing factor (`rescale`), those that were firing before this step.
    """

    firing: Mapping[str, BoolArray] = field(default_factory=dict)
    breaching: Mapping[str, BoolArray] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    acting: frozenset[str] = frozenset()
    due: Mapping[str, Due] = field(default_factory=dict)
    standing: Mapping[str, BoolArray] = field(default_factory=dict)


UNJUDGED = Verdict()
"""Verdict of a step that no rule has judged: this very object."""
