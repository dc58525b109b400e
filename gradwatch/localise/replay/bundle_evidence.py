"""Inputs, gradients and state of a step, copied so that they outlive it: for a bundle (`gradwatch.incidents.bundle`).

Copied on the training thread, at the boundary, for everything here may be written into as soon as the step is taken:
one pass over at most `max_bytes`, at an incident only. Nothing of the training is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.incidents.bundle.incident_json import CallDocument, GeneratorStates, LeftOut, ModelDocument
from gradwatch.localise.diagnosis.python_frames import frame_of
from gradwatch.localise.diagnosis.tensor_values import tensors
from gradwatch.localise.held_calls.batch_identity import fingerprint
from gradwatch.localise.held_calls.inner_model import inner, shared
from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.held_calls.random_generators import CPU, NUMPY, PYTHON, Generators, of_cuda
from gradwatch.localise.held_calls.recorded_call import Call
from gradwatch.localise.replay.arguments_json import encode, missing
from gradwatch.localise.replay.nonfinite_rows import batch_size
from gradwatch.localise.replay.step_replay import refuse
from gradwatch.localise.sharded.whole_parameters import is_spread
from gradwatch.reading.layouts import local
from gradwatch.records.finding import Finding
from gradwatch.runtime.json_numbers import utf8

DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
    }
)
"""What safetensors can hold (https://github.com/huggingface/safetensors, `TensorInfo`)."""

UNASKED = "not asked for; write `snapshot: {batch: true}`"
NO_GRADIENT = "the gradient at its outputs was not kept: beyond max_bytes"
OWN_GENERATOR = "the forward draws from a generator of the script's own, not from one of the process"
SPREAD = "sharded over ranks, and this rank holds only its shard; give --checkpoint to `gradwatch replay`"


@dataclass(slots=True, eq=False)
class Evidence:
    """Copies on the host, by the names they have in the bundle, at most `max_bytes` of them; and what they are.

    What comes first is kept first: whoever gathers begins with what a replay cannot do without.
    """

    max_bytes: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    calls: tuple[CallDocument, ...] = ()
    watched: tuple[str, ...] = ()
    models: tuple[ModelDocument, ...] = ()
    gradients: dict[str, str] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    obstacle: str = ""
    _nbytes: int = 0
    _known: dict[int, tuple[Tensor, str]] = field(default_factory=dict)

    def keep(self, name: str, tensor: Tensor) -> str:
        """Copy a tensor; the name under which it is kept (that of before, if it is), "" where it is left out.

        `name` may hold any parameter's name; what UTF-8 cannot spell is replaced, and two names stay two.
        """
        known = self._known.get(id(tensor))
        if known is not None:
            return known[1]
        name = utf8(name)
        while name in self.tensors:
            name += "~"
        nbytes = tensor.numel() * tensor.element_size()
        if why := _unfit(tensor):
            self.left_out.append(LeftOut(name, nbytes, why))
            return ""
        if self._nbytes + nbytes > self.max_bytes:
            self.left_out.append(LeftOut(name, nbytes, f"beyond max_bytes = {self.max_bytes:,}"))
            return ""
        self.tensors[name] = copied(tensor)
        self._nbytes += nbytes
        self._known[id(tensor)] = (
            tensor,
            name,
        )  # the tensor is held so that its id is given to no other object
        return name

    def release(self) -> None:
        """Hold none of the originals any longer."""
        self._known.clear()

    def keep_bytes(self, name: str, content: bytes) -> str:
        """The same for bytes, as a tensor of uint8."""
        return self.keep(name, torch.frombuffer(bytearray(content), dtype=torch.uint8))


def _unfit(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return "sparse, quantized or nested, which safetensors cannot hold"
    if tensor.dtype not in DTYPES:
        return f"{tensor.dtype}, which safetensors cannot hold"
    if tensor.device.type == "meta":
        return "on the meta device: it has no numbers"
    return ""


@torch.no_grad()
def copied(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor on the host, contiguous, in memory of its own."""
    plain = local(tensor.detach()).resolve_conj().resolve_neg()
    return torch.empty(plain.shape, dtype=plain.dtype, device="cpu").copy_(plain)


def gather(
    evidence: Evidence,
    held: list[tuple[nn.Module, Call]],
    watched: Sequence[nn.Module],
    gradients: Iterable[tuple[str, Tensor]],
    *,
    batch: bool,
    parameters: bool,
    finding: Finding | None = None,
) -> None:
    """Put into `evidence` the calls of the step `held`, the `gradients` named and, if asked, inputs and weights.

    `watched` are the models that the function of a replay is to build. Where inputs are kept, the rows that `finding`
    names come first: a batch may be too large.
    """
    if batch and finding is not None:
        _rows(evidence, held, finding)
    bases = list({id(inner(model)): inner(model) for model, _ in held}.values())
    states = [_generators(evidence, n, call.generators) for n, (_, call) in enumerate(held)]
    trees = [_arguments(evidence, n, call, batch) for n, (_, call) in enumerate(held)]
    reached = [
        {
            str(at): name
            for at, grad in call.gradients.items()
            if (name := evidence.keep(f"gradient_at_output.{n}.{at}", grad))
        }
        for n, (_, call) in enumerate(held)
    ]
    evidence.calls = tuple(
        _call(n, bases.index(inner(model)), call, trees[n], reached[n], states[n])
        for n, (model, call) in enumerate(held)
    )
    first = {id(inner(model)): call.buffers for model, call in reversed(held)}
    buffers = [_buffers(evidence, n, base, first[id(base)]) for n, base in enumerate(bases)]
    for name, grad in gradients:
        if kept := evidence.keep(f"gradient.{name}", grad):
            evidence.gradients[name] = kept
    weights = [_parameters(evidence, n, base) if parameters else {} for n, base in enumerate(bases)]
    evidence.watched = tuple(map(_type, map(inner, watched)))
    evidence.models = tuple(
        _model(base, watched, *kept) for base, *kept in zip(bases, buffers, weights, strict=True)
    )
    evidence.obstacle = _obstacle(evidence, held)
    evidence.release()


def _rows(evidence: Evidence, held: list[tuple[nn.Module, Call]], finding: Finding) -> None:
    """The rows at fault of each input of the call that they are of, as `sample.CALL.INPUT`."""
    call = held[finding.call][1] if finding.by == "replay" and finding.call < len(held) else None
    if call is None or not finding.samples or not _intact(call):
        return
    size = batch_size(call)
    for number, tensor in enumerate(tensors((call.args, call.kwargs))):
        if tensor.dim() and tensor.shape[0] == size and not _unfit(tensor):
            evidence.keep(f"sample.{finding.call}.{number}", tensor.detach()[list(finding.samples)])


def _generators(evidence: Evidence, n: int, found: Generators) -> GeneratorStates:
    """Generators of one call; what was not looked at is not drawn from."""
    name = f"generator.{n}"
    saved: dict[str, Any] = {}
    cuda: dict[str, str] = {}
    devices = {id(source): k for k, source in enumerate(of_cuda())} if torch.cuda.is_initialized() else {}
    moved = found.moved()
    for source, state in found.states:
        if source is PYTHON:
            _, words, saved["gauss_next"] = state
            saved["python"] = evidence.keep_bytes(f"{name}.python", np.array(words, "<u4").tobytes())
        elif source is NUMPY and state[0] == "MT19937":
            _, words, *rest = state
            saved["numpy"] = evidence.keep_bytes(f"{name}.numpy", np.asarray(words, "<u4").tobytes())
            saved |= dict(zip(("position", "has_gauss", "cached_gaussian"), rest, strict=True))
        elif source is CPU:
            saved["cpu"] = evidence.keep(f"{name}.cpu", state)
        elif id(source) in devices:
            k = devices[id(source)]
            cuda[str(k)] = evidence.keep(f"{name}.cuda{k}", state)
        elif source in moved:
            evidence.left_out.append(LeftOut(f"{name}.own", 0, OWN_GENERATOR))
    return GeneratorStates(**saved, cuda=cuda)


def _arguments(evidence: Evidence, n: int, call: Call, batch: bool) -> tuple[Any, Any]:
    """The trees of `args` and `kwargs`, their tensors kept where the batch was asked for."""
    if not batch:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors((call.args, call.kwargs)))
        evidence.left_out.append(LeftOut(f"input.{n}", size, UNASKED))
        return {"missing": UNASKED}, {"missing": UNASKED}
    numbers = iter(range(1 << 30))

    def tensor(found: Tensor) -> dict[str, Any]:
        name = f"input.{n}.{next(numbers)}"
        kept = evidence.keep(name, found)
        if not kept:
            return {"missing": evidence.left_out[-1].why}
        return {
            "tensor": {"name": kept, "requires_grad": found.requires_grad, "stride": list(found.stride())}
        }

    return encode(call.args, tensor), encode(call.kwargs, tensor)


def _call(
    n: int,
    model: int,
    call: Call,
    trees: tuple[Any, Any],
    reached: Mapping[str, str],
    states: GeneratorStates,
) -> CallDocument:
    return CallDocument(
        model=model,
        args=trees[0],
        kwargs=trees[1],
        outputs=call.outputs,
        gradients=reached,
        generators=states,
        autocast={
            device: (enabled, str(dtype).removeprefix("torch."))
            for device, (enabled, dtype) in call.autocast.items()
        },
        training=call.training,
        twice=call.twice,
        caller=next(iter(frame_of(call.caller)), None),
        batch=fingerprint(call.args, call.kwargs, call.indices) if _intact(call) else None,
    )


def _intact(call: Call) -> bool:
    """True if the inputs are still what the model was given."""
    given = tensors((call.args, call.kwargs))
    return not call.reason and [tensor._version for tensor in given] == call.versions


def _buffers(evidence: Evidence, n: int, base: nn.Module, before: Mapping[str, Tensor]) -> dict[str, str]:
    """Buffers as they were before the step's first call, as far as forwards change them."""
    named = base.named_buffers(remove_duplicate=False)
    found = {name: evidence.keep(f"buffer.{n}.{name}", before.get(name, buffer)) for name, buffer in named}
    return {name: kept for name, kept in found.items() if kept}


def _parameters(evidence: Evidence, n: int, base: nn.Module) -> dict[str, str]:
    if is_spread(base) or shared(base):
        size = sum(param.numel() * param.element_size() for param in base.parameters())
        evidence.left_out.append(LeftOut(f"parameter.{n}", size, SPREAD))
        return {}
    named = base.named_parameters(remove_duplicate=False)
    found = {name: evidence.keep(f"parameter.{n}.{name}", param) for name, param in named}
    return {name: kept for name, kept in found.items() if kept}


def _model(
    base: nn.Module, watched: Sequence[nn.Module], buffers: Mapping[str, str], weights: Mapping[str, str]
) -> ModelDocument:
    where = next((param.device for param in base.parameters()), torch.device("cpu"))
    of, name = _place(base, watched)
    return ModelDocument(_type(base), of, name, str(where), is_spread(base), buffers, weights)


def _place(base: nn.Module, watched: Sequence[nn.Module]) -> tuple[int, str]:
    """Index of the watched model that it is a part of, and its name there; (-1, "") for a criterion."""
    for of, model in enumerate(watched):
        for name, module in inner(model).named_modules():
            if module is base:
                return of, name
    return -1, ""


def _type(base: nn.Module) -> str:
    return f"{type(base).__module__}.{type(base).__qualname__}"


def _without_idle_criteria(
    evidence: Evidence, held: list[tuple[nn.Module, Call]]
) -> list[tuple[nn.Module, Call]]:
    """The calls, less those of criteria that cannot be run again from what was kept: the model's can without."""
    kept = []
    for pair, saved in zip(held, evidence.calls, strict=True):
        gap = _gap(*pair, saved) if evidence.models[saved.model].of < 0 else ""
        if gap:
            what = f"the call of {evidence.models[saved.model].type}"
            evidence.left_out.append(LeftOut(what, 0, f"cannot be run again: {gap}"))
        else:
            kept.append((pair, saved))
    evidence.calls = tuple(saved for _, saved in kept)
    return [pair for pair, _ in kept]


def _obstacle(evidence: Evidence, held: list[tuple[nn.Module, Call]]) -> str:
    """The reason why the calls cannot be run again from what was kept; "" where they can."""
    held = _without_idle_criteria(evidence, held)
    gaps = (_gap(model, call, saved) for (model, call), saved in zip(held, evidence.calls, strict=True))
    if gap := next(filter(None, gaps), ""):
        return gap
    if lost := next((one for one in evidence.left_out if one.name.startswith("generator.")), None):
        return f"the state of a random generator was not kept: {lost}"
    return "" if held else "no call was held"


def _gap(model: nn.Module, call: Call, saved: CallDocument) -> str:
    """The reason why one call cannot be run again; "" where it can."""
    try:
        refuse(inner(model), call)
    except Refused as refusal:
        return str(refusal)
    for place, tree in (("args", saved.args), ("kwargs", saved.kwargs)):
        if gap := next(missing(tree, place), ""):
            return f"its inputs were {UNASKED}" if gap.endswith(UNASKED) else f"{gap} was not kept"
    return NO_GRADIENT if len(saved.gradients) < len(call.gradients) else ""
