"""Run by Python's own `site` in every interpreter under `gradwatch run`: waits for torch, then steps aside.

`gradwatch run` puts this folder first on PYTHONPATH, so the whole tree of child processes (torchrun, spawn,
`bash train.sh`) is reached. Any Python may meet this file, hence no syntax that an old one does not know.
Afterwards `sys.path` is what it would have been, and a sitecustomize that this one shadowed has run.
"""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
try:
    if (
        os.environ.get("GRADWATCH_LAUNCH") == "1"
        and os.environ.get("GRADWATCH") != "0"
        and sys.version_info >= (3, 10)
    ):
        __import__("gradwatch_import_hook").install()
except Exception as error:
    sys.stderr.write("gradwatch: not watching this process: %r\n" % (error,))  # noqa: UP031

sys.path[:] = [entry for entry in sys.path if entry != _here]

# The user's own sitecustomize: whatever it raises is reported by `site` exactly as without us.
_ours = sys.modules.pop("sitecustomize", None)
try:
    __import__("sitecustomize")
except ImportError as error:
    if getattr(error, "name", "sitecustomize") != "sitecustomize":
        raise
finally:
    if _ours is not None:
        sys.modules.setdefault("sitecustomize", _ours)
