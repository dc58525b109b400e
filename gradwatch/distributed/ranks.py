"""A watch among the ranks of a distributed training: meeting them, telling and hearing the facts of each step.

Plain replicas (DDP) need nobody to know their reduced norms. The ranks meet once all the same where a rule may
act, for a rank without a watch would not act with the others; and they talk at every step only where
gradients are sharded, where ranks hold different parameters, or where a loaded rule asks about ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwatch.capture.assemble import Extras, appended
from gradwatch.capture.columns.sampled import Ratio, Sampled
from gradwatch.capture.optimizer import OptimizerCapture
from gradwatch.capture.shards import ShardPlacement, holdings, local_taps, whole
from gradwatch.capture.window import Window
from gradwatch.distributed import divergence, parameter_manifest, rank_facts
from gradwatch.distributed.group import AloneError, Group, Meeting, announce, meet, place
from gradwatch.distributed.membership import RankMembership
from gradwatch.distributed.rank_facts import Layout, ReducedFacts, Usual, plain
from gradwatch.reading.layouts import dense
from gradwatch.records.snapshot import Column, Sites

Report = Callable[[str, BaseException], None]
REDUCING = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})
PARTIAL = (
    "some gradients are sums over ranks that nobody has taken yet (SequenceParallel leaves DTensors so), or lie "
    "otherwise than their parameters: these norms and the total are provisional, and no rule learns them; call "
    "`param.grad = param.grad.redistribute(placements=param.placements)` before the step to have them right"
)


@dataclass(frozen=True, slots=True)
class RankRequirements:
    """What a watch is there for: `acts` some rule may change a step; `facts` some rule reads what only all
    ranks together know; `ranked` some rule is about ranks; `sampled` the columns read in bursts; `rules` the
    digest of them all; `refused` why several ranks may not act by these rules ("" = they may).
    """

    rules: str
    acts: bool
    facts: bool
    ranked: bool
    sampled: tuple[str, ...]
    refused: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Columns that have arrived."""

    found: Mapping[str, Column]

    def ready(self) -> bool:
        """Always."""
        return True

    def columns(self) -> dict[str, Column]:
        """The columns."""
        return dict(self.found)


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """One step as every rank sees it; `own` where this rank's parameters stand in it.

    `may_act`: every rank decides the same from these numbers. `total_applied`: the norm of everything the
    optimizers of all ranks are about to use; None where this rank's own is that. `blind`: some rank took part
    without facts, so it learns nothing of this step, and neither may the others.
    """

    window: Window
    extras: Extras
    values: Mapping[str, float]
    own: Any
    may_act: bool
    total_applied: float | None = None
    blind: bool = False


