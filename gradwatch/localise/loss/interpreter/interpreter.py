"""Loss code evaluated expression by expression, so that each call is looked at before it is made.

Operators, torch's functions and methods are torch's own, called for real. Functions of the user's are interpreted in
turn. Attributes that they set are set beside their objects, what they write into lists and dicts of the script is left
out, and what would change anything else raises `Refused` before it has.

Statements call expressions, which call calls; of a function of the user's these come back here.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Sequence
from types import FunctionType
from typing import Any

from gradwatch.localise.diagnosis.interpreted_lines import InterpretedLines
from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.loss.interpreter import purity
from gradwatch.localise.loss.interpreter.calls import Calls, ModuleCall
from gradwatch.localise.loss.interpreter.effort_limits import Effort
from gradwatch.localise.loss.interpreter.expressions import Expressions
from gradwatch.localise.loss.interpreter.own_memory import OwnMemory
from gradwatch.localise.loss.interpreter.scope import Scope, scope_of_call
from gradwatch.localise.loss.interpreter.source_tree import tree_of
from gradwatch.localise.loss.interpreter.statements import Statements

DEEPEST = 40  # calls within calls


class Interpreter:
    """Evaluates statements in a Scope; `module_call(module, arguments)` makes the calls of modules that it allows.

    `arguments()` evaluates those of the call. It returns NotImplemented for others, whose forward is interpreted.
    """

    def __init__(
        self, lines: InterpretedLines, module_call: ModuleCall, effort: Effort | None = None
    ) -> None:
        effort = effort or Effort()
        self._lines = lines
        self._memory = OwnMemory(effort)
        calls = Calls(self._memory, module_call, self._interpret)
        self.begun = calls.begun
        self._expressions = Expressions(lines, self._memory, calls, effort)
        self._statements = Statements(self._expressions, self._memory)

    def run(self, statements: Sequence[ast.stmt], scope: Scope) -> None:
        """Execute statements in their order."""
        self._statements.run(statements, scope)

    def value(self, node: ast.expr, scope: Scope) -> Any:
        """The value of an expression."""
        return self._expressions.value(node, scope)

    def enter(self, node: ast.With, scope: Scope, stack: contextlib.ExitStack) -> None:
        """Enter the contexts of a `with`, as far as they are torch's switches."""
        self._statements.enter(node, scope, stack)

    def _interpret(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function of the user's."""
        switch = purity.switched_by(func)
        if switch is not None:
            with switch():
                return self._interpret(func.__wrapped__, args, kwargs)
        tree = _function_tree(func)
        if self._memory.depth >= DEEPEST:
            raise Refused("loss code calls itself too deeply")
        scope = scope_of_call(func, args, kwargs, self._lines.now)
        self._memory.function_begins()
        try:
            if isinstance(tree, ast.Lambda):
                return self._expressions.value(tree.body, scope)
            return self._statements.returned(tree.body, scope)
        finally:
            self._memory.function_ends()


def _function_tree(func: Any) -> ast.FunctionDef | ast.Lambda:
    """The syntax tree of a function that can be interpreted; raises Refused for any other."""
    if isinstance(func, FunctionType) and purity.has_source(func) and not inspect.isgeneratorfunction(func):
        tree = tree_of(func.__code__)
        if isinstance(tree, (ast.FunctionDef, ast.Lambda)):
            return tree
    raise Refused(f"loss code calls {purity.name_of(func)}")
