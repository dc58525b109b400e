"""A step run again from what was held of it: forward under the recorder, backward from the gradient at its outputs.

The user's loss function is not needed, and nothing of the job is touched: not `.grad`, not the buffers, not the
generators (see `state_restored`). Must run before the optimizer steps, while the weights are what they were.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from gradwatch.localise.diagnosis.node_gain import length_of
from gradwatch.localise.diagnosis.python_frames import frame_of
from gradwatch.localise.diagnosis.tensor_values import describe, finite, state, tensors
from gradwatch.localise.held_calls.inner_model import inner
from gradwatch.localise.held_calls.model_recorder import MAX_BYTES
from gradwatch.localise.held_calls.module_attributes import Refused, written_in_place
from gradwatch.localise.held_calls.recorded_call import Call
from gradwatch.localise.replay.first_nonfinite_in_backward import Culprit, Multiplier
from gradwatch.localise.replay.first_nonfinite_in_forward import Origin
from gradwatch.localise.replay.operation_recorder import Recorder
from gradwatch.localise.replay.state_restored import aliases, state_restored
from gradwatch.localise.replay.tensor_sources import sources
from gradwatch.localise.sharded.whole_parameters import without_sharding
from gradwatch.records.finding import Frame, Operand
from gradwatch.taps import dynamo, module_calls, module_tree, nested_containers
from gradwatch.taps.graph.node_numbers import next_number
from gradwatch.taps.hook_ids import own_ids
from gradwatch.taps.muted_forwards import transforming
from gradwatch.taps.process_totals import uncounted


@dataclass(slots=True, eq=False)
class Trace:
    """Result of one forward call and its backward.

    `origin`: where a non-finite output came from; `has_nan`: that output is NaN. `infinity`: the same of one that is
    infinite on purpose, as far as one can tell. `culprits`: nodes of the backward. `inside`: the operation at fault
    within a custom Function. `incoming`: the gradient at the outputs was finite, else `gradient` describes it.
    `left_out`: it was finite at every output that is not finite, and not at some other: the loss leaves those out.
    `sources`: what an external origin is called, by its key. `caller`: the line that called the model. `stray`: an
    operation that wrote where the old values are not restored.
    `skipped`: why this call was not run again; "" where it was. `multipliers`: nodes that multiplied a finite gradient,
    where that was looked at; `came` is the norm of the gradient at the outputs, NaN where it was not.
    """

    caller: tuple[Frame, ...] = ()
    origin: Origin | None = None
    infinity: Origin | None = None
    has_nan: bool = False
    culprits: list[Culprit] = field(default_factory=list)
    inside: Origin | None = None
    incoming: bool = True
    gradient: Operand | None = None
    left_out: bool = False
    sources: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    stray: str = ""
    skipped: str = ""
    multipliers: list[Multiplier] = field(default_factory=list)
    came: float = math.nan

    @property
    def blamed(self) -> bool:
        """True if some operation is at fault."""
        return self.origin is not None or bool(self.culprits)

    def wrote_to(self, stray: str) -> None:
        """Keep the operation that wrote where the old values are not restored; "" = none."""
        self.stray = stray

    def gradients_came(self, norm: float) -> None:
        """Keep the norm of the gradients at the outputs."""
        self.came = norm


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """One call that was run again, its backward still to come: from `roots`, where `seeds` had come back.

    `given` are the stand-ins of the parameters and buffers of `base`, by name.
    """

    base: nn.Module
    call: Call
    given: Mapping[str, Tensor]
    roots: Sequence[Tensor]
    seeds: Sequence[Tensor]


class CallListener:
    """Listens to each call that is run again; does nothing of itself. `alone`: nothing is recorded beside it."""

    alone = False

    def forward(self, call: Call, inputs: Any) -> AbstractContextManager[Any]:
        """Entered around its forward; gives its (args, kwargs)."""
        return nullcontext(inputs)

    def begins(self, replayed: Replayed) -> None:
        """Note that the backward is about to start."""

    def ended(self, replayed: Replayed, gradients: Mapping[int, Tensor]) -> None:
        """Take in the gradients that the backward gave, by the id of the leaf."""


def replay(
    held: Sequence[tuple[nn.Module, Call]],
    models: Sequence[nn.Module],
    failed: Callable[[BaseException], None],
    around: AbstractContextManager[Any] | None = None,
    max_bytes: int = MAX_BYTES,
    whole: Mapping[int, Mapping[str, Tensor]] | None = None,
    listener: CallListener | None = None,
    measures: bool = False,
) -> list[Trace]:
    """Run the calls of one step again, in their order: (the model called, its call).

    Modules are named by their place in `models`. `around` is entered around every forward. `max_bytes` caps the
    copies of tensors in module attributes. `whole` has the parameters of spread models, by the id of the model (see
    `gathered`). A call that could not be what it was is skipped. Raises `Refused` beyond the cap, and where no call is
    left; what the forward itself raises passes, and everything is as before all the same. `measures`: look at by how
    much each node of the backward multiplies.
    """
    refused = [_refusal(inner(model), call) for model, call in held]
    if any(refused) and (all(refused) or any(call.buffers for _, call in held)):
        raise Refused(next(filter(None, refused)))  # a call skipped would leave the next one other buffers
    buffers: dict[int, dict[str, Tensor]] = {}
    traces = []
    for (model, call), why in zip(held, refused, strict=True):
        if why:
            traces.append(Trace(frame_of(call.caller), skipped=why))
            continue
        base = inner(model)
        given = aliases(base, buffers.get(id(base), call.buffers), (whole or {}).get(id(base)))
        recorder = Recorder(models if within(base, models) else [base], failed, measures=measures)
        traces.append(_again(base, call, given, recorder, around or nullcontext(), max_bytes, listener))
        buffers[id(base)] = {name: given[name] for name, _ in base.named_buffers(remove_duplicate=False)}
    return traces


def within(base: nn.Module, models: Sequence[nn.Module]) -> bool:
    """True if it is one of the watched modules, rather than a criterion beside them."""
    return any(base is module for model in models for module in model.modules())


def _refusal(model: nn.Module, call: Call) -> str:
    try:
        refuse(model, call)
    except Refused as refusal:
        return str(refusal)
    return ""


def refuse(model: nn.Module, call: Call) -> None:
    """Raise `Refused` where a call cannot be run again exactly."""
    if call.reason:
        raise Refused(call.reason)
    if call.parameters is not None and call.parameters != frozenset(map(id, module_tree.parameters(model))):
        raise Refused("the model was called with other parameters (`functional_call`)")
    if call.training != model.training:
        raise Refused("the model was switched between train() and eval() since its forward")
    given = tensors((call.args, call.kwargs))
    if [tensor._version for tensor in given] != call.versions:
        raise Refused("an input was written into since the forward began")


class _Step(nn.Module):
    """Forward and backward in one call, so that both see the stand-ins: a checkpoint runs its forward twice."""

    def __init__(self, model: nn.Module, run: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.model = model
        self.run = run

    def forward(self) -> None:
        """Run the call's forward."""
        self.run(self.model)


