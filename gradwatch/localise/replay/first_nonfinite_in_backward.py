"""The backward, node by node: the first that made a non-finite gradient out of a finite one.

Hooks on the nodes of a graph that was built under anomaly mode with `check_nan=False`: that mode writes down
the Python lines of every node and is otherwise silent, the hooks look. So Inf is found as well as NaN, nothing
is raised, and the first culprit is known rather than the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradwatch.localise.diagnosis import python_frames
from gradwatch.localise.diagnosis.interpreted_lines import InterpretedLines
from gradwatch.localise.diagnosis.module_attribution import ModuleAttribution
from gradwatch.localise.diagnosis.node_gain import MULTIPLIES, Passage, passage
from gradwatch.localise.diagnosis.operation_names import of_node
from gradwatch.localise.diagnosis.tensor_values import describe, finite
from gradwatch.localise.replay.first_nonfinite_in_forward import Origin
from gradwatch.records.finding import Frame, Operand
from gradwatch.runtime.interruption import not_ours
from gradwatch.taps.dispatch_modes import dispatch_disabled
from gradwatch.taps.dynamo import untraced
from gradwatch.taps.hook_ids import own_ids

COUNTED = 16  # further culprits looked for


@dataclass(frozen=True, slots=True, eq=False)
class Culprit:
    """A node that was given finite gradients and made one that is not.

    `made`: where a tensor that its forward saved, and that was not finite, came from; `infinity` the same of one that
    is infinite on purpose, as far as one can tell. `number`: its operation was given a number that is not finite.
    `double`: a backward made this node, whose gradient is differentiated again.
    """

    op: str
    node: str
    module: tuple[str, str]
    frames: tuple[Frame, ...]
    operands: tuple[Operand, ...]
    result: Operand | None
    custom: bool
    function: str = ""
    made: Origin | None = None
    infinity: Origin | None = None
    number: bool = False
    double: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Multiplier:
    """A node that multiplies a finite gradient, and by how much."""

    node: Culprit
    passage: Passage


class BackwardTracer:
    """Looks on at the backward of the graphs given to `attach`; `culprits` in the order they ran.

    `measures` True: also at how much each node multiplies; `multipliers` are those that do by more than `MULTIPLIES`.
    """

    def __init__(
        self,
        where: ModuleAttribution,
        failed: Callable[[BaseException], None],
        function: Callable[[int], str],
        lines: InterpretedLines,
        origin_of: Callable[[Tensor], Origin | None],
        measures: bool = False,
    ) -> None:
        self._lines = lines
        self._measures = measures
        self._origin_of = origin_of
        self._where = where
        self._function = function
        self._failed = failed
        self._handles: list[Any] = []
        self.culprits: list[Culprit] = []
        self.multipliers: list[Multiplier] = []
        self.leaves: list[Tensor] = []
        self.has_custom = False
        self._differentiated: list[tuple[int, int]] = []

    def made_by_a_backward(self, first: int, end: int) -> None:
        """Nodes numbered from `first` to before `end` were made while a backward ran (`create_graph=True`)."""
        if end > first:
            self._differentiated.append((first, end))

    def attach(self, roots: Iterable[Tensor]) -> None:
        """Put a hook on every node that leads to `roots`; `leaves` are the tensors it ends in."""
        for node in nodes(root.grad_fn for root in roots):
            variable = getattr(node, "variable", None)
            if variable is not None:
                self.leaves.append(variable)
                continue
            with own_ids:
                self._handles.append(node.register_hook(self._listener(node)))
            self.has_custom |= isinstance(node, torch.autograd.function.BackwardCFunction)

    def close(self) -> None:
        """Remove the hooks; graphs that live on are as found."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _listener(self, node: Node) -> Callable[[Any, Any], None]:
        @untraced
        def look(grads_in: Any, grads_out: Any) -> None:
            try:
                self._look(node, grads_in, grads_out)
            except Exception as error:
                self._failed(error)

        return look

    @torch.no_grad()
    def _look(self, node: Node, made: Iterable[Tensor | None], given: Iterable[Tensor | None]) -> None:
        made, given = tuple(made), tuple(given)
        if not finite(given):
            return
        if finite(made):
            if self._measures:
                self._measure(node, made, given)
            return
        if len(self.culprits) > COUNTED:
            return
        # A mode is handed `h / 0.0`'s saved 0.0 as a float, and it is a tensor here.
        with dispatch_disabled():
            self.culprits.append(self._culprit(node, made, given))

    def _measure(self, node: Node, made: tuple[Tensor | None, ...], given: tuple[Any, ...]) -> None:
        with dispatch_disabled():
            found = passage(node, made, given)
            if found is not None and found.gain >= MULTIPLIES:
                self.multipliers.append(Multiplier(self._culprit(node, made, given), found))

    def _culprit(self, node: Node, made: tuple[Tensor | None, ...], given: tuple[Any, ...]) -> Culprit:
        name, kept = node.name(), list(saved(node))
        infinite = [tensor for _, tensor in kept if not finite((tensor,))]
        origins = list(map(self._origin_of, infinite))
        broken = [grad for grad in made if grad is not None and not finite((grad,))]
        came = [describe("gradient in", grad) for grad in given if grad is not None]
        return Culprit(
            op=of_node(name),
            node=name,
            module=self._where.at(node._sequence_nr()),
            frames=(
                *python_frames.of_traceback(_metadata(node).get("traceback_") or ()),
                *self._lines.at(node._sequence_nr()),
            ),
            operands=(*came, *(describe(said, tensor) for said, tensor in kept)),
            result=describe("gradient out", broken[0]) if broken else None,
            custom=isinstance(node, torch.autograd.function.BackwardCFunction),
            function=self._function(node._sequence_nr()),
            made=_first(one for one in origins if one and not one.intended),
            infinity=_first(one for one in origins if one and one.intended),
            # No operation has made or read it.
            number=any(
                one is None and not tensor.dim() for one, tensor in zip(origins, infinite, strict=True)
            ),
            double=any(first <= node._sequence_nr() < end for first, end in self._differentiated),
        )


def _first(origins: Iterable[Origin]) -> Origin | None:
    return min(origins, key=lambda one: one.order, default=None)


def nodes(roots: Iterable[Node | None]) -> Iterator[Node]:
    """Every node of the graphs that end in `roots`, once; without recursion, for graphs are deep."""
    waiting = [root for root in roots if root is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def saved(node: Node) -> Iterator[tuple[str, Tensor]]:
    """Tensors that the forward saved for this node: its operands, as far as it needs them."""
    for attribute in dir(node):
        if attribute.startswith("_saved_"):
            try:
                value = getattr(node, attribute)
            except RuntimeError as error:  # a checkpoint unpacks what it saved once, and the node has had it
                if not_ours(error):
                    raise
                return
            if isinstance(value, Tensor):
                yield f"saved {attribute.removeprefix('_saved_')}", value


def _metadata(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = node.metadata  # type: ignore[assignment]  # a property, though typed as a method
    return found
