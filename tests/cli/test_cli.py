"""The command line: what it prints, where, and with which exit status."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import gradwatch
from gradwatch import policies
from gradwatch.cli import main
from gradwatch.rules.problem_codes import CODES
from tests.support.launch_cases import GRADWATCH

GOOD = "version: 1\nrules:\n  nan: {detect: {kind: nonfinite}, optional: true}\n"
BAD = "version: 1\nrules:\n  nan: {detect: {kind: nonfinit}}\n  two: {detekt: {kind: above}}\n"


@pytest.fixture
def good(tmp_path: Path) -> str:
    """A valid rule file."""
    path = tmp_path / "good.gradwatch.yaml"
    path.write_text(GOOD)
    return str(path)


@pytest.fixture
def bad(tmp_path: Path) -> str:
    """A rule file with two problems, on lines 3 and 4."""
    path = tmp_path / "bad.gradwatch.yaml"
    path.write_text(BAD)
    return str(path)


def shell(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A real process, as a user starts it."""
    environment = {**os.environ, **env}
    return subprocess.run([*GRADWATCH, *words], capture_output=True, text=True, timeout=250, env=environment)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["run", "--help"],
        ["rules", "--help"],
        ["rules", "check", "--help"],
        ["doctor", "--help"],
        ["demo", "--help"],
        ["version", "--help"],
    ],
)
def test_help_is_there_for_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` exits 0 and says how to use the command."""
    assert main(words) == 0
    assert "usage: gradwatch" in capsys.readouterr().out


def test_help_and_rules_need_no_torch(good: str) -> None:
    """Neither --help nor anything about rule files imports torch; --help not even numpy or pydantic."""
    code = (
        f"{GRADWATCH[2].rsplit(';', 1)[0]}; status = c.main(sys.argv[1:]); "
        "print(status, [name for name in ('torch', 'numpy', 'pydantic') if name in sys.modules])"
    )
    for words, loaded in ((["--help"], "[]"), (["rules", "check", good], "['numpy', 'pydantic']")):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=250
        )
        assert done.stdout.splitlines()[-1] == f"0 {loaded}", done.stderr


@pytest.mark.parametrize("words", [[], ["no-such"], ["run", "--no-such", "x"], ["rules"], ["rules", "check"]])
def test_a_wrong_command_line_is_exit_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be understood is said on stderr, with the usage."""
    assert main(words) == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "--listen", "nowhere", "--", "true"], "127.0.0.1:29440"),
        (["run", "--listen", "127.0.0.1:99999", "--", "true"], "65535"),
        (["run", "--run-id", "../x", "--", "true"], "letters"),
        (["run"], "gradwatch run -- python train.py"),
        (["run", "--"], "gradwatch run -- python train.py"),
        (["doctor", "--model", "nonsense", "--seconds", "0.1"], "MODULE:FACTORY"),
        (["rules", "explain", "GW999"], "GW999"),
        (["rules", "list", "--rules", "no-such-pack"], "GW001"),
        (["demo", "--rules", "no-such-pack"], "GW001"),
    ],
)
def test_a_wrong_setting_is_exit_2_and_says_what_to_write(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message holds what was wrong, or an example of what is right."""
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_check_accepts_good_files_and_packs(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A valid file and a pack by name: exit 0, nothing on stderr."""
    assert main(["rules", "check", good, "default"]) == 0
    told = capsys.readouterr()
    assert told.out.count("ok ") == 2
    assert told.err == ""


@pytest.mark.parametrize(
    ("sinks", "note"),
    [("[pushgateway]", "no prometheus, no journal, no log: `sinks:`"), ("[log, journal, prometheus]", "")],
)
def test_check_notes_default_sinks_that_a_list_leaves_out(
    sinks: str, note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A note and no problem: without a journal nothing can be reported or explained."""
    path = tmp_path / "rules.yaml"
    path.write_text(f"version: 1\nextends: [default]\nsinks: {sinks}\n", encoding="utf-8")
    assert main(["rules", "check", str(path)]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if "`sinks:`" in line]
    assert [line.startswith(f"note  {note}") for line in notes] == ([True] if note else [])


def test_check_shows_every_problem_with_its_place(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All problems at once, framed with file:line:column, the caret and the code; exit 1."""
    assert main(["rules", "check", bad]) == 1
    told = capsys.readouterr().err
    assert f"--> {bad}:3:" in told
    assert f"--> {bad}:4:" in told
    assert "^" in told
    assert "rules explain GW" in told
    assert "\x1b" not in told


def test_check_speaks_json(bad: str, good: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same for a machine: problems with path, line, column and code."""
    assert main(["rules", "check", "--json", bad, good]) == 1
    document = json.loads(capsys.readouterr().out)
    first, second = document["files"]
    assert first["problems"][0]["line"] == 3
    assert document["problems"] == len(first["problems"]) >= 2
    assert second["ok"] is True
    assert second["enabled"] == 1


def test_check_says_what_columns_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--cost`: cadence and reads of each column, with `--model` in bytes a step; a wrong model is named."""
    (tmp_path / "made.py").write_text(
        "from torch import nn\nbuild = lambda: nn.Linear(1000, 500)\nsize = lambda: 3\n"
        "bare = lambda: nn.ReLU(); one = lambda: nn.Linear(3, 1, bias=False)\n"
        "lazy = lambda: nn.LazyLinear(3)\nwrong = lambda: 1 / 0\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["rules", "check", "default", "--cost", "--model", "made:build"]) == 0
    said = capsys.readouterr().out
    assert "zero_fraction  gradient           each every 10 steps  dead" in said
    assert (
        "2 parameters: 2 MB of gradients a step for their norms, and for these columns 0.8 MB on average"
        in said
    )
    assert main(["rules", "check", "default", "--cost", "--model", "made:one"]) == 0
    assert " 1 parameter: " in capsys.readouterr().out
    assert main(["rules", "check", "default", "--cost", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["files"]
    assert [one["column"] for one in report["cost"]["columns"]] == [
        "zero_fraction",
        "weight_norm",
        "update_ratio",
    ]
    (tmp_path / "h.yaml").write_text("version: 1\nextends: [default]\nhistograms: {every: 50}\n")
    assert main(["rules", "check", "h.yaml", "--cost", "--model", "made:build"]) == 0
    said = capsys.readouterr().out
    assert "histogram      gradient           each every 50 steps  histograms:" in said
    assert "for these columns 0.84 MB on average" in said
    (tmp_path / "h.yaml").write_text(
        "version: 1\nextends: [default]\nmodules: {tap: output}\nhistograms: {of: [activations]}\n"
    )
    assert main(["rules", "check", "h.yaml", "--cost", "--model", "made:build"]) == 0
    said = capsys.readouterr().out
    assert "histogram      output             each every 100 steps  histograms:" in said
    assert "for these columns 0.8 MB on average" in said
    assert "without what is read of modules" in said
    for words in (
        ["--cost", "--model", "made:size"],
        ["--cost", "--model", "made:none"],
        ["--cost", "--model", "made:bare"],
        ["--cost", "--model", "made:lazy"],
        ["--model", "made:build"],
    ):
        assert main(["rules", "check", "default", *words]) == 2
        assert "--model" in capsys.readouterr().err
    assert main(["rules", "check", "default", "--cost", "--model", "made:wrong"]) == 2
    said = capsys.readouterr().err
    assert f"--model made:wrong: ZeroDivisionError: division by zero ({tmp_path / 'made.py'}:6)" in said


def test_check_of_a_missing_file_is_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be read at all is no finding about its content."""
    assert main(["rules", "check", str(tmp_path / "none.yaml")]) == 2
    assert "GW001" in capsys.readouterr().err


