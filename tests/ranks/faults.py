"""Two ranks of which one is in trouble: a NaN, a fault of ours, a watch that is missing, late or gone.

Every situation trains under a time limit that a wait for the other rank would break, and returns hashes of
the weights: whatever happens, the ranks must hold the same ones.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwatch.capture.columns import norm_local
from gradwatch.capture.columns.column_reader import ColumnReader
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.distributed import all_reduce_packing, process_group, ranks
from gradwatch.engine import BoundEngine
from gradwatch.errors import AttachError
from gradwatch.session import active_or_paused, session
from gradwatch.session.pipeline import norm_applied
from gradwatch.session.pipeline import step_pipeline as judging
from gradwatch.session.watch import session_of
from tests.ranks.launch import TRIALS
from tests.ranks.situations import AT_EACH_STEP, Net, batch, fsdp1, fsdp2, loss_of
from tests.ranks.trials import BROKEN, Flip, Poison, made, take_step, told, watched, weights

TRIALS_PER_WATCH = 10
ACTING = """
version: 1
clip: {total: {method: norm, max_norm: 0.05}}
rules:
  non-finite:
    detect: {kind: nonfinite, of: norm}
    severity: critical
    do: [skip_step: {max_consecutive: 10, then: continue}]
  rank-outlier: {detect: {kind: rank_outlier}}
  rank-mismatch: {detect: {kind: rank_mismatch}, severity: critical}
