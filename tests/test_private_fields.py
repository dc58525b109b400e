"""A class sets its own attributes: no private ones of its bases, and none is set from another file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_layers import SOURCES, nodes, parsed, place_of

Fields = dict[str, tuple[list[str], set[str]]]


def fields(trees: list[ast.Module]) -> Fields:
    """By the name of a class: the names of its bases, and the private attributes of `self` that it assigns to."""
    found: Fields = {}
    for tree in trees:
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
                found[node.name] = bases, set(private_fields(node))
    return found


def private_fields(node: ast.ClassDef) -> Iterator[str]:
    for each in ast.walk(node):
        stored = isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if stored and ast.unparse(each.value) == "self" and each.attr.startswith("_"):
            yield each.attr


def set_twice(found: Fields) -> set[str]:
    """`Class._field` of every field that a base sets, too, however far up."""
    wrong = set()
    for name, (bases, own) in found.items():
        above, seen = list(bases), {name}
        while above:
            base = above.pop()
            if base in found and base not in seen:
                seen.add(base)
                above += found[base][0]
                wrong |= {f"{name}.{field}" for field in own & found[base][1]}
    return wrong


def test_no_class_sets_private_fields_of_its_base() -> None:
    """What a class keeps to itself changes in its own methods."""
    found = fields(
        [parsed(path) for path in SOURCES if "integrations" not in path.parts]
    )  # one name, two classes
    assert set_twice(found) == set()


def test_a_field_that_is_set_twice_is_found() -> None:
    """Also two classes further up, and where it is added to."""
    code = """
class A:
    def f(self): self._x = self.y = 1
class B(A):
    def g(self): self.y = 2
class C(B):
    def h(self): self._x += 1
"""
    assert set_twice(fields([ast.parse(code)])) == {"C._x"}


class Declared(NamedTuple):
    """The files of the package that have a class with an attribute of this name, by that name."""

    files: dict[str, set[Path]]

    @classmethod
    def by(cls, trees: dict[Path, ast.Module]) -> Declared:
        """Attributes that a class names in its body, in `__slots__`, or assigns to in a method of its own."""
        files: dict[str, set[Path]] = {}
        for path, tree in trees.items():
            for node in nodes(tree):
                for name in declared_by(node) if isinstance(node, ast.ClassDef) else ():
                    files.setdefault(name, set()).add(path)
        return cls(files)


def declared_by(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
        yield from (one.id for one in targets if isinstance(one, ast.Name))
        if isinstance(each, ast.FunctionDef):
            yield each.name
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__slots__":
            yield from (str(one.value) for one in ast.walk(each.value) if isinstance(one, ast.Constant))
    for one in stores(node):
        if ast.unparse(one.value) in OWN:
            yield one.attr


OWN = {"self", "cls"}
Scope = dict[str, tuple[str, ...]]
"""What is known of the names in a function: of each the classes it may be of, () = one that was made there."""


def stores(node: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that something is assigned to, is added to, or that are deleted."""
    for each in nodes(node) if isinstance(node, ast.Module) else ast.walk(node):
        if isinstance(each, ast.Attribute) and not isinstance(each.ctx, ast.Load):
            yield each


def scope_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Scope:
    """The annotated arguments of a function, and what it has called a class for."""
    found: Scope = {}
    arguments = function.args
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if one.annotation is not None:
            found[one.arg] = tuple(re.findall(r"\w+", ast.unparse(one.annotation)))
    for each in ast.walk(function):
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call):
            name = ast.unparse(each.value.func).rpartition(".")[2]
            made = re.match(r"_?[A-Z]", name)
            found |= {one.id: () for one in each.targets if isinstance(one, ast.Name) and made}
    return found


def set_from_other_files(path: Path, tree: ast.Module, declared: Declared) -> set[str]:
    """`x.attribute` wherever that is assigned to, and belongs to a class of another file of the package.

    By the annotation of x where it is an argument; else by the attribute, which no class of this file has. What a
    function has made itself it may fill in.
    """
    ours = {
        alias.asname or alias.name
        for node in nodes(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gradwatch")
        for alias in node.names
    }
    here = {node.name for node in nodes(tree) if isinstance(node, ast.ClassDef)}
    foreign = {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    } - ours
    scopes: dict[ast.Attribute, Scope] = {}
    for node in nodes(tree):  # outer functions before those in them
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            known = scope_of(node)
            for one in stores(node):
                scopes[one] = {**scopes.get(one, {}), **known}
    found = set()
    for one in stores(tree):
        owner = ast.unparse(one.value)
        classes = scopes.get(one, {}).get(owner)
        if owner in OWN or owner in foreign or classes == ():
            continue
        elsewhere = path not in declared.files.get(one.attr, {path})
        if classes is not None and (ours | here).intersection(classes):
            elsewhere = not here.intersection(classes)
        elif classes is not None:
            elsewhere = False
        if elsewhere:
            found.add(ast.unparse(one))
    return found


FILLED_IN = {
    "localise/held_calls/model_recorder.py": ("call.", "draws.calls"),
    "taps/backward_entry.py": ("TOTALS.backwards", "TOTALS.grad_calls"),
}
"""A recorded call as its forward and backward run, and the backwards of the process as each begins: where caches are
cold, each Python call more costs microseconds (`tests/session/test_step_calls.py`)."""
OF_LIBRARIES = {"action.complete", "drawn.overflow", "module.training", "self._timer.interval"}
"""Of argparse, rich, torch and threading."""


def test_no_attribute_is_set_from_another_file() -> None:
    """What an object knows changes in its own file: others call a method that says what happens."""
    trees = {path: parsed(path) for path in SOURCES}
    declared = Declared.by(trees)
    wrong = {}
    for path, tree in trees.items():
        place = place_of(path)
        beside = FILLED_IN.get(place, ())
        found = set_from_other_files(path, tree, declared) - OF_LIBRARIES
        found = {one for one in found if not one.startswith(beside)}
        wrong |= {place: found} if found else {}
    assert wrong == {}


OTHER_FILE = """
class Other:
    __slots__ = ("slot",)
    field: int = 0
    def f(self): self.own = 1
"""


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f(x): x.own, y = 1, 2", {"x.own"}),
        ("def f(x):\n    x.a.field += 1\n    del x.slot", {"x.a.field", "x.slot"}),
        ("class Here:\n    own: int\ndef f(x): x.own = 1", set()),
        (
            "class Here:\n    own: int\nfrom gradwatch.other import Other\ndef f(x: Other): x.own = 1",
            {"x.own"},
        ),
        ("class Here:\n    own: int\ndef f(x: Here | None): x.own = 1", set()),
        ("def f(x: Namespace): x.own = 1", set()),
        ("import sys\nsys.own = 1", set()),
        ("class Here:\n    def f(self): self.own = 1", set()),
        ("def f():\n    x = Other()\n    x.own = 1", set()),
        ("def f(x): x.unknown = x.own", set()),
    ],
)
def test_an_attribute_set_from_another_file_is_found(code: str, found: set[str]) -> None:
    """In a tuple, where it is added to or deleted, and through other objects; not what was made there."""
    here, other = Path("here.py"), Path("other.py")
    trees = {here: ast.parse(code), other: ast.parse(OTHER_FILE)}
    assert set_from_other_files(here, trees[here], Declared.by(trees)) == found
