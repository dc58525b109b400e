"""Weights of the watched models that no watched optimizer moves: frozen ones, and modules put in unseen.

A checkpoint holds them too, but they rarely change and may be most of a model (LoRA), so of those found fit only some
are read again at each look, in turn, beside any whose version has changed since: a write through `.data` changes none.
Nothing is known of what is usual for them: they have to be finite, or, where they want no gradient, free of NaN (an
additive mask holds -inf).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwatch.reading.layouts import dense

NAMED = 3
READ_AGAIN = 1 << 24
"""Elements read again in one look though their version has not changed: some 10 ms on one core."""


class _Fit(NamedTuple):
    """A parameter that was found fit: its address and version then, and the look that has read it last."""

    state: tuple[int, int]
    look: int


class UnoptimizedWeights:
    """`named()` gives (name, parameter) of every parameter that no optimizer moves, as of now."""

    def __init__(self, named: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._named = named
        self._fit: dict[str, _Fit] = {}
        self._look = 0
        self.broken = False
        """Whether the last look found anything."""

    def check(self) -> tuple[str, ...]:
        """The reason why a checkpoint should not hold these, empty where it may; waits for a device."""
        with torch.no_grad():
            parts = [(name, dense(param), param.requires_grad) for name, param in self._named()]
            broken = self._broken([one for one in parts if _has_numbers(one[1])])
        self.broken = bool(broken)
        more = f" and {len(broken) - NAMED} more" if len(broken) > NAMED else ""
        return (
            (f"weights that no optimizer updates are not finite: {', '.join(broken[:NAMED])}{more}",)
            if broken
            else ()
        )

    def _broken(self, parts: Sequence[tuple[str, Tensor, bool]]) -> list[str]:
        """The names of those unfit, of (name, values, whether they have to be finite), in this order."""
        before, self._fit = self._fit, {}
        self._look += 1
        unread = dict[str, tuple[Tensor, bool]]()
        for name, part, finite in parts:
            state, known = (part.data_ptr(), part._version), before.get(name)
            if known is not None and known.state == state:
                self._fit[name], unread[name] = known, (part, finite)
            elif _is_fit(part, finite):
                self._fit[name] = _Fit(state, self._look)
        left = READ_AGAIN
        for name in sorted(unread, key=lambda name: self._fit[name].look):  # the longest unread first
            if left > 0:
                left -= unread[name][0].numel()
                known = self._fit.pop(name)
                if _is_fit(*unread[name]):
                    self._fit[name] = known._replace(look=self._look)
        return [name for name, *_ in parts if name not in self._fit]


def _has_numbers(part: Tensor) -> bool:
    floating = part.is_floating_point() or part.is_complex()
    return floating and part.numel() > 0 and not part.is_meta and part.untyped_storage().nbytes() > 0


def _is_fit(part: Tensor, finite: bool) -> bool:
    """Read once, without a copy of its size, unless there is something in it."""
    kind = part.dtype if part.is_complex() or part.dtype is torch.float64 else torch.float32
    if torch.isfinite(part.sum(dtype=kind)).item():  # sync: a look waits
        return True
    broken = ~torch.isfinite(part) if finite else torch.isnan(part)
    return not broken.any().item()  # sync: a look waits