"""
OBSERVING = "version: 1\nrules:\n  rail: {detect: {kind: above, of: total_norm, threshold: 1e9}}\n"
NAN_RULE = "  non-finite: {detect: {kind: nonfinite}, do: [skip_step]}\n"
SKIPPING = f"version: 1\nrules:\n{NAN_RULE}"
ON_OBSERVED = (
    "version: 1\nrules: {r: {detect: {kind: below, of: observed.accuracy, threshold: 0.5}, do: [skip_step]}}"
)
ON_LOSS = "version: 1\nrules:\n  loss: {detect: {kind: loss_nonfinite}, do: [skip_step]}\n"
ON_LOCAL = (
    "version: 1\nrules:\n  far: {detect: {kind: above, of: norm_local, threshold: 9}, do: [skip_step]}\n"
)


def nan_on_one_rank(rank: int) -> list[dict[str, Any]]:
    """A NaN in one parameter of rank 1 at a random step, ten times under each of some watches."""
    generator = random.Random(5)
    found = []
    for _ in range(TRIALS // TRIALS_PER_WATCH):
        plain, model, optimizer = made()
        names = [name for name, _ in plain.named_parameters()]
        poisons = {name: Poison(plain, rank, name, generator.choice(BROKEN)) for name in names}
        # Two healthy steps at least in between, so that every one is an incident of its own.
        steps = list(itertools.accumulate(generator.randint(3, 5) for _ in range(TRIALS_PER_WATCH)))
        chosen = {step: generator.choice(names) for step in steps}
        with watched(model, optimizer, AT_EACH_STEP) as (gw, collector):
            hashes = []
            for step in range(steps[-1] + 2):
                for name, poison in poisons.items():
                    poison.now = chosen.get(step) == name
                take_step(model, optimizer, step, rank)
                hashes.append(weights(model))
            found.append(
                {
                    "chosen": list(chosen.items()),
                    "outlier": told(collector, "rank-outlier"),
                    "nonfinite": told(collector, "non-finite"),
                    "skipped": [r.snapshot.step for r in collector.records if r.decision.skip],
                    "hashes": hashes,
                    "errors": gw.health.errors(),
                }
            )
    return found


def acting(rank: int, wrap: Callable[[nn.Module], nn.Module], text: str = ACTING) -> dict[str, Any]:
    """Skip and clip armed, NaN now and then on rank 1."""
    plain, model, optimizer = made(wrap)
    names = [name for name, _ in plain.named_parameters()]
    target = names[2]
    injured = {3, 4, 9}
    poison = None if wrap is fsdp2 else Poison(plain, rank, target)
    with watched(model, optimizer, text) as (gw, collector):
        hashes = []
        for step in range(12):
            if poison is not None:
                poison.now = step in injured
                take_step(model, optimizer, step, rank)
            else:  # autograd's hooks are silent on shards: the batch itself is broken
                optimizer.zero_grad()
                x = batch(step, 0, rank) * (float("nan") if rank == 1 and step in injured else 1.0)
                loss_of(model, x).backward()
                optimizer.step()
            hashes.append(weights(model))
        return {
            "hashes": hashes,
            "skipped": [r.snapshot.step for r in collector.records if r.decision.skip],
            "clipped": [round(r.snapshot.total_norm_applied, 5) for r in collector.records],
            "totals": [r.snapshot.total_norm for r in collector.records if r.snapshot.step not in injured],
            "outlier": told(collector, "rank-outlier"),
            "errors": gw.health.errors(),
        }


SITES: dict[str, tuple[Any, str]] = {
    "settle": (OptimizerCapture, "close_window"),
    "read": (OptimizerCapture, "read"),
    "sample": (ColumnReader, "collect"),
    "local": (norm_local.LocalNorms, "collect"),
    "encode": (all_reduce_packing, "encode"),
    "hear": (ranks, "seen_by_all"),
    "assemble": (judging, "assemble"),
    "evaluate": (BoundEngine, "evaluate"),
    "decide": (BoundEngine, "decide"),
    "clipped": (norm_applied, "reshaped"),
}


def our_fault(rank: int, site: str, wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel) -> Any:
    """A fault of ours on rank 1, at a step with a NaN and at a healthy one."""
    owner, attribute = SITES[site]
    original = getattr(owner, attribute)
    broken = [False]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if broken[0] and rank == 1:
            raise MemoryError("injected")
        return original(*args, **kwargs)

    plain, model, optimizer = made(wrap)
    poison = Poison(plain, rank, "b.weight") if wrap is not fsdp2 else None
    started = time.monotonic()
    with (
        mock.patch.object(owner, attribute, failing),
        watched(model, optimizer, ACTING, strict=False) as (
            gw,
            collector,
        ),
    ):
        for step in range(12):
            broken[0] = step in (4, 7)
            if poison is not None:
                poison.now = step in (7, 9)
            take_step(model, optimizer, step, rank)
        return {
            "hash": weights(model),
            "seconds": time.monotonic() - started,
            "steps": [r.snapshot.step for r in collector.records],
            "skipped": [r.snapshot.step for r in collector.records if r.decision.skip],
            "errors": gw.health.errors(),
            "alone": session_of(gw).attached.degraded,
        }


def without(rank: int, how: str) -> dict[str, Any]:
    """Rank 1 does not watch at all, or other rules, or leaves, or stays away: nobody hangs, nobody acts alone."""
    plain, model, optimizer = made()
    poison = Poison(plain, rank, "b.weight")
    text = SKIPPING if how == "other rules" and rank == 1 else ACTING
    if how == "observing" and rank == 1:
        text = OBSERVING
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(process_group, "MEET_SECONDS", 1.0))
        stack.enter_context(mock.patch.object(process_group, "WAIT_SECONDS", 1.0))
        gw = collector = None
        if how == "missing" and rank == 1:
            next(session._ordinal)  # its attach failed
        else:
            gw, collector = stack.enter_context(watched(model, optimizer, text, strict=False))
        for step in range(8):
            poison.now = step == 6
            if gw is not None and how == "leaves" and rank == 1 and step == 3:
                gw.close()
            optimizer.zero_grad()
            loss_of(model, batch(step, 0, rank)).backward()
            if how == "late" and rank == 1 and step == 3:
                time.sleep(1.6)
            optimizer.step()
        return {
            "hash": weights(model),
            "seconds": time.monotonic() - started,
            "skipped": []
            if collector is None
            else [r.snapshot.step for r in collector.records if r.decision.skip],
            "fired": None if collector is None else told(collector, "non-finite"),
            "errors": {} if gw is None else gw.health.errors(),
            "up": {} if gw is None else gw.health.up(),
        }


def paused(rank: int) -> dict[str, Any]:
    """Rank 1 pauses itself after three faults: it takes part blind, and counts steps as the others afterwards."""
    plain, model, optimizer = made()
    poison = Poison(plain, rank, "b.weight")
    original, broken = OptimizerCapture.close_window, [False]

    def failing(*args: Any) -> Any:
        if broken[0] and rank == 1:
            raise MemoryError("injected")
        return original(*args)

    with (
        mock.patch.object(active_or_paused, "PAUSE_SECONDS", 0.2),
        mock.patch.object(OptimizerCapture, "close_window", failing),
        watched(model, optimizer, ACTING, strict=False) as (gw, collector),
    ):
        for step in range(30):
            broken[0] = 4 <= step < 8
            poison.now = step == 27
            if step == 20:
                time.sleep(0.3)
            take_step(model, optimizer, step, rank)
        return {
            "hash": weights(model),
            "skipped": [r.snapshot.step for r in collector.records if r.decision.skip],
            "last": collector.records[-1].snapshot.step,
            "errors": gw.health.errors(),
        }


def corrupted(rank: int) -> dict[str, Any]:
    """A reduction that gives rank 1 one other bit."""
    _, model, optimizer = made()
    flip = Flip(model, rank)
    with watched(model, optimizer, AT_EACH_STEP) as (gw, collector):
        for step in range(8):
            flip.now = step == 5
            take_step(model, optimizer, step, rank)
        return {"mismatch": told(collector, "rank-mismatch"), "errors": gw.health.errors()}


def flipped(rank: int, wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel) -> dict[str, Any]:
    """A bit of an exponent turns over in rank 1's local gradient: finite, and far too large."""
    plain, model, optimizer = made(wrap)
    poison = Poison(plain, rank, "b.weight", 1e4)
    with watched(model, optimizer, AT_EACH_STEP) as (gw, collector):
        for step in range(40):
            poison.now = step == 33
            take_step(model, optimizer, step, rank)
        return {"outlier": told(collector, "rank-outlier"), "errors": gw.health.errors()}


