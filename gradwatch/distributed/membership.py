"""One capture's place among the ranks."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import numpy as np
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwatch.distributed.all_reduced_facts import Layout, ReducedFacts
from gradwatch.distributed.facts_of_this_rank import Usual
from gradwatch.distributed.process_group import Group
from gradwatch.records.snapshot import Sites


@dataclass(slots=True, eq=False)
class RankMembership:
    """The agreement with the other ranks for one optimizer, and the group for collectives (None = there are none)."""

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
    diverged: bool = (
        False  # it could not do what was decided of its last step, and the others do not know yet
    )
    reducers: tuple[weakref.ref[DistributedDataParallel], ...] = ()

    @property
    def exchanges(self) -> bool:
        """True if the ranks exchange the facts of every step, and so wait for them."""
        return self.layout is not None or bool(self.alone)

    @property
    def waits_for_none(self) -> bool:
        """True if the step boundaries wait for no other rank."""
        return self.layout is None and not (self.alone or self.lost)

    @property
    def pooled(self) -> bool:
        """True if a rank's norm is only a part of the norm over all ranks: not where DDP has averaged it."""
        return self.exchanges and (self.layout is None or self.layout.pooled or not self.ddp)

    @property
    def uneven(self) -> bool:
        """True if DDP takes uneven inputs now (`with ddp.join()`): some ranks take steps that others do not."""
        if not self.reducers:
            return False
        return any(ddp is not None and ddp._join_config.enable for ddp in (ref() for ref in self.reducers))

    def lose(self, why: str, own: Sites) -> None:
        """Go on without the others; what was laid out for all ranks is laid out anew."""
        self.close()
        self.alone, self.layout, self.sites, self.lost = why, None, own, True

    def close(self) -> None:
        """Leave; the others notice at once."""
        if self.group is not None:
            self.group.close()
            self.group = None
