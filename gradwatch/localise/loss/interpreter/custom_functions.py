"""A custom `autograd.Function` may run once more if its source shows that it only computes."""

from __future__ import annotations

import ast
import builtins
import inspect
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.loss.interpreter import purity
from gradwatch.localise.loss.interpreter.source_tree import tree_of
from gradwatch.taps.graph.pure_functions import is_of_torch

METHODS = ("forward", "setup_context", "backward", "vjp")
OF_CONTEXT = frozenset({"save_for_backward", "mark_non_differentiable", "set_materialize_grads"})
STATEMENTS = (
    *(ast.FunctionDef, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr, ast.If, ast.Pass),
    *(ast.For, ast.Assert),
)


def check_custom_function(function: Any) -> None:
    """Raise `Refused` where its forward or its backward may change more than what it returns."""
    for name in METHODS:
        method = inspect.unwrap(getattr(function, name))
        if not isinstance(method, FunctionType) or method.__module__.startswith("torch."):
            continue
        refusal = _refusal(method)
        if refusal:
            raise Refused(f"`{name}` of {function.__name__} {refusal}")


def _refusal(method: FunctionType) -> str:
    tree = tree_of(method.__code__)
    context = method.__code__.co_varnames[0] if method.__code__.co_argcount else ""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not isinstance(node, STATEMENTS):
            return f"contains {type(node).__name__}"
        if isinstance(node, (ast.AugAssign, ast.Subscript)) and not isinstance(
            getattr(node, "ctx", ast.Store()), ast.Load
        ):
            return "writes in place"
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and not _is(node.value, context)
        ):
            return f"sets `{node.attr}`"
        if isinstance(node, ast.Call) and not _computes(node, method, context):
            return f"calls `{ast.unparse(node.func)}`"
    return ""


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _computes(node: ast.Call, method: FunctionType, context: str) -> bool:
    """True for a call of torch's or of a method of a tensor that only computes."""
    if any(keyword.arg == "out" for keyword in node.keywords):
        return False
    if isinstance(node.func, ast.Name):
        func = method.__globals__.get(node.func.id, getattr(builtins, node.func.id, None))
        return func is not None and (func in purity.BUILTINS or is_of_torch(func))
    if not isinstance(node.func, ast.Attribute):
        return False
    name = node.func.attr
    if purity.writes(name):
        return False
    if _is(node.func.value, context):
        return name in OF_CONTEXT
    found = _global(node.func, method)
    if found is not None:
        return is_of_torch(found)
    return hasattr(Tensor, name) and name not in purity.FORBIDDEN_METHODS


def _global(node: ast.expr, method: FunctionType) -> Any:
    """The object that a dotted name of modules stands for; None for anything else."""
    if isinstance(node, ast.Name):
        found = method.__globals__.get(node.id)
        return found if isinstance(found, ModuleType) else None
    if isinstance(node, ast.Attribute):
        owner = _global(node.value, method)
        return None if owner is None else getattr(owner, node.attr, None)
    return None