@pytest.mark.parametrize("code", [*CODES, "gw101"])
def test_every_code_is_explained(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each code has a meaning and a way to mend it; its case does not matter."""
    assert main(["rules", "explain", code]) == 0
    assert len(capsys.readouterr().out) > 80


def test_list_shows_the_default_pack(capsys: pytest.CaptureFixture[str]) -> None:
    """Every rule of the pack has its line."""
    assert main(["rules", "list"]) == 0
    told = capsys.readouterr().out
    assert "non-finite" in told
    assert "skip_step" in told


def test_list_says_which_line_set_what(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--resolved --origin: every setting, its value, and the place it comes from."""
    assert main(["rules", "list", "--rules", good, "--resolved", "--origin"]) == 0
    told = capsys.readouterr().out
    assert "detect.kind" in told
    assert "good.gradwatch.yaml:3" in told
    assert "default" in told


def test_list_speaks_json(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The resolved rules for a machine."""
    assert main(["rules", "list", "--rules", good, "--json", "--origin"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rules"]["nan"]["detect.kind"] == "nonfinite"
    assert document["origins"]


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    """An editor can read it."""
    assert main(["rules", "schema"]) == 0
    assert "properties" in json.loads(capsys.readouterr().out)


def test_a_bad_rule_file_stops_run_before_the_script(bad: str, tmp_path: Path) -> None:
    """Exit 2 with every position, and the script was never started."""
    done = shell("run", "--rules", bad, "--", "touch", str(tmp_path / "started"))
    assert done.returncode == 2
    assert f"{bad}:3:" in done.stderr
    assert f"{bad}:4:" in done.stderr
    assert not (tmp_path / "started").exists()


def test_a_bad_rule_file_may_be_passed_by(bad: str, tmp_path: Path) -> None:
    """--on-config-error=continue says the same and runs the script unwatched."""
    look = "import os; print(os.environ.get('GRADWATCH_LAUNCH'), os.environ.get('PYTHONPATH'))"
    options = ("--rules", bad, "--on-config-error=continue")
    done = shell("run", *options, "--", sys.executable, "-c", look, PYTHONPATH="")
    assert done.returncode == 0
    assert f"{bad}:3:" in done.stderr
    assert done.stdout.split() == ["None"]


@pytest.mark.parametrize(
    ("place", "now", "says"),
    [
        (
            "gradwatch.rules.impossible_actions.NOT_BUILT",
            frozenset({"snapshot"}),
            "'snapshot' is not built yet",
        ),
        (
            "gradwatch.runtime.optional_dependencies._installed",
            lambda module: False,
            "pip install 'gradwatch[bundle]'",
        ),
    ],
    ids=["not built", "library absent"],
)
def test_an_action_that_cannot_be_had_stops_run_before_the_script(
    place: str,
    now: Any,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Valid language, but not here: exit 2 with the reason, and `rules check` refuses it at its place."""
    path = tmp_path / "bundle.gradwatch.yaml"
    path.write_text(GOOD.replace("optional: true", "do: [snapshot]"))
    monkeypatch.setattr(place, now)
    assert main(["run", "--rules", str(path), "--", "touch", str(tmp_path / "started")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "started").exists()
    assert main(["rules", "check", str(path)]) == 1
    checked = capsys.readouterr().err
    assert says in checked
    assert f"{path}:3:36" in checked


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [(("no-such-command-here",), 127, "no such command"), (("{tmp}/x.py",), 126, "python {tmp}/x.py")],
)
def test_what_cannot_be_started_has_the_shells_exit_status(
    command: tuple[str, ...], status: int, says: str, tmp_path: Path
) -> None:
    """127 for a command that is not there, 126 for one that cannot be executed, with the remedy."""
    (tmp_path / "x.py").write_text("print(1)")
    done = shell("run", "--", *(word.format(tmp=tmp_path) for word in command))
    assert done.returncode == status
    assert says.format(tmp=tmp_path) in done.stderr


@pytest.mark.parametrize("words", ["rules list --resolved", "rules list", "--version"])
def test_a_closed_pipe_is_no_traceback(words: str) -> None:
    """What is long and what fits into a buffer ends quietly where nothing reads it, as before `| head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, *GRADWATCH[1:], *words.split()]
    with open(writer, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=250, env=environ)
    assert done.returncode == 1
    assert done.stderr == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", ["rules list --resolved", "--version"])
def test_a_full_disk_is_one_sentence(words: str) -> None:
    """What is long and what fits into a buffer is told to be lost, without a traceback."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, *GRADWATCH[1:], *words.split()]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=250, env=environ)
    assert done.returncode == 1
    assert done.stderr == b"gradwatch: standard output cannot be written: No space left on device\n"


def test_version_names_what_it_stands_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Versions as text and as JSON."""
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("gradwatch ")
    assert main(["version", "--json"]) == 0
    assert {"gradwatch", "python", "torch"} <= set(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colour_is_for_terminals_that_want_it(
    env: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal gets colour unless NO_COLOR or TERM=dumb; a pipe never (the tests above)."""
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["rules", "list"]) == 0
    assert ("\x1b[" in capsys.readouterr().out) is coloured


def test_the_version_is_said_where_it_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """`gradwatch --version` and `gradwatch.__version__` say the installed distribution's."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gradwatch {metadata.version('gradwatch')}\n"
    assert gradwatch.__version__ == metadata.version("gradwatch")
    assert gradwatch.register_policy is policies.register_policy


@pytest.mark.parametrize("closed", ["2>&-", ">&-"])
def test_a_closed_stream_is_no_reason_not_to_run(closed: str, tmp_path: Path) -> None:
    """`gradwatch run` becomes the command all the same, and has its exit status."""
    command = f"{shlex.join([*GRADWATCH, 'run', '--', sys.executable, '-c', 'raise SystemExit(7)'])} {closed}"
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, timeout=250, check=False).returncode == 7


@pytest.mark.parametrize("words", [["run", "--", "true"], ["--version"], ["audit", "--help"]])
def test_it_starts_without_what_takes_long_to_import(words: list[str]) -> None:
    """Under a pack `gradwatch run` becomes its command before numpy, pydantic or a YAML parser are there."""
    check = (
        "import os, sys\n"
        "from gradwatch.cli import main\n"
        "os.execvpe = lambda *_: sys.exit(0)\n"
        f"assert main({words}) == 0\n"
        "heavy = {'numpy', 'pydantic', 'ruamel.yaml', 'structlog', 'rich', 'torch'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
