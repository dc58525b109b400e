"""`gradwatch completion`, in the shells that it is for."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from gradwatch.cli import main
from gradwatch.cli.completion import SHELLS
from gradwatch.cli.entry_point import COMMANDS
from tests.support.launch_cases import GRADWATCH

BASH = """
source <({command} completion bash)
complete -p gradwatch
completed() {{
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_gradwatch; echo ${{COMPREPLY[*]}}
}}
"""
LINES = {
    "completed gradwatch ''": "run top init rules report backtest tune audit explain replay serve deploy doctor "
    "selftest demo docs completion version",
    "completed gradwatch ru": "run rules",
    "completed gradwatch rules ''": "check fmt test kinds columns actions policies sinks explain list schema",
    "completed gradwatch run --strict": "--strict --strict-rules",
    "completed gradwatch run --on-config-error ''": "exit continue",
    "completed gradwatch run --rules def": "default",
    "completed gradwatch run --rules mi": "mine.yaml mi_folder",
    "completed gradwatch rules check mine": "mine.yaml",
    "completed gradwatch rules test mine": "mine.yaml",
    "completed gradwatch audit --dir mi": "mi_folder",
    "completed gradwatch run --rules default -- mi": "mi.txt mi_folder mine.yaml",
    "completed gradwatch completion ''": "bash zsh tcsh",
}


def test_bash_completes_commands_options_and_rule_files(tmp_path: Path) -> None:
    """Loaded as the help says, in a folder with a rule file, another file and a folder."""
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "mi.txt").touch()
    (tmp_path / "mi_folder").mkdir()
    script = BASH.format(command=shlex.join(GRADWATCH)) + "\n".join(LINES)
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    loaded, *completed = done.stdout.splitlines()
    assert loaded == "complete -o bashdefault -F _shtab_gradwatch gradwatch", done.stderr
    found = {line: sorted(words.split()) for line, words in zip(LINES, completed, strict=True)}
    assert found == {line: sorted(words.split()) for line, words in LINES.items()}


@pytest.mark.parametrize(("shell", "check"), [("zsh", "-n"), ("tcsh", "-n")])
def test_other_shells_can_read_their_script(
    shell: str, check: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the shell is installed it finds no fault in the script."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    done = subprocess.run([shell, check, str(tmp_path / "script")], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_every_command_is_in_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Made from the parser, so that none is forgotten."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in COMMANDS:
        assert command in script


def test_an_unknown_shell_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    """With those there are."""
    assert main(["completion", "cmd"]) == 2
    said = capsys.readouterr().err
    assert all(shell in said for shell in SHELLS)
