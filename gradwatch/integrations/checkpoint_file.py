"""The watch's state as a file of its own inside a framework's checkpoint folder.

A file, because the frameworks' own ways refuse a checkpoint that was made before gradwatch was added to the
job (Accelerate), or restore only where a flag was set (transformers). A missing file is no error.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gradwatch.integrations.callback_session import resume
from gradwatch.runtime.atomic_files import write_whole
from gradwatch.session.watch import Watch, session_of

NAME = "gradwatch.json"


def save(gw: Watch, folder: str | os.PathLike[str]) -> None:
    """Write the state, whole or not at all, once there is any; a fault is counted, not raised."""
    try:
        state = gw.state_dict()
        if state["lanes"]:
            write_whole(Path(folder) / NAME, json.dumps(state), 0o666)
    except Exception as error:
        session_of(gw).failed("checkpoint", error)


def load(gw: Watch, folder: str | os.PathLike[str]) -> bool:
    """Continue from the state in `folder`; False where there is none. A fault is counted, not raised."""
    try:
        state: dict[str, Any] = json.loads((Path(folder) / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except Exception as error:
        session_of(gw).failed("resume", error)
        return False
    resume(gw, state)
    return True
