"""Optimizers that a session watches: those named at the attach, and all that own a watched parameter."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch.optim import Optimizer

from gradwatch.capture.capture_lifetimes import Captures
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.read_after_backward import Capture
from gradwatch.runtime.weak_references import Refs


class Ownership:
    """The optimizers of one session, held weakly."""

    def __init__(self, given: Sequence[Optimizer]) -> None:
        self._given = [weakref.ref(optimizer) for optimizer in given]
        # Since captures were made last. Never another list: the capture looks at this one.
        self.wanted = [weakref.ref(optimizer) for optimizer in given]
        self._named: Refs[Optimizer] = Refs()

    def join(self, optimizers: Iterable[Optimizer]) -> None:
        """Watch these optimizers too."""
        self.wanted.extend(map(weakref.ref, optimizers))

    def given(self, captures: Sequence[OptimizerCapture]) -> list[Optimizer]:
        """Optimizers named at the attach, in that order, then those of `captures`."""
        refs = [
            *self._given,
            *(captured.optimizer for captured in captures if captured.optimizer is not None),
        ]
        found = {id(one): one for ref in refs if (one := ref()) is not None}
        return list(found.values())

    def everyone(self, captures: Sequence[OptimizerCapture]) -> list[Optimizer]:
        """Every optimizer that is watched or waits to be, those of `captures` first, in their order."""
        captured = [one.optimizer for one in captures if one.optimizer is not None]
        refs = [*captured, *self._given, *self.wanted, *self._named]
        found = {id(one): one for ref in refs if (one := ref()) is not None}
        return list(found.values())

    def waiting(self, capture: Captures) -> list[Optimizer]:
        """Optimizers named since captures were made last that have none yet."""
        found: list[Optimizer] = []
        for ref in self.wanted:
            optimizer = ref()
            if optimizer is not None:
                self._named.add(ref)
                if optimizer not in found and capture.capture_of(optimizer) is None:
                    found.append(optimizer)
        if len(self._named) > self._named.most:
            self._named.drop_dead()
        return found

    def includes(self, optimizer: Optimizer, capture: Capture) -> bool:
        """True if this optimizer is watched: named at the attach or since, or owner of a watched parameter."""
        if capture.capture_of(optimizer) is not None:
            return True
        if weakref.ref(optimizer) in self._named or any(ref() is optimizer for ref in self.wanted):
            return True
        return capture.holds(optimizer)