def silent(rank: int) -> dict[str, Any]:
    """Plain replicas and a rule about norms: no meeting and no collective."""
    _, model, optimizer = made()
    with mock.patch.object(process_group.Group, "__init__", side_effect=AssertionError("a group was made")):
        with watched(model, optimizer, OBSERVING) as (gw, _):
            for step in range(4):
                take_step(model, optimizer, step, rank)
            observing = gw.health.errors()
        with watched(model, optimizer, SKIPPING) as (gw, _):  # meets, to know that all will act
            for step in range(4):
                take_step(model, optimizer, step, rank)
            return {
                "observing": observing,
                "skipping": gw.health.errors(),
                "alone": session_of(gw).attached.degraded,
            }


def one_collective(rank: int) -> dict[str, Any]:
    """How often the ranks talk: once a step and optimizer."""
    _, model, optimizer = made()
    original, calls = process_group.Group.start, [0]

    def counted(*args: Any) -> Any:
        calls[0] += 1
        return original(*args)

    with (
        mock.patch.object(process_group.Group, "start", counted),
        watched(model, optimizer, AT_EACH_STEP) as (_, collector),
    ):
        for step in range(6):
            take_step(model, optimizer, step, rank)
    return {"calls": calls[0], "records": len(collector.records)}


def on_the_loss(rank: int) -> dict[str, Any]:
    """Only rank 1 observes a NaN loss: both ranks skip, by the mean over ranks."""
    _, model, optimizer = made()
    with watched(model, optimizer, ON_LOSS) as (gw, collector):
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, batch(step, 0, rank))
            loss.backward()
            observed = float("nan") if rank == 1 and step == 3 else float(rank + 1)
            gw.observe(loss=observed)
            optimizer.step()
        return {
            "hash": weights(model),
            "skipped": [r.snapshot.step for r in collector.records if r.decision.skip],
            "losses": [r.snapshot.scalars["loss"] for r in collector.records if r.snapshot.step != 3],
            "errors": gw.health.errors(),
        }


