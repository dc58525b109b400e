"""A class sets its own private fields, never those of a class that it is derived from."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.test_layers import SOURCES, parsed

Fields = dict[str, tuple[list[str], set[str]]]


def fields(trees: list[ast.Module]) -> Fields:
    """By the name of a class: the names of its bases, and the private attributes of `self` that it assigns to."""
    found: Fields = {}
    for tree in trees:
        for node in ast.walk(tree):
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
