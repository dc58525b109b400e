"""Tensors of the loop that no gradient flows to and that are not finite: where they were computed, if that is known."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradwatch.localise.diagnosis.interpreted_lines import InterpretedLines
from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.loss.interpreter.effort_limits import Effort
from gradwatch.localise.loss.interpreter.interpreter import Interpreter
from gradwatch.localise.loss.interpreter.scope import Scope
from gradwatch.localise.loss.interpreter.source_tree import tree_of
from gradwatch.localise.loss.loop_scope import LoopScope
from gradwatch.localise.loss.loss_statements import definition_of
from gradwatch.localise.loss.same_values import same_values
from gradwatch.localise.replay.first_nonfinite_in_forward import Origin, key_of
from gradwatch.localise.replay.operation_recorder import Recorder
from gradwatch.localise.replay.state_restored import state_restored
from gradwatch.runtime.interruption import not_ours

DEEPEST = 4  # names made of names


def constant_origin(
    scope: LoopScope, name: str, failed: Callable[[BaseException], None], effort: Effort
) -> tuple[Origin | None, str]:
    """The operation that made the value of a name, and that name; None where the script did not compute it.

    Its last assignment is run again. That counts only where the same value comes of it, so no random draw does.
    """
    for _ in range(DEEPEST):
        try:
            origin = _again(scope, name, failed, effort)
        except (
            Exception
        ) as error:  # whatever the statement raises: then it is not known how the value was made
            if not_ours(error):
                raise
            return None, name
        if origin is None or not origin.external:
            return origin, name
        inner = next((one for one, value in scope.values.items() if _is(value, origin.source)), name)
        if inner == name:
            return None, name
        name = inner
    return None, name


def _is(value: object, key: int) -> bool:
    return isinstance(value, Tensor) and key_of(value) == key


def _again(
    scope: LoopScope, name: str, failed: Callable[[BaseException], None], effort: Effort
) -> Origin | None:
    statements = definition_of(tree_of(scope.code), name, scope.line)
    if not statements:
        return None
    lines = InterpretedLines()
    recorder = Recorder([], failed, lines)
    effort.begin_try()
    interpreter = Interpreter(lines, lambda *_: NotImplemented, effort)
    inside = Scope(scope.code.co_filename, scope.code.co_name, dict(scope.values), scope.around)
    with state_restored(nn.Module(), 0), torch.enable_grad(), recorder.forward():
        interpreter.run(list(statements), inside)
    made, known = inside.values[name], scope.values[name]
    if not isinstance(made, Tensor) or not same_values(made, known):
        raise Refused(f"run again, the statement gives `{name}` another value")
    return recorder.origin_of(made)
