"""Clip policies on two ranks: the same factors on both, from reduced norms, or a refusal before training starts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from gradwatch.actions import clip_section
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.distributed import all_reduce_packing, ranks
from gradwatch.engine import BoundEngine
from gradwatch.errors import AttachError
from gradwatch.session.pipeline import norm_applied
from gradwatch.session.pipeline import step_pipeline as judging
from tests.ranks.launch import fingerprint
from tests.ranks.situations import batch, fsdp1, fsdp2, loss_of
from tests.ranks.trials import made, take_step, watched, weights

HEAD = """
version: 1
groups: {head: {params: ["c.*"]}, weights: {params: ["*.weight"]}, middle: {params: ["b.*"]}}
rules:
  non-finite: {detect: {kind: nonfinite, of: norm}, do: [skip_step]}
"""
EVERYWHERE = (
    HEAD
    + """
clip:
  total: {method: zclip, warmup: 3, max_norm: 0.4}
  groups:
    head: {method: norm, max_norm: 0.05}
    weights: {method: adagc, warmup: 3, max_norm: 0.3}
    middle: {method: autoclip, percentile: 50}
"""
)
# Talks at every step, and acts by a rule with a memory: the total norm far above its own baseline.
TALKING = EVERYWHERE.replace(
    "clip:",
    """  spike: {detect: {kind: spike, of: total_norm, above: 4}, warmup: 4, for: 1, do: [clip: {to: baseline}]}
  rank-outlier: {detect: {kind: rank_outlier}}
clip:""",
    1,
)
VALUE = (
    HEAD + "clip: {total: {method: norm, max_norm: 0.3}, groups: {head: {method: value, clip_value: 0.01}}}\n"
)
ROWS = HEAD + "clip: {groups: {weights: {method: agc}, middle: {method: centralize}}}\n"
INJURED = (6, 11)
LARGE = {8: 1e3, 13: 1e5}

Wrap = Callable[[nn.Module], nn.Module]


def whole_weights(model: nn.Module) -> str:
    """A hash of the weights; under FSDP1, whose shards differ, of all ranks' hashes."""
    if not isinstance(model, FullyShardedDataParallel):
        return weights(model)
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, fingerprint(model.parameters()))
    return " ".join(parts)


def trained(rank: int, wrap: Wrap, text: str, broken: Callable[[], Any] | None = None) -> dict[str, Any]:
    """Sixteen steps, two of them with a NaN on rank 1; `broken` is a fault of ours there at steps 8 and 9."""
    _, model, optimizer = made(wrap)
    with watched(model, optimizer, text, strict=broken is None) as (gw, collector):
        hashes = []
        for step in range(16):
            with broken() if broken is not None and rank == 1 and step in (8, 9) else nullcontext():
                optimizer.zero_grad()
                x = batch(step, 0, rank) * (float("nan") if rank == 1 and step in INJURED else 1.0)
                large = LARGE.get(step, 1.0) if text is TALKING else 1.0
                (loss_of(model, x) * large).backward()
                optimizer.step()
            if step % 4 == 3:  # a difference stays in all weights after it
                hashes.append(whole_weights(model))
        coefs = {record.snapshot.step: record.snapshot.coef.tolist() for record in collector.records}
        return {
            "hashes": hashes,
            "coefs": coefs,
            "skipped": [record.snapshot.step for record in collector.records if record.decision.skip],
            "states": repr(gw.state_dict()["lanes"]["0"]["engine"]["clips"]),
            "baselines": {
                key: repr(rows)
                for key, rows in gw.state_dict()["lanes"]["0"]["engine"]["baselines"].items()
                if key.endswith("|total_norm")
            },
            "acted": [
                record.snapshot.step
                for record in collector.records
                if any(order.rule == "spike" and not order.shadow for order in record.decision.orders)
            ],
            "errors": gw.health.errors(),
        }


def refused(rank: int, wrap: Wrap, text: str) -> dict[str, Any]:
    """What the attach says."""
    _, model, optimizer = made(wrap)
    try:
        with watched(model, optimizer, text):
            return {"said": ""}
    except AttachError as error:
        return {"said": str(error)}


def sharded_later(rank: int) -> dict[str, Any]:
    """FSDP2 applied after the attach: rows that were whole are no longer, which is found when the rules are bound."""
    plain, _, _ = made(lambda model: model)
    with watched(plain, None, ROWS, strict=False) as (gw, _):
        model = fsdp2(plain)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        hashes = []
        for step in range(3):
            take_step(model, optimizer, step, rank)
            hashes.append(weights(model))
        return {"hashes": hashes, "errors": gw.health.errors()}


def raising(owner: Any, name: str) -> Callable[[], Any]:
    return lambda: mock.patch.object(owner, name, side_effect=MemoryError("injected"))


WRAPS: dict[str, Wrap] = {"ddp": DistributedDataParallel, "fsdp2": fsdp2}
AFTER_THE_EXCHANGE = {"assemble": (judging, "assemble"), "hear": (ranks, "seen_by_all")}
BEFORE_THE_EXCHANGE = {"settle": (OptimizerCapture, "close_window"), "encode": (all_reduce_packing, "encode")}

SITUATIONS: dict[str, Callable[[int], Any]] = {
    "ddp": lambda rank: trained(rank, DistributedDataParallel, EVERYWHERE),
    "fsdp2": lambda rank: trained(rank, fsdp2, EVERYWHERE),
    "fsdp1": lambda rank: trained(rank, fsdp1(True), EVERYWHERE),
    "value ddp": lambda rank: trained(rank, DistributedDataParallel, VALUE),
    "value fsdp2": lambda rank: trained(rank, fsdp2, VALUE),
    "rows ddp": lambda rank: trained(rank, DistributedDataParallel, ROWS),
    "rows fsdp2": lambda rank: refused(rank, fsdp2, ROWS),
    "rows fsdp1": lambda rank: refused(rank, fsdp1(True), ROWS),
    "sharded later": sharded_later,
    "fault evaluate": lambda rank: trained(rank, fsdp2, EVERYWHERE, raising(BoundEngine, "evaluate")),
    "fault reshaped": lambda rank: trained(rank, fsdp2, EVERYWHERE, raising(norm_applied, "reshaped")),
    **{
        f"fault {where} {how}": (
            lambda rank, wrap=wrap, site=site: trained(rank, wrap, TALKING, raising(*site))  # type: ignore[misc]
        )
        for where, site in AFTER_THE_EXCHANGE.items()
        for how, wrap in WRAPS.items()
    },
    **{
        f"blind {where} {how}": (
            lambda rank, wrap=wrap, site=site: trained(rank, wrap, TALKING, raising(*site))  # type: ignore[misc]
        )
        for where, site in BEFORE_THE_EXCHANGE.items()
        for how, wrap in WRAPS.items()
    },
    "fault measured": lambda rank: trained(rank, fsdp2, VALUE, raising(clip_section.ClipSection, "_norms")),
}
