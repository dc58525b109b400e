"""Arguments of `gradwatch run` for `execvpe`: the argv and environment of the command. No torch.

The command is left as typed, and only the environment changes, so that argv, `__main__`, cwd, exit status, death by
signal and tracebacks are plain Python's own. The one exception is `python -E/-I/-S`, which ignores PYTHONPATH or
`site`: there gradwatch's `isolated_python.py` is put before the script, and a line on stderr says so.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from gradwatch.session.settings import LAUNCHED_IN, TELLER

_HERE = os.path.dirname(os.path.realpath(__file__))
BOOTSTRAP = os.path.join(_HERE, "bootstrap")
ISOLATED = os.path.join(_HERE, "isolated_python.py")

_PYTHON = re.compile(r"(python|pypy)[0-9.]*t?$")
_FLAGS_WITH_VALUE = "WX"  # python -W ignore, -X dev: the next word belongs to the flag
_FLAGS_THAT_BLIND = frozenset("EIS")


class Launch(NamedTuple):
    """The program to run: `argv`, its `env`, and a `note` for stderr if it is not watched in the usual way."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    note: str = ""


def prepare(command: Sequence[str], settings: Mapping[str, str], environ: Mapping[str, str]) -> Launch:
    """The Launch that watches `command`.

    `settings` are `GRADWATCH_*` variables; they win over those in `environ`. If neither has a run id, one is made, so
    that all ranks of one launch share it.
    """
    # Of this very process: it becomes the command.
    env = {**environ, **settings, "GRADWATCH_LAUNCH": "1", "GRADWATCH_LAUNCH_PID": str(os.getpid())}
    env.pop(LAUNCHED_IN, None)
    env.pop(TELLER, None)
    with suppress(FileNotFoundError):  # the working folder is gone; with `--dir` nothing is missing
        env[LAUNCHED_IN] = os.getcwd()
    env["PYTHONPATH"] = os.pathsep.join(_python_path(environ.get("PYTHONPATH", "")))
    env.setdefault("GRADWATCH_RUN_ID", new_run_id(environ))
    flags, rest = split_python(command)
    blind = _FLAGS_THAT_BLIND & {letter for flag in flags for letter in _letters(flag)}
    if not blind:
        return Launch(tuple(command), env)
    spelled = "".join(sorted(blind))
    note = (
        f"python -{spelled} ignores PYTHONPATH, so gradwatch runs the script through {os.path.basename(ISOLATED)}; "
        "tracebacks gain its frames, and child processes are not watched"
    )
    return Launch((command[0], *flags, ISOLATED, *rest), env, note)


def new_run_id(environ: Mapping[str, str]) -> str:
    """A run id for everything that is started from here: the scheduler's job id, else the time and four hex digits."""
    job = environ.get("SLURM_JOB_ID") or environ.get("TORCHELASTIC_RUN_ID")
    if job and re.fullmatch(r"[\w.-]{1,64}", job) and job != "none":
        return f"job-{job}"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"


def split_python(command: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The interpreter's own flags, and the program after them (`SCRIPT …`, `-m MODULE …`, `-c CODE …`, `-`).

    Combined words are split: `-Im pkg` is the flag `-I` and the program `-m pkg`. No flags if the command is not a
    Python.
    """
    words = list(command[1:])
    if not command or not _PYTHON.fullmatch(os.path.basename(command[0])):
        return (), tuple(words)
    flags: list[str] = []
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word.startswith("--"):
            flags.append(word)
            continue
        ends = re.search("[cmWX]", word[1:])
        if ends is None:
            flags.append(word)
            continue
        at = ends.start() + 1
        if word[at] in _FLAGS_WITH_VALUE:
            flags += [word] if word[at + 1 :] else [word, *words[:1]]
            words = words if word[at + 1 :] else words[1:]
            continue
        before, value = word[1:at], word[at + 1 :]
        return (
            (*flags, *([f"-{before}"] if before else [])),
            (f"-{word[at]}", *([value] if value else []), *words),
        )
    return tuple(flags), tuple(words)


def _letters(flag: str) -> str:
    """The single-letter flags of one word: `-uE` has u and E; a value glued to -W or -X is not letters."""
    return "" if not flag.startswith("-") or flag.startswith("--") else re.split("(?<=[WX])", flag[1:])[0]


def _python_path(current: str) -> list[str]:
    # An empty PYTHONPATH means none; joining it on would add an empty entry, which means the cwd.
    entries = current.split(os.pathsep) if current else []
    return [BOOTSTRAP, *(entry for entry in entries if entry != BOOTSTRAP)]
