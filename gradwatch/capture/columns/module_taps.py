"""Module taps, opt-in: gradients between layers and statistics of activations.

`output` (the default tap): every output leaf gets a tensor hook; 4-6 us a call, safe with in-place operations, and it
sees tuples, dicts and ModelOutputs. `full_backward`: what `register_full_backward_hook` does, 38 us a call, which also
sees `grad_input`, but turns a module's inputs and outputs into views and so breaks models that modify them in place;
`preflight` refuses those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.capture.columns.activation_reader import ActivationReader
from gradwatch.capture.columns.activation_values import OF_INPUTS, OF_OUTPUTS
from gradwatch.capture.columns.histograms import HistogramTurns, PendingHistograms
from gradwatch.capture.columns.pending_columns import NO_SITES_OVERDUE, OverdueSites, PendingColumns
from gradwatch.capture.columns.running_statistics import RUNNING_COLUMNS, RunningStatisticsReader
from gradwatch.capture.parameter_names import named_modules
from gradwatch.engine.columns_needed import Needs
from gradwatch.engine.judged_steps.staggered_reads import Staggering
from gradwatch.engine.selected_parameters import matching
from gradwatch.reading.async_copy import AsyncCopy, Number, capturing
from gradwatch.reading.layouts import alias, elements, has_values
from gradwatch.records.snapshot import Sites
from gradwatch.rules.rule_set import Histograms
from gradwatch.taps import dispatch_modes, module_calls, nested_containers
from gradwatch.taps.dynamo import untraced
from gradwatch.taps.graph.full_backward import FullBackward, preflight
from gradwatch.taps.hook_ids import own_ids
from gradwatch.taps.muted_forwards import is_muted

TapKind = Literal["output", "full_backward"]
GRADIENT_COLUMNS = frozenset({"grad_output_norm", "grad_input_norm"})
COLUMNS = GRADIENT_COLUMNS | OF_INPUTS.keys() | OF_OUTPUTS.keys() | RUNNING_COLUMNS
INSTEAD = (
    "Use `tap: output` (it is safe with in-place operations), or exclude these modules from `modules.names`."
)


def taps_on(
    models: list[nn.Module],
    globs: Sequence[str],
    tap: TapKind,
    needs: Needs,
    failed: Callable[[str, BaseException], None],
    histograms: Histograms | None = None,
) -> ModuleTaps:
    """Taps on the modules whose name matches one of the globs (see `Sites.select`); on none where none matches.

    `histograms` are of the activations of these modules, where they are asked for. Raises `AttachError` where
    `preflight` refuses the tap.
    """
    named = list(named_modules(models))
    zeros = np.zeros(len(named), np.int64)
    names = tuple(name for name, _ in named)
    sites = Sites(names, ("module",) * len(names), zeros, zeros, np.arange(len(names)))
    chosen = matching(sites, tuple(globs))
    pairs = [pair for pair, keep in zip(named, chosen, strict=True) if keep]
    turns = None
    if histograms is not None:
        every, counted = histograms.every, matching(sites, histograms.modules)[chosen]
        turns = HistogramTurns(every, _staggering(len(pairs)).phases(every), counted)
    return ModuleTaps(pairs, tap, needs, failed, turns)


def _staggering(count: int) -> Staggering:
    """The phases of so many modules, which take turns by count, whatever they put out."""
    return Staggering(np.zeros(count, np.int64))


class GradInputBounds(Protocol):
    """Replaces the gradients that M modules pass on; only the `full_backward` tap can."""

    def bounded(self, m: int, grad_input: Any) -> Any:
        """The `grad_input` that torch goes on with after module m; None = as it is."""

    def taken(self) -> Mapping[int, float | Tensor]:
        """Factor by which each module's `grad_input` was multiplied since this was last asked, by module."""


