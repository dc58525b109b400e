"""Measurement of the cost of watching: two copies of a training, one watched, stepped in turn in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.capture.parameter_names import named_parameters
from gradwatch.engine import Engine
from gradwatch.records.snapshot import Sites
from gradwatch.rules.rule_set import RuleSet
from gradwatch.sinks.journal import JournalSink
from gradwatch.sinks.prometheus.sink import PrometheusSink

Loss = Callable[[nn.Module], Tensor]
Factory = Callable[[], tuple[nn.Module, Loss]]

WARM_UP = 15  # steps until the watch has learned the loop


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over `pairs` of neighbouring steps: `added_seconds`, and `ratio` = watched / bare - 1.

    `noise` is half the interquartile range of the pairs' ratios: a ratio within it says nothing.
    """

    bare_seconds: float
    added_seconds: float
    ratio: float
    noise: float
    pairs: int
    parameters: int


def own_model() -> tuple[nn.Module, Loss]:
    """A 2-million-parameter perceptron and its loss on one fixed batch."""
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(64, 512, generator=generator)
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(512, 512), nn.GELU()]
    return nn.Sequential(*layers), lambda model: model(batch).square().mean()


def measure_cost(factory: Factory, rules: RuleSet, seconds: float = 4.0) -> Cost:
    """Step a bare and a watched copy in turn for about `seconds`; the factory is called once for each.

    The watch is complete (capture, rules, journal, endpoint) and writes to a folder that is deleted after.
    The order within a pair alternates, so that neither side always finds the caches warm.
    """
    with TemporaryDirectory(prefix="gradwatch-doctor-") as folder, _kept_random_state():
        bare_model, bare = _stepper(factory)
        watched_model, watched = _stepper(factory)
        # The default sinks but the log: the probe's own training is no news.
        sinks = (PrometheusSink(listen="127.0.0.1:0"), JournalSink())
        with gradwatch.watch(watched_model, rules=rules, run_dir=folder, sinks=sinks):
            for _ in range(WARM_UP):
                bare(), watched()
            pairs: list[tuple[float, float]] = []
            deadline = time.perf_counter() + seconds
            while time.perf_counter() < deadline or len(pairs) < 10:
                if len(pairs) % 2:
                    late = watched()
                    pairs.append((bare(), late))
                else:
                    pairs.append((bare(), watched()))
    low, middle, high = statistics.quantiles((other / one for one, other in pairs), n=4)
    return Cost(
        bare_seconds=statistics.median(one for one, _ in pairs),
        added_seconds=statistics.median(other - one for one, other in pairs),
        ratio=middle - 1,
        noise=(high - low) / 2,
        pairs=len(pairs),
        parameters=sum(parameter.numel() for parameter in bare_model.parameters()),
    )


def idle_rules(factory: Factory, rules: RuleSet) -> Mapping[str, str]:
    """The reason why a rule could never say anything about this model, by rule id."""
    model, _ = factory()
    named = list(named_parameters([("", model)]))
    sites = Sites(
        names=tuple(name for name, _ in named),
        kinds=("param",) * len(named),
        numels=np.array([parameter.numel() for _, parameter in named], np.int64),
        ndims=np.array([parameter.ndim for _, parameter in named], np.int64),
        depths=np.arange(len(named)),
    )
    return Engine(rules).bind(sites).inactive


def _stepper(factory: Factory) -> tuple[nn.Module, Callable[[], float]]:
    model, loss = factory()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        started = time.perf_counter()
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
        return time.perf_counter() - started

    return model, step


@contextmanager
def _kept_random_state() -> Iterator[None]:
    with torch.random.fork_rng():
        yield
