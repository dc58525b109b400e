"""Outputs of a model in training, compared with those of the same calls run again: does the step come again?

An output that is another is *irreproducible*, as Megatron's rerun state machine has it: computed wrongly once (memory,
a processor), or from something that is not restored. That is said only where it can be seen that all else was the same:
other outputs, or other rows of this one, came again bit for bit; a second run gave what the first one did; and it
neither changed a variable of Python's nor asked the system for anything, nor ran an operator known not to be
deterministic.
"""

from __future__ import annotations

import re
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.localise.diagnosis.output_comparison import Output, output_of
from gradwatch.localise.diagnosis.tensor_values import tensors
from gradwatch.localise.held_calls.inner_model import inner
from gradwatch.localise.held_calls.random_generators import Generators, Source
from gradwatch.localise.held_calls.recorded_call import Call
from gradwatch.localise.replay.hidden_state import SystemCalls, changed, state_of, written_beside
from gradwatch.localise.replay.step_replay import CallListener, Replayed
from gradwatch.records.finding import GAINS, LOSS_SIDE, Finding
from gradwatch.taps.module_tree import WITH_RUNNING_STATISTICS

FEWEST = 8
"""Different numbers that must have come again for the rest of the state to have been the same."""
OPEN = ("unknown", *LOSS_SIDE, *GAINS)  # phases that name no operation: it may be that none is at fault

CAME_AGAIN = "the model's outputs came again, bit for bit"
NOT_KEPT = "what the outputs were in training was not kept"
NOT_KNOWN = "whether the step comes again is not known: {why}"
COMPILED = "something is compiled, and compiled code is run again as it is written, which rounds otherwise"
SHARDED = "parameters are sharded, and the ranks run the step again once only"
CLOSURE = "of a closure no outputs are kept to compare with"

Again = Callable[[CallListener], None]
"""Runs the calls of the step once more, with a listener."""


class Outputs(CallListener):
    """Compares the outputs of each call that is run again with those of training, as far as these were kept."""

    def __init__(self) -> None:
        self.compared: list[Output] = []
        self.whole = True  # all outputs that a gradient came to were kept

    def begins(self, replayed: Replayed) -> None:
        """Take in the outputs of a call that has been run again."""
        for position, again in zip(replayed.call.gradients, replayed.roots, strict=True):
            output = output_of(replayed.call, replayed.base, position, again)
            if output is None:
                self.whole = False
            else:
                self.compared.append(output)

    @property
    @torch.no_grad()
    def same(self) -> bool:
        """True if every output came again, bit for bit."""
        return self.whole and bool(self.compared) and all(one.is_same for one in self.compared)

    @property
    def alike(self) -> bool:
        """True if every output came again, but for rounding."""
        return self.whole and bool(self.compared) and self.other is None

    @property
    @torch.no_grad()
    def other(self) -> Output | None:
        """The first output that is another, by more than rounding; None where there is none."""
        return next((one for one in self.compared if one.differs), None)

    @property
    @torch.no_grad()
    def came_again(self) -> int:
        """Count of the different numbers in rows that came again bit for bit: a weight leads to all rows."""
        equal = [one.rows_again.cpu().double() for one in self.compared]
        return int(torch.cat(equal).unique().numel()) if equal else 0


class WithOutputs(Outputs):
    """The same, beside another listener."""

    def __init__(self, beside: CallListener) -> None:
        super().__init__()
        self._beside = beside

    def forward(self, call: Call, inputs: Any) -> Any:
        """Pass on to the listener beside."""
        return self._beside.forward(call, inputs)

    def begins(self, replayed: Replayed) -> None:
        """Pass on a call that has been run again, too."""
        super().begins(replayed)
        self._beside.begins(replayed)

    def ended(self, replayed: Replayed, gradients: Mapping[int, Tensor]) -> None:
        """Pass on to the listener beside."""
        self._beside.ended(replayed, gradients)


class OutputsAndState(Outputs):
    """The same, alone, with an eye on what is not restored: `unrestored` says what there is, "" = nothing was seen."""

    alone = True

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self._models = models
        self._held: set[int | str] = set()
        self.unrestored = ""

    @contextmanager
    def forward(self, call: Call, inputs: Any) -> Iterator[Any]:
        """Look, around one forward, for what is not restored."""
        self._held |= {_key(source) for source, _ in call.generators.states}
        before, generators = state_of(self._models), Generators.now(self._models)
        with SystemCalls() as system:
            yield inputs
        drawn = [one for one in generators.moved() if _key(one) not in self._held]
        name = changed(before, state_of(self._models))
        written = written_beside(self._models, system.codes, call.caller)
        if not system.known:
            self._note("a profiler is active, beside which it is not known what the forward reads")
        elif system.first:
            self._note(f"the forward {system.first}")
        elif drawn:
            self._note("the forward draws from a generator that it did not draw from before")
        elif name:
            self._note(f"the forward changes {name}")
        elif written:
            self._note(written)

    def begins(self, replayed: Replayed) -> None:
        """Buffers that were not held as they had been."""
        super().begins(replayed)
        self._held |= replayed.call.buffers.keys()
        for path, module in replayed.base.named_modules():
            if isinstance(module, WITH_RUNNING_STATISTICS):
                continue
            for own in module._buffers:
                name = f"{path}.{own}" if path else own
                buffer = replayed.given.get(name)
                if buffer is not None and buffer._version and name not in self._held:
                    self._note(f"the forward writes to the buffer {name}, which it did not do before")

    def _note(self, why: str) -> None:
        self.unrestored = self.unrestored or why


