"""gradwatch/docs/inspect.md: its examples run from top to bottom and draw every picture that the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.docs.test_pages import fences

PAGE = Path(__file__).parents[2] / "gradwatch" / "docs" / "inspect.md"


def test_the_examples_draw_the_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All blocks as one script: the table, the profile and each picture that the page shows, of the same size."""
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    with torch.random.fork_rng(devices=[]):
        exec(compile("\n".join(fences(text, "python")), PAGE.name, "exec"), {})
    printed = capsys.readouterr().out
    assert "17,658 parameters" in printed
    assert "gradwatch: before the step" in printed
    shown = re.findall(r"\]\((pictures/[\w-]+\.png)\)", text)
    assert len(shown) == 8
    for name in shown:
        with Image.open(PAGE.parent / name) as there, Image.open(tmp_path / Path(name).name) as made:
            assert there.size == made.size
