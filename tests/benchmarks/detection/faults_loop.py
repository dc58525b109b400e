"""Live faults of the loop itself: learning rate, clips, scales, data and weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from tests.benchmarks.detection.live import DRIFT, BlockFault, LiveFault, UnfitError, one_element
from tests.benchmarks.detection.training import Batch, Training

# -- learning rate ----------------------------------------------------------------------------------------------


class RateTen(LiveFault):
    """The learning rate times 10, from then on."""

    by = 10.0

    def rate(self, step: int) -> float:
        """The factor."""
        return self.by if self.active(step) else 1.0


class RateHundred(RateTen):
    """The learning rate times 100."""

    by = 100.0


class RateZero(RateTen):
    """A learning rate of 0."""

    by = 0.0


class RateTooHighFromStart(RateTen):
    """A learning rate 50 times too high from the first step on."""

    from_start, by = True, 50.0


# -- loss -------------------------------------------------------------------------------------------------------


class NanLoss(LiveFault):
    """The loss is NaN, once."""

    transient = True
    by = math.nan

    def loss(self, step: int, loss: Tensor) -> Tensor:
        """Times a factor."""
        return loss * self.by if self.active(step) else loss


class LossSpike(NanLoss):
    """The loss times 10, once."""

    by = 10.0


class LossSpikeHundred(NanLoss):
    """The loss times 100, once."""

    by = 100.0


class LossFalls(NanLoss):
    """The loss, and with it all gradients, times 1e-2 from then on."""

    transient, by = False, 1e-2


class LossVanishes(NanLoss):
    """The loss, and with it all gradients, times 1e-4 from then on."""

    transient, by = False, 1e-4


class LossFlipped(NanLoss):
    """The sign of the loss is wrong, from then on: what was learned is unlearned."""

    transient, by = False, -1.0


class LossDrifts(LiveFault):
    """The loss, and with it all gradients, 1 % larger at every step."""

    lasting = DRIFT

    def loss(self, step: int, loss: Tensor) -> Tensor:
        """Exponential growth."""
        return loss * 1.01 ** (step - self.onset) if self.active(step) else loss


class NeverUnscaled(LiveFault):
    """The loss is scaled by 2^16 for half precision, and gradients are never unscaled."""

    from_start = True

    def loss(self, step: int, loss: Tensor) -> Tensor:
        """Times the scale."""
        return loss * 2.0**16


# -- clips ------------------------------------------------------------------------------------------------------


class Clip(LiveFault):
    """The loop clips, but wrongly."""

    from_start = True
    max_norm: float | None = None

    def attach(self, training: Training) -> None:
        """Instead of the clip that it had."""
        super().attach(training)
        if training.closure:
            raise UnfitError("the optimizer calls backward itself")
        training.max_norm = self.max_norm

    def clip(self) -> None:
        """At 1."""
        nn.utils.clip_grad_norm_(list(self.parameters()), 1.0)


class ClipBeforeBackward(Clip):
    """It clips what `zero_grad` has just cleared."""

    def loss(self, step: int, loss: Tensor) -> Tensor:
        """Before backward is called."""
        self.clip()
        return loss


class ClipAfterStep(Clip):
    """It clips when the optimizer has stepped."""

    def after_step(self, step: int) -> None:
        """Too late."""
        self.clip()


class ClipAlwaysBites(Clip):
    """It clips at 1e-5: every step is a sign step of one length."""

    max_norm = 1e-5


class ClipNeverBites(Clip):
    """It clips at 1e9."""

    max_norm = 1e9


class ClipOfScaled(Clip):
    """It clips at 1 what still carries the scale of a GradScaler."""

    max_norm = 1.0

    def attach(self, training: Training) -> None:
        """With a scaler, where there was none."""
        super().attach(training)
        if training.scaler is None:
            if len(training.phases) > 1:
                raise UnfitError("one scaler a step")
            training.scaler = torch.amp.GradScaler("cpu")

    def unscales(self, step: int) -> bool:
        """Never."""
        return False


# -- data -------------------------------------------------------------------------------------------------------


def _first_float(batch: Batch) -> int:
    found = [k for k, part in enumerate(batch) if part.is_floating_point() and part.dim() > 1]
    if not found:
        raise UnfitError("no numbers in the batch")
    return found[0]


class BatchFault(LiveFault):
    """Something is wrong with the inputs."""

    def changed(self, inputs: Tensor) -> Tensor:
        """What they become."""
        raise NotImplementedError

    def batch(self, step: int, batch: Batch) -> Batch:
        """Change the first tensor of numbers; that there is one is asked at the first step."""
        place = _first_float(batch)
        if not self.active(step):
            return batch
        return (*batch[:place], self.changed(batch[place]), *batch[place + 1 :])


class NanInBatch(BatchFault):
    """One element of a batch is NaN, once."""

    transient = True

    def changed(self, inputs: Tensor) -> Tensor:
        """Its first."""
        return one_element(inputs, math.nan)


class BatchHundred(BatchFault):
    """A batch is not normalised: times 100, once."""

    transient = True

    def changed(self, inputs: Tensor) -> Tensor:
        """All of it."""
        return inputs * 100


class EmptyInputs(BatchFault):
    """All inputs are 0, from then on."""

    def changed(self, inputs: Tensor) -> Tensor:
        """Nothing is left."""
        return torch.zeros_like(inputs)


class LabelsShuffled(LiveFault):
    """Targets belong to other rows than inputs, from then on."""

    def batch(self, step: int, batch: Batch) -> Batch:
        """Permute the targets."""
        if len(batch) != 2 or batch[0].dim() < 2 or len(batch[0]) != len(batch[1]):
            raise UnfitError("no targets beside inputs")
        if not self.active(step):
            return batch
        return batch[0], batch[1][torch.randperm(len(batch[1]))]


class SameBatch(LiveFault):
    """The loader gives the same batch again and again."""

    kept: Batch | None = None

    def batch(self, step: int, batch: Batch) -> Batch:
        """The one of the onset."""
        if not self.active(step):
            return batch
        if self.kept is None:
            self.kept = tuple(part.clone() for part in batch)
        return tuple(part.detach().clone() for part in self.kept)


# -- weights and moments ------------------------------------------------------------------------------------------


class LargeInit(LiveFault):
    """Matrices are initialised 20 times too large."""

    from_start = True

    def attach(self, training: Training) -> None:
        """Multiply them."""
        super().attach(training)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(20)


class WeightsCollapse(LiveFault):
    """Weight decay a thousand times too strong: 3 % less at every step."""

    def after_step(self, step: int) -> None:
        """Shrink them."""
        if self.active(step):
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(0.97)


class WeightsOverwritten(BlockFault):
    """The weights of a layer are overwritten by ten times as large ones, once."""

    def start_step(self, step: int) -> None:
        """Multiply them."""
        if step == self.onset:
            with torch.no_grad():
                for parameter in self.block:
                    parameter.mul_(10)


class MomentsCorrupted(BlockFault):
    """A checkpoint gives back other moments: the second of a layer 1e-8 of what they were, or the first times 1e3."""

    def attach(self, training: Training) -> None:
        """Only where there are moments."""
        super().attach(training)
        self.holders = [one for one in training.optimizers if isinstance(one, (Adam, AdamW, RMSprop, SGD))]
        if not self.holders or any(group.get("momentum", 1) == 0 for group in self.holders[0].param_groups):
            raise UnfitError("no moments")

    def before_optimizer(self, step: int) -> None:
        """Change them."""
        if step != self.onset:
            return
        for optimizer in self.holders:
            for parameter in self.block:
                state = optimizer.state.get(parameter, {})
                for name, by in (("exp_avg_sq", 1e-8), ("square_avg", 1e-8), ("momentum_buffer", 1e3)):
                    if state.get(name) is not None:
                        state[name].mul_(by)
