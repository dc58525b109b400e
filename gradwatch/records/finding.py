"""The result of a localisation: which operation, of which module, on which line, made the first NaN or Inf.

No torch here: a Finding is plain data, so sinks, the journal and `gradwatch explain` handle it without tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from gradwatch.runtime.json_numbers import json_ready

Phase = Literal[
    "forward",
    "backward",
    "loss",
    "outputs",
    "number",
    "irreproducible",
    "after_backward",
    "input",
    "tensor",
    "parameter",
    "buffer",
    "activations",
    "exploding",
    "vanishing",
    "unknown",
]
"""Where it began: in the forward or the backward of the operation named; on the loss side of the model's outputs, which
are finite ("loss") or infinite on purpose, as far as one can tell ("outputs"); in a number that an operation was given;
in the batch, another tensor of the loop (a label, a mask), a weight or a buffer that was not finite before the step. Of
gradients that are finite: where they grow or shrink most, or the layer that activations off their usual level enter.
"irreproducible": an output of the module was another when it was run again from the same inputs and generators.
"after_backward": in code between the backward, at whose end the gradients were finite, and the step. Or it is not known
(`note` says why)."""

By = Literal["replay", "record", "closure", "norms"]
"""How it was found: the step run again, the next steps recorded as they ran, `Watch.step(closure)`, or the norms of the
step compared with their usual levels."""

PHASES: tuple[str, ...] = get_args(Phase)
LOSS_SIDE = ("loss", "outputs")  # phases that name no operation at fault
GAINS = ("activations", "exploding", "vanishing")  # phases of gradients that are finite
AS_USUAL = 3.0  # factor up to which a loss is at its usual level
LATER_OF_LAYERS = ("moved", "weights_moved")  # not in findings of earlier versions
MOST_SHOWN = 16  # positions of samples named in a sentence
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "\\site-packages\\")


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of Python on the way to the operation; `source` is its text, "" where it cannot be read."""

    file: str
    line: int
    function: str = ""
    source: str = ""

    @property
    def where(self) -> str:
        """The place as `file:line`."""
        return f"{self.file}:{self.line}"

    @property
    def is_library(self) -> bool:
        """True if the file was installed rather than written for this job."""
        return any(part in self.file for part in LIBRARIES)


@dataclass(frozen=True, slots=True)
class Operand:
    """Values of one tensor: `smallest` and `largest` over its finite elements, NaN where it has none.

    `name` says what it was to the operation ("input 0", "result", "gradient in", "saved self"); `dtype` as torch
    spells it ("float32"); counts are elements. `first` is the position of the first NaN or Inf, () where none is known.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    numel: int
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    smallest: float = math.nan
    largest: float = math.nan
    first: tuple[int, ...] = ()

    def __str__(self) -> str:
        """`input 0: float32[16, 1], 2 of 16 zero, -1.2 … 3`."""
        odd = [f"{count} {word}" for count, word in ((self.nan, "NaN"), (self.inf, "Inf")) if count]
        odd += [f"{self.zeros} zero"] if self.zeros else []
        shape = ", ".join(map(str, self.shape))
        parts = [f"{self.name}: {self.dtype}[{shape}]"]
        if odd:
            parts.append(f"{', '.join(odd)} of {self.numel}")
        if self.first:
            parts.append(f"the first at [{', '.join(map(str, self.first))}]")
        if math.isfinite(self.smallest):
            parts.append(f"{self.smallest:.4g} … {self.largest:.4g}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Layer:
    """One call of a leaf module: L2 norms of the gradient at its output, and of the one it gave its input.

    `at_input` is NaN where the input wanted no gradient. `kind` is the class of the module. `moved` is the factor by
    which the gradient of its bias is off its usual norm, `weights_moved` that of its other parameters; NaN where that
    is not known.
    """

    module: str
    kind: str
    at_output: float
    at_input: float
    moved: float = math.nan
    weights_moved: float = math.nan

    @property
    def gain(self) -> float:
        """at_input / at_output; NaN where either is not known."""
        return self.at_input / self.at_output if self.at_output > 0 else math.nan


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch of one forward call of the model, identified by a hash.

    `hash` is that of `gradwatch.batch_hash` over the call's arguments ("" = not known). `nbytes` is how large their
    tensors are, and `complete` False where only the first of those bytes were hashed. `indices` are the positions in
    the dataset that `Watch.batch` was given, at most 4,096 of `samples`; None = not given.
    """

    hash: str = ""
    nbytes: int = 0
    complete: bool = True
    indices: tuple[int, ...] | None = None
    samples: int = 0

    def __str__(self) -> str:
        """`9f86d081884c7d65 (1,024 bytes), positions 3, 17, 4 in the dataset`."""
        cut = "" if self.complete else ", of which the first were hashed"
        said = f"{self.hash or 'no hash'} ({self.nbytes:,} bytes{cut})"
        if self.indices is None:
            return f"{said}, positions in the dataset not known"
        shown = ", ".join(map(str, self.indices[:MOST_SHOWN]))
        more = f" and {self.samples - MOST_SHOWN:,} more" if self.samples > MOST_SHOWN else ""
        return f"{said}, positions {shown}{more} in the dataset"


