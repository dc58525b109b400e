"""What `gradwatch run` hands to exec: argv, environment, and Python flags that would blind it."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from gradwatch.launch.exit_summary import shown
from gradwatch.launch.script_environment import BOOTSTRAP, ISOLATED, new_run_id, prepare, split_python
from gradwatch.rules.files import parse_rules
from gradwatch.session.settings import LAUNCHED_IN, Settings


@pytest.mark.parametrize(
    ("command", "flags", "program"),
    [
        ("python x.py -E", (), ("x.py", "-E")),
        ("python3.11 -u -B x.py", ("-u", "-B"), ("x.py",)),
        ("/usr/bin/python -W ignore x.py", ("-W", "ignore"), ("x.py",)),
        ("python -Wignore -X dev x.py", ("-Wignore", "-X", "dev"), ("x.py",)),
        ("python -m pkg -I", (), ("-m", "pkg", "-I")),
        ("python -Im pkg a", ("-I",), ("-m", "pkg", "a")),
        ("python -Ic print(1)", ("-I",), ("-c", "print(1)")),
        ("python -cpass", (), ("-c", "pass")),
        ("python -uE - a", ("-uE",), ("-", "a")),
        ("python", (), ()),
        ("torchrun -I x.py", (), ("-I", "x.py")),
    ],
)
def test_the_interpreters_flags_are_told_from_the_program(
    command: str, flags: tuple[str, ...], program: tuple[str, ...]
) -> None:
    """Flags end where the program begins, also in combined words; only a Python has flags."""
    assert split_python(command.split()) == (flags, program)


def test_a_command_is_left_as_typed() -> None:
    """Without a blinding flag argv is untouched; PYTHONPATH gains the bootstrap folder in front, once."""
    launch = prepare(["python", "x.py", "--", "-E"], {}, {"PYTHONPATH": "/a:/b", "HOME": "/h"})
    assert launch.argv == ("python", "x.py", "--", "-E")
    assert launch.env["PYTHONPATH"] == os.pathsep.join([BOOTSTRAP, "/a", "/b"])
    assert launch.env["HOME"] == "/h"
    assert launch.note == ""
    again = prepare(["python"], {}, launch.env)
    assert again.env["PYTHONPATH"] == launch.env["PYTHONPATH"]
    assert again.env["GRADWATCH_RUN_ID"] == launch.env["GRADWATCH_RUN_ID"]


@pytest.mark.parametrize("python_path", ["", None])
def test_an_empty_pythonpath_does_not_put_the_cwd_on_the_path(python_path: str | None) -> None:
    """A trailing separator would: the empty entry means the current folder."""
    environ = {} if python_path is None else {"PYTHONPATH": python_path}
    assert prepare(["python"], {}, environ).env["PYTHONPATH"] == BOOTSTRAP


@pytest.mark.parametrize("flag", ["-E", "-I", "-S", "-uE", "-IB"])
def test_a_blinding_flag_brings_in_isolated_and_says_so(flag: str) -> None:
    """The script is run through isolated_python.py with the same flags and arguments."""
    launch = prepare(["python", flag, "x.py", "a"], {}, {})
    assert launch.argv == ("python", flag, ISOLATED, "x.py", "a")
    assert "ignores PYTHONPATH" in launch.note


def test_settings_win_over_the_environment() -> None:
    """An option of the command line beats a GRADWATCH_ variable that was there before."""
    launch = prepare(
        ["x"], {"GRADWATCH_RULES": "new"}, {"GRADWATCH_RULES": "old", "GRADWATCH_RUN_ID": "kept"}
    )
    assert launch.env["GRADWATCH_RULES"] == "new"
    assert launch.env["GRADWATCH_RUN_ID"] == "kept"


def test_a_run_id_comes_from_the_scheduler_where_there_is_one() -> None:
    """Every task of a Slurm job gets the same run; a strange value is not used; else two ids differ."""
    assert new_run_id({"SLURM_JOB_ID": "4711"}) == "job-4711"
    assert "/" not in new_run_id({"SLURM_JOB_ID": "../x"})
    assert new_run_id({}) != new_run_id({})


def test_the_bootstrap_does_nothing_without_the_launchers_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sitecustomize that is found by accident leaves the interpreter alone."""
    for name in ("GRADWATCH_LAUNCH", "GRADWATCH"):
        monkeypatch.delenv(name, raising=False)
    before = list(sys.meta_path), list(sys.path)
    runpy.run_path(os.path.join(BOOTSTRAP, "sitecustomize.py"))
    assert (list(sys.meta_path), list(sys.path)) == before


def test_the_launcher_ships_as_plain_files() -> None:
    """Both files that other interpreters open by path exist beside the package."""
    assert (Path(BOOTSTRAP) / "sitecustomize.py").is_file()
    assert os.path.isfile(ISOLATED)


def test_runs_are_where_the_launcher_was_wherever_the_script_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default folder and a rule file's are anchored at the launch; one that the script names is its own."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    launched = prepare(["python"], {}, {}).env
    monkeypatch.chdir(elsewhere)
    for rules, name in (
        ("version: 1", "gradwatch-runs"),
        ("version: 1\nsinks: [{journal: {dir: mine}}]", "mine"),
    ):
        found = Settings.resolve(env=launched).run_root(parse_rules(rules).sinks)
        assert found == str(tmp_path / name)
        monkeypatch.setenv(LAUNCHED_IN, launched[LAUNCHED_IN])
        assert shown(found) == name
        monkeypatch.delenv(LAUNCHED_IN)
    own = Settings.resolve(run_dir="own", env=launched).run_root(parse_rules("version: 1").sinks)
    assert own == str(elsewhere / "own")


def test_a_working_folder_that_is_gone_keeps_nothing_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command may need none, and runs may be kept elsewhere (`--dir`)."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    launched = prepare(["python"], {"GRADWATCH_DIR": str(tmp_path)}, {LAUNCHED_IN: "another launch's"})
    assert LAUNCHED_IN not in launched.env
    assert shown(str(tmp_path)) == str(tmp_path)


def test_a_script_is_compiled_as_python_does(tmp_path: Path) -> None:
    """Its annotations are values, not the strings that gradwatch's own are."""
    script = tmp_path / "train.py"
    script.write_text("def loss(x: int): ...\nprint(loss.__annotations__)\n")
    code = "import sys; from gradwatch.launch.run_script import run_script; run_script(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, script], capture_output=True, text=True, check=True)
    assert done.stdout == "{'x': <class 'int'>}\n"
