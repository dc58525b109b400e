"""`norm_local`: what a tensor hook sees, one backward of this rank before any reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from gradwatch.hooks.dense import dense
from gradwatch.hooks.device import Arriving, Number
from gradwatch.hooks.exact import exact_norm
from gradwatch.hooks.sampling import Sampled
from gradwatch.hooks.swapped import contents, revive


class LocalNorms:
    """`Tensor.register_hook` on K parameters; the largest local norm over the backwards of a step.

    A hook sees the gradient of one backward: not accumulated, not reduced over ranks, and still multiplied by
    the loss scale, which `collect` divides out. NaN beats every number. A parameter that cannot be heard is None.
    """

    def __init__(self, params: Sequence[Tensor | None], failed: Callable[[str, BaseException], None]) -> None:
        self._count = len(params)
        self._heard: dict[int, float | Tensor] = {}  # a tensor where the gradient is on a device
        self._handles: list[RemovableHandle] = []
        self._params = [param for param in params if param is not None]
        self._stand_for = list(map(contents, self._params))
        for k, param in enumerate(params):
            if param is None:
                continue
            self._handles.append(param.register_hook(_observer(k, self._heard, failed)))

    def collect(self, scale: Number) -> Sampled:
        """The local norms of this step; starts the next one."""
        sampled = Sampled(self._count)
        present = np.zeros(self._count, bool)
        present[list(self._heard)] = True
        on_host = {k: norm for k, norm in self._heard.items() if not isinstance(norm, Tensor)}
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for k, norm in self._heard.items():
            if isinstance(norm, Tensor):
                by_device.setdefault(norm.device, []).append((k, norm))
        stacks = [torch.stack([norm for _, norm in group]) for group in by_device.values()]
        order = [k for group in by_device.values() for k, _ in group]
        if on_host:
            # In float64 to the end, and never rounded to 0 or past float32 without need: as `norm` is.
            stacks.append(torch.tensor(list(on_host.values()), dtype=torch.float64))
            order += on_host
        sampled.parts["norm_local"] = Arriving(stacks, np.array(order, np.intp), self._count, scale=scale)
        sampled.present["norm_local"] = present
        self._heard.clear()
        return sampled

    def close(self) -> None:
        """Remove the hooks; where a swap silenced them, leave the parameter able to take new ones."""
        for param, handle, before in zip(self._params, self._handles, self._stand_for, strict=True):
            handle.remove()
            if contents(param) != before:
                revive(param, "_backward_hooks", handle.id)
        self._handles.clear()
        self._params.clear()


def _observer(
    k: int, heard: dict[int, float | Tensor], failed: Callable[[str, BaseException], None]
) -> Callable[[Tensor | None], None]:
    """The hook of one parameter. It must not reach the LocalNorms: parameter -> hook -> object would leak."""

    def observe(grad: Tensor | None) -> None:
        try:
            # A custom Function may return None for it; compiled autograd cannot trace what follows.
            if grad is None or torch.compiler.is_dynamo_compiling():
                return
            with torch.no_grad():
                before = heard.get(k)
                if grad.device.type == "cpu":
                    norm, _ = exact_norm(grad)
                    heard[k] = norm if before is None else _larger(norm, float(before))
                else:
                    moving = torch.linalg.vector_norm(dense(grad).detach(), dtype=torch.float32)
                    heard[k] = moving if before is None else torch.maximum(moving, torch.as_tensor(before))
        except Exception as error:
            failed("norm_local", error)

    # Sending a parameter with a hook to another process would otherwise warn.
    hook: Callable[[Tensor | None], None] = unserializable_hook(observe)
    return hook


def _larger(a: float, b: float) -> float:
    """The larger one; NaN beats every number."""
    return a if a > b or a != a else b
