"""Forward calls of a step, held by reference until the step is taken, so that it can be run again.

Per forward call of a watched model: its arguments, the generators and buffers before it, autocast, and the
gradient that reached its outputs. Nothing is copied but buffers that forwards change (running statistics);
what is held beyond the latest call is capped by size.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Container, Sequence
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.localise.diagnosis.tensor_values import tensors
from gradwatch.localise.held_calls.inner_model import inner, shared
from gradwatch.localise.held_calls.kept_row_sums import RowSums, row_sums
from gradwatch.localise.held_calls.module_buffers import Buffers
from gradwatch.localise.held_calls.random_generators import NONE, Held
from gradwatch.localise.held_calls.recorded_call import Call, autocasts, computed_among, held_arguments
from gradwatch.localise.held_calls.similar_models import Kind
from gradwatch.reading.async_copy import capturing
from gradwatch.runtime.interruption import not_ours
from gradwatch.taps import backward_end, dispatch_modes, module_calls, module_tree
from gradwatch.taps.dispatch_modes import dispatching, functions
from gradwatch.taps.dynamo import anything_compiled, untraced
from gradwatch.taps.graph.output_hooks import on_gradient
from gradwatch.taps.muted_forwards import is_muted, muted_threads, transform

MAX_BYTES = 64 << 20
"""Held per model beyond the arguments of its latest call: earlier micro-batches, gradients at outputs."""

MAX_CALLS = 256
SMALL = (
    1 << 16
)  # bytes of an output of which a copy is kept until the step, to see whether it comes again; else sums
_tracing = torch.compiler.is_dynamo_compiling
_orders = itertools.count()  # of calls, over all models of the process
next_order: Callable[[], int] = partial(next, _orders)
"""A number between those of the calls made so far and those to come."""
LOOKED_AT = 3  # first calls, in which a forward that writes into its own parameters is found out
MOVERS = 64  # optimizers of which it is remembered whether they move a model
_cuda = torch.cuda
_grad_enabled, _frame = torch.is_grad_enabled, sys._getframe
# Python calls cost microseconds in the cold caches that a step leaves; these are none.
_version: Callable[[Tensor], int] = operator.attrgetter("_version")
_buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = operator.attrgetter("_buffers")
_requires_grad: Callable[[Tensor], bool] = operator.attrgetter("requires_grad")
_blank: Callable[[type[Call]], Call] = object.__new__
NONE_COMPUTED: frozenset[int] = frozenset()
_params_of: Callable[[dict[str, Any]], list[Tensor]] = operator.itemgetter("params")


class Outermost:
    """The outermost of several recorders of a call: what it calls in turn is a part of it."""

    def __init__(self) -> None:
        self.now: ModelRecorder | None = None

    def reset(self) -> None:
        """Note that no call is under way."""
        self.now = None


class ModelRecorder:
    """Holds the calls of one model between two steps; `close` ends that. Never raises into the forward.

    `max_bytes` caps what is held (see `MAX_BYTES`), with `light` the latest call too. Of holdings that share an
    `outermost` only one records a call. `met` is called, in the first calls, with the frame that calls the
    model. `steps[0]` is how many optimizers have taken, and set by its owner; `kind` is shared by models like it;
    `modules` are those of the model, where they are known.
    """

    unwatched = False  # no Watch is its owner

    def __init__(
        self,
        model: nn.Module,
        failed: Callable[[str, BaseException], None],
        max_bytes: int = MAX_BYTES,
        outermost: Outermost | None = None,
        met: Callable[[FrameType | None], bool] | None = None,
        light: bool = False,
        steps: list[int] | None = None,
        kind: Kind | None = None,
        modules: Sequence[nn.Module] | None = None,
    ) -> None:
        self.model = weakref.ref(model)
        self.calls: deque[Call] = deque()
        self.dropped = 0
        self.twice = False  # a gradient of some call was kept with its graph, to be differentiated again
        self.parts: Sequence[ModelRecorder] = ()  # held beside it until it is called itself
        self.indices: Any = None  # of the samples of the calls to come
        self._failed = failed
        self._max_bytes = max_bytes
        self._outermost = outermost or Outermost()
        self._met = met
        self._light = light
        self._steps = [0] if steps is None else steps
        self._kind = kind = kind or Kind()
        self._draws, self._lines = kind.draws, kind.lines
        self._generators = Held(self.model, kind.draws)
        modules = module_tree.modules(model) if modules is None else modules
        self._buffers = Buffers(inner(model)) if any(map(_buffers_of, modules)) else None
        # By id of an optimizer: whether it moves the model, as of so many parameters.
        self._movers: dict[int, tuple[weakref.ref[Optimizer], int, bool]] = {}
        self._open: Call | None = None
        self._seen = 0
        self._before_params: dict[int, int] | None = None
        self._called_from: list[tuple[CodeType, int]] = []  # the first calls
        self._ignore: list[Callable[[], None]] = []
        self.refused = shared(model, modules)
        if not self.refused:
            self._listen(model)

    def _listen(self, model: nn.Module) -> None:
        self._ignore = [module_calls.listen(model, begins=self.begins, after=self._ends)]

    def close(self) -> None:
        """Record no further call and release everything."""
        self.unhook()
        self.drop()

    def unhook(self) -> None:
        """Notice no further call; gradients of those that are held still are."""
        for ignore in self._ignore:
            ignore()
        self._ignore.clear()
        self._open = None

    def belongs_to(
        self,
        failed: Callable[[str, BaseException], None],
        max_bytes: int,
        steps: list[int],
        met: Callable[[FrameType | None], bool],
    ) -> None:
        """Set the owner that counts its faults and steps, caps what is held, and is notified of callers."""
        self._failed, self._max_bytes, self._steps = failed, max_bytes, steps
        if self._met is not None:
            self._met = met
        for call in list(self.calls):
            call.belongs_to_step(steps[0])
        if len(self.calls) > 1:
            self._make_room()

    def hold_beside(self, parts: Sequence[ModelRecorder]) -> None:
        """Hold these parts of the model beside it, until it is called itself."""
        self.parts = parts

    def set_indices(self, indices: Any) -> None:
        """Set the dataset indices of the calls to come; None = not known."""
        self.indices = indices

    def drop(self) -> None:
        """Release every call."""
        self.calls.clear()
        self.dropped = 0
        self.indices = None
        self._open = None

    def cleared(self, over: Container[int] | None = None) -> set[int]:
        """Release the calls that only gradients which were thrown away had reached.

        With `over` only what the graph tasks in it have reached. Returns the graph tasks of what is released.
        """
        now = backward_end.current()
        gone = [call for call in list(self.calls) if call.tasks and now not in call.tasks]
        if over is not None:
            gone = [call for call in gone if all(task in over for task in call.tasks)]
        for call in gone:
            self._discard(call)
        return {task for call in gone for task in call.tasks}

    def taken(self, optimizer: Optimizer, before: int) -> None:
        """Release, after a step, the calls that led to it or whose weights have moved: they cannot be run again.

        What is left are calls of other models whose backward is still to come (a generator's, at the step of its
        critic), unless they were made before the step numbered `before`.
        """
        self.indices = None
        if not self.calls:
            return
        if self.moves(optimizer):
            self.calls.clear()
            self.dropped, self._open = 0, None
            return
        for call in list(self.calls):
            if call.gradients or call.step <= before:
                self._discard(call)

    def _discard(self, call: Call) -> None:
        with contextlib.suppress(ValueError):  # another thread, which took a step too, has done it
            self.calls.remove(call)

    @property
    def was_called(self) -> bool:
        """True if the model has ever been called, wanting gradients."""
        return self._seen > 0

    @property
    def is_over(self) -> bool:
        """True if it records no further call, and holds none."""
        return not (self._ignore or self.calls or self.refused)

    def moves(self, optimizer: Optimizer) -> bool:
        """True if the optimizer owns a parameter of this model; remembered, for the answer rarely changes."""
        count, known = 0, self._movers.get(id(optimizer))
        for group in optimizer.param_groups:
            count += len(group["params"])
        if known is None or known[0]() is not optimizer or known[1] != count:
            model = self.model()
            own = set() if model is None else set(map(id, module_tree.parameters(model)))
            params = itertools.chain.from_iterable(map(_params_of, optimizer.param_groups))
            if len(self._movers) >= MOVERS:
                self._movers.clear()
            known = weakref.ref(optimizer), count, not own.isdisjoint(map(id, params))
            self._movers[id(optimizer)] = known
        return known[2]

    def begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call of the model. In one piece: a further Python call costs microseconds in cold caches."""
        try:
            if not _grad_enabled() or (muted_threads and is_muted()) or transform() is not None:
                return
            if self._outermost.now not in (None, self) or (_cuda.default_generators and capturing()):
                return
            self._outermost.now = self
            call, versions = _blank(Call), []
            for value in args:
                if type(value) is Tensor and not value.requires_grad:
                    versions.append(value._version)
            # Almost every model is given data, and nothing else.
            if len(versions) == len(args) and not kwargs:
                call.args, call.kwargs, call.versions, call.computed = args, kwargs, versions, NONE_COMPUTED
            else:
                _hold_arguments(call, args, kwargs)
            if self._light and call.nbytes > self._max_bytes:
                return
            draws, generators = self._draws, self._generators
            if generators.learned and draws.calls < draws.idle_until:
                draws.calls += 1
                call.generators, call.looked = NONE, False
            else:
                call.generators = generators.before()
                call.looked = generators.looking
            lines = self._lines
            try:
                frame = _frame(lines.depth)
                caller = lines.known.get((id(frame.f_code), frame.f_lasti))
            except ValueError:  # the stack is less deep than it was
                caller = None
            innermost = None
            if caller is None:
                caller, innermost = lines.find()
            if self._seen < LOOKED_AT and not (
                self._seen and self._kind.keeps_weights and caller in self._kind.callers
            ):
                self._first_call(module, caller, innermost)
            call.order, call.step = next(_orders), self._steps[0]
            call.caller, call.indices = caller, self.indices
            call.training = module.training
            call.autocast = autocasts() if dispatch_modes.any_autocast() else {}
            call.buffers = {} if self._buffers is None else self._buffers.held(first=not self.calls)
            call.gradients, call.tasks = {}, set()
            if lines.substituting and caller in lines.substituting:
                call.parameters = frozenset(map(id, module_tree.parameters(module)))
            self._open = call
        except Exception as error:
            self._open = None
            self._failed("localise", error)

    def _first_call(
        self, module: nn.Module, caller: tuple[CodeType, int] | None, innermost: FrameType | None
    ) -> None:
        """One of the first calls begins: the versions of the weights before it, and what stands beside its line."""
        if not self._kind.keeps_weights:
            self._before_params = _versions(module)
        if caller is not None and self._met is not None and self._is_to_look_beside(caller):
            found = self._met(innermost or self._lines.find(asking=2)[1])
            if self._seen == 0:
                self._kind.stood_beside(caller, found)

    def _is_to_look_beside(self, caller: tuple[CodeType, int]) -> bool:
        """True if, as in the first calls, what stands beside the line that calls the model is to be looked for."""
        kind = self._kind
        if self._seen == 0:
            self._called_from = [caller]
            return not kind.is_alone(caller)
        if caller in kind.callers:
            return False
        if self._seen > 1 and caller in self._called_from:
            kind.looked_beside(caller)
            return False
        self._called_from.append(caller)
        return True

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hold a call of the model that has ended, and the gradients at its outputs to come."""
        try:
            if not _grad_enabled() or (muted_threads and is_muted()) or transform() is not None:
                return
            call, self._open = self._open, None
            if self._outermost.now is self:
                self._outermost.now = None
            if call is None:
                return
            if self._generators.looked_at is not None:
                self._generators.after()
            if self._seen < LOOKED_AT:
                if self._before_params is None and not self.parts:  # of a kind that is known
                    self._seen += 1
                else:
                    self._learn_weights(module)
            outputs = [output] if isinstance(output, Tensor) else tensors(output)
            call.outputs = len(outputs)
            if self._buffers is not None:
                self._buffers.learn()
            returned: dict[int, Tensor | RowSums] = {}
            seen = dispatching() or functions()
            for position, tensor in enumerate(outputs):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    on_gradient(tensor, partial(_gradient, self, call, position))
                    # A copy, for the loss code may write into it. No Python call: caches are cold.
                    plain = not seen and type(tensor) is Tensor and tensor.layout is torch.strided
                    if plain and tensor.nbytes <= SMALL:
                        returned[position] = tensor.detach().clone()
                    elif plain and (sums := row_sums(tensor)) is not None:
                        returned[position] = sums
            if returned:
                call.returned = returned
            self.calls.append(call)
            if len(self.calls) > 1:
                self._make_room()
        except Exception as error:
            self._open = None
            self._failed("localise", error)

    def _learn_weights(self, module: nn.Module) -> None:
        """Learn, in the first calls, if its forward writes into its own parameters. From then on its parts may rest."""
        self._seen += 1
        if self._before_params is not None and _written(self._before_params, _versions(module)):
            self.refused = "its forward writes into its own parameters"
        elif self._before_params is not None and self._seen == LOOKED_AT:
            self._kind.learned_weights(kept=not self.refused)
        self._before_params = None
        if not anything_compiled():  # to notice its parts would cost every forward some microseconds
            for part in self.parts:
                part.unhook()
        self.parts = ()

    def _reached(self) -> None:
        """Note a gradient that has reached an output, while no Watch knows what becomes of it."""

    def _make_room(self) -> None:
        """Release earlier calls as far as the cap asks for it; the latest is alive anyway."""
        earlier = list(self.calls)[:-1]
        held, count = sum(call.nbytes for call in earlier), len(earlier) + 1
        for call in earlier:
            if held <= self._max_bytes and count <= MAX_CALLS:
                return
            self._discard(call)
            held, count = held - call.nbytes, count - 1
            self.dropped += 1


@untraced
def _gradient(recording: ModelRecorder, call: Call, position: int, grad: Tensor | None) -> None:
    """Hold a gradient that has reached an output of the call; nothing is made of it."""
    try:
        if _tracing() or grad is None or call.reason:
            return
        aside = dispatch_modes.Aside() if dispatching() or functions() else None
        try:
            if recording.unwatched:
                recording._reached()
            try:
                kept = grad.detach()  # `grad` itself would cost a copy of every gradient it becomes part of
            except RuntimeError as error:  # batched (`is_grads_batched=True`): it ends in no `.grad`
                if not_ours(error):
                    raise
                return
            if call.looked and not call.tasks:
                recording._generators.learn(call.generators)  # the loss code may have drawn too
            call.tasks.add(backward_end.current())
            if _grad_enabled():  # in a backward: `create_graph=True`
                recording.twice = True
                call.differentiated_again()
            if position in call.gradients:
                call.gradients[position] = call.gradients[position] + kept
                return
            call.gradients[position] = kept
            call.seeds += kept.numel() * kept.element_size()
            if call.seeds > recording._max_bytes:
                call.release(
                    f"the gradient at its outputs takes {call.seeds >> 20} MiB, more than max_bytes allows"
                )
        finally:
            if aside is not None:
                aside.put_back()
    except Exception as error:
        recording._failed("localise", error)


def _hold_arguments(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hold arguments other than plain data: computed by autograd, of other types, in containers or by keyword."""
    (call.args, call.kwargs), given = held_arguments(args, kwargs)
    call.versions = list(map(_version, given))
    call.computed = computed_among(given, args, kwargs) if any(map(_requires_grad, given)) else NONE_COMPUTED


def _versions(module: nn.Module) -> dict[int, int]:
    """Versions of parameters, by id: within its own forward, FSDP2 puts others in the place of these."""
    params = module_tree.parameters(module)
    return dict(zip(map(id, params), map(_version, params), strict=True))


def _written(before: dict[int, int], now: dict[int, int]) -> bool:
    return now != before and any(now.get(one, version) != version for one, version in before.items())
