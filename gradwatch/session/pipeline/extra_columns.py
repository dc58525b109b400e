"""Columns of a step beside its norms: columns of whole tensors, module taps, local norms, observed values, the loss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from gradwatch.capture.columns.loss import without_scale
from gradwatch.capture.columns.module_taps import ModuleTaps
from gradwatch.capture.columns.pending_columns import NO_SITES_OVERDUE, PendingColumns
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.snapshot_assembly import Extras
from gradwatch.capture.window.window_norms import WindowNorms
from gradwatch.distributed.rank_membership import Exchange
from gradwatch.errors import AttachError
from gradwatch.reading.async_copy import Number, host_value, is_ready, start_copy
from gradwatch.records.columns import BATCH_HASH, OBSERVED_ONLY, RESERVED_NAMES
from gradwatch.session.binding.optimizer_rules import ORDINARY, Clock, OptimizerRules
from gradwatch.session.optimizer_context import OptimizerContext
from gradwatch.session.pipeline.learning_rate import learning_rate

MOST_KEPT = 1024
"""Names whose last value is kept for optimizers that have not stepped since; those that no step has are kept all."""
NOTHING = Extras()
"""Of a step on which nothing was measured but norms."""


@dataclass(slots=True, eq=False)
class Measurement:
    """One step as it was measured, by the rules of then; some numbers may still be on their way from a device."""

    captured: OptimizerCapture
    bound_rules: OptimizerRules
    window: WindowNorms
    extras: Extras
    scalars: dict[str, Any]
    clock: Clock
    deferrable: bool = (
        False  # no more was measured than of a step that may be judged later, by which no rule fires
    )
    usual: bool = (
        False  # if it waits, it may be judged together with others that are; on the host only such steps wait
    )
    begins_anew: bool = False  # the first of another optimizer, by the rules of the one before
    exchange: Exchange | None = None  # what it was to tell the other ranks is on its way

    def ready(self) -> bool:
        """True if every number is here."""
        for value in self.scalars.values():
            if type(value) is not float and not is_ready(value):
                return False
        return self.window.ready() and self.extras.ready()

    def as_usual(self) -> bool:
        """True if nothing about it is urgent: all gradients arrived, of the usual size; waits for a device.

        The answer is kept in `usual`.
        """
        usual = self.deferrable and self.captured.as_usual(self.window.raw, self.window.after)
        self.usual = usual and all(map(math.isfinite, self.values().values()))
        return self.usual

    def exchange_begun(self, exchange: Exchange | None) -> None:
        """Keep its part in what the ranks exchange, which is on its way; None where they exchange nothing."""
        self.exchange = exchange

    def knows_ranks(self, extras: Extras, values: Mapping[str, float]) -> None:
        """Take the columns and values of this step with those that the ranks have exchanged of it."""
        self.extras, self.scalars, self.exchange = extras, dict(values), None

    def values(self) -> dict[str, float]:
        """The values that there is one of per step; waits for a device."""
        found: dict[str, float] = dict(self.scalars)
        for name, value in self.scalars.items():
            if type(value) is not float:
                self.scalars[name] = found[name] = host_value(value)
        return found


class ExtraColumns:
    """Reads the extra columns of every step of one session.

    `taps` are those on modules, whose sites belong to the first optimizer; `spent` gives the seconds that watching has
    cost since it was last asked; `defers`: no rule needs the verdict of an ordinary step before the step is taken.
    `failed` is called with what a column could not be read for: it costs that column, and no rule on others.
    `batch()` hashes the batch of the present step, at steps with step % N = 0 for an N of `hashed_every`.
    """

    def __init__(
        self,
        taps: ModuleTaps | None,
        spent: Callable[[], float],
        defers: bool,
        failed: Callable[[str, BaseException], None],
        batch: Callable[[], Number | None],
        hashed_every: Sequence[int] = (),
    ) -> None:
        self._taps = taps
        self._batch, self._hashed_every = batch, hashed_every
        self._spent = spent
        self._defers = defers
        self._failed = failed
        self._observed: dict[str, tuple[int, Any]] = {}  # by name: when it was observed last, and the value
        self._count = self._taken = 0  # observed, and of these up to which a step has them

    def observe(self, name: str, value: float | Tensor) -> None:
        """Keep a one-per-step value for the next step of every optimizer.

        Raises `AttachError` for the name of something that gradwatch measures itself: it would stand in its place.
        """
        if name in RESERVED_NAMES:
            raise AttachError(
                f"observe({name}=…) is not used: gradwatch measures {name!r} itself; choose another name"
            )
        self._count += 1
        self._observed.pop(name, None)  # the oldest stands first
        self._observed[name] = (self._count, start_copy(value))
        oldest = next(iter(self._observed))
        if len(self._observed) > MOST_KEPT and self._observed[oldest][0] <= self._taken:
            del self._observed[oldest]  # a script that makes up a name a step

    def measure(self, ctx: OptimizerContext, bound_rules: OptimizerRules, window: WindowNorms) -> Measurement:
        """Read everything about a window that must be read now."""
        captured = ctx.captured
        optimizer = captured.optimizer() if captured.optimizer is not None else None
        params: list[PendingColumns] = []
        overdue = modules_overdue = NO_SITES_OVERDUE
        if bound_rules.state.overdue:
            overdue, modules_overdue = bound_rules.overdue()
        reader = bound_rules.column_reader
        if reader.wanted and (overdue or window.step not in reader.idle):
            try:
                pending = reader.collect(
                    window.step, captured.params, captured.grads, window.left, optimizer, overdue, window.zero
                )
                params += [] if pending is None else [pending]
            except Exception as error:  # of an optimizer's state that raises when it is looked into, for one
                if ctx.exchanges:  # the other ranks count on this one's part
                    raise
                self._failed("columns", error)
        scale = 1.0 if window.loss_scale is None else window.loss_scale
        if bound_rules.local is not None:
            local = bound_rules.local.take(window.step, scale, partial(_broken, ctx, window))
            params += [] if local is None else [local]
        modules, module_histograms = [], None
        if self._taps is not None and not captured.index:
            module_histograms = self._taps.take_histograms()
            modules.append(self._taps.collect(window.step, scale, modules_overdue))
        histograms = None
        if bound_rules.histograms is not None:
            histograms = bound_rules.histograms.collect(window.step, captured.grads, window.left)
        scalars = {}
        if self._count > bound_rules.observed:
            scalars = bound_rules.unseen(self._observed, self._count)
            self._taken = self._count
        if window.loss is not None and "loss" not in scalars:
            plain = window.loss_scale is None and type(window.loss) is float
            scalars["loss"] = window.loss if plain else without_scale(window.loss, window.loss_scale)
        if captured.without_optimizer:
            scalars[OBSERVED_ONLY] = 1.0
        else:
            for every in self._hashed_every:  # no Python call where none is due
                if not window.step % every:
                    if (seen := self._batch()) is not None:
                        scalars[BATCH_HASH] = seen
                    break
        if optimizer is not None:
            groups = optimizer.param_groups
            lr = groups[0].get("lr") if len(groups) == 1 else None
            if type(lr) is not float:  # else without a call
                lr = learning_rate(optimizer)
            if lr is not None:
                scalars["lr"] = lr
        if window.skipped is not None:
            scalars["scaler_skip"] = window.skipped
        deferrable = False
        if window.deferrable or not (captured.on_cpu or window.provisional):
            complete = not params or (
                not overdue and all(one.complete for one in params) and bool(window.calls.all())
            )
            deferrable = (
                complete
                and not (modules or histograms)
                and self._deferrable(ctx, bound_rules, window, scalars)
            )
        extras = NOTHING
        if params or modules or histograms is not None:
            extras = Extras(
                tuple(params), tuple(modules), histograms=histograms, module_histograms=module_histograms
            )
        step_seconds, begins_anew = bound_rules.step_measured(time.perf_counter())
        clock = Clock(self._spent(), step_seconds, time.time())
        return Measurement(
            captured, bound_rules, window, extras, scalars, clock, deferrable, captured.on_cpu, begins_anew
        )

    def _deferrable(
        self, ctx: OptimizerContext, bound_rules: OptimizerRules, window: WindowNorms, scalars: dict[str, Any]
    ) -> bool:
        """True if this window may be judged later if it is ordinary."""
        finite, late = True, not ctx.captured.on_cpu
        for value in scalars.values():  # those that are late are asked in `as_usual`
            finite = finite and (math.isfinite(value) if type(value) is float else late)
        return (
            finite
            and self._defers
            and bound_rules.ordinary_steps >= ORDINARY
            and window.loss_scale is None
            and window.skipped is None
            and (ctx.needs_no_ranks or not ctx.exchanges)
        )


def _broken(ctx: OptimizerContext, window: WindowNorms) -> bool:
    """True if a step is about to take gradients that are not finite; of shards, this rank may hold the other part."""
    if window.skipped is not None and host_value(window.skipped):
        return False
    return ctx.pooled or not math.isfinite(window.total())
