"""`norm_local`: what a tensor hook sees, one backward of this rank before any reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradwatch.hooks.dense import dense
from gradwatch.hooks.device import Arriving
from gradwatch.hooks.sampling import Sampled


class LocalNorms:
    """`Tensor.register_hook` on K parameters; the largest local norm over the backwards of a step.

    A hook sees the gradient of one backward: not accumulated, not reduced over ranks, and still multiplied by
    the loss scale, which `collect` divides out. NaN beats every number. A parameter that cannot be heard is None.
    """

    def __init__(self, params: Sequence[Tensor | None], failed: Callable[[str, BaseException], None]) -> None:
        self._count = len(params)
        self._heard: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        heard = self._heard  # the closure must not reach this object: parameter -> hook -> object leaks

        def hook(k: int) -> Callable[[Tensor | None], None]:
            def observe(grad: Tensor | None) -> None:
                try:
                    if grad is not None:  # a custom Function may return None for it
                        norm = torch.linalg.vector_norm(dense(grad.detach()).float())
                        before = heard.get(k)
                        heard[k] = norm if before is None else torch.maximum(before, norm)
                except Exception as error:
                    failed("norm_local", error)

            return observe

        for k, param in enumerate(params):
            if param is not None:
                self._handles.append(param.register_hook(hook(k)))

    def collect(self, scale: float) -> Sampled:
        """The local norms of this step; starts the next one."""
        sampled = Sampled(self._count)
        positions = np.array(sorted(self._heard), np.intp)
        present = np.zeros(self._count, bool)
        present[positions] = True
        by_device: dict[torch.device, list[int]] = {}
        for k in positions:
            by_device.setdefault(self._heard[int(k)].device, []).append(int(k))
        stacks = [torch.stack([self._heard[k] for k in ks]) / scale for ks in by_device.values()]
        order = np.array([k for ks in by_device.values() for k in ks], np.intp)
        sampled.parts["norm_local"] = Arriving(stacks, order, self._count)
        sampled.present["norm_local"] = present
        self._heard.clear()
        return sampled

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
