"""Statements of loss code, executed in their order."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.loss.interpreter import purity
from gradwatch.localise.loss.interpreter.expressions import Expressions
from gradwatch.localise.loss.interpreter.own_memory import OwnMemory
from gradwatch.localise.loss.interpreter.scope import Scope
from gradwatch.localise.loss.interpreter.targets import as_load, unpacked


class _ReturnError(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _BreakError(Exception):
    pass


class _ContinueError(Exception):
    pass


class Statements:
    """Executes statements in a Scope."""

    def __init__(self, expressions: Expressions, memory: OwnMemory) -> None:
        self._expressions = expressions
        self._memory = memory
        self._kinds: dict[type, Callable[[Any, Scope], None]] = {
            ast.Pass: lambda node, scope: None,
            ast.Expr: self._expression,
            ast.Assign: self._assign,
            ast.AnnAssign: self._assign_annotated,
            ast.AugAssign: self._update,
            ast.If: self._if,
            ast.For: self._for,
            ast.While: self._while,
            ast.With: self._with,
            ast.Assert: self._assert,
            ast.Return: self._return,
            ast.Break: self._break,
            ast.Continue: self._continue,
        }

    def run(self, statements: Sequence[ast.stmt], scope: Scope) -> None:
        """Execute statements in their order."""
        for node in statements:
            kind = self._kinds.get(type(node))
            if kind is None:
                raise Refused(f"line {node.lineno} of {scope.file} is not run again: {type(node).__name__}")
            kind(node, scope)

    def returned(self, body: Sequence[ast.stmt], scope: Scope) -> Any:
        """The result of a function with this body."""
        try:
            self.run(body, scope)
        except _ReturnError as returned:
            return returned.value
        return None

    def enter(self, node: ast.With, scope: Scope, stack: contextlib.ExitStack) -> None:
        """Enter the contexts of a `with`, as far as they are torch's switches."""
        for item in node.items:
            context: Any = self._expressions.value(item.context_expr, scope)
            if not purity.is_context(type(context)):
                raise Refused(f"line {node.lineno} of {scope.file} enters {type(context).__name__}")
            if item.optional_vars is not None:
                raise Refused(f"line {node.lineno} of {scope.file} names what it enters")
            stack.enter_context(context)

    # -- assignments -------------------------------------------------------------------------------------

    def _assign(self, node: ast.Assign, scope: Scope) -> None:
        value = self._expressions.value(node.value, scope)
        for target in node.targets:
            self._put(target, value, scope)

    def _assign_annotated(self, node: ast.AnnAssign, scope: Scope) -> None:
        if node.value is not None:
            self._put(node.target, self._expressions.value(node.value, scope), scope)

    def _update(self, node: ast.AugAssign, scope: Scope) -> None:
        if isinstance(node.target, ast.Attribute):
            owner = self._expressions.value(node.target.value, scope)
            if not isinstance(owner, Tensor) and not self._memory.attribute(owner, node.target.attr):
                self._expressions.value(node.value, scope)
                self._memory.release_attribute(owner, node.target.attr)
                return
        before = self._expressions.value(as_load(node.target), scope)
        value = self._expressions.value(node.value, scope)
        self._put(node.target, self._expressions.updated(node, before, value, scope), scope)

    def _put(self, targets: ast.expr, values: Any, scope: Scope) -> None:
        for target, value in unpacked(targets, values, self._memory):
            if isinstance(target, ast.Name):
                scope.values[target.id] = value
            elif isinstance(target, ast.Subscript):
                owner = self._expressions.value(target.value, scope)
                self._memory.put(owner, self._expressions.value(target.slice, scope), value)
            elif isinstance(target, ast.Attribute):
                owner = self._expressions.value(target.value, scope)
                self._memory.set_attribute(owner, target.attr, value)
            else:
                raise Refused(f"line {target.lineno} of {scope.file} is not run again")

    # -- all others --------------------------------------------------------------------------------------

    def _expression(self, node: ast.Expr, scope: Scope) -> None:
        if not isinstance(node.value, ast.Constant):
            self._expressions.value(node.value, scope)

    def _if(self, node: ast.If, scope: Scope) -> None:
        self.run(node.body if self._expressions.truth(node.test, scope) else node.orelse, scope)

    def _for(self, node: ast.For, scope: Scope) -> None:
        for value in self._expressions.iterated(node.iter, scope):
            self._put(node.target, value, scope)
            if self._breaks(node, scope):
                return
        self.run(node.orelse, scope)

    def _while(self, node: ast.While, scope: Scope) -> None:
        while self._expressions.truth(node.test, scope):
            if self._breaks(node, scope):
                return
        self.run(node.orelse, scope)

    def _breaks(self, node: ast.For | ast.While, scope: Scope) -> bool:
        """Execute the body of a loop once; True if a `break` ended the loop."""
        try:
            self.run(node.body, scope)
        except _BreakError:
            return True
        except _ContinueError:
            pass
        return False

    def _with(self, node: ast.With, scope: Scope) -> None:
        with contextlib.ExitStack() as stack:
            self.enter(node, scope, stack)
            self.run(node.body, scope)

    def _assert(self, node: ast.Assert, scope: Scope) -> None:
        if not self._expressions.truth(node.test, scope):
            raise Refused("an assertion of the loss code fails when it is run again")

    def _return(self, node: ast.Return, scope: Scope) -> None:
        raise _ReturnError(None if node.value is None else self._expressions.value(node.value, scope))

    def _break(self, node: ast.Break, scope: Scope) -> None:
        raise _BreakError

    def _continue(self, node: ast.Continue, scope: Scope) -> None:
        raise _ContinueError
