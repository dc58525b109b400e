"""The forward, operation by operation: where a NaN or an Inf came into being, and what became of it.

An operation is an *origin* when it makes NaN out of numbers, or Inf out of finite ones. Not every origin is a
fault: attention masks are made of -inf, a `where` throws away the branch that overflowed. So what each storage
holds is traced to its origin, and only the origin of what came out in the end is blamed: an overflow before the
NaN that it led to, and never an infinity that was asked for by name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gradwatch.localise.diagnosis import python_frames
from gradwatch.localise.diagnosis.interpreted_lines import InterpretedLines
from gradwatch.localise.diagnosis.operation_names import CONTRACTIONS, NOT_READ, of_kernel, read_by
from gradwatch.localise.diagnosis.tensor_values import State, describe, readable, state, tensors
from gradwatch.reading.async_copy import capturing
from gradwatch.records.finding import Frame, Operand
from gradwatch.runtime import guard
from gradwatch.runtime.interruption import not_ours
from gradwatch.taps import nested_containers
from gradwatch.taps.dispatch_modes import DispatchMode
from gradwatch.taps.dynamo import untraced

COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Origin of a non-finite number; `external` = it was there already when it was first read.

    `intended`: an infinity that the operation was given as a number, or found in a tensor that no operation computed.
    `order` counts origins; `source` is the key (see `key_of`) of an external tensor. `number`: it is in a number, or in
    data of Python's or numpy's, that the operation was given. `given` is an intended infinity that the operation made
    NaN of; of such a number what was not finite before it, and which it may have been computed from.
    """

    order: int
    op: str
    module: tuple[str, str]
    frames: tuple[Frame, ...]
    operands: tuple[Operand, ...]
    result: Operand
    nan: bool
    function: str = ""
    intended: bool = False
    external: bool = False
    number: bool = False
    source: int = 0
    given: Origin | None = None