def _again(
    model: nn.Module,
    call: Call,
    given: dict[str, Tensor],
    recorder: Recorder,
    around: AbstractContextManager[Any],
    max_bytes: int,
    listener: CallListener | None,
) -> Trace:
    trace, listener = Trace(frame_of(call.caller)), listener or CallListener()
    recorder.expect((*given.values(), *written_in_place(model)[0]))

    def run(substitute: nn.Module) -> None:
        args, kwargs = _fresh((call.args, call.kwargs))
        trace.sources = sources([model], given, args, kwargs)
        call.generators.restore()
        with (
            listener.forward(call, (args, kwargs)) as (args, kwargs),
            call.recorded_modes(),
            nullcontext() if listener.alone else recorder.forward(),
            around,
        ):
            outputs = _outputs(substitute, args, kwargs)
        if len(outputs) != call.outputs:
            raise Refused(f"the forward gave {len(outputs)} tensors, and {call.outputs} when it ran")
        used = [outputs[position] for position in call.gradients]
        replayed = Replayed(model, call, given, used, list(call.gradients.values()))
        if listener.alone:
            _check_seeds(replayed)
            listener.begins(replayed)
            return
        blame_outputs(trace, used or outputs, recorder)
        _check_seeds(replayed)
        listener.begins(replayed)
        listener.ended(replayed, _backward(trace, replayed, recorder))

    named = {f"model.{name}": tensor for name, tensor in given.items()}
    with state_restored(model, max_bytes), without_sharding(model), eager(), unchecked():
        torch.func.functional_call(_Step(model, run), named, ())
    trace.wrote_to(recorder.stray)
    return trace


