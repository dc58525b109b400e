"""Names and attributes of which some statements read the value from before them, and which they then change.

Run again with the values of afterwards, such statements would begin with what the name became later.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator

from gradwatch.localise.loss.interpreter.source_tree import (
    assigned_attributes,
    bodies,
    changed,
    loaded,
    loaded_attributes,
)

PLAIN = frozenset({"requires_grad_", "retain_grad"})
"""Methods that change no value."""


def lost_names(statements: Iterable[ast.stmt], again: Collection[ast.stmt] | None = None) -> set[str]:
    """Names, and attributes (`self.scale`), that are read as they were before, and changed by a later statement.

    Read by those that are run `again` (None: all), and changed by any: what is not run again has changed them, too.
    """
    ordered = list(statements)
    rerun = set(map(id, ordered if again is None else again))
    known: set[str] = set()  # assigned here, in any case
    read: set[str] = set()
    lost: set[str] = set()
    for statement in ordered:
        for part, always in _in_order([statement]):
            own = _of_comprehensions(part)
            lost |= read & (_changed(part) | assigned_attributes(part)) - own
            if id(statement) not in rerun:
                continue
            read |= (loaded(part) | loaded_attributes(part)) - own - known
            if always:
                known |= _assigned(part)
    return lost


def _in_order(statements: Iterable[ast.stmt], always: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Simple statements, and what compound ones evaluate, as they stand; True for those that run in any case."""
    for statement in statements:
        inner = list(bodies(statement))
        if not inner or isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement, always
            continue
        for name in ("test", "iter", "target", "items"):
            part = getattr(statement, name, None)
            for each in part if isinstance(part, list) else () if part is None else (part,):
                yield each, always and not isinstance(statement, (ast.For, ast.AsyncFor))
        for body in inner:
            yield from _in_order(
                [one for one in body if isinstance(one, ast.stmt)],
                always and isinstance(statement, (ast.With, ast.AsyncWith)),
            )


def _changed(part: ast.AST) -> set[str]:
    """`changed`, but for calls that leave values alone."""
    calls = {
        node.func.value.id
        for node in ast.walk(part)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in PLAIN
        and isinstance(node.func.value, ast.Name)
    }
    return changed(part) - calls


def _assigned(part: ast.AST) -> set[str]:
    """Names and attributes that a statement gives another object, as the target of an assignment or of a `with`."""
    if isinstance(part, ast.Assign):
        targets = part.targets
    elif isinstance(part, ast.AnnAssign) and part.value is not None:
        targets = [part.target]
    elif isinstance(part, ast.withitem) and part.optional_vars is not None:
        targets = [part.optional_vars]
    else:
        return set()
    return {name for target in targets for name in _names(target)}


def _names(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Attribute):
        yield ast.unparse(target)
    for part in target.elts if isinstance(target, (ast.Tuple, ast.List)) else ():
        yield from _names(part)


def _of_comprehensions(part: ast.AST) -> set[str]:
    """Names that only a comprehension, or a lambda, of it knows."""
    found: set[str] = set()
    for node in ast.walk(part):
        if isinstance(node, ast.comprehension):
            found |= {one.id for one in ast.walk(node.target) if isinstance(one, ast.Name)}
        elif isinstance(node, ast.Lambda):
            found |= {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
    return found
