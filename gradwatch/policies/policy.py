"""What a clip policy is, and the registry of methods that `clip:` can name.

A policy is a frozen dataclass of hyper-parameters. Those that make one factor of one norm are pure functions over
K series at once, numpy only: `init(count) -> state`, `coefficients(state, norms, present) -> float32[K]`,
`learn(state, norms, present) -> state`. K is the number of parameters where `scope` is param, and the number of
groups (one for the whole) where it is group or total. Those that treat elements or rows apart are named in
`gradwatch.policies.elementwise` and carried out by `gradwatch.actions.elementwise`.

Axes: K series.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gradwatch.errors import GradwatchError
from gradwatch.records.snapshot import BoolArray
from gradwatch.runtime.registry import Registry

ENTRY_POINT_GROUP = "gradwatch.policies"

Floats = NDArray[np.float64]
Coefficients = NDArray[np.float32]
State = tuple[Any, ...]
"""What `init` returns: a NamedTuple of arrays whose last axis is K (empty for a policy without memory)."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Steps = Annotated[int, Field(ge=0, le=1_000_000_000)]

LARGEST = float(np.finfo(np.float32).max)


class AnyPolicy:
    """What every policy is: a frozen dataclass of hyper-parameters whose `method` is its name in `clip:`."""

    __slots__ = ()

    method: ClassVar[str]


class Policy(AnyPolicy):
    """A method that multiplies the gradients of one series by one factor made of their norm.

    Class-level facts: `of` the quantity it is given, `norm` (L2) or `rms` (norm/√numel); `scoped` whether `scope`
    says what a series is (False = each parameter is one, always); `enlarges` whether a factor may exceed 1.

    Given are the norms as found at the step boundary, after the user's own clipping. What the laws of
    `gradwatch.testing.check_policy` hold every policy to: a series that is missing or whose norm is not finite
    gets the factor 1, is not learned, and is to the other series as if it were missing.
    """

    __slots__ = ()

    of: ClassVar[Literal["norm", "rms"]] = "norm"
    scoped: ClassVar[bool] = True
    enlarges: ClassVar[bool] = False

    def state_key(self) -> tuple[Any, ...]:
        """What decides the meaning of a saved state: one with another key is not restored."""
        return (self.method, *(getattr(self, each.name) for each in fields(self)))  # type: ignore[arg-type]

    def init(self, count: int) -> State:
        """The state of `count` series that have seen nothing, in arrays that the caller may fill."""
        return ()

    def coefficients(self, state: State, norms: Floats, present: BoolArray) -> Coefficients:
        """float32[K]: the factor for each series, from what was learned before this step and its norm now."""
        raise NotImplementedError

    def learn(self, state: State, norms: Floats, present: BoolArray) -> State:
        """The state after this step's norms. Never writes `state`; asked only of steps the optimizer takes."""
        return state


def usable(norms: Floats, present: BoolArray) -> BoolArray:
    """bool[K]: the norms that are there and that float32 can hold; nothing is learned of any other."""
    return present & (np.abs(norms) <= LARGEST)  # a NaN compares as False


def finite(norms: Floats, present: BoolArray) -> BoolArray:
    """bool[K]: the norms that are there and finite, beyond float32 too; all else gets the factor 1."""
    return present & np.isfinite(norms)


POLICIES: Registry[type[AnyPolicy]] = Registry("clip method", ENTRY_POINT_GROUP)
"""Every method registered so far, by name."""

P = TypeVar("P", bound=type[AnyPolicy])


def register_policy(cls: P) -> P:
    """Make `cls.method` usable in `clip:`.

    Raises `GradwatchError` for a second class of the same method, and for one that nothing would carry out.
    """
    if not isinstance(getattr(cls, "method", None), str):
        raise GradwatchError(f"{cls!r} lacks the name of its clip method: `method: ClassVar[str] = ...`")
    if cls.method not in POLICIES and not _carried_out(cls):
        raise GradwatchError(
            f"{cls!r} would not be carried out: of the policies on elements and rows only gradwatch's own are; derive "
            "from gradwatch.policies.Policy, which makes one factor of a norm, or from one of those"
        )
    POLICIES.register(cls.method, cls)
    return cls


def _carried_out(cls: type[AnyPolicy]) -> bool:
    """Whether the class makes factors of norms, or is one (or a subclass of one) that gradwatch.actions knows."""
    own = (base for base in cls.__mro__ if base.__module__.startswith("gradwatch.policies."))
    return issubclass(cls, Policy) or any("method" in vars(base) for base in own)


def find_policy(method: str) -> type[AnyPolicy] | None:
    """The class of a method, built in or from an installed package's entry point; None when there is none."""
    return POLICIES.find(method, register_policy)