def _outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Outputs of one call of the model, before hooks of its own, as the gradients that are held are of."""
    made: list[Any] = []

    def after(module: nn.Module, args: Any, output: Any) -> None:
        made.append(output)

    ignore = module_calls.listen(model, after=after)
    try:
        returned = model(*args, **kwargs)
    finally:
        ignore()
    return tensors(made[-1] if made else returned)


def blame_backward(trace: Trace, recorder: Recorder, roots: Sequence[Tensor]) -> Callable[[], None]:
    """Look at a backward that is about to start at `roots`; the returned call, after it, ends that.

    What made them or a gradient non-finite is noted, unless that is known.
    """
    looking = contextlib.ExitStack()
    if trace.blamed or transforming():
        return looking.close
    with torch.no_grad():
        blame_outputs(trace, roots, recorder)
    first = next_number()
    looking.callback(lambda: recorder.made_by_a_backward(first, next_number()))
    looking.callback(blame_nodes, trace, recorder)
    looking.enter_context(recorder.backward(roots))
    return looking.close


def blame_outputs(trace: Trace, outputs: Sequence[Tensor], recorder: Recorder) -> None:
    """The origin of what is not finite among outputs, NaN before Inf."""
    found = []
    for tensor in outputs:
        origin = recorder.origin_of(tensor)
        if origin is not None and origin.intended:
            trace.infinity = trace.infinity or origin
        elif origin is not None:
            nan = state(tensor).nan
            found.append((not nan, origin.order, origin))
            trace.has_nan |= nan
    if found:
        trace.origin = min(found, key=lambda one: one[:2])[2]


def _check_seeds(replayed: Replayed) -> None:
    for root, seed in zip(replayed.roots, replayed.seeds, strict=True):
        if not root.requires_grad or root.shape != seed.shape:
            raise Refused("the outputs are not those that the loss was computed from")


@contextlib.contextmanager
def seeded(roots: Sequence[Tensor], seeds: Sequence[Tensor]) -> Iterator[None]:
    """An output computed from another one: what reached it, all told, is its seed."""
    with contextlib.ExitStack() as hooks:
        for root, seed in zip(roots, seeds, strict=True):
            with own_ids:
                handle = root.register_hook(lambda grad, seed=seed: seed)
            hooks.callback(handle.remove)
        yield


def _backward(trace: Trace, replayed: Replayed, recorder: Recorder) -> dict[int, Tensor]:
    """The gradients of the leaves, by id."""
    roots, seeds = replayed.roots, replayed.seeds
    grads: Sequence[Tensor | None] = ()
    if recorder.measures:
        trace.gradients_came(length_of(seeds))
    broken = [seed for seed in seeds if not finite((seed,))]
    if broken:
        trace.incoming, trace.gradient = False, describe("gradient at the outputs", broken[0])
        came = [finite((seed,)) for seed in seeds]
        unfit = [not finite((root,)) for root in roots]
        trace.left_out = any(unfit) and all(fine for fine, bad in zip(came, unfit, strict=True) if bad)
    with seeded(roots, seeds), recorder.backward(roots) as leaves:
        if leaves:
            with uncounted():
                grads = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
    blame_nodes(trace, recorder)
    return {id(leaf): grad for leaf, grad in zip(leaves, grads, strict=False) if grad is not None}


def blame_nodes(trace: Trace, recorder: Recorder) -> None:
    """Attribute the backward that has just run."""
    trace.culprits, trace.multipliers = list(recorder.culprits), list(recorder.multipliers)
    if trace.culprits:
        trace.inside = recorder.inside(trace.culprits[0])


def _fresh(tree: Any) -> Any:
    """The arguments as leaves of a graph of their own."""

    def fresh(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            return leaf.detach().requires_grad_()
        return leaf

    return nested_containers.replaced(fresh, tree)


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Compiled regions run as they are written: inside them nothing could be told apart."""
    if not dynamo.imported():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Reentrant checkpoints keep their activations: such a one allows no `autograd.grad`, and hides its nodes."""
    apply, thread = CheckpointFunction.apply, threading.get_ident()

    def direct(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if threading.get_ident() == thread:
            return function(*args)
        return apply(function, preserve, *args)  # type: ignore[no-untyped-call]

    CheckpointFunction.apply = staticmethod(direct)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del CheckpointFunction.apply  # what it inherits comes to light again
