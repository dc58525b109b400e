"""Lines of a loop that write to gradients between its last backward and the step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.loss.interpreter.source_tree import Body, own_nodes, tree_of
from gradwatch.localise.loss.loop_scope import LoopScope, scopes
from gradwatch.localise.loss.loss_statements import backwards_of


def written_at() -> str:
    """`gradients are written at train.py:12`, of the innermost function under way that has a backward; "" for none."""
    for scope in scopes(exact=False):
        lines = sorted(set(_lines(scope)))
        if lines:
            shown = ", ".join(f"{scope.code.co_filename}:{line}" for line in lines)
            return f"gradients are written at {shown}"
    return ""


def _lines(scope: LoopScope) -> Iterator[int]:
    try:
        tree = tree_of(scope.code)
    except Refused:
        return
    backward = next(iter(backwards_of(tree, scope.line, exactly=False)), None)
    if backward is None:
        return
    for line in _writes(tree):
        if backward.lineno <= line <= scope.line:
            yield line


def _writes(tree: Body) -> Iterator[int]:
    """Lines with an assignment to `.grad`, or a call of a method of it that works in place."""
    for node in own_nodes(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from [node.lineno] if any(map(_is_gradient, targets)) else []
        elif isinstance(node, ast.Call) and _is_in_place(node):
            yield node.lineno


def _is_in_place(node: ast.Call) -> bool:
    called = node.func
    return isinstance(called, ast.Attribute) and called.attr.endswith("_") and _is_gradient(called.value)


def _is_gradient(node: ast.expr) -> bool:
    """True for `p.grad`, `p.grad.data`, `p.grad[0]`."""
    return any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in ast.walk(node))
