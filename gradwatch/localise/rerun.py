"""The step of a bundle run again in another process: on a model that its user builds, under the same recorder.

The bundle only gives numbers. The model, and with it every line of code that runs, comes from a function that whoever
reads the bundle has named. Weights come from the bundle, from a checkpoint, or are those that the function built,
which is said.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.bundle.document import TENSORS, CallDocument, Document, GeneratorStates, ModelDocument
from gradwatch.bundle.reading import BundleError
from gradwatch.errors import GradwatchError
from gradwatch.finding import Finding
from gradwatch.localise.attributes import Refused
from gradwatch.localise.diagnose import diagnose, warned
from gradwatch.localise.evidence import NO_GRADIENT
from gradwatch.localise.fingerprint import fingerprint
from gradwatch.localise.frames import OURS, TORCH
from gradwatch.localise.held import Call, inner
from gradwatch.localise.profile import Profile, suspect
from gradwatch.localise.randomness import Generators
from gradwatch.localise.replay import replay
from gradwatch.localise.trees import DTYPES, TreeError, decode
from gradwatch.localise.values import finite, tensors

LossFn = Callable[[Any], Tensor]
BUILT = (
    "the weights are those that the function built: name those of the job with --checkpoint FILE.safetensors"
)
ELSEWHERE = "computed on {now}, and on {then} when it happened: the last bits may differ"
MOST_OUTPUTS = 1 << 20
MOST_CALLS = 4096
PYTHON_WORDS, NUMPY_WORDS = (
    625,
    624,
)  # of 32 bits, of the Mersenne twister's state; Python's holds the position too


@dataclass(slots=True, eq=False)
class Rerun:
    """One bundle about to be run again: `models` in the order of the document, what is to be said in `notes`.

    `loss_fn(output)` gives the loss of a model's output. It is used where the gradient at the outputs was not kept, or
    is not finite; otherwise that gradient is exact, and used.
    """

    document: Document
    stored: Mapping[str, Tensor]
    models: Sequence[nn.Module]
    loss_fn: LossFn | None = None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        told = self.document
        if told.obstacle and not (told.obstacle == NO_GRADIENT and self.loss_fn is not None):
            hint = "; have the function return `model, loss_fn`" if told.obstacle == NO_GRADIENT else ""
            raise BundleError(f"this bundle cannot be run again: {told.obstacle}{hint}")
        if len(told.calls) > MOST_CALLS:
            raise BundleError(f"a step of {len(told.calls):,} calls; {MOST_CALLS:,} are run again at most")
        if len(self.models) != len(told.models):
            kinds = ", ".join(one.type for one in told.models)
            raise BundleError(
                f"the step was one of {len(told.models)} models ({kinds}), and the function built {len(self.models)}"
            )

    def load(self, checkpoint: Mapping[str, Tensor] | None = None) -> None:
        """Put weights into the models. Raises `BundleError` where names or shapes do not fit."""
        if checkpoint is not None and len(self.models) > 1:
            raise BundleError(
                "a checkpoint of one model, and the step was one of several: load them in the function"
            )
        for n, (model, told) in enumerate(zip(self.models, self.document.models, strict=True)):
            if checkpoint is not None:
                load_weights(inner(model), checkpoint, "the checkpoint")
            elif told.parameters:
                found = {name: self._tensor(kept, f"models.{n}") for name, kept in told.parameters.items()}
                load_weights(inner(model), found, "the bundle")
            else:
                self.notes.append(BUILT)
            self._compare(model, told)

    def _compare(self, model: nn.Module, told: ModelDocument) -> None:
        base = inner(model)
        kind = f"{type(base).__module__}.{type(base).__qualname__}"
        if kind.rpartition(".")[2] != told.type.rpartition(".")[2]:
            self.notes.append(f"the model is a {kind}, and was a {told.type}")
        now = str(_device(base))
        if now.partition(":")[0] != told.device.partition(":")[0]:
            self.notes.append(ELSEWHERE.format(now=now, then=told.device))

    def run(self, max_bytes: int) -> Finding:
        """Run the step; its cause, signed with the incident's name.

        `max_bytes` caps copies of tensors in module attributes (see `gradwatch.localise.replay`).

        Raises:
            BundleError: the document does not fit the tensors or the model.
            GradwatchError: the model raised; the message says what and where.
        """
        calls = [self._call(n, told) for n, told in enumerate(self.document.calls)]
        held = [self._held(call, told) for call, told in zip(calls, self.document.calls, strict=True)]
        faults: list[BaseException] = []
        try:
            finding = self._found(held, [inner(model) for model in self.models], faults, max_bytes)
        except Refused as refusal:
            raise BundleError(f"the step cannot be run again: {refusal}") from None
        except Exception as error:
            raise GradwatchError(
                f"the model raised {type(error).__name__}{_where(error)}: {error}"
            ) from error
        self.notes += [f"looking on failed: {type(fault).__name__}: {fault}" for fault in faults[:1]]
        return self._signed(finding)

    def _found(
        self,
        held: list[tuple[nn.Module, Call]],
        models: list[nn.Module],
        faults: list[BaseException],
        max_bytes: int,
    ) -> Finding:
        if self.document.suspicion == "nonfinite":
            return diagnose(replay(held, models, faults.append, None, max_bytes))
        profile = Profile(models, faults.append)
        traces = replay(held, models, faults.append, profile, max_bytes)
        finding = diagnose(traces)
        layers = profile.layers()
        found = None if finding.found else suspect(layers, self.document.suspicion == "exploding")
        return finding if found is None else warned(found, traces)

    def _signed(self, finding: Finding) -> Finding:
        incident, calls = self.document.incident, self.document.calls
        event = incident.event
        return finding.told(
            rule="" if event is None else event.rule,
            incident=incident.name,
            step=incident.step,
            rank=incident.rank,
            first_parameter="" if event is None else event.first_cause,
            batch=calls[finding.call].batch if finding.call < len(calls) else None,
            note="; ".join(filter(None, (finding.note, *self.notes))),
        )

    # -- from the document to a call ---------------------------------------------------------------------

    def _call(self, n: int, told: CallDocument) -> Call:
        at = f"calls.{n}"
        if not 0 <= told.model < len(self.models) or not 0 <= told.outputs <= MOST_OUTPUTS:
            raise BundleError(
                f"{at}: model {told.model} and {told.outputs} outputs, of {len(self.models)} models"
            )
        base = inner(self.models[told.model])
        if base.training != told.training:
            self.models[told.model].train(told.training)
        device = _device(base)
        args, kwargs = self._arguments(told, at, device)
        if told.batch is not None and told.batch.hash:
            found = fingerprint(args, kwargs)
            if found.hash != told.batch.hash:
                raise BundleError(
                    f"{at}: its inputs have the hash {found.hash}, and had {told.batch.hash!r:.40}"
                )
        return Call(
            order=n,
            step=0,
            args=args,
            kwargs=kwargs,
            versions=[tensor._version for tensor in tensors((args, kwargs))],
            generators=self._generators(told.generators, at),
            buffers=self._buffers(base, self.document.models[told.model], device),
            autocast={kind: (on, _dtype(name, at)) for kind, (on, name) in told.autocast.items()},
            training=told.training,
            caller=None,
            outputs=told.outputs,
            gradients={
                _position(k, told, at): self._tensor(v, at).to(device) for k, v in told.gradients.items()
            },
        )

    def _arguments(self, told: CallDocument, at: str, device: torch.device) -> tuple[Any, Any]:
        made: dict[str, Tensor] = {}  # one tensor given twice is one tensor again, however often it is named

        def tensor(said: Mapping[str, Any], place: str) -> Tensor:
            name = said.get("name")
            stored = self._tensor(name, f"{at}.{place}")
            if name not in made:
                found = strided(stored, said.get("stride")).to(device).detach()
                wanted = said.get("requires_grad") is True and _differs(found)
                made[str(name)] = found.requires_grad_(wanted)
            return made[str(name)]

        try:
            args, kwargs = decode(told.args, tensor, "args"), decode(told.kwargs, tensor, "kwargs")
        except TreeError as error:
            raise BundleError(f"{at}.{error}") from None
        if not isinstance(args, tuple) or not isinstance(kwargs, dict):
            raise BundleError(f"{at}: its arguments are no tuple and dict")
        return args, kwargs

    def _held(self, call: Call, told: CallDocument) -> tuple[nn.Module, Call]:
        """The call as it was, or, where its gradient is of no use, that of model and loss together."""
        model, given = self.models[told.model], tuple(call.gradients.values())
        if self.loss_fn is None or (given and finite(given)):
            return model, call
        scale = self.document.loss_scale or 1.0
        call.outputs, call.gradients = 1, {0: torch.tensor(scale, device=_device(inner(model)))}
        call.buffers = {f"model.{name}": buffer for name, buffer in call.buffers.items()}
        return _WithLoss(inner(model), self.loss_fn), call

    def _tensor(self, name: Any, at: str) -> Tensor:
        found = self.stored.get(name) if isinstance(name, str) else None
        if found is None:
            raise BundleError(f"{at}: no tensor {name!r:.80} in {TENSORS}")
        return found

    def _buffers(self, base: nn.Module, told: ModelDocument, device: torch.device) -> dict[str, Tensor]:
        own = dict(base.named_buffers(remove_duplicate=False))
        found: dict[str, Tensor] = {}
        for name, kept in told.buffers.items():
            buffer, here = self._tensor(kept, f"buffer {name!r:.80}"), own.get(name)
            if here is None or here.shape != buffer.shape:
                raise BundleError(f"the model has no buffer {name!r:.80} of shape {tuple(buffer.shape)}")
            found[name] = buffer.to(device)
        return found

    def _generators(self, told: GeneratorStates, at: str) -> Generators:
        """The states, tried on generators of our own first: what they refuse must not reach the process's."""
        try:
            found = self._states(told, at)
            if found.python is not None:
                random.Random().setstate(found.python)
            if found.numpy is not None:
                np.random.RandomState().set_state(found.numpy)
            if found.cpu is not None:
                torch.Generator().set_state(found.cpu)
        except BundleError:
            raise
        except (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError) as error:
            raise BundleError(f"{at}.generators: not the state of a generator: {error}") from None
        return found

    def _states(self, told: GeneratorStates, at: str) -> Generators:
        found = Generators()
        if told.python:
            words = np.frombuffer(self._bytes(told.python, PYTHON_WORDS, at), "<u4").tolist()
            found.python = (3, tuple(words), told.gauss_next)
        if told.numpy:
            keys = np.frombuffer(self._bytes(told.numpy, NUMPY_WORDS, at), "<u4").astype(np.uint32)
            found.numpy = ("MT19937", keys, told.position, told.has_gauss, told.cached_gaussian)
        if told.cpu:
            found.cpu = self._tensor(told.cpu, at)
        devices = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        for index, name in told.cuda.items():
            if index.isdecimal() and int(index) < devices:
                found.cuda[int(index)] = self._tensor(name, at)
            elif self.document.models and self.document.models[0].device.startswith("cuda"):
                self.notes.append(f"the generator of device cuda:{index:.8} cannot be put back here")
        return found

    def _bytes(self, name: str, words: int, at: str) -> bytes:
        tensor = self._tensor(name, at)
        if tensor.dtype != torch.uint8 or tensor.shape != (4 * words,):
            raise BundleError(f"{at}: {name!r:.80} is no state of a generator")
        return tensor.numpy().tobytes()


