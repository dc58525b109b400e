"""Targets of assignments: `a, (b, *c) = value` as single targets, each with its value."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.loss.interpreter import purity
from gradwatch.localise.loss.interpreter.own_memory import OwnMemory


def unpacked(target: ast.expr, value: Any, memory: OwnMemory) -> Iterator[tuple[ast.expr, Any]]:
    """(target, value) of every name, attribute and item that is assigned to."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        yield target, value
        return
    purity.check_plain(value, "unpacks")
    memory.check_iterators((value,))
    targets, values = target.elts, list(value)
    star = next((k for k, one in enumerate(targets) if isinstance(one, ast.Starred)), None)
    if star is not None:
        end = len(values) - (len(targets) - star - 1)
        values = [*values[:star], values[star:end], *values[end:]]
    if len(values) != len(targets):
        raise Refused("loss code unpacks another number of values than before")
    for one, each in zip(targets, values, strict=True):
        yield from unpacked(one.value if isinstance(one, ast.Starred) else one, each, memory)


def as_load(target: ast.expr) -> ast.expr:
    """The same place, read."""
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load(), lineno=target.lineno)
    if isinstance(target, ast.Attribute):
        return ast.Attribute(target.value, target.attr, ast.Load(), lineno=target.lineno)
    if isinstance(target, ast.Subscript):
        return ast.Subscript(target.value, target.slice, ast.Load(), lineno=target.lineno)
    raise Refused("loss code assigns to what cannot be read")
