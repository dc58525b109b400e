"""The statements that computed a loss: those from the call of the model to `backward()` that its value depends on.

Found in the syntax tree of the function under way, from its `backward()` upwards, within the innermost loop around it.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.loss.interpreter.lost_names import lost_names
from gradwatch.localise.loss.interpreter.source_tree import (
    Body,
    assigned,
    changed,
    covers,
    grown,
    loaded,
    own_nodes,
    path_to,
)

Statements: TypeAlias = tuple[tuple[tuple[ast.With, ...], ast.stmt], ...]
"""Statements in their order, in each case with the `with` blocks around it."""
LOOPS = (ast.For, ast.While, ast.AsyncFor)
BACKWARDS = 4  # calls of `backward` that may have been the last one
DEFINITIONS = 4  # of a name that is made of itself
REARMOST = 6  # statements at which a loss may begin, where no call of the model is among them


@dataclass(frozen=True, slots=True)
class LossStatements:
    """Statements that a loss, `root`, is computed by; `context` are the `with` blocks around its `backward()`."""

    before: Statements
    root: ast.expr
    context: tuple[ast.With, ...]


def backwards_of(tree: Body, line: int, exactly: bool) -> list[ast.Call]:
    """The calls of a method `backward`: the one on that line, or (not `exactly`) the last ones above it.

    Which of the latter ran is not known where they stand in branches of an `if`: the last comes first.
    """
    calls = [
        node
        for node in own_nodes(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("backward", "manual_backward")
    ]
    if exactly:
        found = [one for one in calls if one.lineno <= line <= (one.end_lineno or one.lineno)]
        return found if len(found) == 1 else []
    above = [one for one in calls if one.lineno <= line]
    return sorted(above, key=lambda one: one.lineno, reverse=True)[:BACKWARDS]


def root_of(call: ast.Call) -> ast.expr | None:
    """The expression that a call of `backward` differentiates; None where it is given a gradient."""
    assert isinstance(call.func, ast.Attribute)
    if any(one.arg not in ("retain_graph", "create_graph") for one in call.keywords):
        return None
    owner = call.func.value
    if call.func.attr == "manual_backward" or (isinstance(owner, ast.Name) and owner.id in _WRAPPERS):
        return call.args[0] if len(call.args) == 1 else None
    if isinstance(owner, ast.Attribute) and owner.attr in _WRAPPERS:
        return call.args[0] if len(call.args) == 1 else None
    return None if call.args else owner


CHANGED = (
    "`{name}` is changed between the call of the model and `backward()`, and what it was before is not known"
)
_WRAPPERS = ("accelerator", "fabric", "engine")


def loss_statements(
    tree: Body, line: int, root: ast.expr, called: Collection[int]
) -> Iterator[LossStatements | Refused]:
    """The statements that `root` depends on, the shortest sequence first that begins at a call of the model.

    `called` are the lines of this function that call a model; without them every statement is tried as the first. None
    if the way to `root` leads past all of these lines: it is in another branch than the one that ran. Refused where a
    name has been given another value since, and the one that it had is not known.
    """
    if isinstance(tree, ast.Lambda):
        return
    path = path_to(tree.body, line, root)
    before: list[ast.stmt | ast.expr] = [root, *(one for _, body, place in path for one in body[:place])]
    if called and not any(covers(one, at) for one in before for at in called):
        return
    inner = max((k for k, (owner, _, _) in enumerate(path) if isinstance(owner, LOOPS)), default=0)
    path = path[inner:]
    ordered: list[tuple[tuple[ast.With, ...], ast.stmt]] = []
    around: tuple[ast.With, ...] = ()
    for owner, body, place in path:
        if isinstance(owner, ast.With):
            around = (*around, owner)
        ordered += [(around, one) for one in body[:place]]
    first = next((k for k, (_, one) in enumerate(ordered) if any(covers(one, line) for line in called)), None)
    if first is not None:
        since = ordered[first:]
        sliced, wanted = needed(since, loaded(root))
        # A sum that goes on (`loss = loss + …`), or a list, is to begin where it began.
        carried = wanted & {name for _, one in since for name in assigned(one) | grown(one)}
        begun, given = needed(ordered[:first], carried) if carried else ((), set())
        since_then = [one for _, one in since]
        lost = lost_names(since_then, [one for _, one in sliced]) - (carried - given)
        if lost:
            yield Refused(CHANGED.format(name=min(lost)))
            return
        # Values that do not depend on the model are still there, unless they were changed since; statements that draw
        # numbers need all those before.
        shortest = depending(sliced, called)
        if lost_names(since_then, [one for _, one in shortest]) - (carried - given):
            shortest = sliced
        tried = dict.fromkeys((shortest, sliced, tuple(since)))
        yield from (LossStatements((*begun, *one), root, around) for one in tried)
        return
    if any(covers(root, line) for line in called):  # `model(x).square().mean().backward()`
        yield LossStatements((), root, around)
    whole, _ = needed(ordered, loaded(root))
    for count in range(1, min(len(whole), REARMOST) + 1):
        yield LossStatements(whole[-count:], root, around)


def needed(
    ordered: Sequence[tuple[tuple[ast.With, ...], ast.stmt]], names: set[str]
) -> tuple[Statements, set[str]]:
    """Statements that the names depend on, and the names that they take from before."""
    kept: list[tuple[tuple[ast.With, ...], ast.stmt]] = []
    wanted = set(names)
    for around, statement in reversed(ordered):
        given = changed(statement)
        if given.isdisjoint(wanted):
            continue
        kept.append((around, statement))
        if isinstance(statement, ast.Assign) and all(isinstance(one, ast.Name) for one in statement.targets):
            wanted -= given
        wanted |= loaded(statement)
    return tuple(reversed(kept)), wanted


def depending(statements: Statements, called: Collection[int]) -> Statements:
    """Statements that call a model, on the lines `called`, or depend on what one gave."""
    kept: list[tuple[tuple[ast.With, ...], ast.stmt]] = []
    names: set[str] = set()
    for around, statement in statements:
        if any(covers(statement, line) for line in called) or not loaded(statement).isdisjoint(names):
            kept.append((around, statement))
            names |= changed(statement)
    return tuple(kept)


def definition_of(tree: Body, name: str, line: int) -> tuple[ast.stmt, ...]:
    """The last statement above a line that assigns a name, and nothing else; () where another one changes it since.

    With those before it as far as each is made of the same name (`w = 1 / n`, then `w = w / w.sum()`).
    """
    found: list[ast.stmt] = []
    while len(found) < DEFINITIONS:
        above = [
            node
            for node in own_nodes(tree)
            if isinstance(node, ast.stmt)
            and (node.lineno < found[0].lineno if found else node.lineno <= line)
            and name in changed(node)
            and not _is_compound(node)
        ]
        if not above:
            return ()
        last = max(above, key=lambda one: one.lineno)
        alone = (
            isinstance(last, ast.Assign) and len(last.targets) == 1 and isinstance(last.targets[0], ast.Name)
        )
        if not alone:
            return ()
        found.insert(0, last)
        if name not in loaded(last):
            return tuple(found)
    return ()


def _is_compound(node: ast.stmt) -> bool:
    return hasattr(node, "body")
