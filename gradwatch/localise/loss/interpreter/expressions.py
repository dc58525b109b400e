"""Expressions of loss code: each operand, then the operator, as Python would, with the line known that it is on."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from gradwatch.localise.diagnosis.interpreted_lines import InterpretedLines
from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.loss.interpreter import lookups, purity
from gradwatch.localise.loss.interpreter.calls import Arguments, Calls
from gradwatch.localise.loss.interpreter.effort_limits import Effort
from gradwatch.localise.loss.interpreter.operators import (
    BINARY,
    COMPARED,
    IDENTITY,
    IN_PLACE,
    MEMBERSHIP,
    UNARY,
)
from gradwatch.localise.loss.interpreter.own_memory import OwnMemory
from gradwatch.localise.loss.interpreter.scope import Scope
from gradwatch.localise.loss.interpreter.targets import unpacked

NEW_CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


class Expressions:
    """Evaluates expressions in a Scope."""

    def __init__(self, lines: InterpretedLines, memory: OwnMemory, calls: Calls, effort: Effort) -> None:
        self._lines = lines
        self._memory = memory
        self._calls = calls
        self._effort = effort
        self._kinds: dict[type, Callable[[Any, Scope], Any]] = {
            ast.Constant: lambda node, scope: node.value,
            ast.JoinedStr: lambda node, scope: "…",  # a message, which no number is made of
            ast.Name: self._name,
            ast.NamedExpr: self._named,
            ast.Attribute: self._attribute,
            ast.Subscript: self._item,
            ast.Slice: self._slice,
            ast.UnaryOp: self._unary,
            ast.BinOp: self._binary,
            ast.BoolOp: self._and_or,
            ast.Compare: self._compared,
            ast.IfExp: self._either,
            ast.Tuple: lambda node, scope: tuple(self._elements(node.elts, scope)),
            ast.List: lambda node, scope: list(self._elements(node.elts, scope)),
            ast.Set: lambda node, scope: _set(self._elements(node.elts, scope)),
            ast.Dict: self._dict,
            ast.ListComp: lambda node, scope: self._comprehended(node, scope),
            ast.GeneratorExp: lambda node, scope: self._comprehended(node, scope),
            ast.SetComp: lambda node, scope: _set(self._comprehended(node, scope)),
            ast.DictComp: self._dict_comprehended,
            ast.Call: self._call,
        }

    def value(self, node: ast.expr, scope: Scope) -> Any:
        """The value of an expression."""
        self._effort.expression()
        kind = self._kinds.get(type(node))
        if kind is None:
            raise Refused(f"line {node.lineno} of {scope.file} is not run again: {type(node).__name__}")
        value = kind(node, scope)
        return self._memory.add_container(value) if isinstance(node, NEW_CONTAINERS) else value

    def truth(self, node: ast.expr, scope: Scope) -> bool:
        """True for a value that counts as true."""
        return _truth(self.value(node, scope))

    def iterated(self, node: ast.expr, scope: Scope) -> Iterable[Any]:
        """A value that is about to be iterated over."""
        value: Iterable[Any] = self.value(node, scope)
        if type(value) not in purity.MODULE_LISTS:
            purity.check_plain(value, "iterates over")
        self._memory.check_iterators((value,))
        return value  # not as a list: a loop may leave a long range early

    def updated(self, node: ast.AugAssign, before: Any, value: Any, scope: Scope) -> Any:
        """The result of `before += value`: in place where Python would, and it was made here."""
        self._at(node, scope)
        if isinstance(before, Tensor):
            in_place = self._memory.writable(before)
            return self._operated(IN_PLACE[type(node.op)], before, value) if in_place else before
        if self._memory.has(before):
            return self._operated(IN_PLACE[type(node.op)], before, value)
        if isinstance(before, (list, dict, set)):
            raise Refused("loss code adds to a container of the script's")
        return self._operated(BINARY[type(node.op)], before, value)

    def _at(self, node: ast.expr | ast.stmt, scope: Scope) -> None:
        self._lines.enter(scope.file, node.lineno, scope.function, scope.outer)

    # -- names, attributes and items ---------------------------------------------------------------------

    def _name(self, node: ast.Name, scope: Scope) -> Any:
        value = scope.get(node.id)
        self._memory.check_complete(value, node.id)
        return value

    def _named(self, node: ast.NamedExpr, scope: Scope) -> Any:
        scope.values[node.target.id] = value = self.value(node.value, scope)
        return value

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        owner = self.value(node.value, scope)
        for value in self._memory.attribute(owner, node.attr):
            return value
        self._at(node, scope)
        found = lookups.attribute(owner, node.attr)
        if isinstance(found, property):
            if purity.function_of_user(found.fget) is None:
                raise Refused(f"loss code reads `{node.attr}` of {type(owner).__name__}")
            return self._calls.call(found.fget, (owner,), {})
        self._memory.check_complete(found, node.attr)
        self._memory.add_read(owner, node.attr)
        return found

    def _item(self, node: ast.Subscript, scope: Scope) -> Any:
        owner, place = self.value(node.value, scope), self.value(node.slice, scope)
        self._at(node, scope)
        return lookups.item(owner, place)

    def _slice(self, node: ast.Slice, scope: Scope) -> slice:
        parts = (node.lower, node.upper, node.step)
        return slice(*(None if one is None else self.value(one, scope) for one in parts))

    # -- operators ---------------------------------------------------------------------------------------

    def _unary(self, node: ast.UnaryOp, scope: Scope) -> Any:
        value = self.value(node.operand, scope)
        self._at(node, scope)
        return self._operated(UNARY[type(node.op)], value)

    def _binary(self, node: ast.BinOp, scope: Scope) -> Any:
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        self._at(node, scope)
        return self._operated(BINARY[type(node.op)], left, right)

    def _and_or(self, node: ast.BoolOp, scope: Scope) -> Any:
        value: Any = None
        for one in node.values:
            value = self.value(one, scope)
            if _truth(value) is isinstance(node.op, ast.Or):
                break
        return value

    def _compared(self, node: ast.Compare, scope: Scope) -> Any:
        left, result = self.value(node.left, scope), None
        for kind, other in zip(node.ops, node.comparators, strict=True):
            right = self.value(other, scope)
            self._at(node, scope)
            if isinstance(kind, MEMBERSHIP):
                self._memory.check_iterators((right,))
                purity.check_keys((left,))
            result = self._operated(COMPARED[type(kind)], left, right)
            if len(node.ops) > 1 and not result:
                break
            left = right
        return result

    def _either(self, node: ast.IfExp, scope: Scope) -> Any:
        return self.value(node.body if self.truth(node.test, scope) else node.orelse, scope)

    def _operated(self, operation: Callable[..., Any], *values: Any) -> Any:
        if operation in IDENTITY:
            if len(values) == 1:
                purity.check_plain(values[0], "tests")
            return operation(*values)
        for value in values:
            purity.check_plain(value, "computes with")
        purity.check_elements(values)
        return self._memory.add_result(operation(*values), values)

    # -- containers --------------------------------------------------------------------------------------

    def _elements(self, nodes: list[ast.expr], scope: Scope) -> Iterator[Any]:
        for node in nodes:
            if isinstance(node, ast.Starred):
                yield from self.iterated(node.value, scope)
            else:
                yield self.value(node, scope)

    def _dict(self, node: ast.Dict, scope: Scope) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                found |= _mapping(self.value(value, scope))
            else:
                name = self.value(key, scope)
                purity.check_keys((name,))
                found[name] = self.value(value, scope)
        return found

    def _comprehended(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, scope: Scope) -> list[Any]:
        return [self.value(node.elt, inner) for inner in self._each(node.generators, scope)]

    def _dict_comprehended(self, node: ast.DictComp, scope: Scope) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for inner in self._each(node.generators, scope):
            name = self.value(node.key, inner)
            purity.check_keys((name,))
            found[name] = self.value(node.value, inner)
        return found

    def _each(self, loops: list[ast.comprehension], scope: Scope) -> Iterator[Scope]:
        """The scope of each turn of the loops of a comprehension."""
        if not loops:
            yield scope
            return
        first, *rest = loops
        for value in self.iterated(first.iter, scope):
            inner = scope.inner()
            for target, each in unpacked(first.target, value, self._memory):
                if not isinstance(target, ast.Name):
                    raise Refused("a comprehension of the loss code assigns to what is no name")
                inner.values[target.id] = each
            if all(self.truth(test, inner) for test in first.ifs):
                yield from self._each(rest, inner)

    # -- calls -------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call, scope: Scope) -> Any:
        if isinstance(node.func, ast.Name):
            if node.func.id == "print" and scope.get("print") is print:
                return None
            if node.func.id == "super":
                raise Refused("loss code calls `super()`")
        func = self.value(node.func, scope)

        def arguments() -> Arguments:
            given = self._arguments(node, scope)
            self._at(node, scope)
            return given

        self._at(node, scope)
        lines = self._lines.now
        try:
            if isinstance(func, nn.Module):
                return self._calls.module(func, arguments)
            return self._calls.call(func, *arguments())
        finally:
            self._lines.put(lines)

    def _arguments(self, node: ast.Call, scope: Scope) -> Arguments:
        args = tuple(self._elements(node.args, scope))
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, scope)
            kwargs.update(_mapping(value) if keyword.arg is None else {keyword.arg: value})
        return args, kwargs


def _truth(value: Any) -> bool:
    purity.check_plain(value, "tests")
    return bool(value)


def _set(elements: Iterable[Any]) -> set[Any]:
    found = list(elements)
    purity.check_keys(found)
    return set(found)


def _mapping(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise Refused(f"loss code unpacks {type(value).__name__}")
    return value
