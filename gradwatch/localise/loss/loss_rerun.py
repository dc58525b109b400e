"""The loss code of a step run again under the recorder, model and all, and its backward.

What comes of it is used only if the gradients that it brings to the model's outputs are those that the step
brought there, bit for bit.
"""

from __future__ import annotations

import ast
import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradwatch.localise.diagnosis.interpreted_lines import InterpretedLines
from gradwatch.localise.diagnosis.node_gain import length_of
from gradwatch.localise.held_calls.inner_model import inner, shared
from gradwatch.localise.held_calls.module_attributes import Refused, written_in_place
from gradwatch.localise.held_calls.recorded_call import Call
from gradwatch.localise.loss.interpreter.effort_limits import Effort, TooMuchError
from gradwatch.localise.loss.interpreter.interpreter import Interpreter
from gradwatch.localise.loss.interpreter.own_graph import check_graph
from gradwatch.localise.loss.interpreter.scope import Scope
from gradwatch.localise.loss.interpreter.source_tree import Body, tree_of
from gradwatch.localise.loss.loop_scope import LoopScope
from gradwatch.localise.loss.loss_statements import LossStatements, backwards_of, loss_statements, root_of
from gradwatch.localise.loss.model_calls import Held, ModelCalls
from gradwatch.localise.replay.operation_recorder import Recorder
from gradwatch.localise.replay.state_restored import aliases, state_restored
from gradwatch.localise.replay.step_replay import (
    Trace,
    blame_backward,
    blame_nodes,
    blame_outputs,
    eager,
    unchecked,
    within,
)
from gradwatch.localise.replay.tensor_sources import sources
from gradwatch.localise.sharded.whole_parameters import is_spread, without_sharding
from gradwatch.runtime.interruption import not_ours
from gradwatch.runtime.warning_filters import filters_kept
from gradwatch.taps.graph import around_backward
from gradwatch.taps.process_totals import uncounted

Whole: TypeAlias = Mapping[int, Mapping[str, Tensor]]
NO_LOSS = "no `backward()` of the loop is known"


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """No warning is shown of loss code that is run again: the script has shown it, or never came there."""
    with filters_kept():
        warnings.simplefilter("ignore")
        yield


