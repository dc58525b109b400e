"""Live faults of gradients: what backward makes, and what becomes of it before the optimizer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tests.benchmarks.detection.live import (
    DRIFT,
    BlockFault,
    LiveFault,
    UnfitError,
    one_element,
    scale_gradients,
)
from tests.benchmarks.detection.training import Training


class NanInGradient(BlockFault):
    """One element of the gradients of a layer becomes NaN, once: in the backward.

    Under a GradScaler between `unscale_` and the optimizer: of a NaN of the backward it rejects the step, so that there
    is nothing to find.
    """

    transient = True
    value = math.nan

    def attach(self, training: Training) -> None:
        """Spoil it in a hook, or later."""
        super().attach(training)
        self.step = -1
        self.late = training.scaler is not None and not math.isfinite(self.value)
        if self.late and training.max_norm is None:
            raise UnfitError("the GradScaler unscales in its own step, and rejects it")
        for parameter in self.block:
            parameter.register_hook(self._spoilt)

    def start_step(self, step: int) -> None:
        """Note the step."""
        self.step = step

    def _spoilt(self, gradient: Tensor) -> Tensor:
        return one_element(gradient, self.value) if self.active(self.step) and not self.late else gradient

    @torch.no_grad()
    def before_optimizer(self, step: int) -> None:
        """What the scaler no longer looks at."""
        for parameter in self.block:
            if self.late and self.active(step) and parameter.grad is not None:
                parameter.grad.view(-1)[0] = self.value


class InfInGradient(NanInGradient):
    """One element becomes infinite, once."""

    value = math.inf


class BitFlip(NanInGradient):
    """One element becomes 1e15, as with a flipped bit of its exponent, once."""

    value = 1e15


class Scaled(BlockFault):
    """The gradients of a layer are multiplied in the backward."""

    def factor(self, k: int) -> float:
        """By how much, `k` steps after the onset."""
        raise NotImplementedError

    def attach(self, training: Training) -> None:
        """Multiply them in a hook."""
        super().attach(training)
        self.step = -1
        self.scale_in_backward(self._now, self.block)

    def start_step(self, step: int) -> None:
        """Note the step."""
        self.step = step

    def _now(self) -> float:
        return self.factor(self.step - self.onset) if self.active(self.step) else 1.0


class SpikeTen(Scaled):
    """Times 10, once."""

    transient = True
    by = 10.0

    def factor(self, k: int) -> float:
        """The same whenever it is."""
        return self.by


class SpikeThirty(SpikeTen):
    """Times 30, once."""

    by = 30.0


class SpikeHundred(SpikeTen):
    """Times 100, once."""

    by = 100.0


class VanishingLayer(SpikeTen):
    """Times 1e-4, from then on."""

    transient = False
    by = 1e-4


class DriftingLayer(Scaled):
    """1 % more at every step."""

    lasting = DRIFT

    def factor(self, k: int) -> float:
        """Exponential growth."""
        return float(1.01**k)


class FlippedLayer(SpikeTen):
    """The sign of a layer's gradients is wrong, from then on."""

    transient = False
    by = -1.0


class AltersLater(LiveFault):
    """Something between backward and step writes to gradients."""

    by = 0.1

    def attach(self, training: Training) -> None:
        """Not where the optimizer calls backward itself."""
        super().attach(training)
        if training.closure:
            raise UnfitError("the optimizer calls backward itself")

    def before_optimizer(self, step: int) -> None:
        """Multiply all of them, unannounced."""
        if self.active(step):
            scale_gradients(self.parameters(), self.by)


class AmplifiesLater(AltersLater):
    """All gradients times 10 between backward and step."""

    by = 10.0


class ZeroedLayer(BlockFault):
    """Between backward and step the gradients of one layer become 0, as in a reduction that lost a bucket."""

    def after_backward(self, step: int) -> None:
        """Zero them."""
        if self.active(step):
            scale_gradients(self.block, 0.0)


class ClearedUnseen(AltersLater):
    """`zero_grad()` stands between backward and step."""

    def before_optimizer(self, step: int) -> None:
        """Clear them."""
        if self.active(step):
            for parameter in self.parameters():
                parameter.grad = None


class NoZeroGrad(LiveFault):
    """`zero_grad()` is left out: gradients add up."""

    def zeroes_gradients(self, step: int) -> bool:
        """Not any more."""
        return not self.active(step)


class AllZero(LiveFault):
    """The loss no longer depends on the model: all gradients are exactly 0."""

    def loss(self, step: int, loss: Tensor) -> Tensor:
        """Times 0."""
        return loss * 0 if self.active(step) else loss


class WithoutGradient(BlockFault):
    """One layer gets no gradient any more."""

    def attach(self, training: Training) -> None:
        """Not in DistributedDataParallel, which ends such a training by an error, one step later."""
        super().attach(training)
        if isinstance(training.model, nn.parallel.DistributedDataParallel):
            raise UnfitError("DistributedDataParallel raises an error")


class Frozen(WithoutGradient):
    """`requires_grad_(False)` on one layer."""

    def start_step(self, step: int) -> None:
        """Freeze it."""
        if step == self.onset:
            self.module.requires_grad_(False)


class Detached(WithoutGradient):
    """A layer is computed with detached weights: it still asks for gradients, and gets none."""

    kinds = (nn.Linear, nn.Conv2d)

    def start_step(self, step: int) -> None:
        """Shadow its parameters by detached ones; anew, since the optimizer may have replaced what they share."""
        if self.active(step):
            for name, parameter in self.module.named_parameters():
                self.module.__dict__[name] = parameter.detach()


class NotOwned(BlockFault):
    """One layer was not given to the optimizer."""

    from_start = True

    def attach(self, training: Training) -> None:
        """Take it out of the groups."""
        super().attach(training)
        block = {id(parameter) for parameter in self.block}
        for optimizer in training.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [one for one in group["params"] if id(one) not in block]
            if not any(group["params"] for group in optimizer.param_groups):
                raise UnfitError("nothing is left to the optimizer")
            if training.closure:
                raise UnfitError("LBFGS holds its parameters twice")


class OptimizerOfCopies(LiveFault):
    """The optimizer was made before the model was copied: what it holds is never used."""

    from_start = True

    def attach(self, training: Training) -> None:
        """Have it hold copies."""
        super().attach(training)
        if training.closure:
            raise UnfitError("LBFGS holds its parameters twice")
        for optimizer in training.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [nn.Parameter(one.detach().clone()) for one in group["params"]]


class DeadUnits(BlockFault):
    """All units of a layer before a ReLU are driven below zero for good: the layer gets gradients of 0."""

    kinds = (nn.Linear, nn.Conv2d)

    def attach(self, training: Training) -> None:
        """Choose among layers in front of a ReLU."""
        self._before = {
            id(one)
            for sequence in training.model.modules()
            if isinstance(sequence, nn.Sequential)
            for one, after in zip(sequence, list(sequence)[1:], strict=False)
            if isinstance(after, nn.ReLU)
        }
        super().attach(training)

    def suits(self, module: nn.Module) -> bool:
        """A bias, and a ReLU behind it."""
        return id(module) in self._before and getattr(module, "bias", None) is not None

    def start_step(self, step: int) -> None:
        """Lower the bias."""
        if step == self.onset:
            with torch.no_grad():
                self.module.bias -= 1e3  # type: ignore[operator]
