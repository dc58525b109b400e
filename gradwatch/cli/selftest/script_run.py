"""The script as the selftest runs it: its processes, how long they have, and what is left of them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gradwatch.cli.processes.started_processes import end_all
from gradwatch.errors import GradwatchError
from gradwatch.launch.script_environment import Launch, prepare
from gradwatch.launch.selftest_faults import RESULTS, VARIABLE, Document, Plan
from gradwatch.session.settings import ROOT

EXITED_EARLY_SECONDS = 15.0
"""For the step under way when the time is up, after which a process without ranks ends by itself."""
START_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """One run of the script: what it has reported (None = nothing), the folder of its journals, and how it ended.

    `status` is its exit status; None where it was ended, because its time was up.
    """

    document: Document | None
    folder: Path
    status: int | None

    @property
    def time_up(self) -> bool:
        """True if the clock has ended it."""
        return self.status is None or (self.document is not None and self.document.time_up)


def run_script(
    command: Sequence[str], rules: str, scratch: Path, plan: Plan, environ: dict[str, str]
) -> ScriptRun:
    """Run the command in the copy below `scratch`, its output into a file there; all its processes have ended then.

    Raises GradwatchError where it cannot be started.
    """
    results = Path(plan.directory)
    settings = {
        "GRADWATCH_RULES": rules,
        "GRADWATCH_DIR": str(scratch / "runs"),
        "GRADWATCH_RUN_ID": results.name,
        "GRADWATCH_LISTEN": "127.0.0.1:0",
        ROOT: str(scratch / "runs"),
        VARIABLE: json.dumps(asdict(plan)),
    }
    launch = prepare(command, settings, {**environ, "WANDB_MODE": "offline", "PWD": str(scratch / "cwd")})
    process = _started(launch, scratch)
    try:
        status = _waited(process, results, plan.seconds)
    finally:
        end_all(process, mark=f"GRADWATCH_RUN_ID={results.name}")
    return ScriptRun(read_document(results), scratch / "runs" / results.name, status)


def _started(launch: Launch, scratch: Path) -> subprocess.Popen[bytes]:
    with (scratch / "output").open("ab") as output:
        try:
            return subprocess.Popen(
                launch.argv,
                cwd=scratch / "cwd",
                env={**launch.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            raise GradwatchError(f"cannot run {launch.argv[0]}: {error.strerror}") from None


def _waited(process: subprocess.Popen[bytes], results: Path, seconds: float) -> int | None:
    """The exit status of a process that has START_SECONDS to its first step, and then so many; None: it still runs.

    A process alone ends itself after so many seconds; ranks would have to agree, and are ended here.
    """
    deadline = time.monotonic() + START_SECONDS
    began = False
    while process.poll() is None and time.monotonic() < deadline:
        document = None if began else read_document(results)
        if document is not None and (document.steps or document.rejected or document.why):
            alone = document.world_size == 1 and not document.why
            began, deadline = True, time.monotonic() + seconds + alone * EXITED_EARLY_SECONDS
        time.sleep(0.05)
    return process.poll()


def read_document(folder: Path) -> Document | None:
    """Document of the first rank; `broke` is that of any rank. None where it did not come so far."""
    found = {path.name: _read(path) for path in sorted(folder.glob(RESULTS.format("*")))}
    first = found.get(RESULTS.format(0))
    broke = next((one.broke for one in found.values() if one is not None and one.broke), "")
    if first is None:
        return Document(broke=broke) if broke else None
    return replace(first, broke=broke)


def _read(path: Path) -> Document | None:
    try:
        return Document.of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # not written yet; a script may write there, too
        return None


def program(name: str, work: Path) -> str:
    """The program as the copy's working folder finds it: `.venv/bin/python` is not copied."""
    return name if os.sep not in name or (work / name).exists() else os.path.abspath(name)
