"""One fault in the gradients of some parameters, put there by tensor hooks as long as it lasts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwatch.launch.selftest_faults import Fault
from gradwatch.runtime.interruption import not_ours
from gradwatch.taps.hook_ids import own_ids


class FaultyGradients:
    """Hooks that make gradients of `params` faulty until `remove`; `entered` counts those that they have made so.

    A failure of this code goes to `broke`, and the gradient stays as it was.
    """

    def __init__(self, fault: Fault, params: Sequence[Tensor], broke: Callable[[Exception], None]) -> None:
        self._fault, self._broke = fault, broke
        self.entered = 0
        with own_ids:
            self._handles = [param.register_hook(self._changed) for param in params]

    def remove(self) -> None:
        """End the fault: gradients are left alone from now on."""
        while self._handles:
            self._handles.pop().remove()

    def _changed(self, gradient: Tensor) -> Tensor | None:
        try:
            wrong = faulty(gradient, self._fault)
            self.entered += wrong is not None
            return wrong
        except Exception as error:
            if not_ours(error):
                raise
            self._broke(error)
            return None


def faulty(gradient: Tensor, fault: Fault) -> Tensor | None:
    """The gradient with the fault in it, of the same layout; None where it holds no element that could be wrong.

    Raises TypeError for a layout that is neither strided nor sparse COO.
    """
    if fault.element is None:
        return gradient * fault.factor
    wrong = gradient.clone()
    if wrong.layout is torch.sparse_coo:
        wrong = wrong.coalesce()
        held = wrong.values()
    elif wrong.layout is torch.strided:
        held = wrong
    else:
        raise TypeError(f"a gradient of layout {wrong.layout}")
    if not held.numel():
        return None
    held[(0,) * held.ndim] = (
        fault.element
    )  # by index: a view of one dimension needs strides that follow the shape
    return wrong


def parameter_to_break(params: Sequence[Tensor]) -> Tensor:
    """The one of these parameters that a fault of one layer enters: in the middle, a matrix with a dense gradient.

    Where there is none, the nearest to it. To be asked while the gradients of a step are there.
    """
    found = list(params)
    for fits in (_has_gradient, _has_dense_gradient, _is_matrix):
        found = list(filter(fits, found)) or found
    return found[len(found) // 2]


def _has_gradient(param: Tensor) -> bool:
    return param.grad is not None


def _has_dense_gradient(param: Tensor) -> bool:
    return param.grad is not None and param.grad.layout is torch.strided


def _is_matrix(param: Tensor) -> bool:
    return param.ndim >= 2
