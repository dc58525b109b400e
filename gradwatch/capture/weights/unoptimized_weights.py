"""Weights of the watched models that no watched optimizer moves: frozen ones, and modules put in unseen.

A checkpoint holds them too, but they rarely change and may be most of a model (LoRA), so one that was found fit is
read again only where its version has changed since. Nothing is known of what is usual for them: they have to be finite,
or, where they want no gradient, free of NaN (an additive mask holds -inf).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gradwatch.reading.layouts import dense

NAMED = 3


class UnoptimizedWeights:
    """`named()` gives (name, parameter) of every parameter that no optimizer moves, as of now."""

    def __init__(self, named: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._named = named
        self._fit: dict[str, tuple[int, int]] = {}  # address and version of those found fit
        self.broken = False
        """Whether the last look found anything."""

    def check(self) -> tuple[str, ...]:
        """The reason why a checkpoint should not hold these, empty where it may; waits for a device."""
        fit, broken = {}, []
        with torch.no_grad():
            for name, param in self._named():
                part = dense(param)
                state = part.data_ptr(), param._version
                if not _has_numbers(part):
                    continue
                if self._fit.get(name) == state or _is_fit(part, finite=param.requires_grad):
                    fit[name] = state
                else:
                    broken.append(name)
        self._fit, self.broken = fit, bool(broken)
        more = f" and {len(broken) - NAMED} more" if len(broken) > NAMED else ""
        return (
            (f"weights that no optimizer updates are not finite: {', '.join(broken[:NAMED])}{more}",)
            if broken
            else ()
        )


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
