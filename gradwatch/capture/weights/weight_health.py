"""The weights themselves, looked at: finite, and none far larger than when they were last healthy.

Also known is which of them are far larger than when watching began. That alone is no reason: in small steps the weights
of a healthy training may well grow so far.

What this rank holds of every parameter that wants a gradient is read in one pass, as gradients are, and without a
collective: shards of FSDP and DTensors are judged by the rank that holds them. A look costs about what the read of one
step's gradients costs. The reference is one number per parameter, its root mean square, so that a shard of another size
may take the place of the one it was taken of.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.capture.weights.unoptimized_weights import UnoptimizedWeights
from gradwatch.checkpoint.health_tracker import NO_GROWTH, NOT_LOOKED_AT, Growth
from gradwatch.reading import async_copy, foreach_norms
from gradwatch.reading.batched_norms import CpuReader, inspect
from gradwatch.reading.layouts import dense
from gradwatch.runtime.fork_safe_locks import ForkSafeLock

FACTOR = 10.0
"""A root mean square beyond this many times the larger of its own and the model's is no training any more."""
RESTORED = 2.0
"""Once one was beyond, until all are within this many times: what decays after a blow-up is not restored by that."""
ROW_NORM = 0.5
"""The rows of matrices are about this long as they are usually initialised (torch's defaults: 0.58, GPT-2: 0.55): the
model counts as at least of this size, so that one which was initialised far smaller may grow to it."""
SHARE = 1000.0
"""Looks that were not asked for are this many times their own cost apart: 0.1 % of the time at most."""
LEAST_SECONDS = 1.0
BYTES_PER_SECOND = 1e8
"""Of weights read unasked on a device, whose time the host does not see: 0.1 % of 100 GB/s."""
NAMED = 3
UNREADABLE = f"{NOT_LOOKED_AT} (meta device, or a CUDA graph being captured)"


Named: TypeAlias = Callable[[], Iterable[tuple[str, Tensor]]]
"""Gives (name, parameter) of each, as of now."""
Steps: TypeAlias = dict[int, int]
"""The last step taken by each optimizer, by its index."""


class Looked(NamedTuple):
    """A look: root mean square of each of K parameters by `names[K]` (not finite where an element is not).

    `numels[K]` are elements held here, `rows[K]` the rows of a matrix (or filters), 0 for what has one dimension.
    `statistics` names the running statistics read with them that are not finite.
    """

    names: tuple[str, ...]
    rms: NDArray[np.float64]
    numels: NDArray[np.float64]
    rows: NDArray[np.float64]
    statistics: tuple[str, ...] = ()


class Found(NamedTuple):
    """Outcome of a look that was due, begun after `steps`: reasons, and running statistics that are not finite."""

    steps: Steps
    ruin: tuple[str, ...]
    statistics: tuple[str, ...] = ()


