"""Syntax trees of the functions that are under way, from their files."""

from __future__ import annotations
import __future__

import ast
import functools
import linecache
import operator
from collections.abc import Iterator
from types import CodeType

from gradwatch.localise.held_calls.module_attributes import Refused

Body = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
ADDS = ("append", "extend", "insert", "add", "update")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
FIELDS = ("body", "orelse", "finalbody")
FUTURES = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


def tree_of(code: CodeType) -> Body:
    """The syntax tree of a function, or of a whole script. Raises Refused where its source cannot be read.

    Or where compiled it is another code: a file that was edited meanwhile would give other lines.
    """
    file = code.co_filename
    module = _module(file, "".join(linecache.getlines(file)))
    if code.co_name == "<module>":
        tree: Body | None = _script(module, code)
    else:
        defined = any(_same(one, code) for one in _nested(_compiled(module, code)))
        tree = _function(module, code) if defined else None
    if tree is None:
        raise Refused(f"the source of {code.co_name} is not known, or not what was run")
    return tree


def _script(module: ast.Module, code: CodeType) -> ast.Module | None:
    """A script, or the statement of it that was compiled alone, as notebooks do."""
    for tree in (module, *(ast.Module([one], []) for one in module.body)):
        if _same(_compiled(tree, code), code):
            return tree
    return None


def _function(module: ast.Module, code: CodeType) -> Body | None:
    if code.co_name == "<lambda>":
        lambdas = [one for one in ast.walk(module) if isinstance(one, ast.Lambda)]
        here = [one for one in lambdas if one.lineno == code.co_firstlineno]
        return here[0] if len(here) == 1 else None
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def _compiled(tree: ast.Module, like: CodeType) -> CodeType:
    """Compiled as other code of that file was, which may have inherited `from __future__ import ...`."""
    return _compile(tree, like.co_filename, like.co_flags & FUTURES)


@functools.lru_cache(maxsize=64)
def _compile(tree: ast.Module, file: str, flags: int) -> CodeType:
    try:
        compiled: CodeType = compile(tree, file, "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise Refused(f"the source of {file} cannot be compiled") from error
    return compiled


def _nested(code: CodeType) -> Iterator[CodeType]:
    """The code of functions defined in some code, and in each other."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def _same(one: CodeType, other: CodeType) -> bool:
    """True for the same instructions on the same lines; the file may have been reached by another path."""
    return one == other and list(one.co_lines()) == list(other.co_lines())


@functools.lru_cache(maxsize=64)
def _module(file: str, text: str) -> ast.Module:
    if not text:
        raise Refused(f"the source of {file} is not known")
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise Refused(f"the source of {file} cannot be read") from error


def own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions and classes defined in it."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, DEFINITIONS):
            yield node
            yield from own_nodes(node)


def path_to(
    body: list[ast.stmt], line: int, part: ast.expr
) -> list[tuple[ast.stmt | None, list[ast.stmt], int]]:
    """Path to the innermost statement on that line from the outermost: (owner, its list of statements, place in it).

    Of several on one line it is the one that `part` is of, else the first.
    """
    owner: ast.stmt | None = None
    found: list[tuple[ast.stmt | None, list[ast.stmt], int]] = []
    while True:
        places = [k for k, one in enumerate(body) if covers(one, line)]
        if not places:
            return found
        place = next((k for k in places if len(places) > 1 and _is_part(part, body[k])), places[0])
        found.append((owner, body, place))
        owner = body[place]
        inner = next((one for one in bodies(owner) if any(covers(each, line) for each in one)), None)
        if inner is None or isinstance(owner, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            return found
        body = inner


def _is_part(part: ast.expr, statement: ast.stmt) -> bool:
    return any(node is part for node in ast.walk(statement))


def covers(statement: ast.stmt | ast.expr, line: int) -> bool:
    """True if a line belongs to the statement, or expression."""
    return statement.lineno <= line <= (statement.end_lineno or statement.lineno)


def bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The lists of statements inside one."""
    for name in FIELDS:
        inner = getattr(statement, name, None)
        if isinstance(inner, list) and inner:
            yield inner


def loaded(tree: ast.AST) -> set[str]:
    """Names that are read."""
    return {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def assigned(tree: ast.AST) -> set[str]:
    """Names that are given another object."""
    return {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def loaded_attributes(tree: ast.AST) -> set[str]:
    """Attributes that are read, of objects with a name: `self.scale`."""
    return {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _base(node)
    }


def assigned_attributes(tree: ast.AST) -> set[str]:
    """Attributes that are given another object."""
    return {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def grown(tree: ast.AST) -> set[str]:
    """Names of lists and sets that something is added to."""
    return {
        node.func.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ADDS
        and isinstance(node.func.value, ast.Name)
    }


def changed(tree: ast.AST) -> set[str]:
    """Names that are assigned, or of whose objects a part is: `x = …`, `x[0] = …`, `x.mul_(2)`, `x.append(y)`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            found |= _base(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if (name.endswith("_") and not name.endswith("__")) or name in ADDS:
                found |= _base(node.func.value)
    return found


def _base(node: ast.expr) -> set[str]:
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()
