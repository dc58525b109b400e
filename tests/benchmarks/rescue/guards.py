"""Who guards a run: what people put between `backward()` and `step()`, and gradwatch.

Those that are not gradwatch are reference implementations where there is one to install (torch, pytorch_optimizer,
zclip), and otherwise the published formula. None of them shares a line with `gradwatch.policies`.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.rules.files import load_rules
from gradwatch.rules.rule_set import NOT_BUILT, RuleSet
from gradwatch.runtime.internal_errors import Health
from tests.benchmarks.rescue.faults import Fault

HERE = Path(__file__).parent


class Guard:
    """One way to guard a run; this one does nothing. `interventions` counts steps it changed or left out."""

    name: ClassVar[str] = "none"
    title: ClassVar[str] = "no guard"
    package: ClassVar[str] = "torch"

    def __init__(self) -> None:
        self.interventions = 0

    def promises(self, fault: Fault) -> bool:
        """Whether a run with this fault is to end as if nothing had happened; nobody else's guard says so."""
        return False

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Called once, before the first step."""
        self.model, self.params = model, list(model.parameters())

    def after_backward(self, step: int) -> None:
        """Called between `backward()` and `optimizer.step()`."""

    def close(self) -> None:
        """Leave nothing behind; raises where this guard was not what it claims to be."""

    @classmethod
    def missing(cls) -> str:
        """Why this guard cannot run here, or ""."""
        try:
            _quietly_import(cls.package)
        except ImportError:
            return f"{cls.package} is not installed"
        return ""


def _quietly_import(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # importing lightning, which zclip does, warns of its own dependencies
        return importlib.import_module(name)


class ClipNorm(Guard):
    """`torch.nn.utils.clip_grad_norm_` at 1.0, as in most training scripts."""

    name = "clip"
    title = "clip 1.0"

    def after_backward(self, step: int) -> None:
        total = torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.interventions += not bool(total <= 1.0)


class AGC(Guard):
    """Adaptive gradient clipping (Brock et al. 2021), λ 0.01, not on the last layer."""

    name = "agc"
    title = "AGC 0.01"
    package = "pytorch_optimizer"

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().attach(model, optimizer)
        self._clip = _quietly_import("pytorch_optimizer.optimizer.agc").agc
        last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        exempt = {id(param) for param in last.parameters()}
        self.params = [param for param in self.params if id(param) not in exempt]

    def after_backward(self, step: int) -> None:
        acted = False
        for param in self.params:
            assert param.grad is not None
            clipped = self._clip(param.detach(), param.grad, agc_clip_val=0.01)
            acted |= not torch.equal(clipped, param.grad)
            param.grad.copy_(clipped)
        self.interventions += acted


class AdaGC(Guard):
    """AdaGC (arXiv:2502.11034), by its formula: λ 1.05, β 0.98, global clip at 1.0 for the first 100 steps.

    pytorch_optimizer has it only inside its own Adam; `tests/benchmarks/test_rescue.py` compares the two.
    """

    name = "adagc"
    title = "AdaGC"
    relative, absolute, beta, warmup = 1.05, 1.0, 0.98, 100

    def __init__(self) -> None:
        super().__init__()
        self._usual: list[Tensor] | None = None

    def after_backward(self, step: int) -> None:
        grads = [param.grad for param in self.params if param.grad is not None]
        if self._usual is None or step < self.warmup - 1:  # counted from 1
            total = torch.nn.utils.get_total_norm(grads) + 1e-8
            factors = [(self.absolute / total).clamp(max=1.0)] * len(grads)
        else:
            factors = [
                (self.relative * usual.clamp_min(1e-8) / grad.norm().clamp_min(1e-8)).clamp(max=1.0)
                for usual, grad in zip(self._usual, grads, strict=True)
            ]
        for grad, factor in zip(grads, factors, strict=True):
            grad.mul_(factor)
        self.interventions += not all(bool(factor == 1) for factor in factors)
        norms = [grad.norm() for grad in grads]
        if self._usual is None:
            self._usual = norms
        elif step < self.warmup - 1:
            self._usual = list(map(torch.minimum, self._usual, norms))
        else:
            pairs = zip(self._usual, norms, strict=True)
            self._usual = [self.beta * usual + (1 - self.beta) * norm for usual, norm in pairs]


class ZClip(Guard):
    """ZClip (arXiv:2504.02507) by its authors' own package, with their defaults (z 2.5, α 0.97, max_norm 1)."""

    name = "zclip"
    title = "ZClip"
    package = "zclip"

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().attach(model, optimizer)
        self._zclip = _quietly_import("zclip").ZClip()

    def after_backward(self, step: int) -> None:
        probe = self.params[0].grad
        assert probe is not None
        before = probe.clone()
        self._zclip.step(self.model)
        self.interventions += not torch.equal(before, probe)