class Weights:
    """The trained parameters of one watch, by name, and what they were like when they were last healthy.

    `unoptimized()` gives those of its models that no optimizer of the watch moves, `statistics()` the running
    statistics of these models: what writes these may leave no trace in any gradient.
    """

    def __init__(self, named: Named, unoptimized: Named = tuple, statistics: Named = tuple) -> None:
        self._named = named
        self._statistics = statistics
        self._unoptimized = UnoptimizedWeights(unoptimized)
        self._reader = CpuReader()
        self._lock = ForkSafeLock()  # a thread that saves may ask while another trains
        self._reference: dict[str, float] = {}
        self._level = 0.0
        self._first: dict[str, float] = {}  # as `_reference`, and of when each was met: never renewed
        self._first_level = 0.0
        self._ruined = False  # the latest look found a parameter too large
        self.grown: frozenset[str] = frozenset()
        """The names of all that the latest look found too large."""
        self._latest: Looked | None = None
        self._before: Looked | None = None  # the look before the latest
        self._met: list[Callable[[], Looked]] = []  # taken, and maybe still on their way from a device
        self._known: set[str] = set()
        self._copies: tuple[Steps, Callable[[], bool], Callable[[], Looked]] | None = None
        self._next = 0.0

    # -- the reference -----------------------------------------------------------------------------------

    def meet(self) -> None:
        """Take the parameters that are new for healthy as they are: an optimizer is about to move them first.

        Waits for no device.
        """
        began = time.perf_counter()
        fresh = [(name, param) for name, param in self._trained() if name not in self._known]
        if not fresh or not readable(fresh):
            return
        with self._lock.held:
            self._known |= dict(fresh).keys()
            self._met.append(self._begin(fresh)[1])
            self._rest(began)

    def renew(self) -> None:
        """Compare others with the weights of the latest look from now on: they are healthy."""
        with self._lock.held:
            if self._latest is not None:
                self._arrive()
                self._remember(self._latest, only_new=False)
                self._ruined, self.grown = False, frozenset()

    def _arrive(self) -> None:
        met, self._met = self._met, []
        for looked in met:
            self._remember(looked(), only_new=True)

    def _remember(self, looked: Looked, only_new: bool) -> None:
        kept = self._reference if only_new else {}
        fresh = {name: float(rms) for name, rms in zip(looked.names, looked.rms, strict=True)}
        finite = {name: rms for name, rms in fresh.items() if math.isfinite(rms)}
        self._reference, self._first = {**finite, **kept}, {**finite, **self._first}
        level = _level(looked)
        if math.isfinite(level) and not (only_new and self._level):
            self._level = level
        self._first_level = self._first_level or self._level

    def to_dict(self) -> dict[str, Any]:
        """The reference, JSON-safe, for a checkpoint."""
        with self._lock.held:
            self._arrive()
            return {
                "rms": dict(self._reference),
                "level": self._level,
                "ruined": self._ruined,
                "first": {"rms": dict(self._first), "level": self._first_level},
            }

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from `to_dict()`; None (an earlier version wrote it): the weights are met anew."""
        saved = saved or {"rms": {}, "level": 0.0}
        with self._lock.held:
            self._met.clear()
            self._reference = {str(name): float(rms) for name, rms in saved["rms"].items()}
            self._known = set(self._reference)
            self._level = float(saved["level"])
            first = saved.get("first", saved)  # earlier versions did not write it
            self._first = {str(name): float(rms) for name, rms in first["rms"].items()}
            self._first_level = float(first["level"])
            self._ruined = bool(saved.get("ruined", False))  # earlier versions did not write it

    def growth(self) -> Growth:
        """The largest from the look before the latest to the latest, of parameters that both have seen."""
        with self._lock.held:
            before, latest = self._before, self._latest
        if before is None or latest is None:
            return NO_GROWTH
        own = dict(zip(before.names, before.rms.tolist(), strict=True))  # sync: numpy
        factors = _factors(latest, own, max(_level(before), _usual_level(before)))
        most = int(factors.argmax()) if len(factors) else -1
        return NO_GROWTH if most < 0 else Growth(float(factors[most]), latest.names[most])

    def outgrown(self) -> tuple[Growth, ...]:
        """The parameters that the latest look found far larger than when each was met, the largest factor first."""
        with self._lock.held:
            latest, own, level = self._latest, self._first, self._first_level
        if latest is None or not level:  # of a model of zeros nothing is known
            return ()
        factors = _factors(latest, own, max(level, _usual_level(latest)))
        grown = sorted(map(int, np.flatnonzero(factors > FACTOR)), key=lambda k: -factors[k])
        return tuple(Growth(float(factors[k]), latest.names[k]) for k in grown)

    # -- looking -----------------------------------------------------------------------------------------

    def check(self) -> tuple[str, ...]:
        """The reason why these weights are no healthy ones, empty where they are; waits for a device."""
        named = self._trained()
        if not named:  # not met yet, or gone: a look that found nothing is none
            return self._unoptimized.check()
        if not readable(named):
            return (UNREADABLE,)
        with self._lock.held:
            self._copies = None
            return self._judged(self._begin(named)[1]()) + self._unoptimized.check()

    def check_if_due(self, steps: Callable[[], Steps], urgent: bool) -> Found | None:
        """Finding, at a step boundary, of a look that has just come to its end, with the `steps()` of its beginning.

        One is begun where none is under way and it is `urgent` or due. On the host it ends at once, from a device
        some steps later, and nothing waits for it.
        """
        now = time.perf_counter()
        if self._copies is None and not urgent and now < self._next:
            return None
        with self._lock.held:
            if self._copies is None:
                named = self._trained()
                if not readable(named):
                    return None
                self._copies = steps(), *self._begin(named, self._readable_statistics())
                self._rest(now)  # on a device what follows is another call's time
            begun, ready, result = self._copies
            if not ready():
                return None
            self._copies = None
            looked = result()
            reasons = self._judged(looked)
            if self._unoptimized.broken:  # a healthy answer would be about these as well
                reasons += self._unoptimized.check()
            self._rest(now)
            return Found(begun, reasons, looked.statistics)

    def _readable_statistics(self) -> list[tuple[str, Tensor]]:
        return [one for one in self._statistics() if readable([one])]

    def look_next(self) -> None:
        """Look at the next step boundary, however short ago the last look was."""
        self._next = 0.0

    def _rest(self, began: float) -> None:
        now = time.perf_counter()
        self._next = max(self._next, now + max(LEAST_SECONDS, SHARE * (now - began)))

    def _begin(
        self, named: Sequence[tuple[str, Tensor]], statistics: Sequence[tuple[str, Tensor]] = ()
    ) -> tuple[Callable[[], bool], Callable[[], Looked]]:
        with torch.no_grad():
            held = [(name, part) for name, param in named if (part := dense(param)).numel()]
            beside = [(name, part) for name, buffer in statistics if (part := dense(buffer)).numel()]
            parts = [
                part for _, part in (*held, *beside)
            ]  # in one read: on a device nothing else is launched
            sizes = [(name, _size(part)) for name, part in held]  # not the parts: a look may outlive them
            looked = partial(_looked, sizes, tuple(name for name, _ in beside))
            if all(map(async_copy.on_host, parts)):
                norms = self._on_host(parts) if parts else np.zeros(0)
                return (lambda: True), lambda: looked(norms)
            size = sum(part.numel() * part.element_size() for part in parts)
            self._next = time.perf_counter() + max(LEAST_SECONDS, size / BYTES_PER_SECOND)
            reading = foreach_norms.read(parts)
            return reading.ready, lambda: looked(reading.norms())

    def _on_host(self, parts: list[Tensor]) -> NDArray[np.float64]:
        norms: NDArray[np.float64] = np.sqrt(self._reader.read(parts).squares())
        for k in map(int, np.flatnonzero(~np.isfinite(norms))):
            norms[k] = inspect(parts[k]).norm  # of large weights only the sum of squares is not finite
        return norms

    def _judged(self, looked: Looked) -> tuple[str, ...]:
        self._arrive()
        self._before, self._latest = self._latest, looked
        self.grown = frozenset()
        broken = ~np.isfinite(looked.rms)
        if broken.any():
            return (f"weights are not finite: {_listed(looked.names, broken)}",)
        own = np.array([self._reference.get(name, 0.0) for name in looked.names])
        # Of a model of zeros nothing is known yet.
        level = max(self._level, _usual_level(looked)) if self._level else 0.0
        allowed = np.maximum(own, level)
        grown = (looked.rms > (RESTORED if self._ruined else FACTOR) * allowed) & (allowed > 0)
        self._ruined = bool(grown.any())
        if not self._ruined:
            return ()
        self.grown = frozenset(looked.names[k] for k in map(int, np.flatnonzero(grown)))
        with np.errstate(divide="ignore", over="ignore"):
            worst = float((looked.rms[grown] / allowed[grown]).max())
        renewed = any(self._reference.get(name) != self._first.get(name) for name in self.grown)
        since = (
            "they were last healthy" if renewed else "watching began"
        )  # no look since is known to be healthy
        return (
            f"weights are up to {worst:.3g} times as large as when {since}: {_listed(looked.names, grown)}",
        )

    def _trained(self) -> list[tuple[str, Tensor]]:
        """Those that want a gradient, or did: what a step has made of one that is frozen by now is in a checkpoint."""
        return [
            (name, param)
            for name, param in self._named()
            if (param.requires_grad or name in self._known)
            and (param.is_floating_point() or param.is_complex())
            and param.numel()
        ]


def readable(named: list[tuple[str, Tensor]]) -> bool:
    """True if there are numbers behind these parameters, and reading them would disturb nothing."""
    if any(param.device.type == "meta" or not _stored(param) for _, param in named):
        return False
    return all(async_copy.on_host(param) for _, param in named) or not async_copy.capturing()


def _stored(param: Tensor) -> bool:
    part = dense(param)
    # FSDP frees the storage of what is gathered.
    return not part.numel() or part.untyped_storage().nbytes() > 0


def _level(looked: Looked) -> float:
    """The root mean square of all weights of a look that are finite; NaN where there are none."""
    finite = np.isfinite(looked.rms)
    count = float(looked.numels[finite].sum())
    with np.errstate(over="ignore"):
        squares = float((np.square(looked.rms[finite]) * looked.numels[finite]).sum())
    return math.sqrt(squares / count) if count else math.nan


def _factors(looked: Looked, own: Mapping[str, float], level: float) -> NDArray[np.float64]:
    """Factor of each parameter over the larger of `own` and `level`; 0 where `own` has none."""
    was = np.array([own.get(name, math.nan) for name in looked.names])
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        found: NDArray[np.float64] = np.nan_to_num(
            looked.rms / np.maximum(was, level), nan=0.0, posinf=math.inf
        )
    return found


def _usual_level(looked: Looked) -> float:
    """The root mean square of a matrix whose rows all have `ROW_NORM`, over the matrices of a look; 0 without any."""
    matrices = looked.rows > 0
    count = float(looked.numels[matrices].sum())
    return ROW_NORM * math.sqrt(float(looked.rows.sum()) / count) if count else 0.0


def _looked(
    held: Sequence[tuple[str, tuple[int, int]]], statistics: tuple[str, ...], norms: NDArray[np.float64]
) -> Looked:
    """A look at K parameters, each with its elements and rows, and the statistics behind them; `norms` of all."""
    count = len(held)
    numels = np.array([numel for _, (numel, _) in held], np.float64)
    rows = np.array([rows for _, (_, rows) in held], np.float64)
    broken = tuple(
        name for name, norm in zip(statistics, norms[count:], strict=True) if not np.isfinite(norm)
    )
    return Looked(tuple(name for name, _ in held), norms[:count] / np.sqrt(numels), numels, rows, broken)


def _size(part: Tensor) -> tuple[int, int]:
    return part.numel(), len(part) if part.ndim > 1 else 0


def _listed(names: tuple[str, ...], chosen: NDArray[np.bool_]) -> str:
    found = [names[k] for k in map(int, np.flatnonzero(chosen))]
    return ", ".join(found[:NAMED]) + (f" and {len(found) - NAMED} more" if len(found) > NAMED else "")
