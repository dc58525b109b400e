"""What goes into modules and comes out on two ranks: each rank has the columns and histograms of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.capture.columns.test_activation_reader import COLUMNS, check, of_column, rules_of
from tests.capture.columns.test_histograms import by_hand, equal
from tests.ranks.situations import fsdp1
from tests.ranks.trials import watched
from tests.support.module_calls import ModuleCalls

STEPS = 6
RULES = rules_of(COLUMNS, 1) + "histograms: {of: [gradients, activations], every: 2}\n"


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2, a group for each layer."""
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer)
    return fully_shard(model)  # type: ignore[return-value]


def trained(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """The histograms of modules and parameters that came, after a comparison of every value with float64 by hand."""
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    calls = ModuleCalls([plain])
    model = wrap(plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer, RULES) as (gw, collector):
        for step in range(STEPS):
            calls.begin()
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(3, 6, generator=generator)).square().mean().backward()
            optimizer.step()
        errors = gw.health.errors()
    came: dict[str, list[str]] = {"module": [], "param": []}
    for record, inputs, outputs in zip(collector.records, calls.inputs, calls.outputs, strict=True):
        sites = record.snapshot.sites
        for column in COLUMNS:
            side, statistic = column.split("_", 1)
            now = inputs if side == "input" else outputs
            found = {name: value for name, value in of_column(record, column).items() if name in now}
            assert {"0", "1", "2"} <= found.keys(), (column, found.keys())
            check(found, now, statistic)
        for site, histogram in record.snapshot.histograms.items():
            name, kind = sites.names[site], sites.kinds[site]
            came[kind].append(name)
            assert kind == "param" or name not in outputs or equal(histogram, by_hand(outputs[name])), name
    return {"errors": errors, **{kind: sorted(set(names)) for kind, names in came.items()}}


SITUATIONS: dict[str, Callable[[int], Any]] = {
    "ddp": lambda rank: trained(rank, DistributedDataParallel),
    "fsdp1": lambda rank: trained(rank, fsdp1(True)),
    "fsdp2": lambda rank: trained(rank, sharded),
}