def _key(source: Source) -> int:
    return id(source if source.generator is None else source.generator)


def of_one_run(finding: Finding, outputs: Outputs, why: str) -> Finding:
    """The finding where the step can be run again only once, or as other code: it came again, or that is not known."""
    if outputs.same:
        return finding.amended(deterministic=True) if finding.found else finding.noted(CAME_AGAIN)
    return finding.noted(NOT_KNOWN.format(why=why))


@dataclass(slots=True)
class Reproduction:
    """The verdict on a step that was run again: whether it came again. `first` has looked on at that run.

    `again` runs it once more.
    """

    first: Outputs
    models: Sequence[nn.Module]
    held: Sequence[tuple[nn.Module, Call]]
    again: Again
    stray: str = ""
    _second: OutputsAndState = field(init=False)

    def of(self, finding: Finding) -> Finding:
        """The finding with what is known of it."""
        if self.first.same:
            return finding.amended(deterministic=True) if finding.found else finding.noted(CAME_AGAIN)
        other = self.first.other
        if other is None:
            return finding.noted("" if self.first.whole or finding.phase not in LOSS_SIDE else NOT_KEPT)
        self._second = OutputsAndState(self.models)
        self.again(self._second)
        if self._second.other is None:  # a recorder makes torch choose other kernels
            return finding
        name, why = _name(other, self.models), self._not_known(other)
        note = f"run again, {name} is another than in training" + (f": {why}" if why else "")
        if finding.phase not in OPEN and not self._is_of(finding, other):
            return finding.noted(note)
        if why:  # so what else was seen is not what happened in training
            return Finding("unknown", finding.by, note=note)
        return self._irreproducible(finding, other)

    def _is_of(self, finding: Finding, other: Output) -> bool:
        """True if what is at fault was computed of the outputs of an earlier call, which are others now."""
        calls = [call for _, call in self.held]
        number = next(k for k, call in enumerate(calls) if call is other.call)
        return finding.phase == "input" and number < finding.call and bool(calls[finding.call].computed)

    def _not_known(self, other: Output) -> str:
        """Reason why it cannot be said what made an output another one."""
        if self.stray:
            return f"that may be because {self.stray} wrote into a tensor that is not restored"
        if any(_is_foreign(one) for one in tensors((other.call.args, other.call.kwargs))):
            return (
                "an input lies in memory that is not torch's, of which it is not known whether it was written"
            )
        if self._second.unrestored:
            return f"that may be so because {self._second.unrestored}"
        operators = self._not_deterministic()
        if operators:
            return f"operators that are not deterministic were run: {', '.join(operators)}"
        if self.first.came_again < FEWEST:
            return "so is nearly all else, so that weights, or something else that it reads, may have been others"
        if not self._came_alike(other):
            return "run a third time, it was another again"
        return ""

    def _came_alike(self, other: Output) -> bool:
        """True if both runs gave the same, bit for bit."""
        second = (one for one in self._second.compared if one.call is other.call)
        return any(one.position == other.position and other.came_alike(one) for one in second)

    def _not_deterministic(self) -> list[str]:
        """The operators of these calls that torch knows to have no deterministic implementation."""
        enabled = torch.are_deterministic_algorithms_enabled()
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                torch.use_deterministic_algorithms(True, warn_only=True)
                self.again(_Alone())
            finally:
                torch.use_deterministic_algorithms(enabled, warn_only=warns)
        said = (_NOT_DETERMINISTIC.match(str(one.message)) for one in caught)
        return list(dict.fromkeys(one["operator"] for one in said if one is not None))

    @torch.no_grad()
    def _irreproducible(self, finding: Finding, other: Output) -> Finding:
        name = _name(other, self.models)
        seen, again = other.described(name)
        number = next(k for k, (_, call) in enumerate(self.held) if call is other.call)
        note = (
            f"run again twice from the same inputs and generators, {name} was the same both times and not what it was "
            f"in training, in {other.extent}: a fault of the hardware, or "
            "something that the forward reads was changed since (a global variable, a weight through `.data`)"
        )
        return Finding(
            "irreproducible",
            finding.by,
            module=_path(other.model, self.models),
            module_type=type(other.model).__name__,
            operands=(seen,),
            result=again,
            call=number,
            device=str(other.device),
            host=socket.gethostname(),
            note=note,
        )


def _is_foreign(tensor: Tensor) -> bool:
    """True for memory of numpy, or the like: what writes there counts no version."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    memory = tensor.untyped_storage()
    return not memory.resizable() and not memory.is_shared()


_NOT_DETERMINISTIC = re.compile(r"(?P<operator>.+?) does not have a deterministic implementation")


class _Alone(CallListener):
    alone = True


def _path(model: nn.Module, models: Sequence[nn.Module]) -> str:
    found = (name for one in models for name, module in inner(one).named_modules() if module is inner(model))
    return next(found, "") or type(model).__name__


def _name(output: Output, models: Sequence[nn.Module]) -> str:
    return f"output {output.position} of {_path(output.model, models)}"
