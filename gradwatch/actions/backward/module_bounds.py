"""Bounding what a module passes on: a full-backward hook that returns a smaller `grad_input`.

It stops an explosion between layers, where it begins: the parameters of the module itself see their gradient as
it was, those before it see the bounded one. Each call of a module is bounded by itself, over all its inputs together.

Axes: M tapped modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwatch.actions.backward.clip_state import SCALED, SEVERAL_RANKS, WHY, factor_on_device
from gradwatch.policies.norm_bound import Bound, at_site, factor_of
from gradwatch.reading.async_copy import capturing
from gradwatch.reading.foreach_norms import widest
from gradwatch.reading.layouts import dense
from gradwatch.reading.single_norm import exact_norm

Square = float | Tensor
"""A squared norm, or a ratio of two: on the host, or 0-dim on its device."""


class ModuleBounds:
    """The bounds on M modules; `publish` writes them between a step and the next backward, the hooks read them.

    As the `BackwardClipper` of parameters it switches itself off, and reports it, under a GradScaler and where ranks
    would not learn of it, unless it is `local`. `refused(reason)` is called once; `failed` counts an internal error.
    """

    def __init__(
        self,
        local: bool,
        failed: Callable[[str, BaseException], None],
        refused: Callable[[str], None],
    ) -> None:
        self._bounds: tuple[Bound, ...] = ()
        self._local = local
        self._failed = failed
        self._refused = refused
        self._scale: Tensor | None = None
        self._squares: dict[int, tuple[Square, Square]] = {}
        self.disabled_reason = ""

    def publish(self, bounds: tuple[Bound, ...]) -> None:
        """Set the bounds of the next backward."""
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if ranks > 1 and not self._local:
            self._stop(SEVERAL_RANKS.format(count=ranks))
        self._bounds = () if self.disabled_reason else bounds

    def scaled(self, scale: Tensor) -> None:
        """Note the 0-dim `scale` that a GradScaler has multiplied a loss by."""
        if self._local:
            self._scale = scale
        else:
            self._stop(SCALED)

    def _stop(self, reason: str) -> None:
        if not self.disabled_reason:
            self.disabled_reason, self._bounds = WHY.format(reason=reason, instead=""), ()
            self._refused(self.disabled_reason)

    def bounded(self, m: int, grad_input: Any) -> Any:
        """Return value of the hook of module m: None, or its gradients multiplied by one factor."""
        try:
            if not self._bounds or capturing():
                return None
            return self._multiplied_by(m, grad_input)
        except Exception as error:
            self._failed("action", error)
            return None

    def taken(self) -> dict[int, Square]:
        """Factor applied to the norm of each module since the last call, over all calls of the module."""
        squares, self._squares = self._squares, {}
        return {m: (after / before) ** 0.5 for m, (before, after) in squares.items()}

    def _multiplied_by(self, m: int, grad_input: Any) -> Any:
        grads = grad_input if isinstance(grad_input, tuple) else (grad_input,)
        present = [grad for grad in grads if isinstance(grad, Tensor)]
        bounds = at_site(self._bounds, m)
        if not bounds or not present:
            return None
        factor: float | Tensor
        if all(grad.is_cpu for grad in present):
            scale = 1.0 if self._scale is None else float(self._scale)  # sync: CPU tensor
            norm = math.sqrt(sum(exact_norm(grad)[0] ** 2 for grad in present)) / (scale or math.nan)
            factor = factor_of(bounds, norm)
            if (square := norm * norm) > 0 and math.isfinite(square):
                self._note(m, square, square * factor * factor)
            if factor == 1.0:
                return None
        else:
            found = self._norm_on_device(present)
            factor = factor_on_device(bounds, found)
            known = torch.nan_to_num(found.double(), nan=0.0, posinf=0.0)
            self._note(m, known.square(), known.square() * factor.double().square())
        made = tuple((grad * factor).to(grad.dtype) if isinstance(grad, Tensor) else grad for grad in grads)
        return made if isinstance(grad_input, tuple) else made[0]

    def _note(self, m: int, before: Square, after: Square) -> None:
        """One call's squared norm, before and after."""
        if m in self._squares:
            first, second = self._squares[m]
            before, after = first + before, second + after
        self._squares[m] = before, after

    def _norm_on_device(self, grads: list[Tensor]) -> Tensor:
        where = grads[0].device
        norms = [torch.linalg.vector_norm(dense(grad).detach(), dtype=widest(where)) for grad in grads]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm if self._scale is None else norm / self._scale.to(where, non_blocking=True)
