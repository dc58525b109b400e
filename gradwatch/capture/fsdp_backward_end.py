"""FSDP1, and FSDP2 that offloads: where the end of a backward is seen though no hook on a parameter is called.

FSDP1 accumulates into flat parameters of its own, so a hook on an original (`use_orig_params`) is never called,
and one on a parameter that FSDP2 offloads would make it wait for every copy to the host. The gradients would
be read only at the step, after the user's clipping. A tensor hook on what the wrapped module returns runs when
its backward begins and queues the same nested callback as a hook on a parameter; that one runs after FSDP's own has
put the sharded gradients in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.capture.parameter_shards import offloaded
from gradwatch.taps import dispatch_modes, module_calls, nested_containers
from gradwatch.taps.hook_ids import own_ids
from gradwatch.taps.muted_forwards import is_muted


class FlatTaps:
    """Notices the calls of the outermost modules of those; `expect` is called as their backward begins."""

    def __init__(
        self,
        models: Iterable[nn.Module],
        expect: Callable[[list[nn.Parameter]], None],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._failed = failed
        self._expect = expect
        self._ignore = [
            module_calls.listen(module, after=self._observe)
            for model in models
            for module in outermost(model)
        ]

    def _observe(self, module: nn.Module, args: Any, output: Any) -> None:
        try:
            if is_muted() or not torch.is_grad_enabled():
                return
            for leaf in nested_containers.leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    with own_ids:
                        leaf.register_hook(partial(self._begin, module))
        except Exception as error:
            self._failed("capture", error)

    def _begin(self, module: nn.Module, _: Tensor) -> None:
        try:
            dispatch_modes.unseen(self._expect, [*flattened(module), *offloaded([module]).values()])
        except Exception as error:
            self._failed("capture", error)

    def close(self) -> None:
        """Notice no further call."""
        for ignore in self._ignore:
            ignore()
        self._ignore.clear()


def flattened(module: nn.Module) -> Iterator[nn.Parameter]:
    """Flat parameters of FSDP1's modules in here, which the modules hide during backward."""
    for one in module.modules():
        flat: Any = getattr(getattr(one, "_handle", None), "flat_param", None)
        if flat is not None:
            yield from flat._params or (flat,)


def outermost(model: nn.Module) -> Iterator[nn.Module]:
    """The FSDP1 modules, and FSDP2 modules that offload, that are not inside another one."""
    first = getattr(model, "_handle", None) is not None and hasattr(model, "_fsdp_wrapped_module")
    if first or (hasattr(model, "_get_fsdp_state") and offloaded([model])):
        yield model
        return
    for child in model.children():
        yield from outermost(child)
