"""The interface of clip policies, and the registry of methods that `clip:` can name.

A policy is a frozen dataclass of hyper-parameters. Those that make one factor of one norm (`Policy`) are pure functions
over K series at once, numpy only: `init(count) -> state`, `coefficients(state, norms, present) -> float32[K]`,
`learn(state, norms, present) -> state`. K is the number of parameters where `scope` is param, and the number of
groups (one for the whole) where it is group or total. Those that treat elements or rows apart (`ElementwisePolicy`)
make a new gradient of one parameter's.

What a policy can do beside that it says itself, and all else asks it: `bound`, so that a hook inside the backward can
carry it out; `constant_bound`, so that a device can; `covered`; `misfit`.

Axes: K series.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradwatch.errors import GradwatchError
from gradwatch.policies.norm_bound import Bound
from gradwatch.records.key_limits import Limits
from gradwatch.records.snapshot import BoolArray, Sites
from gradwatch.runtime.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

ENTRY_POINT_GROUP = "gradwatch.policies"

Floats = NDArray[np.float64]
Coefficients = NDArray[np.float32]
State = tuple[Any, ...]
"""What `init` returns: a NamedTuple of arrays whose last axis is K (empty for a policy without memory)."""

Positive = Annotated[float, Limits(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Limits(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Limits(gt=0, lt=1)]
Count = Annotated[int, Limits(ge=1, le=1_000_000_000)]
Steps = Annotated[int, Limits(ge=0, le=1_000_000_000)]

LARGEST = float(np.finfo(np.float32).max)


class AnyPolicy:
    """Base of every policy: a frozen dataclass of hyper-parameters whose `method` is its name in `clip:`."""

    __slots__ = ()

    method: ClassVar[str]

    @classmethod
    def works_in_backward(cls) -> bool:
        """True if a hook that sees one parameter's gradient can carry the policy out (`at: backward`)."""
        return False

    def covered(self, mask: BoolArray, sites: Sites) -> BoolArray:
        """bool[S]: which of the parameters of `mask` the policy really treats."""
        return mask

    def misfit(self, covered: int, series: int) -> tuple[str, str] | None:
        """(reason, advice) where it cannot work on so many covered parameters in so many series; None where it can."""
        return None


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

    @classmethod
    def works_in_backward(cls) -> bool:
        """True if the class has a `bound`."""
        return cls.bound is not Policy.bound

    @classmethod
    def works_on_device(cls) -> bool:
        """True if a device can carry it out by itself: the class has a `constant_bound`."""
        return cls.constant_bound is not Policy.constant_bound

    def bound(self, state: State, roots: Floats) -> Bound:
        """The policy as a bound on K norms; `roots[K]` are √numel of the series, for bounds on an rms.

        Within it the factor is 1; outside it is as `coefficients` says. Asked only where each series is a parameter.
        """
        raise NotImplementedError

    def constant_bound(self) -> float:
        """The number c of a policy whose factor is always min(1, c / (norm + 1e-6)): a device needs no more."""
        raise NotImplementedError

    def state_key(self) -> tuple[Any, ...]:
        """Key of a saved state: one with another key is not restored."""
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


class ElementwisePolicy(AnyPolicy):
    """A method that makes a new gradient of one parameter's, and remembers nothing.

    Class-level facts: `rowwise` whether it looks at whole rows, which a sharded parameter may not have; `transforms`
    whether it comes before all others, which then work on its result (False: it bounds, and where several policies
    cover a parameter each element takes the smallest).
    """

    __slots__ = ()

    rowwise: ClassVar[bool] = False
    transforms: ClassVar[bool] = False

    @classmethod
    def works_in_backward(cls) -> bool:
        """True: it needs one parameter only."""
        return True

    def shape(self, grad: Tensor, param: Tensor, scale: float | Tensor, finite: bool) -> Tensor:
        """A new tensor, or `grad` where nothing is changed; neither argument is written to.

        `grad` is dense and carries the loss scale `scale` (a number, or a 0-dim tensor where the host does not know
        it: nothing may wait for it); `param` are the weights. `finite`: every element is known to be. What is not
        finite must pass as found, and spread to no other element.
        """
        raise NotImplementedError

    def clamps_at(self) -> float | None:
        """c where `shape` clamps every element to ±c·scale and does no more, so that many take one call; else None."""
        return None

    def idle(self, norm: float) -> bool:
        """True if a gradient of this L2 norm is certainly left unchanged, and need not be read."""
        return False


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
    if cls.method not in POLICIES and not _does_something(cls):
        raise GradwatchError(
            f"{cls!r} would change no gradient: give it `coefficients` (derived from gradwatch.policies.Policy) or "
            "`shape` (derived from gradwatch.policies.ElementwisePolicy)"
        )
    POLICIES.register(cls.method, cls)
    return cls


def _does_something(cls: type[AnyPolicy]) -> bool:
    if issubclass(cls, Policy):
        return cls.coefficients is not Policy.coefficients
    return issubclass(cls, ElementwisePolicy) and cls.shape is not ElementwisePolicy.shape


def find_policy(method: str) -> type[AnyPolicy] | None:
    """The class of a method, built in or from an installed package's entry point; None when there is none."""
    return POLICIES.find(method, register_policy)
