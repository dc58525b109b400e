"""Tables, colour and progress on a terminal, in a pipe, and what they cost a command that shows none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwatch.cli import main, terminal
from gradwatch.cli.terminal import Counter, paint, table
from tests.cli.pseudo_terminal import PseudoTerminal

HEADER = ("rule", "where", "action")


@pytest.fixture
def tty(monkeypatch: pytest.MonkeyPatch) -> Iterator[PseudoTerminal]:
    """A terminal with colours and a cursor."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = PseudoTerminal()
    yield terminal
    terminal.read()


def test_wide_characters_take_two_columns() -> None:
    """Names in Chinese, and an emoji of several code points, leave the columns behind them where they are."""
    drawn = table(
        HEADER, [("spike", "层.权重", "clip"), ("nan", "👩‍🔬.bias", "skip"), ("é", "w", "")], indent="  "
    )
    assert drawn.splitlines() == [
        "  rule   where    action",
        "  spike  层.权重  clip",
        "  nan    👩‍🔬.bias  skip",
        "  é      w",
    ]


def test_the_caret_stands_below_wide_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rules check` underlines the columns in which a terminal shows the wrong key."""
    path = tmp_path / "wide.gradwatch.yaml"
    path.write_text("version: 1\nrules: {层归: {错误: 1}}\n", encoding="utf-8")
    main(["rules", "check", str(path)])
    told = capsys.readouterr().err.splitlines()
    carets = {told[i + 1] for i, line in enumerate(told) if line.endswith("{层归: {错误: 1}}")}
    assert "  |                ^^^^" in carets


def test_a_narrow_terminal_wraps_and_cuts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is one line however long: what reads the lines of a pipe finds them whole."""
    monkeypatch.setenv("COLUMNS", "20")
    assert len(table(HEADER, [("r" * 300, "w" * 300, "a b " * 100)]).splitlines()) == 2


def test_only_what_is_painted_has_escape_codes(tty: PseudoTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blanks between columns are plain, and no line ends in any."""
    monkeypatch.setattr(sys, "stdout", tty.stream)
    assert table(("a", "b"), [("long", paint("x", "red")), (paint("y", "dim"), "longer")]).splitlines() == [
        "\x1b[1ma\x1b[0m     \x1b[1mb\x1b[0m",
        "long  \x1b[31mx\x1b[0m",
        "\x1b[2my\x1b[0m     longer",
    ]


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_no_variable_forces_colour_into_a_pipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rich would obey is not obeyed: a pipe never gets an escape code."""
    monkeypatch.setenv(name, "1")
    assert "\x1b" not in table(("a",), [(paint("x", "red"),)])


def test_progress_is_a_line_on_stderr_that_goes_away(
    tty: PseudoTerminal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once patience is over; nothing of it is on stdout, and the last thing done is to erase it."""
    monkeypatch.setattr(sys, "stderr", tty.stream)
    monkeypatch.setattr(terminal, "PATIENCE", 0.0)
    count = Counter("{:,} of {:,} folders read")
    count(1_000, 2_000)
    count.close()
    count.close()
    drawn = tty.read()
    assert "1,000 of 2,000 folders read" in drawn
    assert drawn.endswith("\x1b[1A\x1b[2K")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("patience", "term"), [(float("inf"), "xterm"), (0.0, "dumb")])
def test_progress_is_for_what_takes_long_on_a_terminal_with_a_cursor(
    patience: float, term: str, tty: PseudoTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is drawn before patience is over, nor where a line cannot be drawn over."""
    monkeypatch.setattr(sys, "stderr", tty.stream)
    monkeypatch.setattr(terminal, "PATIENCE", patience)
    monkeypatch.setenv("TERM", term)
    count = Counter("{} read")
    count(1)
    count.close()
    assert tty.read() == ""


def test_progress_in_a_pipe_is_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even when it takes long."""
    monkeypatch.setattr(terminal, "PATIENCE", 0.0)
    count = Counter("{} read")
    count(1)
    count.close()
    assert capsys.readouterr() == ("", "")


def test_watching_a_command_imports_nothing_that_draws(tmp_path: Path) -> None:
    """`import gradwatch`, and `gradwatch run` up to where it becomes the command, load neither rich nor shtab."""
    code = (
        "import os, sys\n"
        "drawing = lambda: {name.partition('.')[0] for name in sys.modules} & {'rich', 'shtab', 'pygments'}\n"
        "import gradwatch\n"
        "assert not drawing(), drawing()\n"
        "from gradwatch.cli import main\n"
        "def become(*command): assert not drawing(), drawing(); print('becomes', command[0]); os._exit(0)\n"
        "os.execvpe = become\n"
        "sys.stdout.reconfigure(line_buffering=True)\n"
        f"main(['run', '--dir', {str(tmp_path)!r}, '--', 'true'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "becomes true\n", done.stderr
