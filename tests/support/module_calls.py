"""What goes into the modules of a model and comes out, by torch's own hooks on them: the independent computation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gradwatch.capture.parameter_names import named_modules

Elements = dict[str, Tensor]
"""By module, the elements of its last call in a step that had any: a copy, as real numbers in float64."""


class ModuleCalls:
    """Keeps, by step, the `inputs` and `outputs` of each module of some models that is in training mode."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.inputs: list[Elements] = []
        self.outputs: list[Elements] = []
        for name, module in named_modules(list(models)):
            self._listen(name, module)

    def begin(self) -> None:
        """Another step begins."""
        self.inputs.append({})
        self.outputs.append({})

    def _listen(self, name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module.training:
                _keep(name, (args, kwargs), self.inputs[-1])

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if module.training:
                _keep(name, output, self.outputs[-1])

        # Before hooks that the script has put there: what its caller gives, and what its forward returns.
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        module.register_forward_hook(after, prepend=True)


def _keep(name: str, tree: Any, kept: Elements) -> None:
    """Those of the first tensor of floating or complex numbers."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            if leaf.numel():
                real = (
                    torch.view_as_real(leaf.detach().resolve_conj()) if leaf.is_complex() else leaf.detach()
                )
                kept[name] = real.double().clone()
            return
