"""What the two-rank trials share: a model under DDP or FSDP2, a NaN or another bit at will, a watch, hashes."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwatch
from gradwatch.rules.files import parse_rules
from gradwatch.rules.rule_set import RuleSet
from tests.ranks.launch import fingerprint
from tests.ranks.situations import Collector, Net, batch, loss_of

BROKEN = (math.nan, math.inf, -math.inf)


class Poison:
    """Spoils one element of one parameter's local gradient, at the step it is told to."""

    def __init__(self, model: nn.Module, rank: int, name: str, value: float = float("nan")) -> None:
        self.now = False
        self._value = value
        if rank == 1:
            dict(model.named_parameters())[name].register_hook(self._spoil)

    def _spoil(self, grad: Tensor) -> Tensor | None:
        if not self.now:
            return None
        grad = grad.clone()
        grad.view(-1)[-1] = self._value
        return grad


class Flip:
    """Gives rank 1 one other bit of what DDP reduces, at the steps it is told to."""

    def __init__(self, model: Any, rank: int) -> None:
        self.now = False
        self._rank = rank

        def hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
            work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
            return work.get_future().then(self._flipped)

        hook.__annotations__.clear()  # DDP compares them with its own types, not with their names
        model.register_comm_hook(None, hook)

    def _flipped(self, future: Any) -> Tensor:
        reduced: Tensor = future.value()[0]
        if self.now and self._rank == 1:
            reduced.view(torch.int32)[3] ^= 1 << 20
        return reduced


@contextlib.contextmanager
def watched(
    model: nn.Module, optimizer: Any, text: str, strict: bool = True, origin: str = "user"
) -> Iterator[tuple[Any, Collector]]:
    """A watch by the rules in a text; not strict where a fault of ours is what is tested."""
    collector = Collector()
    rules: str | RuleSet = parse_rules(text) if text else "default"
    with tempfile.TemporaryDirectory() as folder:
        gw = gradwatch.watch(
            model, optimizer, rules=rules, sinks=[collector], run_dir=folder, strict=strict, origin=origin
        )
        try:
            yield gw, collector
        finally:
            gw.close()


def made(
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
) -> tuple[nn.Module, nn.Module, Any]:
    """(plain, wrapped, optimizer)."""
    plain = Net()
    model = wrap(plain)
    return plain, model, torch.optim.AdamW(model.parameters(), lr=0.01)


def take_step(model: nn.Module, optimizer: Any, step: int, rank: int) -> float:
    """One training step; the loss."""
    optimizer.zero_grad()
    loss = loss_of(model, batch(step, 0, rank))
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def weights(model: nn.Module) -> str:
    """A hash of the weights; of all ranks' shards where they are sharded."""
    parts = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in model.parameters()]
    return fingerprint(parts)


def told(collector: Collector, rule: str) -> list[Any]:
    """[step, sites, first cause] of every time a rule fired or acted again."""
    return [
        [event.step, list(event.sites), event.first_cause, event.description]
        for record in collector.records
        for event in record.verdict.events
        if event.rule == rule and event.kind in ("firing", "repeat")
    ]
