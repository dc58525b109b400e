"""`gradwatch run --live`: the live view of a script that is about to start, where its own output is not touched.

On this terminal where both streams of the script go elsewhere; in a pane of its own under tmux; else nowhere, and the
command for another terminal is said.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gradwatch.cli.terminal import complain

TERMINAL = "/dev/tty"
_LOOK_SECONDS = 0.3
_PANE = "50%"


def show(root: str) -> None:
    """Start the view of the run that this process is about to become, whose folder will lie in `root`."""
    from gradwatch.demo.follow_run import launcher

    # Whatever lies in the folder of the script is not imported in gradwatch's stead.
    command = [*launcher(), "top", "--dir", root, "--beside", str(os.getpid())]
    if not _on_terminal(sys.stdout) and not _on_terminal(sys.stderr) and _has_terminal():
        _start_detached(command)
    elif not _in_pane([*command, "--stay"]):
        advice = f"gradwatch top --dir {shlex.quote(root)}"
        complain(
            "gradwatch: --live: the script writes to this terminal itself, and there is no tmux to open a pane in: "
            f"redirect both of its streams (> log 2>&1), or type in another terminal: {advice}"
        )


def _on_terminal(stream: object) -> bool:
    return stream is not None and bool(getattr(stream, "isatty", bool)())


def _has_terminal() -> bool:
    try:
        os.close(os.open(TERMINAL, os.O_WRONLY | os.O_NOCTTY))
    except OSError:
        return False
    return os.environ.get("TERM") not in (None, "", "dumb")


def _start_detached(command: list[str]) -> None:
    """Run it on the terminal, as a child of init: the script waits for its own children alone.

    In a process group of its own, so that Ctrl-C is the script's, and with no terminal to read from.
    """
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setpgid(0, 0)
        if os.fork() == 0:
            terminal = os.open(TERMINAL, os.O_WRONLY | os.O_NOCTTY)
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor, stream in ((nothing, 0), (terminal, 1), (nothing, 2)):
                os.dup2(descriptor, stream)
            os.execve(command[0], command, _environment())
    finally:
        os._exit(0)


def _environment() -> dict[str, str]:
    return {**os.environ, "GRADWATCH": "0"}


def _in_pane(command: Sequence[str]) -> bool:
    """True if tmux has opened a pane for it, beside that of this process."""
    tmux, pane = shutil.which("tmux"), os.environ.get("TMUX_PANE")
    if tmux is None or not os.environ.get("TMUX") or pane is None:
        return False
    split = [tmux, "split-window", "-d", "-t", pane, "-l", _PANE, "-e", "GRADWATCH=0", shlex.join(command)]
    with suppress(OSError):
        return (
            subprocess.run(split, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0
        )
    return False


def wait_for_run(root: Path, pid: int, since: float) -> Path | None:
    """The run in `root` that begins after `since` (Unix seconds), as soon as it has a journal.

    None where process `pid` has ended before.
    """
    from gradwatch.runtime.process_identity import is_running

    while True:
        gone = not is_running(pid)
        found = _begun(root, since)
        if found is not None or gone:
            return found
        time.sleep(_LOOK_SECONDS)


def _begun(root: Path, since: float) -> Path | None:
    from gradwatch.journal import JournalReader

    for path in sorted(root.glob("*/*.gwj")):
        with suppress(OSError):
            if path.stat().st_mtime >= since and not path.is_symlink():
                entry = JournalReader(path).run()
                if entry is not None and entry.run.start_time >= since:
                    return path.parent
    return None
