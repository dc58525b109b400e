"""The loss code of a step run again under the recorder, model and all, and its backward.

What comes of it is believed only if the gradients that it brings to the model's outputs are those that the step
brought there, bit for bit.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.localise.diagnosis.interpreted_lines import InterpretedLines
from gradwatch.localise.diagnosis.tensor_values import tensors
from gradwatch.localise.hold.inner_model import inner, shared
from gradwatch.localise.hold.module_attributes import Refused, written_in_place
from gradwatch.localise.hold.recorded_call import Call
from gradwatch.localise.loss import purity
from gradwatch.localise.loss.interpreter import Arguments, Interpreter, Scope, TooLongError
from gradwatch.localise.loss.loop_scope import LoopScope
from gradwatch.localise.loss.loss_statements import LossStatements, backward_of, loss_statements, root_of
from gradwatch.localise.loss.own_graph import check_graph
from gradwatch.localise.loss.same_values import same_values
from gradwatch.localise.loss.source_tree import tree_of
from gradwatch.localise.replay.fsdp2_all_gather import is_spread
from gradwatch.localise.replay.operation_recorder import Recorder
from gradwatch.localise.replay.state_restored import aliases, state_restored
from gradwatch.localise.replay.step_replay import (
    Trace,
    blame_backward,
    blame_nodes,
    blame_outputs,
    eager,
    refuse,
    sources,
    unchecked,
    within,
)
from gradwatch.taps import module_calls
from gradwatch.taps.graph import around_backward
from gradwatch.taps.process_totals import uncounted

Held = Sequence[tuple[nn.Module, Call]]
NO_LOSS = "no `backward()` of the loop is known"


class _Everything(nn.Module):
    """Several models, so that all their parameters can be stood in for at once."""

    def __init__(self, models: Sequence[nn.Module], run: Callable[[], None]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.run = run

    def forward(self) -> None:
        """Run it."""
        self.run()


@dataclass(slots=True, eq=False)
class Again:
    """One run of loss code: the calls of models it has made, and the gradients that reached them."""

    models: Sequence[nn.Module]
    held: Held
    made: list[Call] = field(default_factory=list)
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    line: Callable[[], tuple[str, int]] = lambda: ("", 0)

    def call(self, module: nn.Module, arguments: Callable[[], Arguments]) -> Any:
        """Make the call of a module as it was recorded, else as it is if it is torch's or a part of the models."""
        base = inner(module)
        call = self._recorded(base)
        if call is None:
            own = within(base, self.models)
            if own or type(base).__module__.startswith("torch.nn.modules"):
                purity.check_module(base, stands_in=own)
                args, kwargs = arguments()
                return module(*args, **kwargs)
            return NotImplemented
        refuse(base, call)
        self.made.append(call)
        # What was computed of other tensors is held without the graph behind it.
        graded = any(one.requires_grad for one in tensors((call.args, call.kwargs)))
        args, kwargs = arguments() if graded else (call.args, call.kwargs)
        call.generators.restore()
        with call.recorded_modes():
            return self._outputs(base, call, args, kwargs)

    def _recorded(self, base: nn.Module) -> Call | None:
        """The recorded call that comes next of this module; of several the one from the line under way."""
        calls = [call for model, call in self.held if inner(model) is base and call not in self.made]
        file, line = self.line()
        here = [one for one in calls if one.caller is not None and one.caller[0].co_filename == file]
        near = [one for one in here if one.caller is not None and one.caller[1] == line]
        return next(iter(near or here or calls), None)

    def _outputs(self, base: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            for position, tensor in enumerate(tensors(output)):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(self._reached(call, position))

        ignore = module_calls.listen(base, after=after)
        try:
            return base(*args, **kwargs)
        finally:
            ignore()

    def _reached(self, call: Call, position: int) -> Callable[[Tensor], None]:
        def reached(grad: Tensor) -> None:
            key, kept = (call.order, position), grad.detach()
            self.gradients[key] = self.gradients[key] + kept if key in self.gradients else kept

        return reached

    def verify(self) -> None:
        """Raise `Refused` where the gradients at the outputs are not those of the step."""
        if not self.made:
            raise Refused("the loss code calls no model whose call was recorded")
        compared = 0
        for call in self.made:
            for position, grad in call.gradients.items():
                again = self.gradients.get((call.order, position))
                if again is None or not same_values(again, grad):
                    raise Refused("run again, the loss code brings other gradients to the model's outputs")
                compared += 1
        if not compared:
            raise Refused("no gradient at the model's outputs was kept to compare with")


def run_loss_again(
    loop: Sequence[LoopScope],
    models: Sequence[nn.Module],
    held: Held,
    failed: Callable[[BaseException], None],
    max_bytes: int,
) -> tuple[Trace, LoopScope, Call]:
    """Run the loss code of a step again, from the functions that were under way. Raises `Refused` where it cannot.

    The trace, the function with the loss in it, and the first call of a model.
    """
    why, root = NO_LOSS, None
    for scope in loop:
        try:
            root, found = _statements(scope, held, root)
            for statements in found:
                try:
                    trace, first = _again(scope, statements, models, held, failed, max_bytes)
                    return trace, scope, first
                except TooLongError:  # so would the others
                    raise
                except Refused as refusal:
                    why = str(refusal)
                except Exception as error:  # what the loop's code raises when it is run again
                    why = f"it raised {type(error).__name__}: {error}"
        except TooLongError:
            raise
        except Refused as refusal:
            why = str(refusal)
    raise Refused(why)


def _statements(scope: LoopScope, held: Held, known: Any) -> tuple[Any, Iterator[LossStatements]]:
    """The loss, as far as it is a value with a name, and the statements it may be computed by.

    `known` is the loss that a function called from here differentiates.
    """
    tree = tree_of(scope.code)
    backward = backward_of(tree, scope.line, scope.exact)
    root = None if backward is None else root_of(backward)
    line = scope.line if backward is None else backward.lineno
    if root is None and known is not None:
        name = next((name for name, value in scope.values.items() if value is known), None)
        root, line = None if name is None else ast.Name(name, ast.Load(), lineno=line), scope.line
    if root is None:
        return known, iter(())
    value = scope.values.get(root.id) if isinstance(root, ast.Name) else None
    lines = [call.caller[1] for _, call in held if call.caller is not None and call.caller[0] is scope.code]
    found = loss_statements(tree, line, root, [one for one in lines if one <= line])
    return value if isinstance(value, Tensor) else None, found


def _again(
    scope: LoopScope,
    statements: LossStatements,
    models: Sequence[nn.Module],
    held: Held,
    failed: Callable[[BaseException], None],
    max_bytes: int,
) -> tuple[Trace, Call]:
    whole = _outermost([*models, *(inner(model) for model, _ in held)])
    if any(is_spread(model) or shared(model) for model in whole):
        raise Refused("the models communicate with other ranks")
    first: dict[int, Call] = {}
    for model, call in held:
        first.setdefault(id(inner(model)), call)
    given: dict[str, Tensor] = {}
    for number, model in enumerate(whole):
        buffers = first[id(model)].buffers if id(model) in first else {}
        found = aliases(model, buffers)
        given |= {f"models.{number}.{name}": tensor for name, tensor in found.items()}
    lines = InterpretedLines()
    recorder = Recorder(whole, failed, lines)
    recorder.expect(tensor for model in whole for tensor in written_in_place(model)[0])
    recorder.expect(given.values())
    named = {key.split(".", 2)[2]: tensor for key, tensor in given.items()}
    trace = Trace(sources={**_values(scope), **_inputs(scope, models, held), **sources(named)})
    again = Again(models, held, line=lambda: (lines.now[0].file, lines.now[0].line) if lines.now else ("", 0))
    interpreter = Interpreter(lines, again.call)
    values = _without_graphs(scope.values)
    around = {**scope.around, **values} if scope.code.co_name == "<module>" else scope.around
    gone = scope.values.keys() - values.keys()
    around = {name: value for name, value in around.items() if name not in gone} if gone else around
    inside = Scope(scope.code.co_filename, scope.code.co_name, values, around)

    def nested(roots: Sequence[Tensor]) -> Callable[[], None]:
        return blame_backward(trace, recorder, roots)

    def run() -> None:
        with torch.enable_grad(), recorder.forward(), around_backward.watched(nested):
            root = _evaluated(interpreter, statements, inside)
        if not isinstance(root, Tensor) or not root.requires_grad or root.numel() != 1:
            raise Refused("what `backward()` was called on is no loss")
        with torch.no_grad():
            blame_outputs(trace, [root], recorder)
        check_graph([root], interpreter.begun)
        with recorder.backward([root]) as leaves:
            _refuse_hooked(leaves, given.values())
            with uncounted():
                torch.autograd.grad([root], leaves, allow_unused=True)
        blame_nodes(trace, recorder)

    with state_restored(_Everything(whole, run), max_bytes), eager(), unchecked():
        torch.func.functional_call(_Everything(whole, run), given, ())
    again.verify()
    trace.stray = recorder.stray
    return trace, again.made[0]


def _evaluated(interpreter: Interpreter, statements: LossStatements, scope: Scope) -> Any:
    for around, statement in statements.before:
        with contextlib.ExitStack() as stack:
            for block in around:
                interpreter.enter(block, scope, stack)
            # A call whose result has no name (`optimizer.zero_grad()`) is left out where it may not be made.
            with (
                contextlib.suppress(Refused) if isinstance(statement, ast.Expr) else contextlib.nullcontext()
            ):
                interpreter.run([statement], scope)
    with contextlib.ExitStack() as stack:
        for block in statements.context:
            interpreter.enter(block, scope, stack)
        return interpreter.value(statements.root, scope)


def _outermost(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Each once, without those that are parts of another."""
    whole = list({id(model): model for model in models}.values())
    return [
        one
        for one in whole
        if not any(one is not other and any(one is part for part in other.modules()) for other in whole)
    ]


def _without_graphs(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of names, but for tensors of the graph that the step's own backward runs through."""
    return {
        name: value
        for name, value in values.items()
        if not (isinstance(value, Tensor) and value.grad_fn is not None)
    }


def _values(scope: LoopScope) -> dict[int, tuple[str, str]]:
    named = {name: value for name, value in scope.values.items() if isinstance(value, Tensor)}
    return {key: ("tensor", name) for key, (_, name) in sources(named).items()}


def _inputs(scope: LoopScope, models: Sequence[nn.Module], held: Held) -> dict[int, tuple[str, str]]:
    """Arguments of the models' calls, by the key of their memory."""
    names = _values(scope)
    found: dict[int, tuple[str, str]] = {}
    for model, call in held:
        if within(inner(model), models):
            for key, (kind, name) in sources({}, call.args, call.kwargs).items():
                found[key] = kind, names[key][1] if key in names else name
    return found


def _refuse_hooked(leaves: Sequence[Tensor], given: Any) -> None:
    """A hook of the user's on a tensor beside the models would run a second time."""
    own = set(map(id, given))
    if any(id(leaf) not in own and leaf._backward_hooks for leaf in leaves):
        raise Refused("a tensor beside the models has a hook")
