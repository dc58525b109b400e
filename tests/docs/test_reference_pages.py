"""gradwatch/docs/reference is what the code says now."""

from __future__ import annotations

import pytest

from gradwatch.cli.docs.markdown_text import escaped, linked, prose, table
from gradwatch.cli.docs.reference_pages import FOLDER, pages
from gradwatch.cli.entry_point import COMMANDS
from gradwatch.detectors import DETECTORS


def test_made_anew_nothing_changes() -> None:
    """After a change: python -m gradwatch.cli.docs.reference_pages."""
    shipped = {
        str(path.relative_to(FOLDER)): path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.md")
    }
    assert shipped == pages()


OWN = sorted(name for name, cls in DETECTORS.items() if cls.__module__.startswith("gradwatch"))


@pytest.mark.parametrize("kind", OWN)
def test_every_kind_has_a_page(kind: str) -> None:
    """With a rule file that is accepted (tests/docs/test_pages.py) and a row for every key."""
    text = (FOLDER / "kinds" / f"{kind}.md").read_text(encoding="utf-8")
    assert f"detect: {{kind: {kind}" in text
    assert f"(kinds/{kind}.md)" in (FOLDER / "kinds.md").read_text(encoding="utf-8")


def test_every_command_is_there() -> None:
    """With its options; those that are hidden are not."""
    text = (FOLDER / "commands.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        assert f"## gradwatch {command}" in text
    assert "`--beside" not in text


def test_docstrings_become_markdown() -> None:
    """What is in backticks is markup, nothing else; errors that are raised are a list; cells keep their pipes."""
    assert escaped("a*b < `c*d` [x]") == r"a\*b \< `c*d` \[x\]"
    raises = "One.\n\nRaises:\n    KeyError: none.\n    more of it."
    assert prose(raises) == "One.\n\nRaises:\n\n- KeyError: none. more of it."
    assert table(("a", "b"), [("x | y", "z\nw")]) == "| a | b |\n|---|---|\n| x \\| y | z w |"
    assert (
        linked("`drift` `x` [`drift`](y)", {"drift": "drift.md"}.get)
        == "[`drift`](drift.md) `x` [`drift`](y)"
    )