@dataclass(frozen=True, slots=True)
class Finding:
    """The cause of one incident, as far as it is known.

    `module` is the innermost torch FQN ("" = outside the model) and `module_type` its class; `op` the operation
    as torch's functions are named ("sqrt", "div", "softmax"); `node` its autograd node where it was found in
    backward ("SqrtBackward0"). `function` is the torch function that the line called, where it is another one
    ("einsum", whose `bmm` it was). `frames` are the Python lines that led there, innermost first, torch's own
    left out. `operands` and `result` describe the tensors, on this rank. `profile` is the gradient by depth, in
    the order of the forward, where it explodes or vanishes; `at_outputs`: it does not do so on its way through the
    model, but came so to its outputs; `begins` the first layer on that way where it is so, "" where that is not known.
    `lr_jumped_at` is the step shortly before at which the learning rate had jumped, None where it had not.
    `loss_moved` is the factor by which the loss is off its usual level, None where that is not known, or not looked at.
    `call` is the index of the model's forward call among those of the step (micro-batch) and `batch` what went into it,
    None where that was not held. `samples` are the rows of that batch which alone were not finite, or whose gradients
    at the model's outputs alone were not, or which carry most of a gradient that explodes; () where all are, or it is
    not known. `share` is the part that they carry of such a gradient (that call for `samples` of ()), 0 where it is not
    known. `others` is how many further operations did the same, and `first_parameter` the first parameter in backward
    order that the rule named. `deterministic`: run again, the model's outputs were the same, bit for bit; False where
    that is not known, or not so. `device` and `host` are those of an output that was not.
    `note` says what else is to be said, or why nothing was found.
    """

    phase: Phase
    by: By
    step: int = 0
    rank: int = 0
    module: str = ""
    module_type: str = ""
    op: str = ""
    node: str = ""
    function: str = ""
    frames: tuple[Frame, ...] = ()
    operands: tuple[Operand, ...] = ()
    result: Operand | None = None
    profile: tuple[Layer, ...] = ()
    at_outputs: bool = False
    begins: str = ""
    lr_jumped_at: int | None = None
    loss_moved: float | None = None
    call: int = 0
    batch: Batch | None = None
    samples: tuple[int, ...] = ()
    share: float = 0.0
    others: int = 0
    deterministic: bool = False
    device: str = ""
    host: str = ""
    first_parameter: str = ""
    rule: str = ""
    incident: str = ""
    note: str = ""

    @property
    def found(self) -> bool:
        """True if a cause is known."""
        return self.phase != "unknown"

    @property
    def exactness(self) -> int:
        """0 where no cause is known, 1 where only the side of the model's outputs is, 2 for an operation."""
        return 0 if not self.found else 1 if self.phase in LOSS_SIDE else 2

    @property
    def frame(self) -> Frame | None:
        """The line that called the operation: the innermost of the user's own, a library's where there is none."""
        own = (frame for frame in self.frames if not frame.is_library)
        return next(own, self.frames[0] if self.frames else None)

    @property
    def carriers(self) -> str:
        """`rows 3, 17 of the batch (dimension 0; positions 1043, 88 in the dataset)`, "" where they are not known.

        Of a gradient that explodes with their part of it: `…, 99.7% of the gradient`.
        """
        if not self.samples:
            return ""
        shown = self.samples[:MOST_SHOWN]
        more = f" and {len(self.samples) - MOST_SHOWN:,} more" if len(self.samples) > MOST_SHOWN else ""
        said = f"row{'s' if len(self.samples) > 1 else ''} {', '.join(map(str, shown))}{more} of the batch"
        known = None if self.batch is None else self.batch.indices
        if known is None or max(shown) >= len(known):
            said += " (dimension 0)"
        else:
            said += f" (dimension 0; positions {', '.join(str(known[row]) for row in shown)} in the dataset)"
        return f"{said}, {min(self.share, 1):.1%} of the gradient" if self.share else said

    @property
    def where(self) -> str:
        """`file:line` of `frame`, "" where no line is known."""
        return "" if self.frame is None else self.frame.where

    def amended(self, **changes: Any) -> Finding:
        """The same finding with some fields set."""
        return replace(self, **changes)

    def noted(self, *notes: str) -> Finding:
        """The same finding with more in its `note`, behind what is there; "" adds nothing."""
        return replace(self, note="; ".join(filter(None, (self.note, *notes))))

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe; NaN and the infinities as the strings "NaN", "Infinity", "-Infinity"."""
        document: dict[str, Any] = json_ready(asdict(self))
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Finding:
        """Read the output of `to_dict`; unknown keys are ignored. Raises ValueError for anything else."""
        try:
            known = {each.name for each in fields(cls)}
            given = {key: value for key, value in document.items() if key in known}
            given["frames"] = tuple(Frame(**frame) for frame in given.get("frames", ()))
            given["operands"] = tuple(map(_operand, given.get("operands", ())))
            given["profile"] = tuple(map(_layer, given.get("profile", ())))
            given["samples"] = tuple(map(int, given.get("samples", ())))
            result = given.get("result")
            given["result"] = None if result is None else _operand(result)
            batch = given.get("batch")
            given["batch"] = None if batch is None else _batch(batch)
            if given["phase"] not in PHASES:
                raise ValueError(f"phase {given['phase']!r} is none of {', '.join(PHASES)}")
            return cls(**given)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a Finding: {error}") from error


def _layer(document: Mapping[str, Any]) -> Layer:
    numbers = {
        name: float(document[name])
        for name in ("at_output", "at_input", *LATER_OF_LAYERS)
        if name in document
    }
    return Layer(document["module"], document["kind"], **numbers)


def _batch(document: Mapping[str, Any]) -> Batch:
    indices = document.get("indices")
    return Batch(**{**document, "indices": None if indices is None else tuple(map(int, indices))})


def _operand(document: Mapping[str, Any]) -> Operand:
    given = dict(document)
    given["shape"] = tuple(given["shape"])
    given["first"] = tuple(given.get("first", ()))
    for bound in ("smallest", "largest"):
        given[bound] = float(given[bound])  # "NaN" and "Infinity" are words float knows
    return Operand(**given)
