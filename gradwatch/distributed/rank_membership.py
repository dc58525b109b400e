"""The place of one optimizer among the ranks: what was agreed on when they met, and what is owed to them now."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwatch.capture.window.window_norms import WindowNorms
from gradwatch.distributed.all_reduce_layout import Layout, ReducedFacts
from gradwatch.distributed.all_reduce_packing import Usual
from gradwatch.distributed.process_group import Group
from gradwatch.distributed.replica_divergence import agreeing
from gradwatch.records.snapshot import Sites

MOST_COMPARED = 64
"""Steps whose norms are compared at one exchange, at most."""


@dataclass(slots=True, eq=False)
class Exchange:
    """Facts of one step on their way to all ranks and back: `wait` ends it, and gives None where the others are lost.

    It is `due` at a boundary that all ranks count alike, and begun there by each of them, whatever fails.
    """

    wait: Callable[[], ReducedFacts | None]
    _found: tuple[ReducedFacts | None] | None = None

    def reduced(self) -> ReducedFacts | None:
        """The facts of all ranks; waits for them once."""
        if self._found is None:
            self._found = (self.wait(),)
        return self._found[0]


@dataclass(slots=True, eq=False)
class RankMembership:
    """The agreement with the other ranks for one optimizer, and the group for collectives (None = there are none).

    `cadences`: where no rule acts by what ranks exchange, and replicas need nothing else of each other, they exchange
    at every so many of their steps only, and do not wait for it in that step (empty = at every step, and wait).
    `boundaries` are those that all ranks have come to together. A step's own number may differ from rank to rank (one
    that paused has missed some), so `ahead`, by which step numbers exceed boundaries, is what all learned at the last
    exchange: no rank begins one that another does not.

    `compared` are the cadences of the rules that compare the norms of replicas. Such a rule is judged by all steps
    since it was judged last, whatever was exchanged in between: hence `recent`, the last windows that all ranks have.
    """

    captured_sites: Sites
    optimizer: weakref.ref[Optimizer] | None
    sites: Sites
    sharded: bool
    layout: Layout | None = None
    group: Group | None = None
    alone: str = ""
    ranked: bool = False
    replicas: bool = False
    ddp: bool = False
    usual: Usual = field(default_factory=lambda: Usual(np.zeros(0)))
    lost: bool = False
    reduced: ReducedFacts | None = None
    owes: bool = False  # at a step boundary, and the others have not been sent its facts yet
    diverged: int = 0  # 1 + the last step of which it could not do what was decided, until the others know
    reducers: tuple[weakref.ref[DistributedDataParallel], ...] = ()
    cadences: tuple[int, ...] = ()
    boundaries: int = 0
    ahead: int = 0
    under_way: Exchange | None = None
    unmeasured: bool = False  # at a step boundary, and nothing has been measured there yet
    missed: int = 0  # boundaries left so since the last exchange
    behind: bool = False  # the last one was
    compared: tuple[int, ...] = ()
    recent: deque[WindowNorms] = field(default_factory=lambda: deque(maxlen=MOST_COMPARED - 1))

    @property
    def exchanges(self) -> bool:
        """True if the ranks exchange the facts of every step, and so wait for them."""
        return (self.layout is not None and not self.cadences) or bool(self.alone)

    @property
    def waits_for_none(self) -> bool:
        """True if the step boundaries wait for no other rank."""
        return self.layout is None and not (self.alone or self.lost)

    @property
    def pooled(self) -> bool:
        """True if a rank's norm is only a part of the norm over all ranks: not where DDP has averaged it."""
        if self.layout is None:
            return bool(self.alone)
        return self.layout.pooled or not self.ddp

    @property
    def uneven(self) -> bool:
        """True if DDP takes uneven inputs now (`with ddp.join()`): some ranks take steps that others do not."""
        if not self.reducers:
            return False
        return any(ddp is not None and ddp._join_config.enable for ddp in (ref() for ref in self.reducers))

    @property
    def step(self) -> int:
        """The number of the step under way, as all ranks count."""
        return self.boundaries + self.ahead

    def meet_by(self, reducers: Sequence[DistributedDataParallel]) -> None:
        """Note the wrappers by which uneven inputs are seen, before the ranks meet."""
        self.reducers = tuple(map(weakref.ref, reducers))

    def agree(self, ranked: bool, ddp: bool) -> None:
        """Note what the ranks have found of each other: `ranked` rules have something to read; all are under DDP."""
        self.ranked, self.ddp, self.replicas = ranked, ddp, ddp

    def exchange_by(
        self, layout: Layout, group: Group, compared: tuple[int, ...], cadences: tuple[int, ...]
    ) -> None:
        """Exchange facts in this layout from the next boundary on."""
        self.layout, self.sites, self.group = layout, layout.sites, group
        self.usual = Usual(np.full(len(layout.own), np.nan))
        self.compared, self.cadences = compared, cadences

    def arrive(self) -> None:
        """Come to a step boundary together with the other ranks; what is owed to them there is found out alike.

        Under uneven inputs not all ranks come to it, so it is not counted.
        """
        self.reduced = None
        if self.uneven:
            return
        if self.under_way is not None:
            self.learn(self.under_way.reduced())
        self.boundaries += 1
        self.unmeasured = True
        first = self.boundaries == 1  # from which `ahead` is known
        self.owes = not self.cadences or first or any(self.step % n == 0 for n in self.cadences)

    def learn(self, reduced: ReducedFacts | None) -> None:
        """Count steps as all ranks do from the exchange that has just ended on."""
        self.under_way = None
        if reduced is not None and reduced.head("facts"):
            self.ahead = int(reduced.by_rank("step").max()) - 1 - self.boundaries

    def has_missed_some(self) -> bool:
        """True, once, if the boundary before was left without counting its step."""
        behind, self.behind = self.behind, False
        return behind

    def has_just_lost(self) -> bool:
        """True, once, if the others have been lost since this was asked last."""
        lost, self.lost = self.lost, False
        return lost

    def measured(self) -> None:
        """Note that the window of this boundary has been measured."""
        self.unmeasured = False

    def start(self, wait: Callable[[], ReducedFacts | None]) -> Exchange:
        """The exchange of what is owed at this boundary, which has been sent."""
        exchange = self.under_way = Exchange(wait)
        return exchange

    def take_owed(self) -> tuple[int, int]:
        """Take the step `diverged` at and the boundaries `missed`, which the others learn of now."""
        owed = self.diverged, self.missed
        self.owes, self.diverged, self.missed = False, 0, 0
        return owed

    def receive(self, exchange: Exchange) -> ReducedFacts | None:
        """The facts of all ranks of the step under way; waits for them."""
        self.reduced = exchange.reduced()
        self.under_way = None
        return self.reduced

    def learn_replicas(self, reduced: ReducedFacts) -> None:
        """Ranks whose norms have once been the same are replicas."""
        self.replicas = self.replicas or agreeing(reduced)

    def diverge(self, step: int) -> None:
        """Note that this rank could not do at `step` what was decided: the others learn it with the next facts."""
        self.diverged = step + 1

    def depart(self) -> bool:
        """Leave a step boundary; True if the others wait for facts of it that nothing has sent."""
        if self.unmeasured and self.cadences:
            self.missed += not self.owes
            self.behind = True
        self.unmeasured = False
        owes, self.owes = self.owes, False
        return owes

    def keep(self, window: WindowNorms) -> None:
        """Keep the norms of a step that all ranks take until every rule that compares them has been judged by it."""
        longest = max(self.compared, default=1)
        if longest == 1 or self.uneven:
            return
        self.recent.append(window)
        while self.recent[0].step + longest <= window.step:
            self.recent.popleft()

    def earlier(self, step: int) -> list[WindowNorms]:
        """The windows before this step by which the rules that are due now have not been judged yet."""
        back = max((n for n in self.compared if step % n == 0), default=1)
        return [one for one in self.recent if step - back < one.step < step]

    def lose(self, why: str, own: Sites) -> None:
        """Go on without the others; what was laid out for all ranks is laid out anew."""
        self.close()
        self.alone, self.layout, self.sites, self.lost = why, None, own, True
        self.cadences, self.under_way = (), None
        self.recent.clear()

    def close(self) -> None:
        """Leave; the others notice at once."""
        if self.group is not None:
            self.group.close()
            self.group = None
