"""Text files of gradwatch are UTF-8 on every host, whatever encoding its locale has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gradwatch

FILES = sorted(Path(gradwatch.__file__).parent.rglob("*.py"))


def in_the_locales_encoding(call: ast.Call) -> bool:
    """True for a text file that is opened, read or written without an `encoding`."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if any(keyword.arg == "encoding" for keyword in call.keywords):
        return False
    if name in ("read_text", "write_text"):
        return len(call.args) == (name == "write_text")
    function = ast.unparse(call.func)
    if function in ("open", "os.fdopen", "io.open"):
        modes = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
        return not any(isinstance(mode, ast.Constant) and "b" in str(mode.value) for mode in modes)
    return False


@pytest.mark.parametrize(
    "text", ["open(p)", "open(p, 'a')", "p.read_text()", "p.write_text(x)", "os.fdopen(f, 'w')"]
)
def test_a_text_file_without_an_encoding_is_found(text: str) -> None:
    """The law below looks at what opens a text file."""
    assert in_the_locales_encoding(ast.parse(text, mode="eval").body)  # type: ignore[arg-type]


def test_every_text_file_names_its_encoding() -> None:
    """A host with a Latin-9 locale writes and reads the same rule files, journals and reports."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and in_the_locales_encoding(node)
    ]
    assert not found