class ForwardTracer(DispatchMode):
    """Looks at every operation while it is entered; `of(tensor)` is where what a tensor holds came from.

    `module` says which module is under way, `function` which torch function of the user's. `failed` is called at an
    fault of ours; the operation runs all the same. `asleep` True lets everything pass.
    """

    def __init__(
        self,
        module: Callable[[], tuple[str, str]],
        failed: Callable[[BaseException], None],
        function: Callable[[], str] = str,
        lines: InterpretedLines | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lines = lines or InterpretedLines()
        self._process = os.getpid()
        self._module = module
        self._failed = failed
        self._function = function
        self._held: dict[int, tuple[Tensor, dict[bool, Origin]]] = {}
        self.origins: list[Origin] = []
        self.asleep = False
        self.stray = ""
        # Memory that is expected to be written, or was made while this is entered.
        self._own: set[int] = set()

    def expect(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that may be written into; any other that was not made here is listed in `stray`."""
        self._own.update(map(key_of, tensors))

    @untraced
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and look at what it was given and what it made."""
        try:
            before = self._looked_before(func, args, kwargs or {})
        except Exception as error:
            before = None
            guard.fault("localise", error)
        try:
            result = func(*args, **(kwargs or {}))
        except BaseException as error:
            if not isinstance(error, Exception) or guard.came_out_of(type(func).__call__, error):
                guard.without_frames(error, type(func).__call__)
                raise
            guard.fault("localise", error)
            result = func(*args, **(kwargs or {}))
        try:
            if before is not None:
                self._guarded(self._makes, func, result)
                self._guarded(self._after, func, args, kwargs or {}, result, before)
            return result
        except Exception as error:
            guard.fault("localise", error)
        return result

    def set_asleep(self, asleep: bool) -> bool:
        """Let everything pass from now on, or no longer; True if everything passed until now."""
        before, self.asleep = self.asleep, asleep
        return before

    def _looked_before(self, func: Any, args: Any, kwargs: Any) -> dict[int, State] | None:
        """The result of `_before`; None where the operation is not looked at."""
        watched = not (self.asleep or func.namespace in COLLECTIVES or capturing())
        # A worker forked meanwhile is not looked at.
        if not watched or os.getpid() != self._process:
            return None
        before: dict[int, State] | None = self._guarded(self._before, func, args, kwargs)
        if before is not None and func._schema.is_mutable and not self.stray:
            self._guarded(self._writes, func, args, kwargs)
        return before

    def of(self, tensor: Tensor) -> Origin | None:
        """The origin of what is not finite in a tensor; None for a finite one, or one never seen."""
        found = state(tensor)
        return None if found.finite else self._origin(tensor, found.nan)

    def _guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:
            self._failed(error)
            return None

    def _before(self, func: Any, args: Any, kwargs: Any) -> dict[int, State]:
        """States of the inputs that an operation is about to overwrite; {} for all others."""
        if not func._schema.is_mutable:
            return {}
        return {id(tensor): state(tensor) for tensor in tensors((args, kwargs))}

    def _writes(self, func: Any, args: Any, kwargs: Any) -> None:
        """Remember an operation that writes into memory that the replay has not made."""
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            if any(key_of(tensor) not in self._own for tensor in tensors(value)):
                line = next(iter(python_frames.of_stack()), None)
                at = "" if line is None else f" ({line.file}:{line.line})"
                self.stray = f"{func.overloadpacket.__name__}{at}"

    def _makes(self, func: Any, result: Any) -> None:
        """Note the origin of outputs that are neither arguments of the operation nor views of one."""
        returns = func._schema.returns
        results = result if isinstance(result, (tuple, list)) and len(returns) > 1 else (result,)
        for said, value in zip(returns, results, strict=False):
            if said.alias_info is None or func.overloadpacket.__name__ == "lift_fresh":  # `torch.tensor(…)`
                self._own.update(map(key_of, tensors(value)))

    def _after(self, func: Any, args: Any, kwargs: Any, result: Any, before: dict[int, State]) -> None:
        name = func.overloadpacket.__name__
        made = [tensor for tensor in tensors(result) if readable(tensor)]
        broken = [(tensor, state(tensor)) for tensor in made]
        broken = [(tensor, found) for tensor, found in broken if not found.finite]
        if not broken or name.rstrip("_") in NOT_READ:
            return
        args, kwargs = read_by(name, args, kwargs)
        given = tensors((args, kwargs))
        states = [before.get(id(tensor)) or state(tensor) for tensor in given]
        for tensor, found in broken:
            origin = self._judge(name, (args, kwargs), given, states, tensor, found)
            self._keep(tensor, found.nan, origin)

    def _judge(
        self,
        name: str,
        arguments: Any,
        given: list[Tensor],
        states: list[State],
        made: Tensor,
        found: State,
    ) -> Origin:
        """The origin of what `made` holds, a new one where this operation is it."""
        traced = list(self._sources(name, given, states))
        if name in CONTRACTIONS:
            traced = [replace(one, intended=False) if one.external else one for one in traced]
        if found.nan and not any(one.nan for one in states):
            overflow = [one for one in traced if not (one.intended or one.nan)]
            if overflow:
                return min(overflow, key=lambda one: one.order)
        elif any(not one.finite for one in states):
            alike = [one for one in traced if one.nan == found.nan]
            blamed = [one for one in alike if not one.intended] or alike or traced
            return min(blamed, key=lambda one: one.order)
        return self._new(name, arguments, given, made, found, next(iter(traced), None))

    def _sources(self, name: str, given: list[Tensor], states: list[State]) -> Iterator[Origin]:
        for tensor, found in zip(given, states, strict=True):
            if not found.finite:
                known = self._origin(tensor, found.nan)
                yield known or self._found(name, tensor, found)

    def _origin(self, tensor: Tensor, nan: bool) -> Origin | None:
        kept = self._held.get(key_of(tensor), (None, {}))[1]
        return kept.get(nan) or kept.get(not nan)

    def _keep(self, tensor: Tensor, nan: bool, origin: Origin) -> None:
        # The tensor is kept so that its storage is given to no other tensor for as long as it is a key.
        self._held.setdefault(key_of(tensor), (tensor, {}))[1].setdefault(nan, origin)

    def _new(
        self,
        name: str,
        arguments: Any,
        given: list[Tensor],
        made: Tensor,
        found: State,
        traced: Origin | None,
    ) -> Origin:
        numbers = (leaf for leaf in nested_containers.leaves(arguments) if isinstance(leaf, float))
        number = any(map(math.isnan if found.nan else math.isinf, numbers))
        return self._add(
            op=of_kernel(name),
            operands=tuple(describe(f"input {n}", tensor) for n, tensor in enumerate(given)),
            result=describe("result", made),
            nan=found.nan,
            intended=number and not found.nan,
            number=number,
            given=traced or (self._before_number() if number else None),
        )

    def _before_number(self) -> Origin | None:
        """The first NaN or Inf that an operation made: a number that comes from Python may have been computed of it."""
        return next((one for one in self.origins if not (one.intended or one.number)), None)

    def _found(self, name: str, tensor: Tensor, found: State) -> Origin:
        """A tensor that was not finite before anything watched here was done with it."""
        held = describe("input", tensor)
        number = name == "lift_fresh"  # as of `torch.tensor(…)`, `from_numpy`
        origin = self._add(
            op=of_kernel(name),
            operands=(held,),
            result=held,
            nan=found.nan,
            intended=not found.nan,
            external=True,
            number=number,
            given=self._before_number() if number else None,
            source=key_of(tensor),
        )
        self._keep(tensor, found.nan, origin)
        return origin

    def _add(self, **facts: Any) -> Origin:
        origin = Origin(
            order=len(self.origins),
            module=self._module(),
            function=self._function(),
            frames=(*python_frames.of_stack(), *self._lines.now),
            **facts,
        )
        self.origins.append(origin)
        return origin


def key_of(tensor: Tensor) -> int:
    """Key of the memory of a tensor, shared by its views."""
    if tensor.is_sparse:
        return id(tensor)
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError) as error:
        if not_ours(error):
            raise
        return id(tensor)
