"""One post-accumulate hook on each parameter, which notes its slot and arms the end of the backward.

The hook keeps no gradient alive (that would defeat autograd's buffer stealing), and reaches neither a parameter
nor what holds one: torch never collects a cycle through a hook.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from gradwatch.runtime import guard
from gradwatch.taps.backward_end import NONE
from gradwatch.taps.dynamo import untraced
from gradwatch.taps.hook_ids import own_ids
from gradwatch.taps.swap_tensors import contents, revive


class GradReadyHooks:
    """Hooks, at most one a slot. `ready` takes the slots whose gradients are ready, by graph task.

    `arm` is called by the first hook of every graph task, and makes room there; it must not raise.
    """

    def __init__(self, ready: dict[int, list[int]], arm: Callable[[], None]) -> None:
        self._ready = ready
        self._arm = arm
        self.spared: set[int] = set()  # ids of parameters that must not be hooked
        # By slot: the hooks of its parameter, and the key of this one among them.
        self.hooked: dict[int, tuple[weakref.ref[OrderedDict[int, Any]], int]] = {}
        self._marked_as: dict[int, tuple[int, int]] = {}  # contents and hook id of a slot's last hook
        # The function of each slot, for whatever parameter is in it: what comes and goes takes slots again.
        self._noting: dict[int, Callable[[torch.Tensor], None]] = {}

    def __len__(self) -> int:
        return len(self.hooked)

    def put(self, slots: Sequence[int], params: Sequence[nn.Parameter]) -> None:
        """Hook the parameters, one for each slot, that want a gradient and have no hook."""
        own = own_ids.take(len(slots))
        for slot, param in zip(slots, params, strict=True):
            if slot in self.hooked or not param.requires_grad or id(param) in self.spared:
                continue
            now = contents(param)
            stands_for, last = self._marked_as.get(slot, (now, 0))
            if stands_for != now:
                revive(param, "_post_accumulate_grad_hooks", last)
            if slot not in self._noting:
                self._noting[slot] = _noting(slot, self._ready, self._arm)
            if type(param) is nn.Parameter and param.is_leaf:
                # What `register_post_accumulate_grad_hook` does, without its Python calls: caches are cold here.
                hooks: Any = param._post_accumulate_grad_hooks
                if hooks is None:
                    param._post_accumulate_grad_hooks = hooks = OrderedDict()
                number, own = own, own + 1
                hooks[number] = self._noting[slot]
                self.hooked[slot] = weakref.ref(hooks), number
            else:
                with own_ids:
                    handle = param.register_post_accumulate_grad_hook(self._noting[slot])
                number = handle.id
                self.hooked[slot] = handle.hooks_dict_ref, number
            self._marked_as[slot] = now, number

    def rehook(self, slot: int, param: nn.Parameter) -> bool:
        """Hook a parameter again if its contents were swapped, which disables hooks. True if they were."""
        if self._marked_as.get(slot, (0, 0))[0] == contents(param) or not param.requires_grad:
            return False
        if id(param) in self.spared:
            return False
        self.remove([slot])
        self.put([slot], [param])
        return True

    def lives(self, slot: int) -> bool:
        """True if the parameter lives that the hook of a slot was put on."""
        hooked = self.hooked.get(slot)
        return hooked is not None and hooked[0]() is not None

    def is_on(self, slot: int, param: nn.Parameter) -> bool:
        """True if the hook of a slot is on this parameter."""
        hooked = self.hooked.get(slot)
        return hooked is not None and param._post_accumulate_grad_hooks is hooked[0]() is not None

    def swapped(self, slot: int, param: nn.Parameter) -> bool:
        """True if the hook of a slot no longer fires, since the contents of its parameter were swapped."""
        return slot in self.hooked and self._marked_as[slot][0] != contents(param)

    def remove(self, slots: Iterable[int]) -> None:
        """Remove the hooks of these slots, as far as there are any."""
        for slot in slots:
            hooked = self.hooked.pop(slot, None)
            hooks = None if hooked is None else hooked[0]()
            if hooked is not None and hooks is not None:
                hooks.pop(hooked[1], None)

    def free(self, slots: Sequence[int]) -> None:
        """Free the slots of parameters that were released: others may take them."""
        self.remove(slots)
        for slot in slots:
            self._marked_as.pop(slot, None)

    def discard_arrivals(self, slots: Collection[int]) -> None:
        """Drop what backwards that raised have left of these slots: it is of parameters that are gone."""
        gone = set(slots)
        for ready in self._ready.values():
            ready[:] = [slot for slot in ready if slot not in gone]

    def close(self) -> None:
        """Remove every hook."""
        self.remove(list(self.hooked))
        self._noting.clear()


def _noting(
    slot: int, ready: dict[int, list[int]], arm: Callable[[], None]
) -> Callable[[torch.Tensor], None]:
    """The hook of a slot."""
    current, tracing = torch._C._current_graph_task_id, torch.compiler.is_dynamo_compiling

    def arrived(_: torch.Tensor) -> None:
        try:
            # Compiled autograd: what follows the first of these would break its graph.
            task = NONE if tracing() else current()
            # By the graph task: other threads may run another, and after one that raised no callback comes.
            if task not in ready:
                if tracing():
                    ready[task] = []
                else:
                    arm()
            ready[task].append(slot)
        except Exception as error:
            guard.fault("capture", error)

    return arrived


untraced(_noting(0, {}, lambda: None))  # all of these hooks are one piece of code
