"""torch.compile: watching breaks no graph, causes no compilation, and leaves compiled results alone."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

import gradwatch
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept
from tests.support.zoo import EVERY_TAP

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
BY_COMPILER = [pytest.mark.soak, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=BY_COMPILER)]
"""The last compiles, for the time that a C++ compiler takes, what the second has traced; `.ci/run` asks for it."""


def train(backend: str, watched: bool, late: bool) -> tuple[list[torch.Tensor], dict[str, Any], int]:
    """Ten steps; weights, dynamo's counters, and how many Snapshots there were.

    Two input shapes, where a graph is not seconds of a C++ compiler.
    """
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    fast = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    sink, gw = Kept(), None

    def attach() -> gradwatch.Watch:
        return gradwatch.watch(model, optimizer, rules=parse_rules(EVERY_TAP), sinks=[sink], strict=True)

    if watched and not late:
        gw = attach()
    for number in range(10):
        if watched and late and number == 5:
            gw = attach()
        optimizer.zero_grad()
        fast(torch.randn(4 if number % 2 and backend != "inductor" else 6, 8)).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    if gw is not None:
        assert gw.health.errors() == {}
        gw.close()
    found = {
        "graph_break": dict(counters["graph_break"]),
        "recompiles": dict(counters["recompiles"]),
        "graphs": counters["stats"].get("unique_graphs"),
        "frames": dict(counters["frames"]),
        # Not which graphs lay in the cache on disk: of two equal runs the first may fill it for the second.
        "aot": {
            key: n for key, n in counters["aot_autograd"].items() if not key.startswith("autograd_cache")
        },
    }
    return [param.detach().clone() for param in model.parameters()], found, len(sink.records)


@cache
def unwatched(backend: str) -> tuple[list[torch.Tensor], dict[str, Any], int]:
    """The same training, bare."""
    return train(backend, watched=False, late=False)


@pytest.mark.parametrize("late", [False, True], ids=["attached first", "attached after compiling"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_graph_break_no_recompilation_no_other_bit(backend: str, late: bool) -> None:
    """fullgraph holds with every tap on; dynamo compiled exactly what it compiles without us; equal weights."""
    bare, without, _ = unwatched(backend)
    weights, with_us, steps = train(backend, watched=True, late=late)
    assert without == with_us
    assert with_us["graph_break"] == {}
    assert steps == (5 if late else 10)
    assert all(torch.equal(a, b) for a, b in zip(bare, weights, strict=True))


def compiled_autograd(watched: bool) -> tuple[list[torch.Tensor], Counter[str], int]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    gw = gradwatch.watch(model, optimizer, rules="default", sinks=[Kept()], strict=True) if watched else None
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).pow(2).mean()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
            loss.backward()
        optimizer.step()
    if gw is not None:
        assert gw.health.errors() == {}
        gw.close()
    captures = int(counters["compiled_autograd"]["captures"])
    return [p.detach().clone() for p in model.parameters()], Counter(counters["graph_break"]), captures


def test_compiled_autograd_stays_one_graph() -> None:
    """Marks are traced into the graph of compiled autograd: no break, no further capture, equal weights."""
    bare, breaks, captures = compiled_autograd(watched=False)
    weights, ours, with_us = compiled_autograd(watched=True)
    assert breaks == ours == Counter()
    assert captures == with_us
    assert all(torch.equal(a, b) for a, b in zip(bare, weights, strict=True))


def test_nothing_of_gradwatch_is_compiled_where_a_compiled_step_breaks() -> None:
    """Where dynamo cannot capture the backward in a compiled step, it compiles none of the hooks that are run."""
    torch._dynamo.reset()
    clear_compilation_metrics()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    @torch.compile(backend="eager")
    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    sink = Kept()
    with gradwatch.watch(model, optimizer, rules=parse_rules(EVERY_TAP), sinks=[sink], strict=True):
        for _ in range(5):
            step(torch.randn(4, 8))
    compiled = {metrics.co_filename for metrics in get_compilation_metrics()}
    assert __file__ in compiled
    ours = os.path.dirname(gradwatch.__file__) + os.sep
    assert [name for name in compiled if name and name.startswith(ours)] == []
    assert len(sink.records) == 5
