"""Which process this is, known without a call: what a step asks twice finds cold caches after a backward."""

from __future__ import annotations

import os

here = [os.getpid()]
"""In one place: the id of this process, also in a forked child. Not of one that C code forks behind Python's back."""


def _forked() -> None:
    here[0] = os.getpid()


os.register_at_fork(after_in_child=_forked)
