"""Syntax trees of functions: of those whose file says what was compiled, and of no others."""

from __future__ import annotations
import __future__

import ast
import linecache
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.loss.interpreter.source_tree import tree_of

SOURCE = """
import math


def outer(factor):
    def loss(x):
        y = x * factor
        return math.sqrt(y) + 1.5

    return loss
"""


def loss_in(file: Path, source: str = SOURCE) -> Callable[[float], float]:
    """Compile and run a file; the function in it."""
    file.write_text(source, encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(source, str(file), "exec", dont_inherit=True), names)
    loss: Callable[[float], float] = names["outer"](2.0)
    return loss


def edited(file: Path, old: str, new: str) -> None:
    """Edit a file; whoever looks sees that at once."""
    file.write_text(file.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    linecache.checkcache(str(file))


def test_a_function_within_a_function(tmp_path: Path) -> None:
    """Found by its name and its first line."""
    tree = tree_of(loss_in(tmp_path / "train.py").__code__)
    assert isinstance(tree, ast.FunctionDef)
    assert (tree.name, tree.lineno) == ("loss", 6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x * factor", "x + factor"),
        ("1.5", "2.5"),
        ("math.sqrt", "math.log"),
        ("        y = x", "        # scaled\n        y = x"),
        ("        return", "\n        return"),
    ],
)
def test_an_edited_function_is_refused(tmp_path: Path, old: str, new: str) -> None:
    """Another operator, number or name, or another line for the same: its first line is where it was in each case."""
    file = tmp_path / "train.py"
    code = loss_in(file).__code__
    edited(file, old, new)
    with pytest.raises(Refused):
        tree_of(code)


def test_an_edit_elsewhere_is_none(tmp_path: Path) -> None:
    """What stands after the function may change."""
    file = tmp_path / "train.py"
    code = loss_in(file).__code__
    edited(file, "    return loss", "    return loss  # made")
    assert isinstance(tree_of(code), ast.FunctionDef)


def test_an_edited_script_is_refused(tmp_path: Path) -> None:
    """So is one whose statements run while its file changes."""
    file = tmp_path / "train.py"
    loss_in(file)
    code = compile(SOURCE, str(file), "exec", dont_inherit=True)
    assert isinstance(tree_of(code), ast.Module)
    edited(file, "import math", "import math, os")
    with pytest.raises(Refused):
        tree_of(code)


def test_a_script_that_inherited_a_future(tmp_path: Path) -> None:
    """Run by a shell in which `from __future__ import annotations` was written, code is compiled by other flags."""
    file = tmp_path / "train.py"
    loss_in(file)
    code = compile(SOURCE, str(file), "exec", __future__.annotations.compiler_flag)
    assert isinstance(tree_of(code), ast.Module)


def test_a_statement_compiled_alone(tmp_path: Path) -> None:
    """Notebooks compile a cell statement by statement: each is known again."""
    file = tmp_path / "cell.py"
    file.write_text("a = 1\nfor k in range(3):\n    a += k\n")
    cell = ast.parse(file.read_text(encoding="utf-8"))
    code: CodeType = compile(ast.Module(cell.body[1:], []), str(file), "exec", dont_inherit=True)
    tree = tree_of(code)
    assert isinstance(tree, ast.Module)
    assert [type(one) for one in tree.body] == [ast.For]
