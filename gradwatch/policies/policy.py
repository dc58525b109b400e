"""What a clip policy is, and the registry of methods that `clip:` can name."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import ClassVar, Protocol, TypeVar

import numpy as np

from gradwatch.errors import GradwatchError

ENTRY_POINT_GROUP = "gradwatch.policies"


class Policy(Protocol):
    """A frozen dataclass of hyper-parameters that turns a norm into a multiplier; `method` is its name."""

    method: ClassVar[str]

    def coefficient(self, total_norm: float) -> np.float32:
        """The multiplier (<= 1) for a total norm; 1 for a norm that is not finite."""


POLICIES: dict[str, type[Policy]] = {}
"""Every method registered so far, by name."""

P = TypeVar("P", bound=type[Policy])


def register_policy(cls: P) -> P:
    """Make `cls.method` usable in `clip:`; a second class of the same method raises `GradwatchError`."""
    if POLICIES.get(cls.method, cls) is not cls:
        raise GradwatchError(f"clip method {cls.method!r} is registered already, by {POLICIES[cls.method]!r}")
    POLICIES[cls.method] = cls
    return cls


def find_policy(method: str) -> type[Policy] | None:
    """The class of a method, built in or from an installed package's entry point; None when there is none."""
    if method not in POLICIES:
        for entry in entry_points(group=ENTRY_POINT_GROUP, name=method):
            register_policy(entry.load())
    return POLICIES.get(method)
