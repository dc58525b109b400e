"""What holds in every situation: right numbers, what the optimizer was given, the bits of a bare run, clean copies."""

from __future__ import annotations

import copy
import io
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gradwatch
from gradwatch.records.record import Record
from gradwatch.records.snapshot import Snapshot
from gradwatch.rules.files import parse_rules
from tests.promises.test_bit_identity import digest, tensors
from tests.situations.catalogue import Situation
from tests.situations.probe import Expected, Probe, norm64
from tests.situations.training import STEPS, Training, small
from tests.support.kept import Kept
from tests.support.zoo import EVERY_TAP

TOLERANCE = 1e-5  # relative, against float64
NUMBERS = ("norm", "norm_applied", "norm_local", "total_norm")
LAWS = (*NUMBERS, "given", "bits", "copies")
LOCAL = "version: 1\nrules: {local: {detect: {kind: above, of: norm_local, threshold: 1e9}}}"


def seeded(make: Callable[[], Training]) -> Training:
    """The training, from the same generators each time."""
    if torch._dynamo.utils.counters:  # something has been compiled since
        torch._dynamo.reset()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    return make()


@contextmanager
def watched(training: Training, rules: str, optimizers: list[Optimizer] | None = None) -> Iterator[Kept]:
    """A strict watch in which nothing of ours fails, every parameter is covered in the end, and no step is skipped."""
    sink = Kept()
    with gradwatch.watch(
        training.models, optimizers or None, rules=parse_rules(rules), sinks=[sink], strict=True
    ) as gw:
        yield sink
        assert gw.health.errors() == {}
        assert gw.coverage == 1.0
    assert not any(record.decision.skip for record in sink.records)


# -- numbers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """Worst relative error of each number over all steps that are not provisional; inf = missing or invented."""

    worst: dict[str, float]
    steps: int
    provisional: int
    given: (
        bool  # whether the norms after clipping are those that the optimizer got, as a step hook finds them
    )

    def said(self, number: str) -> str:
        """The cell of the table."""
        if self.provisional == self.steps and number != "norm_applied":
            return "provisional"
        error = self.worst[number]
        return "right" if error <= TOLERANCE else "absent" if math.isinf(error) else f"off by {error:.0e}"


@contextmanager
def given(training: Training) -> Iterator[list[list[float]]]:
    """What each step of its optimizers is given: float64 norms, sorted."""
    steps: list[list[float]] = []

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(optimizer is one for one in training.optimizers):
            params = [param for group in optimizer.param_groups for param in group["params"] if param.numel()]
            steps.append(sorted(norm64(param.grad) for param in params if param.grad is not None))

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield steps
    finally:
        handle.remove()


def measure(make: Callable[[], Training]) -> Result:
    """Train, then compare step by step; an exception in the situation is the caller's."""
    training = seeded(make)
    training.loop = probe = Probe(lambda: training.models)
    with given(training) as steps, watched(training, LOCAL, training.optimizers) as sink:
        for number in range(STEPS):
            training.step(number)
    # A step that a GradScaler rejects is a Record that says so; the optimizer, and so the probe, never saw it.
    records = [one for one in sink.records if not one.snapshot.scalars.get("scaler_skip")]
    records.sort(
        key=lambda record: record.wall_time
    )  # those of two optimizers may be published in another order
    assert len(records) == len(probe.expected) > 0, (
        f"{len(records)} Snapshots for {len(probe.expected)} steps"
    )
    worst = dict.fromkeys(NUMBERS, 0.0)
    for record, want in zip(records, probe.expected, strict=True):
        for number in ("norm_applied",) if record.snapshot.provisional else NUMBERS:
            worst[number] = max(worst[number], error_of(number, record, want))
    provisional = sum(record.snapshot.provisional for record in records)
    applied = [sorted(_by_name(record.snapshot, "norm_applied").values()) for record in records]
    same = [len(a) for a in applied] == [len(b) for b in steps] and all(
        _relative(a, b) <= TOLERANCE
        for pair in zip(applied, steps, strict=True)
        for a, b in zip(*pair, strict=True)
    )
    return Result(worst, len(records), provisional, same)


def error_of(number: str, record: Record, want: Expected) -> float:
    """The largest relative error of one number at one step; inf where sites are missing or invented."""
    if number == "total_norm":
        return _relative(record.snapshot.total_norm, want.total_norm)
    got, wanted = _by_name(record.snapshot, number), getattr(want, number)
    if got.keys() != wanted.keys():
        return math.inf
    return max((_relative(got[name], wanted[name]) for name in wanted), default=0.0)


def _by_name(snapshot: Snapshot, number: str) -> dict[str, float]:
    column = snapshot.column(number)
    if column is None:
        return {}
    triples = zip(snapshot.sites.names, column.values.tolist(), column.present.tolist(), strict=True)
    return {name: value for name, value, present in triples if present}


def _relative(got: float, want: float) -> float:
    error = abs(got - want) / want if want else abs(got)
    return math.inf if math.isnan(error) else error


# -- beside a bare run ---------------------------------------------------------------------------------------------


def left_behind(training: Training) -> str:
    """A hash of everything a training leaves behind: weights, buffers, optimizer states, generators."""
    states = [tensors(model.state_dict()) for model in training.models]
    states += [tensors(optimizer.state_dict()["state"]) for optimizer in training.optimizers]
    generators = [
        torch.get_rng_state(),
        *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()),
    ]
    return digest(states, tensors(generators), random.getstate(), np.random.get_state())


def copies(model: nn.Module) -> list[str]:
    """What a deep copy and a saved file of a model hold of a watch, or why there is none."""
    found = []
    try:
        for param in copy.deepcopy(model).parameters():
            found += ["a hook"] * bool(param._post_accumulate_grad_hooks or param._backward_hooks)
    except Exception as error:
        found.append(type(error).__name__)
    try:
        torch.save(model, file := io.BytesIO())
        found += ["our name"] * (b"gradwatch" in file.getvalue())
    except Exception as error:
        found.append(type(error).__name__)
    return found


def beside_bare(make: Callable[[], Training]) -> dict[str, str]:
    """Watched with every tap: bits and copies are those of a bare run."""
    with small():
        bare = seeded(make)
    for number in range(STEPS):
        bare.step(number)
    want = left_behind(bare)
    with small():
        training = seeded(make)
    with watched(training, EVERY_TAP) as sink:
        for number in range(STEPS):
            training.step(number)
        got = left_behind(training)
        same = [copies(model) for model in training.models] == [copies(model) for model in bare.models]
    assert len(sink.records) >= STEPS
    return {"bits": "right" if got == want else "other", "copies": "right" if same else "other"}


def found(situation: Situation) -> dict[str, str]:
    """What is found of every law that is asked of a situation."""
    torch._dynamo.reset()
    result = measure(situation.make)
    said = {number: result.said(number) for number in NUMBERS}
    said["given"] = "right" if result.given else "other"
    if not {"bits", "copies"} <= situation.without.keys():
        said |= beside_bare(situation.make)
    return {law: what for law, what in said.items() if law not in situation.without}