class ModuleTaps:
    """Taps on M named modules; `collect` gives their columns for the step that ends."""

    def __init__(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        tap: TapKind,
        needs: Needs,
        failed: Callable[[str, BaseException], None],
        turns: HistogramTurns | None = None,
    ) -> None:
        if tap == "full_backward":
            preflight(modules, INSTEAD)
        self.names = tuple(name for name, _ in modules)
        staggering = _staggering(len(modules))
        self._wanted = needs.columns
        self._running = RunningStatisticsReader([module for _, module in modules], needs, staggering)
        self._inputs = ActivationReader(OF_INPUTS, needs, staggering)
        self._outputs = ActivationReader(OF_OUTPUTS, needs, staggering, turns)
        self._failed = failed
        self._collected: dict[str, dict[int, Tensor]] = {column: {} for column in GRADIENT_COLUMNS}
        self._ignore: list[Callable[[], None]] = []
        self.bounds: GradInputBounds | None = None  # where a rule acts on what the modules pass on
        for m, (_, module) in enumerate(modules):
            if self._inputs.wanted:
                self._ignore.append(module_calls.listen(module, before=self._input(m)))
            if self._outputs.wanted or (tap == "output" and "grad_output_norm" in self._wanted):
                self._ignore.append(module_calls.listen(module, after=self._forward(m, tap)))
            if tap == "full_backward":
                around = FullBackward(self._backward(m), failed)
                self._ignore.append(module_calls.listen(module, around.before, around.after))

    def bound_by(self, bounds: GradInputBounds | None) -> None:
        """Clip what the modules pass on by these bounds, inside the backward; None: pass it on as it is."""
        self.bounds = bounds

    def collect(self, step: int, scale: Number, overdue: OverdueSites = NO_SITES_OVERDUE) -> PendingColumns:
        """Measurements of the taps since the last step boundary; the loss scale is divided out of gradients.

        `overdue` bool[M] are modules that are read at the next step whatever it is, if they are called; their running
        statistics are read at this one.
        """
        gradients = {column: dict(found) for column, found in self._collected.items() if found}
        for found in self._collected.values():
            found.clear()  # before anything can fail: the next step starts with none
        activations = self._inputs.take_statistics() | self._outputs.take_statistics()
        for reader in (self._inputs, self._outputs):
            reader.schedule(step + 1, overdue)
        pending = PendingColumns(len(self.names))
        for column, found in gradients.items():
            _put(pending, column, found, scale)
        for column, found in activations.items():
            _put(pending, column, found, 1.0)
        self._running.read(pending, step, overdue)
        if self.bounds is not None:
            self._bounded(self.bounds.taken(), pending)
        if pending.copy is not None:
            pending.copy.leave()
        return pending

    def take_histograms(self) -> PendingHistograms | None:
        """Histograms of activations since the last step boundary; called before `collect`, which begins a step."""
        return self._outputs.take_histograms()

    def _bounded(self, factors: Mapping[int, float | Tensor], pending: PendingColumns) -> None:
        """Put the factors into `pending` by which hooks have multiplied what modules pass on."""
        if factors:
            positions = np.array(sorted(factors), np.intp)
            present = np.zeros(len(self.names), bool)
            present[positions] = True
            stack = torch.stack([torch.as_tensor(factors[int(m)]) for m in positions])
            pending.parts["coef"] = AsyncCopy([stack], positions, len(self.names))
            pending.present["coef"] = present

    def close(self) -> None:
        """Notice no further call of the modules."""
        for ignore in self._ignore:
            ignore()
        self._ignore.clear()

    def _input(self, m: int) -> Callable[..., None]:
        # Before the forward, which may write to its inputs.
        def given(module: nn.Module, args: Any, kwargs: Any) -> None:
            try:
                if not (is_muted() or capturing()):
                    self._inputs.read(m, module, (args, kwargs))
            except Exception as error:
                self._failed("modules", error)

        return given

    def _forward(self, m: int, tap: TapKind) -> Callable[..., None]:
        gradients = tap == "output" and "grad_output_norm" in self._wanted

        def observe(module: nn.Module, args: Any, output: Any) -> None:
            try:
                if is_muted() or capturing():
                    return
                self._outputs.read(m, module, output)
                if gradients and torch.is_grad_enabled():
                    for leaf in nested_containers.leaves(output):
                        if isinstance(leaf, Tensor) and leaf.requires_grad:
                            with own_ids:
                                leaf.register_hook(self._adder("grad_output_norm", m))
            except Exception as error:
                self._failed("modules", error)

        return observe

    def _backward(self, m: int) -> Callable[..., Any]:
        inputs, outputs = self._adder("grad_input_norm", m), self._adder("grad_output_norm", m)

        def collected(grad_input: Any, grad_output: Any) -> Any:
            for grads, add in ((grad_input, inputs), (grad_output, outputs)):
                for grad in grads if isinstance(grads, tuple) else (grads,):
                    add(grad)
            return None if self.bounds is None else self.bounds.bounded(m, grad_input)

        def observe(_: nn.Module, grad_input: Any, grad_output: Any) -> Any:
            try:
                return dispatch_modes.unseen(collected, grad_input, grad_output)
            except Exception as error:
                self._failed("modules", error)
                return None

        return observe

    def _adder(self, column: str, m: int) -> Callable[[Tensor | None], None]:
        collected, failed = self._collected[column], self._failed
        tracing = torch.compiler.is_dynamo_compiling  # compiled autograd: what follows would break its graph

        def add_square(grad: Tensor) -> None:
            kept = alias(grad)
            if kept is not None:
                values = elements(kept)
                if has_values(values):
                    square = torch.linalg.vector_norm(values.float()).square()
                    collected[m] = (
                        square if m not in collected else collected[m] + square.to(collected[m].device)
                    )

        @untraced
        def add(grad: Tensor | None) -> None:
            try:
                if not tracing() and isinstance(grad, Tensor) and not capturing():
                    dispatch_modes.unseen(add_square, grad)
            except Exception as error:
                failed("modules", error)

        return add


def _put(pending: PendingColumns, column: str, found: Mapping[int, Tensor], scale: Number) -> None:
    """Send the numbers of some modules, those of each device together; of gradients the roots of squares."""
    kinds: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for m, number in sorted(found.items()):
        kinds.setdefault((number.device, number.dtype), {})[m] = number
    parts = [torch.stack(list(group.values())) for group in kinds.values()]
    positions = np.array([m for group in kinds.values() for m in group], np.intp)
    present = np.zeros(pending.count, np.bool_)
    present[positions] = True
    roots = [part.sqrt() for part in parts] if column in GRADIENT_COLUMNS else parts
    pending.parts[column] = AsyncCopy(roots, positions, pending.count, scale=scale)
    pending.present[column] = present
