"""Imports in the midst of a training that leave Python's own record of warnings alone.

Any change of the warning filters, also one that is taken back, makes Python forget which warnings it has shown: what
the script shows once would be shown again.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

_NOTICES = ("_filters_mutated", "_filters_mutated_lock_held")  # by version of Python


@contextlib.contextmanager
def filters_kept() -> Iterator[None]:
    """Inside, changes of the warning filters are not noticed by Python, and none is left afterwards."""
    filters = list(warnings.filters)
    noticed = {name: vars(warnings)[name] for name in _NOTICES if name in vars(warnings)}
    for name in noticed:
        setattr(warnings, name, _unnoticed)
    try:
        yield
    finally:
        warnings.filters[:] = filters  # type: ignore[index]
        for name, original in noticed.items():
            setattr(warnings, name, original)


def _unnoticed() -> None:
    pass
