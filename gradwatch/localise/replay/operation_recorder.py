"""The recorder: a forward and its backward watched operation by operation.

Anomaly mode with `check_nan=False` writes down the Python lines of every node, a dispatch mode looks at what
every operation of the forward makes, hooks on the nodes look at the gradients. Nothing is raised and nothing
is changed; everything is looked at on the host, so it is slow, and used for one step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn

from gradwatch.localise.diagnosis.called_torch_function import Calls
from gradwatch.localise.diagnosis.interpreted_lines import InterpretedLines
from gradwatch.localise.diagnosis.module_attribution import ModuleAttribution
from gradwatch.localise.replay.first_nonfinite_in_backward import BackwardTracer, Culprit, Multiplier
from gradwatch.localise.replay.first_nonfinite_in_forward import ForwardTracer, Origin
from gradwatch.taps.dispatch_modes import beneath, enter, leave_dispatch, leave_function
from gradwatch.taps.graph.anomaly import AnomalyMode


class Recorder:
    """Follows `models`; enter `forward()`, then `backward(outputs)`; ask `origin_of` and `culprits` after.

    `enter` and `leave` are for a forward that no block encloses.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        failed: Callable[[BaseException], None],
        lines: InterpretedLines | None = None,
        measures: bool = False,
    ) -> None:
        """`lines`: those of interpreted code, of which the Python stack shows nothing.

        `measures`: it is looked at by how much each node multiplies a finite gradient (`multipliers`).
        """
        self._failed = failed
        self.measures = measures
        self._anomaly = AnomalyMode()
        self._where = ModuleAttribution(models)
        self._calls = Calls()
        lines = lines or InterpretedLines()
        self._forward = ForwardTracer(lambda: self._where.now, failed, lambda: self._calls.now, lines)
        self._inside_custom = ForwardTracer(lambda: ("", ""), failed)
        self._backward = BackwardTracer(
            self._where, failed, self._calls.at, lines, self._forward.of, measures
        )

    @contextlib.contextmanager
    def forward(self, functions: bool = True) -> Iterator[None]:
        """Watch the operations of a forward; with `functions` the torch functions they belong to as well."""
        try:
            self.enter(functions)
            yield
        finally:
            self.leave()

    def enter(self, functions: bool = True) -> None:
        """Begin to watch; to be followed by `leave`, also where this raises."""
        self._anomaly.enter()
        self._where.__enter__()
        if functions:
            enter(self._calls)
        enter(self._forward)

    def leave(self) -> None:
        """Leave all of it, as far as it was entered; does nothing the second time."""
        try:
            self._leave()
        finally:  # once more: what arrived at the first must not leave a mode on
            self._leave()

    def _leave(self) -> None:
        leave_dispatch(self._inside_custom)
        leave_dispatch(self._forward)
        leave_function(self._calls)
        self._where.__exit__()
        self._anomaly.leave()

    @contextlib.contextmanager
    def backward(self, roots: Iterable[Tensor]) -> Iterator[list[Tensor]]:
        """Watch the backward that starts at `roots`; gives the leaves it ends in."""
        slept = self._forward.set_asleep(True)  # the nodes are looked at, not their kernels
        try:
            self._backward.attach(roots)
            if self._backward.has_custom:
                # The backward of a custom Function is Python of the user's: its line can be told too.
                enter(self._inside_custom)
            yield self._backward.leaves
        finally:
            leave_dispatch(self._inside_custom)
            self._forward.set_asleep(slept)
            self._backward.close()

    def made_by_a_backward(self, first: int, end: int) -> None:
        """Nodes numbered from `first` to before `end` were made while a backward ran (`create_graph=True`)."""
        self._backward.made_by_a_backward(first, end)

    @property
    def beneath(self) -> bool:
        """True if another dispatch mode was entered since this was, and is still active: `leave` cannot remove it."""
        return beneath(self._forward)

    def expect(self, tensors: Iterable[Tensor]) -> None:
        """A write into one of these is restored, so it is not reported."""
        self._forward.expect(tensors)

    @property
    def stray(self) -> str:
        """The first operation of the forward that wrote into a tensor neither expected nor made in it; "" = none."""
        return self._forward.stray

    def sleep(self) -> None:
        """Look at nothing any more, and leave all that can be left."""
        self._forward.set_asleep(True)
        self.leave()

    def origin_of(self, tensor: Tensor) -> Origin | None:
        """Origin of the non-finite values in an output of the forward."""
        return self._forward.of(tensor)

    @property
    def culprits(self) -> list[Culprit]:
        """The nodes that made a non-finite gradient out of finite ones, in the order they ran."""
        return self._backward.culprits

    @property
    def multipliers(self) -> list[Multiplier]:
        """The nodes that multiplied a finite gradient, in the order they ran."""
        return self._backward.multipliers

    def inside(self, culprit: Culprit) -> Origin | None:
        """The operation at fault inside the backward of a custom Function."""
        if not culprit.custom:
            return None
        written = (one for one in self._inside_custom.origins if one.frames and not one.intended)
        return next(written, None)
