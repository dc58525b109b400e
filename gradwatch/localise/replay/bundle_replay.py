"""The step of a bundle run again in another process: on a model that its user builds, under the same recorder.

The bundle only gives numbers. The model, and with it every line of code that runs, comes from a function that whoever
reads the bundle has named. Weights come from the bundle, from a checkpoint, or are those that the function built,
which is said.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.errors import GradwatchError
from gradwatch.incidents.bundle.bundle_reader import BundleError
from gradwatch.incidents.bundle.incident_json import (
    TENSORS,
    CallDocument,
    Document,
    GeneratorStates,
    ModelDocument,
)
from gradwatch.localise.diagnosis.deviation import TWICE, Deviation
from gradwatch.localise.diagnosis.diagnose import diagnose
from gradwatch.localise.diagnosis.module_gain import Profile
from gradwatch.localise.diagnosis.python_frames import OURS, TORCH
from gradwatch.localise.diagnosis.tensor_values import finite, tensors
from gradwatch.localise.held_calls.batch_identity import fingerprint
from gradwatch.localise.held_calls.inner_model import inner
from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.held_calls.random_generators import CPU, NUMPY, PYTHON, Generators, Source, of_cuda
from gradwatch.localise.held_calls.recorded_call import Call
from gradwatch.localise.replay.arguments_json import DTYPES, TreeError, decode
from gradwatch.localise.replay.bundle_evidence import NO_GRADIENT
from gradwatch.localise.replay.diagnosed_replay import diagnosed_gain
from gradwatch.localise.replay.step_replay import replay
from gradwatch.records.finding import GAINS, Finding

LossFn = Callable[[Any], Tensor]
BUILT = (
    "the weights are those that the function built: name those of the job with --checkpoint FILE.safetensors"
)
ELSEWHERE = "computed on {now}, and on {then} when it happened: the last bits may differ"
WAS_SPREAD = "its parameters were sharded over ranks, and may have been used in another dtype"
CRITERION = "the criterion {kind} was not run again: have the function return it as `model, loss_fn`"
MOST_OUTPUTS = 1 << 20
MOST_CALLS = 4096
# Of 32 bits, of the Mersenne twister's state; Python's holds the position too.
PYTHON_WORDS, NUMPY_WORDS = 625, 624


@dataclass(slots=True, eq=False)
class Rerun:
    """One bundle about to be run again: `models` are the watched ones in their order, `notes` what is to be said.

    `loss_fn(output)` gives the loss of a model's output. It is used where the gradient at the outputs was not kept, or
    is not finite; otherwise that gradient is exact, and used. A loss that is a module, of the class of a criterion that
    was called in the step, is run as that one; without it calls of criteria are left out, for they were not built.
    """

    document: Document
    stored: Mapping[str, Tensor]
    models: Sequence[nn.Module]
    loss_fn: LossFn | None = None
    notes: list[str] = field(default_factory=list)
    _ran: list[CallDocument] = field(default_factory=list)

    def __post_init__(self) -> None:
        saved = self.document
        if saved.obstacle and not (saved.obstacle == NO_GRADIENT and self.loss_fn is not None):
            hint = "; have the function return `model, loss_fn`" if saved.obstacle == NO_GRADIENT else ""
            raise BundleError(f"this bundle cannot be run again: {saved.obstacle}{hint}")
        if len(saved.calls) > MOST_CALLS:
            raise BundleError(f"a step of {len(saved.calls):,} calls; {MOST_CALLS:,} are run again at most")
        if len(self.models) != len(saved.watched):
            kinds = ", ".join(saved.watched)
            raise BundleError(
                f"the step was one of {len(saved.watched)} models ({kinds}), and the function built {len(self.models)}"
            )

    def load(self, checkpoint: Mapping[str, Tensor] | None = None) -> None:
        """Put weights into the models. Raises `BundleError` where names or shapes do not fit."""
        if checkpoint is not None and len(self.models) > 1:
            raise BundleError(
                "a checkpoint of one model, and the step was one of several: load them in the function"
            )
        if checkpoint is not None:
            load_weights(inner(self.models[0]), checkpoint, "the checkpoint")
        for n, saved in enumerate(self.document.models):
            module = self._module(n)
            if module is None:
                continue
            if saved.parameters and checkpoint is None:
                found = {name: self._tensor(kept, f"models.{n}") for name, kept in saved.parameters.items()}
                load_weights(module, found, "the bundle")
            elif checkpoint is None and any(True for _ in module.parameters()):
                self._note(BUILT)
            self._compare(module, saved)

    def _module(self, n: int) -> nn.Module | None:
        """The module that was called, in the models of the function; None for a criterion that it did not build."""
        saved = self.document.models[n]
        if saved.of < 0:
            loss = self.loss_fn
            alike = isinstance(loss, nn.Module) and _name(loss) == saved.type.rpartition(".")[2]
            return loss if alike else None  # type: ignore[return-value]
        try:
            return inner(self.models[saved.of]).get_submodule(saved.name)
        except (AttributeError, LookupError):
            raise BundleError(f"models.{n}: no part {saved.name!r:.80} in model {saved.of}") from None

    @property
    def _has_criterion(self) -> bool:
        """True if the loss is one of the criteria that were called, with arguments that are known."""
        saved = self.document.models
        return any(self._module(n) is not None for n, one in enumerate(saved) if one.of < 0)

    def _compare(self, base: nn.Module, saved: ModelDocument) -> None:
        if _name(base) != saved.type.rpartition(".")[2]:
            self._note(f"the model is a {type(base).__module__}.{_name(base)}, and was a {saved.type}")
        now = str(_device(base))
        if now.partition(":")[0] != saved.device.partition(":")[0]:
            self._note(ELSEWHERE.format(now=now, then=saved.device))
        if saved.spread:
            self._note(WAS_SPREAD)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def run(self, max_bytes: int) -> Finding:
        """Run the step; its cause, signed with the incident's name.

        `max_bytes` caps copies of tensors in module attributes (see `gradwatch.localise.replay.step_replay`).

        Raises:
            BundleError: the document does not fit the tensors or the model.
            GradwatchError: the model raised; the message says what and where.
        """
        held = []
        self._ran = []
        for n, saved in enumerate(self.document.calls):
            if not 0 <= saved.model < len(self.document.models) or not 0 <= saved.outputs <= MOST_OUTPUTS:
                raise BundleError(f"calls.{n}: model {saved.model} and {saved.outputs} outputs")
            module = self._module(saved.model)
            if module is None:
                self._note(CRITERION.format(kind=self.document.models[saved.model].type))
                continue
            held.append(self._held(module, self._call(n, saved, module), saved))
            self._ran.append(saved)
        if not held:
            raise BundleError("this bundle cannot be run again: it holds no call of a model")
        faults: list[BaseException] = []
        try:
            finding = self._found(held, [inner(model) for model in self.models], faults, max_bytes)
        except Refused as refusal:
            raise BundleError(f"the step cannot be run again: {refusal}") from None
        except Exception as error:
            raise GradwatchError(
                f"the model raised {type(error).__name__}{_where(error)}: {error}"
            ) from error
        self.notes += [f"recording failed: {type(fault).__name__}: {fault}" for fault in faults[:1]]
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
        exploding = self.document.suspicion == "exploding"
        if any(saved.twice for saved in self._ran):
            return Finding("exploding" if exploding else "vanishing", "replay", note=TWICE)
        profile = Profile(models, faults.append)
        traces = replay(held, models, faults.append, profile, max_bytes)
        return diagnosed_gain(traces, profile, exploding, Deviation())

    def _signed(self, finding: Finding) -> Finding:
        incident, calls = self.document.incident, self._ran
        event = incident.event
        known = len(calls) == 1 or finding.phase not in GAINS  # which of the calls it is of
        return finding.noted(*self.notes).amended(
            rule="" if event is None else event.rule,
            incident=incident.name,
            step=incident.step,
            rank=incident.rank,
            first_parameter="" if event is None else event.first_cause,
            batch=calls[finding.call].batch if known and finding.call < len(calls) else None,
        )

    # -- from the document to a call ---------------------------------------------------------------------

    def _call(self, n: int, saved: CallDocument, base: nn.Module) -> Call:
        at = f"calls.{n}"
        if base.training != saved.training:
            base.train(saved.training)
        device = _device(base, *map(inner, self.models))  # a criterion has no parameters of its own
        args, kwargs = self._arguments(saved, at, device)
        if saved.batch is not None and saved.batch.hash:
            found = fingerprint(args, kwargs)
            if found.hash != saved.batch.hash:
                raise BundleError(
                    f"{at}: its inputs have the hash {found.hash}, and had {saved.batch.hash!r:.40}"
                )
        return Call(
            order=n,
            step=0,
            args=args,
            kwargs=kwargs,
            versions=[tensor._version for tensor in tensors((args, kwargs))],
            generators=self._generators(saved.generators, at),
            buffers=self._buffers(base, self.document.models[saved.model], device),
            autocast={kind: (on, _dtype(name, at)) for kind, (on, name) in saved.autocast.items()},
            training=saved.training,
            caller=None,
            outputs=saved.outputs,
            gradients={
                _position(k, saved, at): self._tensor(v, at).to(device) for k, v in saved.gradients.items()
            },
        )

    def _arguments(self, saved: CallDocument, at: str, device: torch.device) -> tuple[Any, Any]:
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
            args, kwargs = decode(saved.args, tensor, "args"), decode(saved.kwargs, tensor, "kwargs")
        except TreeError as error:
            raise BundleError(f"{at}.{error}") from None
        if not isinstance(args, tuple) or not isinstance(kwargs, dict):
            raise BundleError(f"{at}: its arguments are no tuple and dict")
        return args, kwargs

    def _held(self, module: nn.Module, call: Call, saved: CallDocument) -> tuple[nn.Module, Call]:
        """The call as it was, or, where its gradient is of no use, that of model and loss together."""
        given = tuple(call.gradients.values())
        whole = any(module is inner(model) for model in self.models)  # of a part the loss is not known
        if self.loss_fn is None or self._has_criterion or not whole or (given and finite(given)):
            return module, call
        scale = self.document.loss_scale or 1.0
        call.ends_in_loss(torch.tensor(scale, device=_device(module)))
        return _WithLoss(module, self.loss_fn), call

    def _tensor(self, name: Any, at: str) -> Tensor:
        found = self.stored.get(name) if isinstance(name, str) else None
        if found is None:
            raise BundleError(f"{at}: no tensor {name!r:.80} in {TENSORS}")
        return found

    def _buffers(self, base: nn.Module, saved: ModelDocument, device: torch.device) -> dict[str, Tensor]:
        own = dict(base.named_buffers(remove_duplicate=False))
        found: dict[str, Tensor] = {}
        for name, kept in saved.buffers.items():
            buffer, here = self._tensor(kept, f"buffer {name!r:.80}"), own.get(name)
            if here is None or here.shape != buffer.shape:
                raise BundleError(f"the model has no buffer {name!r:.80} of shape {tuple(buffer.shape)}")
            found[name] = buffer.to(device)
        return found

    def _generators(self, saved: GeneratorStates, at: str) -> Generators:
        """The states, tried on generators of our own first: what they refuse must not reach the process's."""
        try:
            found = dict(self._states(saved, at))
            for source, scratch in ((PYTHON, random.Random().setstate), (CPU, torch.Generator().set_state)):
                if source in found:
                    scratch(found[source])
            if NUMPY in found:
                np.random.RandomState().set_state(found[NUMPY])
        except BundleError:
            raise
        except (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError) as error:
            raise BundleError(f"{at}.generators: not the state of a generator: {error}") from None
        return Generators.of(found.items())

    def _states(self, saved: GeneratorStates, at: str) -> Iterator[tuple[Source, Any]]:
        if saved.python:
            words = np.frombuffer(self._bytes(saved.python, PYTHON_WORDS, at), "<u4").tolist()
            yield PYTHON, (3, tuple(words), saved.gauss_next)
        if saved.numpy:
            keys = np.frombuffer(self._bytes(saved.numpy, NUMPY_WORDS, at), "<u4").astype(np.uint32)
            yield NUMPY, ("MT19937", keys, saved.position, saved.has_gauss, saved.cached_gaussian)
        if saved.cpu:
            yield CPU, self._tensor(saved.cpu, at)
        devices = of_cuda() if torch.cuda.is_initialized() else []
        for index, name in saved.cuda.items():
            if index.isascii() and index.isdecimal() and len(index) < 4 and int(index) < len(devices):
                yield devices[int(index)], self._tensor(name, at)
            else:
                self._note(f"the generator of device cuda:{index:.8} cannot be restored here")

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
        """Compute the loss."""
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


def _name(module: nn.Module) -> str:
    return type(module).__qualname__.rpartition(".")[2]


def _differs(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _device(*models: nn.Module) -> torch.device:
    """Device of the first parameter of the first model that has any."""
    params = (param for model in models for param in model.parameters())
    return next((param.device for param in params), torch.device("cpu"))


def _dtype(name: str, at: str) -> torch.dtype:
    if name not in DTYPES:
        raise BundleError(f"{at}.autocast: no dtype {name!r:.40}")
    return DTYPES[name]


def _position(text: str, saved: CallDocument, at: str) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > 8 or int(text) >= saved.outputs:
        raise BundleError(f"{at}.gradients: no output {text!r:.40} among {saved.outputs}")
    return int(text)


def _where(error: BaseException) -> str:
    """The innermost line of the user's own that led to an error."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((OURS, TORCH))
    ]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
