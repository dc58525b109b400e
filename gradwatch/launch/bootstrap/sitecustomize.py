"""Run by Python's `site` in every interpreter under `gradwatch run`: installs the wait for torch, then steps aside.

`gradwatch run` puts this folder first on PYTHONPATH, so that all child processes (torchrun, spawn, `bash train.sh`)
load it. Any Python version may load this file, hence no syntax that an old one does not know. Afterwards `sys.path` is
as it would have been, and a sitecustomize that this one has shadowed has been run.
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
