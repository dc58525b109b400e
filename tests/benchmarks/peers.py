"""Everything that watches gradients and whose cost is compared: gradwatch, torch's own functions, the peers.

A contender is attached to a task once and stays attached, as it would in training. Recorders are asked for
what gradwatch does by default: something about every parameter at every step.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.benchmarks.workloads import Task

NEVER_CLIPS = 1e9
"""A max_norm nothing reaches: torch multiplies all the same, and training goes on as without a clip."""


class Contender:
    """One way to watch a task; this one does nothing.

    `handover`: all of its work lies between the arrival of gradients and the end of `optimizer.step()`, so it
    can be timed without the forward and the backward (loops.py). `slow`: takes fewer turns, after the others.
    """

    name: ClassVar[str] = "bare"
    title: ClassVar[str] = "bare"
    package: ClassVar[str] = "torch"
    handover: ClassVar[bool] = True
    slow: ClassVar[bool] = False

    def missing(self) -> str:
        """Why this contender cannot run here, or ""."""
        try:
            importlib.import_module(self.package)
        except ImportError:
            return f"{self.package} not installed"
        return ""

    def attach(self, task: Task) -> None:
        """Start to watch a task."""

    def suspend(self) -> None:
        """Take away whatever would run in the steps of others; called after attach and after each step."""

    def resume(self) -> None:
        """Put back what `suspend` took away; called before each step and before detach."""

    def guard(self) -> AbstractContextManager[Any]:
        """Surrounds forward and backward."""
        return contextlib.nullcontext()

    def after_backward(self, task: Task) -> None:
        """Called between backward() and optimizer.step()."""

    def after_step(self, task: Task) -> None:
        """Called when the optimizer has stepped."""

    def drain(self) -> None:
        """Wait for work this contender left to its own threads, so that no other is slowed by it."""

    def complaint(self) -> str:
        """Why what was measured is not what it claims to be, or ""."""
        return ""

    def detach(self) -> None:
        """Stop watching and leave nothing behind."""


class BareAgain(Contender):
    """A second unwatched task: what it seems to add is the error of the measurement."""

    name = "bare-again"
    title = "bare, a second time (error of measurement)"


class Floor(Contender):
    """Reads every gradient byte once, no more: a monitor of every gradient cannot cost less on one core.

    Small gradients of a shape are stacked and read in one call; for large ones the fastest of torch's
    single-pass reductions on this machine is taken, tried on the first gradients seen.
    """

    name = "floor"
    title = "floor: read every gradient byte once"
    SMALL = 2048  # elements

    def attach(self, task: Task) -> None:
        by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
        for parameter in task.parameters:
            by_shape[parameter.shape].append(parameter)
        self._stacks = [ps for shape, ps in by_shape.items() if len(ps) > 1 and shape.numel() <= self.SMALL]
        stacked = {id(p) for ps in self._stacks for p in ps}
        self._single = [p for p in task.parameters if id(p) not in stacked]
        self._read: Callable[[Tensor], Tensor] | None = None

    @torch.no_grad()
    def after_backward(self, task: Task) -> None:
        if self._read is None:
            self._read = _fastest_read([_flat(p) for p in self._single])
        for parameters in self._stacks:
            torch.stack([p.grad for p in parameters if p.grad is not None]).sum()
        for parameter in self._single:
            self._read(_flat(parameter))


def _flat(parameter: torch.nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient.view(-1)


def _fastest_read(gradients: list[Tensor]) -> Callable[[Tensor], Tensor]:
    from tests.benchmarks.interleave import Turns, interleave, timed

    reductions: dict[str, Callable[[Tensor], Tensor]] = {
        "dot": lambda g: torch.dot(g, g),
        "sum": torch.sum,
        "vector_norm": torch.linalg.vector_norm,
    }

    def read_all(reduction: Callable[[Tensor], Tensor]) -> None:
        for gradient in gradients:
            reduction(gradient)

    steps = {name: timed(lambda r=reduction: read_all(r)) for name, reduction in reductions.items()}  # type: ignore[misc]
    walls = interleave(steps, Turns(rounds=9, settle=0, steps=1)).wall
    return reductions[min(walls, key=lambda name: float(sorted(walls[name].ravel())[len(walls[name]) // 2]))]


class TotalNorm(Contender):
    """The norm of all gradients, read by the host; nothing per parameter."""

    name = "get_total_norm"
    title = "torch get_total_norm (one number)"

    def after_backward(self, task: Task) -> None:
        float(torch.nn.utils.get_total_norm(task.gradients()))


class ClipGradNorm(Contender):
    """What most training loops do already."""

    name = "clip_grad_norm"
    title = "torch clip_grad_norm_ (one number)"

    def after_backward(self, task: Task) -> None:
        torch.nn.utils.clip_grad_norm_(task.parameters, NEVER_CLIPS)


class ItemHooks(Contender):
    """The hook everybody writes first."""

    name = "item-hooks"
    title = "naive hooks: grad.norm().item()"

    def attach(self, task: Task) -> None:
        self.norms: dict[int, float] = {}

        def hook(index: int) -> Callable[[Tensor], None]:
            def read(parameter: Tensor) -> None:
                assert parameter.grad is not None
                self.norms[index] = parameter.grad.norm().item()

            return read

        self._handles = [
            parameter.register_post_accumulate_grad_hook(hook(index))
            for index, parameter in enumerate(task.parameters)
        ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()


class NormHooks(Contender):
    """A tensor hook on every parameter that knows the norm of its gradient: what has to be known to clip it there."""

    name = "norm-hooks"
    title = "bare tensor hooks: vector_norm(grad).item()"

    def attach(self, task: Task) -> None:
        self.norms: dict[int, float] = {}
        norm = torch.linalg.vector_norm

        def hook(index: int) -> Callable[[Tensor], None]:
            def read(grad: Tensor) -> None:
                self.norms[index] = norm(grad).item()

            return read

        self._handles = [
            parameter.register_hook(hook(index)) for index, parameter in enumerate(task.parameters)
        ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()


class LightningGradNorm(Contender):
    """`lightning.pytorch.utilities.grad_norm`, called where its docs say; what it returns is not logged."""

    name = "lightning"
    title = "Lightning grad_norm(), not logged"
    package = "lightning"

    def attach(self, task: Task) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # importing lightning warns of its own dependencies
            self._grad_norm = importlib.import_module("lightning.pytorch.utilities").grad_norm

    def after_backward(self, task: Task) -> None:
        self._grad_norm(task.model, norm_type=2)


class DetectAnomaly(Contender):
    """torch's own search for NaN in the backward, on throughout."""

    name = "detect_anomaly"
    title = "torch detect_anomaly"
    handover = False
    slow = True

    def guard(self) -> AbstractContextManager[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that it is slow; that is what is measured
            return torch.autograd.detect_anomaly()


class WandbWatch(Contender):
    """wandb.watch with log_freq=1, into an offline run."""

    name = "wandb"
    title = "wandb.watch, offline, every step"
    package = "wandb"
    handover = False
    slow = True

    def attach(self, task: Task) -> None:
        wandb = importlib.import_module("wandb")
        self._model = task.model
        self._directory = tempfile.mkdtemp(prefix="gradwatch-bench-")
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        self._run = wandb.init(project="bench", mode="offline", dir=self._directory, settings=settings)
        self._run.watch(task.model, log="gradients", log_freq=1)

    def after_step(self, task: Task) -> None:
        self._run.log({"step": 1})

    def detach(self) -> None:
        self._run.unwatch(self._model)
        self._run.finish()
        shutil.rmtree(self._directory, ignore_errors=True)


class TensorBoardHistograms(Contender):
    """add_histogram of every gradient, every step."""

    name = "tensorboard"
    title = "TensorBoard add_histogram, every step"
    package = "tensorboard"
    handover = False
    slow = True

    def attach(self, task: Task) -> None:
        self._directory = tempfile.mkdtemp(prefix="gradwatch-bench-")
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(self._directory)
        self._named = list(task.model.named_parameters())
        self._step = 0

    def after_backward(self, task: Task) -> None:
        self._step += 1
        for name, parameter in self._named:
            self._writer.add_histogram(name, parameter.grad, self._step)

    def drain(self) -> None:
        self._writer.flush()

    def detach(self) -> None:
        self._writer.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class Gradwatch(Contender):
    """The whole default watch: capture, the default rules, endpoint listening, journal on disk, log."""

    name = "gradwatch"
    title = "gradwatch, default"
    package = "gradwatch"
    rules: Any = "default"

    def missing(self) -> str:
        try:
            return "" if hasattr(importlib.import_module("gradwatch"), "watch") else "no gradwatch.watch here"
        except ImportError as error:
            return f"gradwatch does not import: {error}"

    def attach(self, task: Task) -> None:
        gradwatch = importlib.import_module("gradwatch")
        self._directory = tempfile.mkdtemp(prefix="gradwatch-bench-")
        self._steps = 0
        self.watch = gradwatch.watch(
            task.model,
            task.optimizer,
            rules=self.rules,
            run_dir=self._directory,
            listen="127.0.0.1:0",
            run_id=self.name,
        )

    def suspend(self) -> None:
        # In a process of its own, bare would not run our hook on all optimizers, nor one watch another's. Not empty
        # lists: with nobody left to tell, the hooks would be removed from torch.
        self._listeners = []
        for listening in step_listeners():
            self._listeners.append([one for one in listening if one is not NOBODY])
            listening[:] = [NOBODY]

    def resume(self) -> None:
        for listening, ours in zip(step_listeners(), self._listeners, strict=True):
            listening[:] = ours

    def after_step(self, task: Task) -> None:
        self._steps += 1

    def drain(self) -> None:
        self.watch.flush()

    def complaint(self) -> str:
        found = []
        if errors := self.watch.health.errors():
            found.append(f"internal errors: {errors}")
        if self.watch.coverage < 1:
            found.append(f"coverage {self.watch.coverage:.2f}")
        if self.watch.url is None:
            found.append("no endpoint")
        if (seen := self.watch.status()["steps"]) != self._steps:
            found.append(f"{seen} of {self._steps} steps seen")
        return "; ".join(found)

    def detach(self) -> None:
        self.watch.close()
        shutil.rmtree(self._directory, ignore_errors=True)


NOBODY: Any = (lambda *_: None, ())
"""A listener that is never called."""


def step_listeners() -> tuple[list[Any], list[Any]]:
    """Those who hear of every optimizer's step, before it and after it; gradwatch has one such list each a process."""
    hooks = importlib.import_module("gradwatch.taps.step_hooks")
    return hooks._befores, hooks._afters


class GradwatchObserve(Gradwatch):
    """The pack that never acts."""

    name = "gradwatch-observe"
    title = "gradwatch, observe-only"
    rules = "observe-only"


class GradwatchUserClip(Gradwatch):
    """The loop clips too, so gradients change between backward and step and are read twice."""

    name = "gradwatch-user-clip"
    title = "gradwatch, and the loop calls clip_grad_norm_"

    def after_backward(self, task: Task) -> None:
        torch.nn.utils.clip_grad_norm_(task.parameters, NEVER_CLIPS)


class GradwatchClip(Gradwatch):
    """The default watch clips the total norm, at a bound nothing reaches; compare `ClipGradNorm`."""

    name = "gradwatch-clip"
    title = "gradwatch clips (clip.total), bound not reached"
    max_norm: ClassVar[float] = NEVER_CLIPS

    def attach(self, task: Task) -> None:
        from gradwatch.rules.files import parse_rules

        clip = f"{{total: {{method: norm, max_norm: {self.max_norm}}}}}"
        self.rules = parse_rules(f"version: 1\nextends: [{Gradwatch.rules}]\nclip: {clip}\n")
        super().attach(task)


class GradwatchClipBites(GradwatchClip):
    """The same at a bound that every step exceeds; torch multiplies whether it is reached or not."""

    name = "gradwatch-clip-bites"
    title = "gradwatch clips (clip.total), bound exceeded"
    max_norm = 1e-3


class GradwatchLocal(Gradwatch):
    """The default watch and a rule on `norm_local`, which needs a tensor hook on every parameter."""

    name = "gradwatch-local"
    title = "gradwatch observes by tensor hooks too (norm_local)"

    def attach(self, task: Task) -> None:
        from gradwatch.rules.files import parse_rules

        rule = f"{{detect: {{kind: above, of: norm_local, threshold: {NEVER_CLIPS}}}}}"
        self.rules = parse_rules(f"version: 1\nextends: [{Gradwatch.rules}]\nrules: {{local: {rule}}}\n")
        super().attach(task)


class GradwatchBackward(Gradwatch):
    """The default watch, and a bound on every parameter inside the backward that nothing reaches."""

    name = "gradwatch-backward"
    title = "gradwatch clips every parameter `at: backward`, bound not reached"

    def attach(self, task: Task) -> None:
        from gradwatch.rules.files import parse_rules

        clip = f"{{total: {{method: norm, max_norm: {NEVER_CLIPS}, scope: param}}, at: backward}}"
        self.rules = parse_rules(f"version: 1\nextends: [{Gradwatch.rules}]\nclip: {clip}\n")
        super().attach(task)


CONTENDERS: dict[str, type[Contender]] = {
    contender.name: contender
    for contender in (
        Contender,
        BareAgain,
        Floor,
        Gradwatch,
        GradwatchObserve,
        GradwatchUserClip,
        GradwatchClip,
        GradwatchClipBites,
        GradwatchLocal,
        GradwatchBackward,
        TotalNorm,
        ClipGradNorm,
        ItemHooks,
        NormHooks,
        LightningGradNorm,
        DetectAnomaly,
        WandbWatch,
        TensorBoardHistograms,
    )
}


def present(names: Iterable[str]) -> tuple[list[Contender], dict[str, str]]:
    """The named contenders that can run here, and for the others the reason."""
    found: list[Contender] = []
    absent: dict[str, str] = {}
    for name in names:
        contender = CONTENDERS[name]()
        if reason := contender.missing():
            absent[name] = reason
        else:
            found.append(contender)
    return found, absent