def on_an_observed_value(rank: int) -> dict[str, Any]:
    """Only rank 1 observes a low accuracy, and on step 3 only rank 0 observes any: both skip, by the mean of those."""
    _, model, optimizer = made()
    with watched(model, optimizer, ON_OBSERVED) as (gw, collector):
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, batch(step, 0, rank)).backward()
            if step == 3:
                gw.observe(**({"accuracy": 0.1} if rank == 0 else {}))
            elif step != 4:
                gw.observe(accuracy=0.0 if rank == 1 and step == 1 else 0.8)
            optimizer.step()
        return {
            "hash": weights(model),
            "skipped": [r.snapshot.step for r in collector.records if r.decision.skip],
            "values": [r.snapshot.scalars.get("accuracy") for r in collector.records],
            "errors": gw.health.errors(),
        }


def moments(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """Moments of Adam whose state each rank holds a part of: the columns, and those of the whole by hand."""
    _, model, _ = made(wrap)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    columns = ("moment_norm", "second_moment_rms", "second_moment_near_zero")
    rules = "version: 1\nrules:\n" + "".join(
        f"  {name}: {{detect: {{kind: above, of: {name}, threshold: 1e9}}, every: 1}}\n" for name in columns
    )
    by_hand: list[dict[str, dict[str, float]]] = []
    with watched(model, optimizer, rules) as (gw, collector):
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, batch(step, 0, rank)).backward()
            now: dict[str, dict[str, float]] = {name: {} for name in columns}
            for name, param in model.named_parameters():
                parts = [
                    getattr(kept, "to_local", lambda kept=kept: kept)().double()
                    for key, kept in optimizer.state.get(param, {}).items()
                    if key.startswith("exp_avg")
                ]
                if step == 0:
                    continue
                first, second = parts or (torch.zeros(0), torch.zeros(0))  # a rank may hold nothing of it
                sums = torch.tensor(
                    [first.square().sum(), second.square().sum(), (second < 2.0**-53).sum(), second.numel()],
                    dtype=torch.float64,
                )
                dist.all_reduce(sums)
                squares, second_squares, near_zero, size = sums.tolist()
                site = name.replace("_fsdp_wrapped_module.", "")
                now["moment_norm"][site] = squares**0.5
                now["second_moment_rms"][site] = (second_squares / size) ** 0.5
                now["second_moment_near_zero"][site] = near_zero / size
            by_hand.append(now)
            optimizer.step()
        found = [
            {
                name: {
                    site: float(column.values[k])
                    for k, site in enumerate(record.snapshot.sites.names)
                    if column.present[k]
                }
                if (column := record.snapshot.columns.get(name)) is not None
                else {}
                for name in columns
            }
            for record in collector.records
        ]
        return {"found": found, "by hand": by_hand, "errors": gw.health.errors()}


