"""Names that two packages may want, and packages that are not imported yet."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gradwatch.errors import GradwatchError
from gradwatch.runtime.registry import Registry


def test_a_name_belongs_to_the_first() -> None:
    """The same again is harmless; another one is refused, with what has the name."""
    numbers: Registry[int] = Registry("number", "no-such-group")
    thousand = 1000
    assert numbers.register("k", thousand) is thousand
    assert numbers.register("k", thousand) is thousand
    with pytest.raises(GradwatchError, match="number 'k' is registered already, by 1000"):
        numbers.register("k", 1024)
    assert numbers == {"k": thousand}


def test_a_class_of_the_same_module_and_name_takes_the_place() -> None:
    """As where an import was interrupted, or a cell of a notebook is run again; not one made inside a function."""
    kinds: Registry[type] = Registry("kind", "no-such-group")
    first, again, other = (type("Kind", (), {"__module__": module}) for module in ("a", "a", "b"))
    kinds.register("k", first)
    assert kinds.register("k", again) is again
    assert kinds == {"k": again}
    with pytest.raises(GradwatchError, match="registered already"):
        kinds.register("k", other)


def test_plugins_are_loaded_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, by the name of their entry point; None where no package has one."""
    loaded: list[str] = []

    class Entry:
        name = "k"

        def load(self) -> int:
            loaded.append("k")
            return 1000

    def entry_points(group: str) -> list[Entry]:
        asked.append(group)
        return [Entry()] if group == "plugins" else []

    asked: list[str] = []

    monkeypatch.setattr("gradwatch.runtime.registry.entry_points", entry_points)
    numbers: Registry[int] = Registry("number", "plugins")
    found = [numbers.find(name, lambda entry: numbers.register("k", entry)) for name in ("k", "k", "m")]
    assert found == [1000, 1000, None]
    assert loaded == ["k"]
    assert asked == ["plugins"]


def test_a_package_that_comes_meanwhile_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As by `pip install` in a notebook, after a name was asked for in vain."""
    monkeypatch.syspath_prepend(tmp_path)
    numbers: Registry[Any] = Registry("number", "plugins-of-a-test")
    assert numbers.find("pi", lambda entry: numbers.register("pi", entry)) is None
    folder = tmp_path / "circle-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: circle\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[plugins-of-a-test]\npi = math:pi\n")
    assert numbers.find("pi", lambda entry: numbers.register("pi", entry)) == math.pi
