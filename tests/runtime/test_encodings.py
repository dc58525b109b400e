"""Text files of gradwatch are UTF-8 on every host, whatever encoding its locale has."""

from __future__ import annotations

import ast

import pytest

from tests.test_layers import SOURCES, nodes, parsed


def in_the_locales_encoding(call: ast.Call) -> bool:
    """True for a text file that is opened, read or written without an `encoding`."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if any(keyword.arg == "encoding" for keyword in call.keywords):
        return False
    if name in ("read_text", "write_text"):
        return len(call.args) == (name == "write_text")
    function = ast.unparse(call.func) if name in ("open", "fdopen") else ""
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
        for path in SOURCES
        for node in nodes(parsed(path))
        if isinstance(node, ast.Call) and in_the_locales_encoding(node)
    ]
    assert not found
