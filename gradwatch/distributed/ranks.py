"""A watch among the ranks of a distributed training: it meets them, and exchanges the facts of each step with them.

Plain replicas (DDP) need no other rank to know their reduced norms. The ranks meet once all the same where a rule may
act, for a rank without a watch would not act with the others; and they exchange facts at every step only where
gradients are sharded, where ranks hold different parameters, or where a rule acts by what only all of them know.
Replicas whose rules on ranks only observe exchange at the steps of those rules: begun at the boundary, on the way
during the next forward, received at the next boundary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from torch import nn

from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.parameter_shards import placements, whole
from gradwatch.capture.snapshot_assembly import Extras, appended
from gradwatch.capture.window.window_norms import WindowNorms
from gradwatch.distributed import all_reduce_packing, replica_divergence
from gradwatch.distributed.all_reduce_layout import Layout, ReducedFacts, Vector, blind
from gradwatch.distributed.handshake import RankMeeting, RankRequirements
from gradwatch.distributed.process_group import AloneError, Group, place
from gradwatch.distributed.rank_membership import Exchange, RankMembership
from gradwatch.distributed.step_seen_by_all_ranks import Shared, norms_seen_by_all, of_ranks, seen_by_all
from gradwatch.reading.cpu_norms import CpuNorms, add_up_all
from gradwatch.records.snapshot import Sites

Report = Callable[[str, BaseException], None]
REDUCING = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


class Ranks:
    """The meetings of one watch with the other ranks; what was agreed on for one optimizer is its `RankMembership`.

    Nothing here raises because of another rank; it is reported, and this one goes on alone.
    """

    def __init__(
        self,
        name: str,
        rank_requirements: RankRequirements,
        models: Callable[[], list[nn.Module]],
        report: Report,
        stages: Callable[[], tuple[int, ...]] = tuple,
    ) -> None:
        """`stages` says which stages of a pipeline this rank has seen itself take."""
        self._name = name
        self._requirements = rank_requirements
        self._models = models
        self._report = report
        self._meeting = RankMeeting(rank_requirements, models, report, stages)
        # By the number of the optimizer: one that another rank does not have must not shift those of the others.
        self._meetings: Counter[int] = Counter()

    @property
    def several(self) -> bool:
        """True if this process is one of several ranks."""
        return place()[1] > 1

    def shared_step_name(
        self, captured: OptimizerCapture, membership: RankMembership | None, of_own_values: bool = False
    ) -> str:
        """A name by which all ranks may meet over a step of this capture; "" where they do not all judge it alike.

        `of_own_values`: it is judged by a loss or an observed value, which is each rank's own but where ranks exchange
        facts of every step.
        """
        if (
            not self.several
            or membership is None
            or membership.alone
            or membership.captured_sites is not captured.sites
            or membership.uneven
            or (of_own_values and (membership.layout is None or membership.cadences))
        ):
            return ""
        met = self._requirements.acts or self._requirements.facts or membership.sharded
        return f"{self._name}/{captured.index}/{self._meetings[captured.index]}/cause" if met else ""

    # -- meeting -----------------------------------------------------------------------------------------

    def arrive(self, captured: OptimizerCapture, membership: RankMembership | None) -> None:
        """Begin a step boundary: from here to `depart` this rank owes the others one vector."""
        if membership is None:
            return
        membership.arrive()
        if not membership.uneven and membership.has_missed_some():
            captured.resume_at(max(captured.step, membership.step))

    def enter(
        self, captured: OptimizerCapture, membership: RankMembership | None
    ) -> tuple[RankMembership, bool]:
        """Meet the other ranks at the first boundary of a capture, or of its changed parameters.

        The membership from now on, and whether it is new, or has just lost the others.
        """
        if (
            membership is not None
            and membership.captured_sites is captured.sites
            # Others may not have noticed yet that the optimizer before is gone: over a new one ranks meet anew.
            and (membership.optimizer is captured.optimizer or not self.several)
        ):
            return membership, membership.has_just_lost()
        if membership is not None:
            membership.close()
        held = placements(captured.params, self._models())
        sites, sharded = whole(captured.sites, held), any(one.sharded for one in held)
        captured.expect_manual_allreduce(self.several and not sharded and not _reduced(self._models()))
        membership = RankMembership(captured.sites, captured.optimizer, sites, sharded)
        membership.arrive()
        if self.several:
            try:
                self._meetings[captured.index] += 1
                name = f"{self._name}/{captured.index}/{self._meetings[captured.index]}"
                self._meeting.hold(name, captured, membership, held)
            except Exception as error:
                membership.lose(str(error), sites)
                self._report("ranks", error)
        return membership, True

    def sites(self, captured: OptimizerCapture, membership: RankMembership | None) -> Sites:
        """The parameters that the capture's rules judge: whole, and of all ranks where those hold different ones."""
        return (
            captured.sites
            if membership is None or membership.captured_sites is not captured.sites
            else membership.sites
        )

    def with_ranks(self, membership: RankMembership | None, sites: Sites) -> Sites:
        """The sites, followed by one per rank where rules about ranks have something to read."""
        if (
            membership is None
            or membership.group is None
            or not membership.ranked
            or membership.layout is None
        ):
            return sites
        return appended(sites, tuple(f"rank {rank}" for rank in range(membership.layout.world)), "rank")

    # -- every step --------------------------------------------------------------------------------------

    def begin(
        self,
        membership: RankMembership | None,
        window: WindowNorms,
        extras: Extras,
        values: Callable[[], Mapping[str, float]],
    ) -> Exchange | None:
        """Begin to send the others the facts of a window that has been measured, where that is due and none waits."""
        if membership is None or not membership.cadences:
            return None
        membership.measured()
        if not membership.owes or membership.layout is None or membership.group is None:
            membership.keep(window)
            return None
        vector = self._facts(membership, membership.layout, window, extras, values())
        return self._begin(membership, membership.layout, membership.group, vector)

    def share(
        self,
        captured: OptimizerCapture,
        membership: RankMembership | None,
        window: WindowNorms,
        extras: Extras,
        values: Mapping[str, float],
        exchange: Exchange | None = None,
    ) -> Shared | None:
        """Send the others the facts of this window and receive theirs; None where its numbers mean nothing alone.

        Where ranks exchange at some steps only, the `exchange` was begun when this one was measured.
        """
        mine = slice(0, len(window.sites))
        if membership is None:  # its optimizers step inside backward, which is no boundary
            return Shared(window, extras, values, mine, may_act=not self.several)
        if membership.layout is None:
            # A shard's norms: shown, but no baseline may learn them.
            if membership.alone and membership.sharded:
                window = replace(window, provisional=True)
            return Shared(window, extras, values, mine, may_act=not membership.alone)
        if membership.cadences:
            return self._learned(captured, membership, Shared(window, extras, values, mine, True), exchange)
        pooled = membership.layout.pooled
        if membership.uneven and membership.ddp and not membership.owes:
            return Shared(window, extras, values, mine, may_act=True)  # those who step have the same average
        reduced = self._exchange(membership, window, extras, values)
        if reduced is not None and reduced.complete:
            return seen_by_all(reduced, membership, window, extras, values)
        self._catch_up(captured, window, reduced)
        return (
            None if pooled else Shared(window, extras, values, mine, may_act=False, blind=reduced is not None)
        )

    def learned(self, membership: RankMembership | None, shared: Shared, exchange: Exchange) -> Shared | None:
        """The step with what its exchange says of the ranks; None where some rank had no facts, or is lost."""
        reduced = exchange.reduced()
        if membership is None or reduced is None or not reduced.complete:
            return None
        membership.learn_replicas(reduced)
        extras, values = of_ranks(reduced, membership, shared.window, shared.extras, shared.values)
        return replace(shared, extras=extras, values=values)

    def _learned(
        self,
        captured: OptimizerCapture,
        membership: RankMembership,
        shared: Shared,
        exchange: Exchange | None,
    ) -> Shared:
        """A step of a replica, which needs no other rank to know its norms."""
        if exchange is None:
            return shared
        learned = self.learned(membership, shared, exchange)
        if learned is not None:
            return learned
        reduced = exchange.reduced()
        self._catch_up(captured, shared.window, reduced)
        return replace(shared, may_act=False, blind=reduced is not None)

    def _exchange(
        self, membership: RankMembership, window: WindowNorms, extras: Extras, values: Mapping[str, float]
    ) -> ReducedFacts | None:
        layout, group = membership.layout, membership.group
        if layout is None or group is None or not membership.owes:
            return None
        vector = self._facts(membership, layout, window, extras, values)
        return membership.receive(self._begin(membership, layout, group, vector))

    def _facts(
        self,
        membership: RankMembership,
        layout: Layout,
        window: WindowNorms,
        extras: Extras,
        values: Mapping[str, float],
    ) -> Vector:
        columns = all_reduce_packing.columns_of(extras)
        local = columns.get("norm_local")
        earlier = membership.earlier(window.step)
        if earlier:
            add_up_all([one.raw for one in earlier if isinstance(one.raw, CpuNorms)])
        before = [one.raw.norms() for one in earlier]
        vector = all_reduce_packing.encode(
            layout, window, window.wait(), values, columns, local, membership.usual, before
        )
        membership.keep(window)
        return vector

    def _begin(self, membership: RankMembership, layout: Layout, group: Group, vector: Vector) -> Exchange:
        diverged, missed = membership.take_owed()
        layout.part(vector, "parted")[layout.rank] = diverged
        layout.part(vector, "missed")[layout.rank] = missed
        try:
            wait = group.start(vector)
        except AloneError as error:
            return Exchange(partial(self._lost, membership, error))
        return membership.start(partial(self._end, membership, layout, wait))

    def _lost(self, membership: RankMembership, error: AloneError) -> None:
        membership.lose(str(error), membership.captured_sites)
        self._report("ranks", error)

    def _end(
        self, membership: RankMembership, layout: Layout, wait: Callable[[], Vector]
    ) -> ReducedFacts | None:
        try:
            reduced = ReducedFacts(layout, wait())
        except AloneError as error:
            self._lost(membership, error)
            return None
        if not reduced.complete or reduced.missed.any():
            membership.recent.clear()  # on all ranks: one of them does not have these windows
        if reduced.head("blind"):
            ranks = ", ".join(map(str, reduced.blind))
            self._report(
                "ranks", AloneError(f"rank {ranks} reported no measurements of this step; no rank acts on it")
            )
        if reduced.diverged.any():
            self._report("ranks", replica_divergence.by(reduced))
        if self._requirements.acts and reduced.missed.any():
            self._report("ranks", replica_divergence.unjudged(reduced))
        return reduced

    def did_otherwise(self, captured: OptimizerCapture, membership: RankMembership | None) -> None:
        """Note that this rank could not do what was decided: the others learn it with the facts of the next step."""
        if membership is not None and membership.layout is not None and membership.group is not None:
            membership.diverge(captured.step)
        elif self.several:
            self._report("ranks", replica_divergence.unsent(place()[0], captured.step))

    def norms_alone(
        self, membership: RankMembership | None, window: WindowNorms, values: Mapping[str, float]
    ) -> Shared | None:
        """The step as every rank sees it but for extra columns: after an internal error on it.

        None where the others cannot know it, or do not know it yet.
        """
        mine = slice(0, len(window.sites))
        if not self.several:
            return Shared(window, Extras(), values, mine, may_act=True)
        if membership is None or membership.alone:
            return None
        if membership.layout is None or membership.cadences:
            return Shared(window, Extras(), values, mine, may_act=True)
        reduced = membership.reduced
        if reduced is None or not reduced.complete or membership.owes:
            return None
        return norms_seen_by_all(reduced, window, values)

    def _catch_up(
        self, captured: OptimizerCapture, window: WindowNorms, reduced: ReducedFacts | None
    ) -> None:
        """Count steps as the rank that has seen most of them: one that paused has missed some."""
        if reduced is not None and reduced.head("facts"):
            ahead = int(reduced.by_rank("step").max()) - 1 - window.step
            captured.resume_at(captured.step + max(0, ahead))

    def depart(self, captured: OptimizerCapture, membership: RankMembership | None) -> None:
        """Leave a step boundary. Where nothing was sent, because of an internal error, take part all the same.

        Always called when a step ends, so that other ranks do not block.
        """
        if membership is None or not membership.depart():
            return
        if membership.layout is not None and membership.group is not None:
            # A device's numbers are sent one step late: on its first step there are none, by no failure.
            vector = blind(membership.layout) if captured.on_cpu else membership.layout.empty()
            exchange = self._begin(membership, membership.layout, membership.group, vector)
            if not membership.cadences:
                membership.receive(exchange)


def _reduced(models: list[nn.Module]) -> bool:
    """True if torch itself reduces gradients over ranks, within the backward. By name: FSDP may not be there."""
    kinds = {type(module) for model in models for module in model.modules()}
    return any(cls.__name__ in REDUCING for kind in kinds for cls in kind.__mro__)
