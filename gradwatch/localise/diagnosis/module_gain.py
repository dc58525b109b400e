"""Gradients that explode or vanish: how much every module multiplies the gradient that passes through it.

For each call of a leaf module: the norm of the gradient at its output and of the one it gives its input. Their
ratio is its gain; the largest is where a gradient explodes, the smallest where it vanishes. What happens between
two modules, in the forward that calls both, is a gain of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gradwatch.capture.parameter_names import named_modules
from gradwatch.localise.diagnosis.tensor_values import tensors
from gradwatch.reading.layouts import dense
from gradwatch.records.finding import Layer
from gradwatch.taps.hook_ids import own_ids


class Profile:
    """A context manager around a forward; after its backward, `layers` in the order of the forward.

    The forward must be one that is run again: inputs of leaf modules are replaced by views of themselves, so
    that a hook sees the module's own part of a gradient and not that of other readers of the same tensor.
    """

    def __init__(self, models: Iterable[nn.Module], failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._names = {
            id(module): (name, type(module).__name__)
            for name, module in named_modules(list(models))
            if not any(True for _ in module.children())
        }
        self._rows: list[tuple[str, str, list[Tensor], list[Tensor]]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Profile:
        with own_ids:
            self._handles = [
                register_module_forward_pre_hook(self._before),
                register_module_forward_hook(self._after),
            ]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def layers(self) -> list[Layer]:
        """One row per call of a leaf module through which a gradient has passed."""
        found = []
        for name, kind, at_output, at_input in self._rows:
            if at_output:
                found.append(Layer(name, kind, _root(at_output), _root(at_input) if at_input else math.nan))
        return found

    def _before(self, module: nn.Module, args: Any) -> Any:
        named = self._names.get(id(module))
        if named is None:
            return None
        row: tuple[str, str, list[Tensor], list[Tensor]] = (*named, [], [])
        self._rows.append(row)
        if getattr(module, "inplace", False):
            return None  # writing into a view takes its hook away; such a module's gain is not known
        return tuple(self._hooked(arg, row[3]) for arg in args)

    def _hooked(self, arg: Any, squares: list[Tensor]) -> Any:
        if not isinstance(arg, Tensor) or arg.grad_fn is None:
            return arg
        view = arg.view_as(arg)
        with own_ids:
            view.register_hook(_listener(squares))
        return view

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        named = self._names.get(id(module))
        row = next((row for row in reversed(self._rows) if named and row[:2] == named), None)
        if row is not None:
            for tensor in tensors(output):
                if tensor.grad_fn is not None:
                    with own_ids:
                        tensor.register_hook(_listener(row[2]))


def _listener(squares: list[Tensor]) -> Callable[[Tensor], None]:
    def record(grad: Tensor) -> None:
        with torch.no_grad():
            squares.append(dense(grad).double().square().sum())

    return record


def _root(squares: list[Tensor]) -> float:
    return math.sqrt(float(torch.stack(squares).sum()))  # sync: the finding is about these numbers


class Gain(NamedTuple):
    """Factor by which a module, or what stands between two, multiplies the gradient that passes through it."""

    factor: float
    module: str
    kind: str
    said: str


def gains(layers: Sequence[Layer], exploding: bool) -> list[Gain]:
    """Gains of each layer, and of each gap between two; those that are not known left out."""
    steps = [
        Gain(
            layer.gain,
            layer.module,
            layer.kind,
            f"its gradient goes from {layer.at_output:.3g} to {layer.at_input:.3g}",
        )
        for layer in layers
    ]
    for number, below in enumerate(layers[:-1]):
        # A gradient may come over a branch (a residual) rather than from the next layer: what a later layer has
        # given its input already did not begin in this gap.
        later = [layer for layer in layers[number + 1 :] if layer.at_input > 0]
        if later:
            above = (max if exploding else min)(later, key=lambda layer: layer.at_input)
            between = f"between {below.module} and {above.module}"
            text = f"{between} it goes from {above.at_input:.3g} to {below.at_output:.3g}"
            module = parent(below.module, above.module)
            steps.append(Gain(below.at_output / above.at_input, module, "", text))
    return [step for step in steps if math.isfinite(step.factor) and (step.factor > 0 or not exploding)]


def parent(one: str, other: str) -> str:
    """The FQN of the module that contains both."""
    shared = itertools.takewhile(
        lambda pair: pair[0] == pair[1], zip(one.split("."), other.split("."), strict=False)
    )
    return ".".join(part for part, _ in shared)