def scale_of_noise(rank: int) -> dict[str, Any]:
    """The gradient noise scale beside local gradients of a copy by hand; of the last steps each has two backwards."""
    plain, model, optimizer = made()
    by_hand = copy.deepcopy(plain)
    rules = "version: 1\nrules: {r: {detect: {kind: above, of: noise_scale, threshold: 1e9}, every: 1}}"
    expected: list[float | None] = []
    with watched(model, optimizer, rules) as (gw, collector):
        for step in range(6):
            optimizer.zero_grad()
            by_hand.load_state_dict(plain.state_dict())
            own = torch.autograd.grad(loss_of(by_hand, batch(step, 0, rank)), list(by_hand.parameters()))
            gradient = torch.cat([one.double().flatten() for one in own])
            mean, squares = gradient.clone(), gradient.square().sum()
            dist.all_reduce(mean)
            dist.all_reduce(squares)
            of_ranks, of_mean = float(squares) / 2, float((mean / 2).square().sum())
            loss_of(model, batch(step, 0, rank)).backward()
            if step < 4:
                left = 2 * of_mean - of_ranks
                expected.append(2 * (of_ranks - of_mean) / left if left > 0 else None)
            else:
                loss_of(model, batch(step, 1, rank)).backward()
                expected.append(None)
            optimizer.step()
        return {
            "found": [record.snapshot.scalars.get("noise_scale") for record in collector.records],
            "expected": expected,
            "errors": gw.health.errors(),
            "hash": weights(model),
        }


def on_the_local_norm(rank: int) -> dict[str, Any]:
    """An action on what only this rank knows is refused before training starts; a launcher's watch goes on without."""
    plain, model, optimizer = made()
    refused = ""
    try:
        with watched(model, optimizer, ON_LOCAL):
            pass
    except AttachError as error:
        refused = str(error)
    poison = Poison(plain, rank, "b.weight")
    with watched(model, optimizer, ON_LOCAL + NAN_RULE, origin="launcher") as (gw, collector):
        for step in range(5):
            poison.now = step == 3
            take_step(model, optimizer, step, rank)
        return {
            "refused": refused,
            "off": gw.health.inactive(),
            "skipped": [r.snapshot.step for r in collector.records if r.decision.skip],
            "measured": all(r.snapshot.column("norm_local") is not None for r in collector.records),
            "hash": weights(model),
            "errors": gw.health.errors(),
        }


def two_optimizers(rank: int) -> dict[str, Any]:
    """A generator and a discriminator, an optimizer each: the second skips, the first does not."""
    first, second = DistributedDataParallel(Net()), DistributedDataParallel(Net())
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (first, second)]
    poison = Poison(second.module, rank, "b.weight")
    with watched([first, second], optimizers, ACTING) as (gw, collector):  # type: ignore[arg-type]
        for step in range(6):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                poison.now = step == 4
                take_step(model, optimizer, step, rank)
        return {
            "hash": [weights(first), weights(second)],
            "skipped": [
                [r.snapshot.optimizer, r.snapshot.step] for r in collector.records if r.decision.skip
            ],
            "errors": gw.health.errors(),
        }


SITUATIONS: dict[str, Callable[[int], Any]] = {
    "nan on one rank": nan_on_one_rank,
    "acting under ddp": lambda rank: acting(rank, DistributedDataParallel),
    "acting under fsdp2": lambda rank: acting(rank, fsdp2),
    "default pack under fsdp2": lambda rank: acting(rank, fsdp2, AT_EACH_STEP),
    **{f"fault in {site}": (lambda rank, site=site: our_fault(rank, site)) for site in SITES},
    **{
        f"fsdp2, fault in {site}": (lambda rank, site=site: our_fault(rank, site, fsdp2))
        for site in ("settle", "encode", "evaluate")
    },
    **{
        f"rank 1: {how}": (lambda rank, how=how: without(rank, how))
        for how in ("missing", "other rules", "observing", "leaves", "late")
    },
    "paused": paused,
    "corrupted": corrupted,
    "flipped": flipped,
    "silent": silent,
    "one collective": one_collective,
    "on the loss": on_the_loss,
    "on an observed value": on_an_observed_value,
    "moments under fsdp2": lambda rank: moments(rank, fsdp2),
    "moments under fsdp1": lambda rank: moments(rank, fsdp1(True)),
    "on the local norm": on_the_local_norm,
    "noise scale": scale_of_noise,
    "two optimizers": two_optimizers,
}