class _WithLoss(nn.Module):
    """A model and its loss function as one."""

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss."""
        return self.loss_fn(self.model(*args, **kwargs))


def load_weights(model: nn.Module, found: Mapping[str, Tensor], source: str) -> None:
    """Put tensors by name into a model. Raises `BundleError` where one does not fit, or a parameter gets none.

    A parameter that shares its memory with one that gets its values needs none of its own.
    """
    own = model.state_dict(keep_vars=True)
    strangers = [name for name in found if name not in own]
    wrong = [name for name, tensor in found.items() if name in own and own[name].shape != tensor.shape]
    given = {id(own[name]) for name in found if name in own}
    bare = [name for name, param in model.named_parameters(remove_duplicate=False) if id(param) not in given]
    problems = (("the model has no", strangers), ("another shape has", wrong), ("it lacks", bare))
    said = [f"{what} {_listed(names)}" for what, names in problems if names]
    if said:
        raise BundleError(f"{source} does not fit the model: {'; '.join(said)}")
    with torch.no_grad():
        for name, tensor in found.items():
            own[name].copy_(tensor)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(f"{name!r:.120}" for name in names[:5]) + more


def strided(tensor: Tensor, stride: Any) -> Tensor:
    """The tensor laid out in memory as it was, where that has no gaps (channels last); else as it is."""
    if not isinstance(stride, list) or len(stride) != tensor.dim() or list(tensor.stride()) == stride:
        return tensor
    order = sorted(
        range(tensor.dim()), key=lambda k: (stride[k], -k) if isinstance(stride[k], int) else (0, 0)
    )
    expected = 1
    for k in order:
        if tensor.shape[k] != 1 and stride[k] != expected:
            return tensor
        expected *= tensor.shape[k]
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)


def _differs(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _device(model: nn.Module) -> torch.device:
    return next((param.device for param in model.parameters()), torch.device("cpu"))


def _dtype(name: str, at: str) -> torch.dtype:
    if name not in DTYPES:
        raise BundleError(f"{at}.autocast: no dtype {name!r:.40}")
    return DTYPES[name]


def _position(text: str, told: CallDocument, at: str) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > 8 or int(text) >= told.outputs:
        raise BundleError(f"{at}.gradients: no output {text!r:.40} among {told.outputs}")
    return int(text)


def _where(error: BaseException) -> str:
    """The innermost line of the user's own that led to an error."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((OURS, TORCH))
    ]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