class _Everything(nn.Module):
    """Several models, so that all their parameters can be stood in for at once."""

    def __init__(self, models: Sequence[nn.Module], run: Callable[[], None]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.run = run

    def forward(self) -> None:
        """Run the forward."""
        self.run()


def run_loss_again(
    loop: Sequence[LoopScope],
    models: Sequence[nn.Module],
    held: Held,
    failed: Callable[[BaseException], None],
    max_bytes: int,
    effort: Effort,
    whole: Whole,
    measures: bool = False,
) -> tuple[Trace, LoopScope, Sequence[Call]]:
    """Run the loss code of a step again, from the functions that were under way. Raises `Refused` where it cannot.

    The trace, the function with the loss in it, and the calls of models. `whole` has the parameters of models that are
    sharded over ranks, by the id of the model. `measures`: look at by how much each node of the backward multiplies.
    """
    why = ""
    for scope, statements in _candidates(loop, held):
        try:
            if isinstance(statements, Refused):
                raise statements
            effort.begin_try()
            run = _Run(scope, statements, models, held, failed, effort, whole, measures)
            return run.run(max_bytes), scope, run.calls.made
        except TooMuchError:  # so would the others
            raise
        except Refused as refusal:
            why = why or str(refusal)  # of the innermost function
        except Exception as error:  # what the loop's code raises when it is run again
            if not_ours(error):
                raise
            why = why or f"it raised {type(error).__name__}: {error}"
    raise Refused(why or NO_LOSS)


def _candidates(
    loop: Sequence[LoopScope], held: Held
) -> Iterator[tuple[LoopScope, LossStatements | Refused]]:
    """Statements that the loss may be computed by, of the innermost function first; of some, why they are not known."""
    differentiated: Tensor | None = None  # by a function called from the next one
    for scope in loop:
        try:
            tree = tree_of(scope.code)
        except Refused as refusal:
            yield scope, refusal
            continue
        roots = list(_roots(tree, scope, differentiated))
        called = [
            call.caller[1]
            for _, call in held
            if call.caller is not None and call.caller[0] is scope.code and call.caller[1] <= scope.line
        ]
        for line, root in roots:
            for statements in loss_statements(tree, line, root, [one for one in called if one <= line]):
                yield scope, statements
        named = (scope.values.get(root.id) for _, root in roots if isinstance(root, ast.Name))
        if roots:
            differentiated = next((value for value in named if isinstance(value, Tensor)), None)


def _roots(tree: Body, scope: LoopScope, differentiated: Tensor | None) -> Iterator[tuple[int, ast.expr]]:
    """(line, expression) of what may have been the loss: what `backward` is called on, or has been further in."""
    found = False
    for backward in backwards_of(tree, scope.line, scope.exact):
        root = root_of(backward)
        if root is not None:
            found = True
            yield backward.lineno, root
    if found or differentiated is None:
        return
    for name, value in scope.values.items():
        if value is differentiated:
            yield scope.line, ast.Name(name, ast.Load(), lineno=scope.line)
            return


class _Run:
    """One run of some statements, forward and backward, of all models with what stands in for their parameters."""

    def __init__(
        self,
        scope: LoopScope,
        statements: LossStatements,
        models: Sequence[nn.Module],
        held: Held,
        failed: Callable[[BaseException], None],
        effort: Effort,
        whole: Whole,
        measures: bool,
    ) -> None:
        lines = InterpretedLines()
        self._statements = statements
        self._whole = _outermost([*models, *(inner(model) for model, _ in held)])
        if any((is_spread(model) and id(model) not in whole) or shared(model) for model in self._whole):
            raise Refused("the models communicate with other ranks")
        self._stand_ins = _stand_ins(self._whole, held, whole)
        self._trace = Trace(sources=_sources(scope, models, held, self._stand_ins))
        self._recorder = Recorder(self._whole, failed, lines, measures)
        self._recorder.expect(tensor for model in self._whole for tensor in written_in_place(model)[0])
        self._recorder.expect(self._stand_ins.values())
        self.calls = ModelCalls(models, held, lines)
        self._interpreter = Interpreter(lines, self.calls.call, effort)
        self._scope = _without_graphs(scope)

    def run(self, max_bytes: int) -> Trace:
        """Run them, and compare the gradients that come of it."""
        everything = _Everything(self._whole, self._forward_and_backward)
        with contextlib.ExitStack() as stack:
            stack.enter_context(state_restored(everything, max_bytes))
            for model in self._whole:
                stack.enter_context(without_sharding(model))
            with eager(), unchecked(), _unheard():
                torch.func.functional_call(everything, self._stand_ins, ())
        self.calls.verify()
        self._trace.wrote_to(self._recorder.stray)
        return self._trace

    def _forward_and_backward(self) -> None:
        with torch.enable_grad(), self._recorder.forward(), around_backward.watched(self._nested):
            root = _evaluated(self._interpreter, self._statements, self._scope)
        if not isinstance(root, Tensor) or not root.requires_grad or root.numel() != 1:
            raise Refused("what `backward()` was called on is no loss")
        with torch.no_grad():
            blame_outputs(self._trace, [root], self._recorder)
        check_graph([root], self._interpreter.begun)
        with self._recorder.backward([root]) as leaves:
            _refuse_hooked(leaves, self._stand_ins.values())
            with uncounted():
                given = torch.autograd.grad([root], leaves, allow_unused=True)
        if self._recorder.measures:
            arrived = [one for one in given if one is not None]
            self._trace.gradients_came(max(map(length_of, (arrived, list(self.calls.gradients.values())))))
        blame_nodes(self._trace, self._recorder)

    def _nested(self, roots: Sequence[Tensor]) -> Callable[[], None]:
        """A backward within the loss code, as of a gradient penalty."""
        ended = blame_backward(self._trace, self._recorder, roots)

        def after() -> None:
            ended()
            self._recorder.multipliers.clear()  # what this backward gave ends in no `.grad`

        return after


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
    """Outermost of these, each once: no part of another."""
    whole = list({id(model): model for model in models}.values())
    return [
        one
        for one in whole
        if not any(one is not other and any(one is part for part in other.modules()) for other in whole)
    ]


def _stand_ins(models: Sequence[nn.Module], held: Held, whole: Whole) -> dict[str, Tensor]:
    """Parameters and buffers of all models, the buffers as they were at the first call of each."""
    first: dict[int, Call] = {}
    for model, call in held:
        first.setdefault(id(inner(model)), call)
    given: dict[str, Tensor] = {}
    for number, model in enumerate(models):
        buffers = first[id(model)].buffers if id(model) in first else {}
        found = aliases(model, buffers, whole.get(id(model)))
        given |= {f"models.{number}.{name}": one for name, one in found.items()}
    return given


def _without_graphs(scope: LoopScope) -> Scope:
    """The names of the loop, but for tensors of the graph that the step's own backward runs through."""
    gone = {
        name
        for name, value in scope.values.items()
        if isinstance(value, Tensor) and value.grad_fn is not None
    }
    values = {name: value for name, value in scope.values.items() if name not in gone}
    around = (
        {name: value for name, value in scope.around.items() if name not in gone} if gone else scope.around
    )
    if scope.code.co_name == "<module>":  # as they were at the backward
        around = {**around, **values}
    return Scope(scope.code.co_filename, scope.code.co_name, values, around)


def _sources(
    scope: LoopScope, models: Sequence[nn.Module], held: Held, stand_ins: Mapping[str, Tensor]
) -> dict[int, tuple[str, str]]:
    """Names of tensors that the loss code has not made, by the key of their memory."""
    named = {name: value for name, value in scope.values.items() if isinstance(value, Tensor)}
    names = {key: name for key, (_, name) in sources((), named).items()}
    found = {key: ("tensor", name) for key, name in names.items()}
    for model, call in held:
        if within(inner(model), models):
            for key, (_, name) in sources((), {}, call.args, call.kwargs).items():
                found[key] = "input", names.get(key, name)
    given = {key.split(".", 2)[2]: tensor for key, tensor in stand_ins.items()}
    return sources(models, {}) | found | sources((), given)


def _refuse_hooked(leaves: Sequence[Tensor], given: Any) -> None:
    """A hook of the user's on a tensor beside the models would run a second time."""
    own = set(map(id, given))
    if any(id(leaf) not in own and leaf._backward_hooks for leaf in leaves):
        raise Refused("a tensor beside the models has a hook")