class Ranks:
    """The meetings of one watch with the other ranks; what was agreed on for one optimizer is its `RankMembership`.

    Nothing here raises because of another rank; it is reported, and this one goes on alone.
    """

    def __init__(
        self,
        name: str,
        wants: RankRequirements,
        models: Callable[[], list[nn.Module]],
        report: Report,
        stages: Callable[[], tuple[int, ...]] = tuple,
    ) -> None:
        """`stages` says which stages of a pipeline this rank has seen itself take."""
        self._name = name
        self._wants = wants
        self._models = models
        self._report = report
        self._stages = stages
        self._meetings = 0

    @property
    def several(self) -> bool:
        """Whether this process is one of several ranks."""
        return place()[1] > 1

    def judging_together(self, lane: OptimizerCapture, seat: RankMembership | None) -> str:
        """A name by which all ranks may meet over a step of this lane; "" where they do not all judge it alike."""
        if not self.several or seat is None or seat.alone or seat.lane_sites is not lane.sites or seat.uneven:
            return ""
        met = self._wants.acts or self._wants.facts or seat.sharded
        return f"{self._name}/{lane.index}/{self._meetings}/cause" if met else ""

    # -- meeting -----------------------------------------------------------------------------------------

    def arrive(self, seat: RankMembership | None) -> None:
        """A step boundary begins: from here to `depart` this rank owes the others one vector."""
        if seat is not None:
            seat.told = None
            if not seat.uneven:
                seat.owes = True

    def enter(self, lane: OptimizerCapture, seat: RankMembership | None) -> tuple[RankMembership, bool]:
        """Meet the other ranks at the first boundary of a lane, or of its changed parameters.

        The seat from now on, and whether it is new, or has just lost the others.
        """
        if seat is not None and seat.lane_sites is lane.sites:
            lost, seat.lost = seat.lost, False
            return seat, lost
        if seat is not None:
            seat.close()
        held = holdings(lane.params, self._models())
        sites, sharded = whole(lane.sites, held), any(one.sharded for one in held)
        lane.by_hand = self.several and not sharded and not _reduced(self._models())
        seat = RankMembership(lane.sites, sites, sharded, owes=True)
        if self.several:
            try:
                self._meet(lane, seat, held)
            except Exception as error:
                seat.lose(str(error), sites)
                self._report("ranks", error)
        return seat, True

    def _meet(self, lane: OptimizerCapture, seat: RankMembership, held: list[ShardPlacement]) -> None:
        wants = self._wants
        self._meetings += 1
        name = f"{self._name}/{lane.index}/{self._meetings}"
        if not (wants.acts or wants.facts or seat.sharded):
            announce(name)
            return
        if wants.refused:
            announce(name)
            raise AloneError(wants.refused)
        models = self._models()
        reducers = [m for model in models for m in model.modules() if isinstance(m, DistributedDataParallel)]
        seat.reducers, ddp = tuple(map(weakref.ref, reducers)), bool(reducers)
        table = parameter_manifest.table(seat.sites)
        digest = parameter_manifest.identity(seat.sites, () if ddp else held, self._stages())
        card = {
            "rules": wants.rules,
            "table": digest,
            "sharded": seat.sharded,
            "facts": wants.facts,
            "ddp": ddp,
            "heard": any(tap is not None for tap in local_taps(lane.params, models)),
        }
        met = meet(name, card, {digest: table})
        if len({one["rules"] for one in met.cards}) > 1:
            raise AloneError("the ranks run different rules; give all of them the same rule file")
        apart = len({one["table"] for one in met.cards}) > 1
        pooled = apart or any(one["sharded"] for one in met.cards)
        heard = all(card["heard"] for card in met.cards)
        seat.ranked = wants.ranked and not apart and (heard or not pooled)
        seat.ddp = seat.replicas = all(one["ddp"] for one in met.cards)
        if partial := lane.partial():
            names = [lane.sites.names[k] for k in partial]
            self._report("ranks", AloneError(f"{PARTIAL}: {', '.join(names[:5])}"))
        if pooled or any(one["facts"] for one in met.cards):
            seat.layout = self._laid_out(met, digest, held, lane, pooled)
            seat.sites = seat.layout.sites
            seat.usual = Usual(np.full(len(held), np.nan))
            seat.group = Group(met)

    def _laid_out(
        self, met: Meeting, digest: str, held: list[ShardPlacement], lane: OptimizerCapture, pooled: bool
    ) -> Layout:
        order = list(dict.fromkeys(str(card["table"]) for card in met.cards))
        found = {table: met.read(table) for table in order}
        start = sum(len(found[table][0]) for table in order[: order.index(digest)])
        leader = next(rank for rank, card in enumerate(met.cards) if card["table"] == digest)
        here = [dense(param.detach()).numel() for param in lane.params]
        sampled = tuple(name for name in self._wants.sampled if plain(name) in rank_facts.REDUCED_SAMPLES)
        return Layout(
            sites=parameter_manifest.joined([found[table] for table in order]),
            own=np.arange(start, start + len(held)),
            counts=np.array([one.counts(met.rank, leader) for one in held], np.float64),
            share=np.array([size / max(1, one.numel) for size, one in zip(here, held, strict=True)]),
            rank=met.rank,
            world=met.world,
            pooled=pooled,
            sampled=sampled if pooled else (),
        )

    def sites(self, lane: OptimizerCapture, seat: RankMembership | None) -> Sites:
        """The parameters that the lane's rules judge: whole, and of all ranks where those hold different ones."""
        return lane.sites if seat is None or seat.lane_sites is not lane.sites else seat.sites

    def with_ranks(self, seat: RankMembership | None, sites: Sites) -> Sites:
        """The sites, followed by one per rank where rules about ranks have something to read."""
        if seat is None or seat.group is None or not seat.ranked or seat.layout is None:
            return sites
        return appended(sites, tuple(f"rank {rank}" for rank in range(seat.layout.world)), "rank")

    # -- every step --------------------------------------------------------------------------------------

    def share(
        self,
        lane: OptimizerCapture,
        seat: RankMembership | None,
        window: Window,
        extras: Extras,
        values: Mapping[str, float],
    ) -> Shared | None:
        """Send the others the facts of this window and receive theirs; None where its numbers mean nothing alone."""
        mine = slice(0, len(window.sites))
        if seat is None:  # its optimizers step inside backward, which is no boundary
            return Shared(window, extras, values, mine, may_act=not self.several)
        if seat.layout is None:
            if seat.alone and seat.sharded:  # a shard's norms: shown, but no baseline may learn them
                window = replace(window, provisional=True)
            return Shared(window, extras, values, mine, may_act=not seat.alone)
        pooled = seat.layout.pooled
        if seat.uneven and seat.ddp and not seat.owes:
            return Shared(window, extras, values, mine, may_act=True)  # those who step have the same average
        told = self._exchange(seat, window, extras, values)
        if told is not None and told.complete:
            return _seen_by_all(told, seat, window, extras, values)
        self._catch_up(lane, window, told)
        return None if pooled else Shared(window, extras, values, mine, may_act=False, blind=told is not None)

    def _exchange(
        self, seat: RankMembership, window: Window, extras: Extras, values: Mapping[str, float]
    ) -> ReducedFacts | None:
        layout, group = seat.layout, seat.group
        if layout is None or group is None or not seat.owes:
            return None
        columns = {name: column for one in extras.params for name, column in one.columns().items()}
        columns |= _sizes(extras, columns)
        local = columns.get("norm_local")
        vector = rank_facts.encode(layout, window, window.resolve(), values, columns, local, seat.usual)
        return self._send(seat, layout, group, vector)

    def _send(
        self, seat: RankMembership, layout: Layout, group: Group, vector: rank_facts.Vector
    ) -> ReducedFacts | None:
        seat.owes, seat.told = False, None
        layout.part(vector, "parted")[layout.rank], seat.parted = float(seat.parted), False
        try:
            told = seat.told = ReducedFacts(layout, group.total(vector))
        except AloneError as error:
            seat.lose(str(error), seat.lane_sites)
            self._report("ranks", error)
            return None
        if told.head("blind"):
            ranks = ", ".join(map(str, told.blind))
            self._report("ranks", AloneError(f"rank {ranks} has no facts of this step; nobody acts on it"))
        if told.parted.any():
            self._report("ranks", divergence.by(told))
        return told

    def did_otherwise(self, lane: OptimizerCapture, seat: RankMembership | None) -> None:
        """This rank could not do what was decided of a step: the others learn it with the facts of the next one."""
        if seat is not None and seat.layout is not None and seat.group is not None:
            seat.parted = True
        elif self.several:
            self._report("ranks", divergence.untold(place()[0], lane.step))

    def norms_alone(
        self, seat: RankMembership | None, window: Window, values: Mapping[str, float]
    ) -> Shared | None:
        """The step as every rank sees it but for extra columns: where a fault of ours has spoilt the whole of it.

        None where there are no others, where they cannot know it either, or where they have not been told yet.
        """
        if seat is None or seat.alone or not self.several:
            return None
        if seat.layout is None:
            return Shared(window, Extras(), values, slice(0, len(window.sites)), may_act=True)
        told = seat.told
        if told is None or not told.complete or seat.owes:
            return None
        return _norms_seen_by_all(told, window, values)

    def _catch_up(self, lane: OptimizerCapture, window: Window, told: ReducedFacts | None) -> None:
        """Count steps as the rank that has seen most of them: one that paused has missed some."""
        if told is not None and told.head("facts"):
            lane.step += max(0, int(told.by_rank("step").max()) - 1 - window.step)

    def depart(self, lane: OptimizerCapture, seat: RankMembership | None) -> None:
        """Leave a step boundary. Where nothing was sent, because of an internal error, take part all the same.

        Always called when a step ends, so that other ranks do not block.
        """
        if seat is None or not seat.owes:
            return
        seat.owes = False
        if seat.layout is not None and seat.group is not None:
            # A device's numbers are sent one step late: on its first step there are none, by no failure.
            vector = rank_facts.blind(seat.layout) if lane.on_cpu else seat.layout.empty()
            self._send(seat, seat.layout, seat.group, vector)


