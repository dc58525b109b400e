"""Marks and the end-of-backward read: which gradients arrived, and their norms before anybody touches them.

`register_post_accumulate_grad_hook` only marks a parameter. The first mark of a graph task queues a callback
that queues another: the nested one runs after DDP and FSDP have finished their reduction, on the caller's
streams, and reads every marked gradient in one batch. Neither hook keeps a gradient alive (that would defeat
autograd's buffer stealing), and none holds a weak reference to a parameter (`swap_tensors` would raise).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwatch.hooks.lane import Lane
from gradwatch.hooks.names import named_parameters
from gradwatch.hooks.shards import is_shard
from gradwatch.snapshot import Sites

_GONE = nn.Parameter(torch.empty(0), requires_grad=False)
THIN_FROM = 32  # parameters; below this the marks cost nothing worth saving


class Capture:
    """The slots of one Watch: every watched parameter, its mark, and the lanes (optimizers) they belong to.

    `ended` is called at the end of every backward that touched a watched parameter, before anything is read;
    it runs inside autograd and must not raise. `waiting` names optimizers that are known but have no lane yet:
    they get one at the end of the first backward, when the order in which gradients arrive is known.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        ended: Callable[[], None],
        failed: Callable[[str, BaseException], None],
        waiting: Callable[[], list[Optimizer]] = list,
    ) -> None:
        self._waiting = waiting
        self._models = [weakref.ref(model) for model in models]
        self._ended = ended
        self._failed = failed
        self.lanes: list[Lane] = []
        self.params: list[nn.Parameter] = []
        self.names: list[str] = []
        self._slot_of: dict[int, int] = {}
        self._handles: dict[int, RemovableHandle] = {}
        self._touched: list[int] = []
        self._silent: set[int] = set()
        self._task = [
            -2
        ]  # graph task the callback is queued for; a list so that marks need no attribute walk
        self._arrival: list[int] = []
        self.spent_seconds = 0.0
        self.scan()

    # -- parameters --------------------------------------------------------------------------------------

    def models(self) -> list[nn.Module]:
        """The watched models that are still alive."""
        return [model for ref in self._models if (model := ref()) is not None]

    def add_models(self, models: Iterable[nn.Module]) -> None:
        """Watch further models."""
        known = {id(model) for model in self.models()}
        self._models += [weakref.ref(model) for model in models if id(model) not in known]
        self.scan()

    def scan(self) -> None:
        """Give every parameter of the models a slot and a mark; parameters already known keep theirs."""
        for name, param in named_parameters(self.models()):
            if not isinstance(param, nn.UninitializedParameter):
                self.slot(param, name)

    def slot(self, param: nn.Parameter, name: str) -> int:
        """The slot of a parameter, made (and marked) where it is new."""
        slot = self._slot_of.get(id(param))
        if slot is None:
            slot = len(self.params)
            self._slot_of[id(param)] = slot
            self.params.append(param)
            self.names.append(name)
        if slot not in self._handles and param.requires_grad:
            self._handles[slot] = self._mark(slot, param)
        return slot

    def knows(self, param: nn.Parameter) -> bool:
        """Whether a parameter belongs to the watched models."""
        return id(param) in self._slot_of

    def covers_id(self, identity: int) -> bool:
        """Whether the parameter with this `id()` has a slot."""
        return identity in self._slot_of

    def all_sites(self) -> Sites:
        """Every parameter that wants a gradient, whatever optimizer it has or will have."""
        slots = [slot for slot, param in enumerate(self.params) if param.requires_grad]
        return self._sites(np.array(slots, np.intp), [self.params[slot] for slot in slots])

    def coverage(self) -> float:
        """Watched over wanted: parameters of the models (and optimizers) that want a gradient and have a slot."""
        wanted = {id(p) for model in self.models() for p in model.parameters() if p.requires_grad}
        known = sum(1 for identity in wanted if identity in self._slot_of)
        return known / len(wanted) if wanted else 1.0

    def remark(self, lane: Lane) -> None:
        """Mark the parameters of an unthinned lane that have come to want a gradient again."""
        if not lane.thinned:
            for slot in map(int, lane.slots):
                if slot not in self._handles and self.params[slot].requires_grad:
                    self._handles[slot] = self._mark(slot, self.params[slot])

    @property
    def marked(self) -> int:
        """How many parameters carry a mark at present."""
        return len(self._handles)

    def close(self) -> None:
        """Remove every mark and let go of every parameter."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._slot_of.clear()
        self.params.clear()
        self.lanes.clear()
        self._touched.clear()

    # -- lanes -------------------------------------------------------------------------------------------

    def lane_of(self, optimizer: Optimizer) -> Lane | None:
        """The lane of an optimizer seen before."""
        for lane in self.lanes:
            if lane.optimizer is not None and lane.optimizer() is optimizer:
                return lane
        return None

    def adopt(self, optimizer: Optimizer, lane: Lane | None = None) -> Lane:
        """Build the lane of an optimizer (or rebuild it after its parameters changed, keeping its step)."""
        fresh = [param for group in optimizer.param_groups for param in group["params"]]
        if any(not self.knows(param) for param in fresh):
            self.scan()  # a parameter was replaced or added: its name is in the model
        # A shard may be empty here and hold something on other ranks, which must see the same parameters.
        named = [param for param in fresh if param.requires_grad and (param.numel() or is_shard(param))]
        slots = [self.slot(param, _fallback_name(optimizer, param)) for param in named]
        order = sorted(range(len(slots)), key=lambda k: slots[k])  # sites stand in model order
        params = [named[k] for k in order]
        kept = np.array([slots[k] for k in order], np.intp)
        lane = lane or self._predecessor(set(map(id, params)))
        index = len(self.lanes) if lane is None else lane.index
        built = Lane(index, optimizer, params, self._sites(kept, params))
        built.slots = kept
        built.position = {int(slot): k for k, slot in enumerate(kept)}
        if lane is None:
            self.lanes.append(built)
        else:
            built.step = lane.step
            self.restore(lane)
            self.lanes[self.lanes.index(lane)] = built
        built.watched_ids = list(map(id, fresh))
        built.frozen = [param for param in fresh if not param.requires_grad]
        return built

    def _predecessor(self, wanted: set[int]) -> Lane | None:
        """The lane of an optimizer that is gone, whose index a new one takes over: best one of the same model."""
        dead = [lane for lane in self.lanes if lane.optimizer is not None and lane.optimizer() is None]
        same = [lane for lane in dead if wanted & set(lane.param_ids)]
        return next(iter(same or dead), None)

    def drop_dead(self) -> None:
        """Let go of parameters that belong to no living optimizer and to no model any more."""
        for lane in self.lanes:
            if lane.optimizer is not None and lane.optimizer() is None:
                lane.release()
        wanted = {id(param) for lane in self.lanes for param in lane.params}
        wanted |= {id(param) for model in self.models() for param in model.parameters()}
        for slot, param in enumerate(self.params):
            if id(param) not in wanted and param is not _GONE:
                self._release(slot)

    def _release(self, slot: int) -> None:
        """Let go of a parameter; its slot stays, so that the others keep theirs."""
        handle = self._handles.pop(slot, None)
        if handle is not None:
            handle.remove()
        self._slot_of.pop(id(self.params[slot]), None)
        self.params[slot] = _GONE

    def _sites(self, slots: np.ndarray, params: list[nn.Parameter]) -> Sites:
        arrival = {slot: position for position, slot in enumerate(self._arrival)}
        # The first gradient to arrive is the deepest; parameters not seen yet go by registration order.
        latest = len(arrival)
        keys = [(-arrival.get(int(slot), latest), int(slot)) for slot in slots]
        depths = np.empty(len(slots), np.int64)
        depths[sorted(range(len(slots)), key=lambda k: keys[k])] = np.arange(len(slots))
        return Sites(
            names=tuple(self.names[slot] for slot in slots),
            kinds=("param",) * len(slots),
            numels=np.array([param.numel() for param in params], np.int64),
            ndims=np.array([param.dim() for param in params], np.int64),
            depths=depths,
        )

    # -- marks -------------------------------------------------------------------------------------------

    def _mark(self, slot: int, param: nn.Parameter) -> RemovableHandle:
        touched, task, arm = self._touched, self._task, self._arming()
        current = torch._C._current_graph_task_id

        def mark(_: torch.Tensor) -> None:
            # Keyed by the graph task: after a backward that raised, its callback never ran.
            if task[0] != current():
                arm()
            touched.append(slot)

        handle: RemovableHandle = param.register_post_accumulate_grad_hook(mark)
        return handle

    def _arming(self) -> Callable[[], None]:
        owner = weakref.ref(self)  # a strong reference would tie parameter -> hook -> Capture -> parameter

        def arm() -> None:
            capture = owner()
            if capture is not None:
                capture._arm()

        return arm

    def _arm(self) -> None:
        try:
            task = torch._C._current_graph_task_id()
            self._task[0] = task
            if task != -1:
                owner = weakref.ref(self)
                queue = torch.autograd.Variable._execution_engine.queue_callback

                def end() -> None:
                    capture = owner()
                    if capture is not None:
                        capture._backward_end()

                queue(lambda: queue(end))
        except Exception as error:
            self._failed("capture", error)

    def _backward_end(self) -> None:
        try:
            started = time.perf_counter()
            self._task[0] = -2
            touched, count = self._touched[:] + self._unmarked_arrivals(), len(self.params)
            self._touched.clear()
            if not self._arrival:
                self._arrival = list(dict.fromkeys(touched))
            for optimizer in self._waiting():
                self.adopt(optimizer).born = False  # it hears this window from its first backward on
            self._tell_lanes(touched, count)
            self._ended()
            self.spent_seconds += time.perf_counter() - started
        except Exception as error:
            self._failed("capture", error)

    def hear(self, params: list[nn.Parameter]) -> None:
        """A backward has begun that will reach parameters whose marks stay silent (FSDP1)."""
        if self._task[0] != torch._C._current_graph_task_id():
            self._arm()
        self._silent.update(self._slot_of[id(param)] for param in params if id(param) in self._slot_of)

    def _unmarked_arrivals(self) -> list[int]:
        """The slots that `hear` told of, and that have a gradient now."""
        silent = self._silent.difference(self._touched)
        self._silent.clear()
        return sorted(slot for slot in silent if self.params[slot].grad is not None)

    def _tell_lanes(self, touched: list[int], count: int) -> None:
        if len(touched) < THIN_FROM:
            for lane in self.lanes:
                lane.hear(touched)
            return
        counts = np.bincount(touched, minlength=count).astype(np.int32)
        for lane in self.lanes:
            mine = counts[lane.slots]
            if mine.any():
                lane.arrived(mine)

    def drain(self) -> None:
        """Count marks whose callback never ran (compiled autograd drops it) as one backward."""
        if self._touched:
            self._backward_end()

    # -- thinning ----------------------------------------------------------------------------------------

    def thin(self, lane: Lane) -> None:
        """Keep a few sentinels of a lane whose loop is learned; the rest of its marks are removed."""
        if len(lane) < THIN_FROM:
            return
        keep = {int(lane.slots[k]) for k in lane.sentinels()}
        shared = {int(slot) for other in self.lanes if other is not lane for slot in other.slots}
        for slot in map(int, lane.slots):
            if slot not in keep and slot not in shared and slot in self._handles:
                self._handles.pop(slot).remove()
        lane.thinned = True

    def restore(self, lane: Lane) -> None:
        """Put every mark of a lane back."""
        lane.block()
        self.remark(lane)


def _fallback_name(optimizer: Optimizer, param: nn.Parameter) -> str:
    """`group0.3[64x64]` for a parameter no watched model owns."""
    shape = "x".join(map(str, param.shape)) or "scalar"
    for group, settings in enumerate(optimizer.param_groups):
        for position, candidate in enumerate(settings["params"]):
            if candidate is param:
                names = settings.get("param_names")
                return str(names[position]) if names else f"group{group}.{position}[{shape}]"
    return f"unnamed[{shape}]"
