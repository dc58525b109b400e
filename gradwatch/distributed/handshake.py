"""Ranks meet at the first step of an optimizer, and agree on the facts that they exchange at every later step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.parameter_shards import ShardPlacement, local_taps
from gradwatch.distributed import parameter_manifest, sharded_norms
from gradwatch.distributed.all_reduce_layout import Layout
from gradwatch.distributed.process_group import AloneError, Group, Meeting, announce, meet
from gradwatch.distributed.rank_membership import RankMembership
from gradwatch.reading.layouts import dense

PARTIAL = (
    "some gradients are DTensors that still need a reduction over ranks (as SequenceParallel leaves them), or "
    "have other placements than their parameters: these norms and the total are provisional and enter no "
    "baseline; call "
    "`param.grad = param.grad.redistribute(placements=param.placements)` before the step to get exact norms"
)


@dataclass(frozen=True, slots=True)
class RankRequirements:
    """Reasons for collectives between ranks: `acts` some rule may change a step; `facts` some rule reads what only all
    ranks together know; `ranked` some rule is about ranks; `costly` the columns of whole tensors that rules read;
    `averaged` the one-per-step values that they read and that may differ from rank to rank; `rules` the digest of them
    all; `refused` why several ranks may not act by these rules ("" = they may). `cadences` are those of the rules that
    read `facts`: where none of these is 1, whole gradients' facts are exchanged at steps of theirs only. `compared` are
    those of the rules that compare the norms of replicas.
    """

    rules: str
    acts: bool
    facts: bool
    ranked: bool
    costly: tuple[str, ...]
    averaged: tuple[str, ...] = ("loss",)
    refused: str = ""
    cadences: tuple[int, ...] = (1,)
    compared: tuple[int, ...] = ()


class RankMeeting:
    """Meetings of the ranks of one watch, which each has its `rank_requirements` and models.

    `stages` says which stages of a pipeline this rank has seen itself take; `report` takes what is no reason to go on
    alone.
    """

    def __init__(
        self,
        rank_requirements: RankRequirements,
        models: Callable[[], list[nn.Module]],
        report: Callable[[str, BaseException], None],
        stages: Callable[[], tuple[int, ...]],
    ) -> None:
        self._requirements = rank_requirements
        self._models = models
        self._report = report
        self._stages = stages

    def hold(
        self,
        name: str,
        captured: OptimizerCapture,
        membership: RankMembership,
        held: Sequence[ShardPlacement],
    ) -> None:
        """Meet under a name that is the same on all ranks, and note in `membership` what was agreed on.

        `held` are the parts of the capture's parameters on this rank. Raises `AloneError` where the ranks cannot agree,
        and what the process group raises.
        """
        rank_requirements = self._requirements
        if not (rank_requirements.acts or rank_requirements.facts or membership.sharded):
            announce(name)
            return
        if rank_requirements.refused:
            announce(name)
            raise AloneError(rank_requirements.refused)
        models = self._models()
        reducers = [m for model in models for m in model.modules() if isinstance(m, DistributedDataParallel)]
        membership.meet_by(reducers)
        ddp = bool(reducers)
        table = parameter_manifest.table(membership.sites)
        digest = parameter_manifest.identity(membership.sites, () if ddp else held, self._stages())
        hello = {
            "rules": rank_requirements.rules,
            "table": digest,
            "sharded": membership.sharded,
            "facts": rank_requirements.facts,
            "ddp": ddp,
            "heard": any(tap is not None for tap in local_taps(captured.params, models)),
        }
        met = meet(name, hello, {digest: table})
        if len({one["rules"] for one in met.hellos}) > 1:
            raise AloneError("the ranks run different rules; give all of them the same rule file")
        models_differ = len({one["table"] for one in met.hellos}) > 1
        pooled = models_differ or any(one["sharded"] for one in met.hellos)
        tapped = all(hello["heard"] for hello in met.hellos)
        ranked = rank_requirements.ranked and not models_differ and (tapped or not pooled)
        membership.agree(ranked, ddp=all(one["ddp"] for one in met.hellos))
        if partial := captured.partial():
            names = [captured.sites.names[k] for k in partial]
            self._report("ranks", AloneError(f"{PARTIAL}: {', '.join(names[:5])}"))
        if pooled or any(one["facts"] for one in met.hellos):
            layout = self._laid_out(met, digest, held, captured, pooled)
            every_step = pooled or 1 in rank_requirements.cadences
            membership.exchange_by(
                layout,
                Group(met),
                compared=() if pooled else rank_requirements.compared,
                cadences=() if every_step else rank_requirements.cadences,
            )

    def _laid_out(
        self,
        met: Meeting,
        digest: str,
        held: Sequence[ShardPlacement],
        captured: OptimizerCapture,
        pooled: bool,
    ) -> Layout:
        order = list(dict.fromkeys(str(hello["table"]) for hello in met.hellos))
        found = {table: met.read(table) for table in order}
        start = sum(len(found[table][0]) for table in order[: order.index(digest)])
        leader = next(rank for rank, hello in enumerate(met.hellos) if hello["table"] == digest)
        here = [dense(param.detach()).numel() for param in captured.params]
        costly = tuple(name for name in self._requirements.costly if name in sharded_norms.REDUCED_COLUMNS)
        return Layout(
            sites=parameter_manifest.joined([found[table] for table in order]),
            own=np.arange(start, start + len(held)),
            counts=np.array([one.counts(met.rank, leader) for one in held], np.float64),
            share=np.array([size / max(1, one.numel) for size, one in zip(here, held, strict=True)]),
            rank=met.rank,
            world=met.world,
            pooled=pooled,
            costly=costly if pooled else (),
            averaged=self._requirements.averaged,
        )
