"""Hooks that `torch.utils.swap_tensors` has silenced.

A swap (`Module.to` and `load_state_dict` under `torch.__future__.set_swap_module_params_on_conversion`, and
always for tensor subclasses) exchanges what two Python tensors stand for. The C++ side of a hook goes with
the old contents, the Python dict of hooks stays, and because that dict exists torch does not register a new
hook on the C++ side either. Nothing says so: the hook simply never fires again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Literal

from torch import Tensor

Hooks = Literal["_backward_hooks", "_post_accumulate_grad_hooks"]


contents: Callable[[Tensor], int] = operator.attrgetter("_cdata")
"""Identity of the contents of a Python tensor: changes when it is swapped, and only then."""


def revive(tensor: Tensor, kind: Hooks, lost: int) -> None:
    """Make hooks registered from now on fire again.

    Those with a handle id up to `lost` stay silent, as torch left them: a hook of the user's that watching
    brought back to life would change the job. Later ones are alive without us, so they are here too.
    """
    hooks = getattr(tensor, kind)
    if hooks is not None:
        for number in [number for number in hooks if number <= lost]:
            del hooks[number]
        setattr(tensor, kind, hooks)  # assigning is what registers the dict with the new contents