class AutoClip(Guard):
    """AutoClip (Seetharaman et al. 2020), by its formula: the 10th percentile of all norms so far."""

    name = "autoclip"
    title = "AutoClip 10 %"

    def __init__(self) -> None:
        super().__init__()
        self._history: list[float] = []

    def after_backward(self, step: int) -> None:
        grads = [param.grad for param in self.params if param.grad is not None]
        self._history.append(float(torch.nn.utils.get_total_norm(grads)))
        limit = float(np.percentile(self._history, 10))
        torch.nn.utils.clip_grad_norm_(self.params, limit)
        self.interventions += not self._history[-1] <= limit


class RunTotals:
    """A sink that counts the steps gradwatch changed or left out."""

    name = "tally"

    def __init__(self) -> None:
        self.skipped = self.clipped = self.steps = 0

    def open(self, run: RunInfo, health: Health) -> None:
        """Nothing to open."""

    def write(self, record: Record) -> None:
        """Count it."""
        self.steps += 1
        self.skipped += record.decision.skip
        shrunk = (record.snapshot.coef < 1) & (record.snapshot.calls > 0)
        self.clipped += bool(shrunk.any()) and not record.decision.skip

    def flush(self, timeout: float) -> bool:
        """Nothing waits here."""
        return True

    def close(self) -> None:
        """Nothing to close."""


class Gradwatch(Guard):
    """A real watch with a rule file; its actions alone stand between the fault and the weights."""

    package = "gradwatch"
    rules: ClassVar[Path]

    def promises(self, fault: Fault) -> bool:
        return fault.transient and fault.in_gradients

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().attach(model, optimizer)
        self._run_totals, self._expected = RunTotals(), 0
        watch = importlib.import_module("gradwatch").watch
        self._watch = watch(model, optimizer, rules=self.ruleset(optimizer), sinks=[self._run_totals])

    def ruleset(self, optimizer: Optimizer) -> RuleSet:
        """The rules of this guard."""
        return load_rules(self.rules)

    def after_backward(self, step: int) -> None:
        self._expected += 1

    def close(self) -> None:
        self._watch.close()
        self.interventions = self._run_totals.skipped + self._run_totals.clipped
        errors = self._watch.health.errors()
        if errors or self._run_totals.steps != self._expected:
            raise RuntimeError(
                f"{self._run_totals.steps} of {self._expected} steps seen; internal errors: {errors}"
            )


class GradwatchSkip(Gradwatch):
    """Steps whose gradients are not finite, or spike, are skipped."""

    name = "gradwatch-skip"
    title = "gradwatch skip"
    rules = HERE / "skip.gradwatch.yaml"


class GradwatchCapped(GradwatchSkip):
    """As `gradwatch-skip`, and steps at more than three times the highest learning rate planned are skipped.

    After fifty in a row it stops the run: a rate that is wrong for good is a person's affair.
    """

    name = "gradwatch-capped"
    title = "gradwatch skip, rate capped"

    def promises(self, fault: Fault) -> bool:
        return fault.transient

    def ruleset(self, optimizer: Optimizer) -> RuleSet:
        rules = super().ruleset(optimizer)
        detect = replace(rules.rule("rate").detect, threshold=3 * optimizer.defaults["lr"])
        ours = tuple(
            replace(rule, detect=detect, enabled=True) if rule.id == "rate" else rule for rule in rules.rules
        )
        return replace(rules, rules=ours)


class GradwatchBaseline(Gradwatch):
    """Steps whose gradients are not finite are skipped; spikes are clipped to the baseline."""

    name = "gradwatch-baseline"
    title = "gradwatch baseline"
    rules = HERE / "baseline.gradwatch.yaml"

    @classmethod
    def missing(cls) -> str:
        return "`clip` in a rule's `do:` is not built" if "clip" in NOT_BUILT else ""


GUARDS: dict[str, type[Guard]] = {
    guard.name: guard
    for guard in (
        Guard,
        ClipNorm,
        AGC,
        AdaGC,
        ZClip,
        AutoClip,
        GradwatchSkip,
        GradwatchCapped,
        GradwatchBaseline,
    )
}
