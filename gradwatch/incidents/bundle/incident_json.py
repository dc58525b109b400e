"""The contents of `incident.json`: the incident, and how the tensors beside it made up the step.

Plain data without torch. Version 1: keys may be added, and are ignored by a reader that does not know them; a change
of meaning is a new version, which this reader refuses.

A value of an argument is a tree of JSON objects with one key each: `{"tensor": {…}}` names a tensor of the bundle,
`{"list": […]}`, `{"tuple": […]}`, `{"dict": [[key, value], …]}` hold others, `{"value": …}` is None, a truth value, a
number or a text, `{"float": "NaN"}` a number that JSON lacks, `{"dtype": "float32"}` one of torch's types, and
`{"missing": "why"}` something that is not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gradwatch.incidents.incident import Incident
from gradwatch.records.finding import Batch, Frame
from gradwatch.runtime.json_numbers import json_ready

FORMAT: Literal["gradwatch-incident"] = "gradwatch-incident"
VERSION: Literal[1] = 1
DOCUMENT, PAGE, TENSORS = "incident.json", "incident.md", "tensors.safetensors"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that is not in the bundle: `nbytes` is its size where it is a tensor, else 0."""

    name: str
    nbytes: int
    why: str

    def __str__(self) -> str:
        size = f" ({self.nbytes:,} bytes)" if self.nbytes else ""
        return f"{self.name}{size}: {self.why}"


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """Names of tensors (uint8) that hold the states of random generators before a call; "" = not drawn from.

    `python` holds the 625 words of `random.getstate()` as little-endian uint32, `numpy` the 624 of the legacy MT19937
    generator; `gauss_next`, `position`, `has_gauss`, `cached_gaussian` the rest of them. `cpu` and `cuda` (by index of
    the device) are as `get_state()` of torch's generators gives them.
    """

    python: str = ""
    gauss_next: float | None = None
    numpy: str = ""
    position: int = 0
    has_gauss: int = 0
    cached_gaussian: float = 0.0
    cpu: str = ""
    cuda: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallDocument:
    """One forward call of the step: `model` is the position of what was called in `Document.models`.

    `args` and `kwargs` are trees (see above). `outputs` is how many tensors it returned, `gradients` the tensors that
    reached them, by position; `autocast` (enabled, dtype) by kind of device. `twice`: such a gradient was kept with its
    graph, to be differentiated again.
    """

    model: int
    args: Any
    kwargs: Any
    outputs: int
    gradients: Mapping[str, str] = field(default_factory=dict)
    generators: GeneratorStates = field(default_factory=GeneratorStates)
    autocast: Mapping[str, tuple[bool, str]] = field(default_factory=dict)
    training: bool = True
    caller: Frame | None = None
    batch: Batch | None = None
    twice: bool = False


@dataclass(frozen=True, slots=True)
class ModelDocument:
    """A module that was called, where it computed, and the tensors that hold its buffers and parameters, by name.

    `of` is the position of the watched model it belongs to in `Document.watched`, `name` its FQN in there ("" = the
    model itself); `of` -1: a criterion, which belongs to none. `spread`: its parameters were over several ranks.
    """

    type: str
    of: int = 0
    name: str = ""
    device: str = "cpu"
    spread: bool = False
    buffers: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Document:
    """Everything in a bundle that is no tensor.

    `obstacle` says why the step cannot be run again from it ("" = it can). `watched` are the classes of the watched
    models, `models` the modules that were called: they, parts of them, criteria beside them. `sites` names the S
    elements of the tensors `site.norm`, `site.usual` (the usual norm, NaN where it is not known), `site.calls` and
    `site.coef`, and `gradients` the gradients kept, by parameter:
    as they were found at the step, before anything was done about them, and the part of this rank where they are
    sharded. `loss_scale` is that of the GradScaler they went through, None without one.
    """

    incident: Incident
    suspicion: Literal["nonfinite", "exploding", "vanishing"] = "nonfinite"
    obstacle: str = ""
    calls: tuple[CallDocument, ...] = ()
    watched: tuple[str, ...] = ()
    models: tuple[ModelDocument, ...] = ()
    sites: tuple[str, ...] = ()
    gradients: Mapping[str, str] = field(default_factory=dict)
    loss_scale: float | None = None
    left_out: tuple[LeftOut, ...] = ()
    format: Literal["gradwatch-incident"] = FORMAT
    version: Literal[1] = VERSION

    def encode(self) -> bytes:
        """The file: ASCII JSON, whatever is in the names; NaN and the infinities as strings."""
        document = {"format": self.format, "version": self.version, **json_ready(asdict(self))}
        document["incident"] = self.incident.to_dict()
        return json.dumps(document, indent=1, allow_nan=False).encode("ascii")