def _reduced(models: list[nn.Module]) -> bool:
    """Whether torch itself reduces gradients over ranks, within the backward. By name: FSDP may not be there."""
    kinds = {type(module) for model in models for module in model.modules()}
    return any(cls.__name__ in REDUCING for kind in kinds for cls in kind.__mro__)


def _seen_by_all(
    told: ReducedFacts, seat: RankMembership, window: Window, extras: Extras, values: Mapping[str, float]
) -> Shared:
    seat.replicas = seat.replicas or rank_facts.agreeing(told)
    ranked = (Known(rank_facts.rank_columns(told, seat.replicas)),) if seat.ranked else ()
    if told.layout.pooled:
        extras = replace(extras, params=(Known(rank_facts.pooled_columns(told)),))
    return replace(_norms_seen_by_all(told, window, values), extras=replace(extras, ranks=ranked))


def _norms_seen_by_all(told: ReducedFacts, window: Window, values: Mapping[str, float]) -> Shared:
    values = dict(values)
    if told.loss is not None:
        values["loss"] = told.loss
    if told.head("rejected"):
        values["scaler_skip"] = 1.0
    if not told.layout.pooled:
        whole_window = replace(window, provisional=told.head("provisional") > 0)
        return Shared(whole_window, Extras(), values, slice(0, len(window.sites)), may_act=True)
    total = float(np.sqrt(told.column("applied").sum()))
    return Shared(rank_facts.pooled_window(told, window), Extras(), values, told.layout.own, True, total)


def _sizes(extras: Extras, columns: Mapping[str, Column]) -> dict[str, Column]:
    """‖w‖ behind a sampled ‖Δw‖/‖w‖, without which shards' ratios do not add up."""
    return {
        rank_facts.size_of(name): Column(ratio.size(), columns[name].present)
        for one in extras.params
        if isinstance(one, Sampled)
        for name, ratio in one.parts.items()
        if isinstance(ratio, Ratio) and name in columns
    }
