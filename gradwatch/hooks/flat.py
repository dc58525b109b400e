"""FSDP1: where the end of backward is heard although no parameter is.

FSDP1 accumulates into flat parameters of its own, so a mark on an original (`use_orig_params`) stays silent
and the gradients would be read only at the step, after the user's clipping. A tensor hook on what the wrapped
module returns runs when its backward begins and queues the same nested callback that a mark does; that one
runs after FSDP's own has put the sharded gradients in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from gradwatch.hooks.modules import Tap


class FlatTaps:
    """Forward hooks on the outermost FSDP1 modules; `heard` is called as their backward begins."""

    def __init__(
        self,
        models: Iterable[nn.Module],
        heard: Callable[[list[nn.Parameter]], None],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._failed = failed
        self._heard = heard
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(Tap(self._observe))
            for model in models
            for module in outermost(model)
        ]

    def _observe(self, module: nn.Module, args: Any, output: Any) -> None:
        try:
            if not torch.is_grad_enabled():
                return
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: self._begin(module))
        except Exception as error:
            self._failed("capture", error)

    def _begin(self, module: nn.Module) -> None:
        try:
            self._heard(list(flattened(module)))
        except Exception as error:
            self._failed("capture", error)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def flattened(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters an optimizer has of FSDP1's modules in here; during backward the modules hide them."""
    for one in module.modules():
        flat: Any = getattr(getattr(one, "_handle", None), "flat_param", None)
        if flat is not None:
            yield from flat._params or (flat,)


def outermost(model: nn.Module) -> Iterator[nn.Module]:
    """The FSDP1 modules that are not inside another one."""
    if getattr(model, "_handle", None) is not None and hasattr(model, "_fsdp_wrapped_module"):
        yield model
        return
    for child in model.children():
        yield from outermost(child)
