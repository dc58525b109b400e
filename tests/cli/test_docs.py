"""`gradwatch docs`: the list of pages, one of them in a pipe, on a terminal, in a browser."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gradwatch.cli import main
from gradwatch.cli.docs.command import page_html, topics
from tests.cli.terminal_session import TerminalSession
from tests.support.launch_cases import GRADWATCH

Captured = pytest.CaptureFixture[str]


def test_the_list_begins_with_what_a_newcomer_needs(capsys: Captured) -> None:
    """Every page has a title; kinds of detectors are counted."""
    assert main(["docs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["start", "concepts", "howto", "using"]
    assert all(len(line.split()) > 1 for line in lines[1:24])
    assert "34 kinds of detectors" in lines[-1]
    assert main(["docs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["start"]["title"] == "Start in five minutes"


@pytest.mark.parametrize("topic", ["spike", "kinds/spike", "kinds/spike.md"])
def test_a_pipe_gets_the_page_as_it_is(topic: str, capsys: Captured) -> None:
    """A kind by its name alone, too."""
    assert main(["docs", topic]) == 0
    assert capsys.readouterr().out == topics()["kinds/spike"].read_text(encoding="utf-8")


def test_a_page_that_is_not_there(capsys: Captured) -> None:
    """The nearest name, and the list."""
    assert main(["docs", "rulez"]) == 2
    assert "did you mean 'rules'?" in capsys.readouterr().err


def test_a_word_that_is_no_page_leads_to_those_that_have_it(capsys: Captured) -> None:
    """A key of a rule has no page of its own: the pages in which it stands most often are named."""
    assert main(["docs", "cooldown"]) == 2
    assert "there is no page 'cooldown'; more of it stands in: rule-file" in capsys.readouterr().err


def test_a_terminal_gets_it_drawn(tmp_path: Path) -> None:
    """Tables with borders, through the pager that the environment names."""
    env = {**os.environ, "PAGER": "cat", "LC_ALL": "C.UTF-8"}
    with TerminalSession([*GRADWATCH, "docs", "drift"], tmp_path, env) as session:
        assert session.process.wait(60) == 0
        text = session.wait_for("All kinds")
        assert "| key |" not in text
        assert "━" in text or "─" in text


def test_a_browser_gets_a_page_without_scripts() -> None:
    """Tables and code are HTML, links lead to the other pages as files."""
    html = page_html("start", topics()["start"])
    assert "<table>" in page_html("spike", topics()["kinds/spike"])
    assert "<code" in html
    assert "<script" not in html
    assert "Made by" not in page_html("spike", topics()["kinds/spike"])
    assert f'<base href="{topics()["start"].parent.as_uri()}/">' in html


def test_without_a_browser_the_file_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """It can be opened by hand; the exit status is 1."""
    monkeypatch.setenv("BROWSER", "/bin/false")
    monkeypatch.setenv("DISPLAY", "")
    assert main(["docs", "start", "--browser"]) in (0, 1)
    place = capsys.readouterr().out.split()[0]
    assert "Start in five minutes" in Path(place).read_text(encoding="utf-8")
    Path(place).unlink()
