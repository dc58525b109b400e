"""Small models with one fault each, whose operation and line are known: the line that carries `# fault`.

Each is finite for two steps and goes wrong when its input says so (`x[0, 0] == BAD`), so that what breaks is a
step of a training that worked. A model's docstring says what goes wrong.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BAD = 7.0


class Faulty(nn.Module):
    """Two layers around a fault; `at` is the FQN of the module at fault, `ops` the names that are right."""

    at = "Faulty"
    ops: tuple[str, ...] = ()
    phase = "backward"

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 6)
        self.leave = nn.Linear(6, 3)
        self.build()

    def build(self) -> None:
        """Further modules of a case."""

    def forward(self, x: Tensor) -> Any:
        """Right for two steps, wrong at the third."""
        h = torch.tanh(self.enter(x))
        return self.leave(self.wrong(h, x) if bool(x[0, 0] == BAD) else h)

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        """The fault."""
        raise NotImplementedError


class SqrtAtZero(Faulty):
    """The derivative of sqrt at 0 is infinite, and infinity times 0 is NaN."""

    ops = ("sqrt",)

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        spread = (h - h).square().sum(-1, keepdim=True)
        return h + torch.sqrt(spread)  # fault


class LogOfZero(Faulty):
    """log of a ReLU's zero is -inf, in the forward."""

    ops = ("log",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        gated = torch.relu(h - 2)
        return torch.log(gated)  # fault


class LogOfNegative(Faulty):
    """log of a negative number is NaN."""

    ops = ("log",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.log(h - 2)  # fault


class WhereTrap(Faulty):
    """The forward takes the safe branch, the backward goes through both."""

    ops = ("log",)

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        positive = (h * 0).abs()  # not a ReLU: its backward would throw the NaN away
        logged = torch.log(positive)  # fault
        return torch.where(positive > 0, logged, torch.zeros_like(h))


class MaskedMean(Faulty):
    """A mean over a mask that selects nothing: 0/0."""

    ops = ("div",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        mask = (h > 5).float()
        mean = (h * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)  # fault
        return h - mean


class NormAtZero(Faulty):
    """The derivative of a vector norm at 0, by torch.norm: a subgradient of 0, but not of its square root here."""

    ops = ("sqrt", "pow")

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        zero = h - h
        length = zero.pow(2).sum(-1, keepdim=True).pow(0.5)  # fault
        return h * (1 + length)


class DivideByNorm(Faulty):
    """A vector of zeros divided by its length."""

    ops = ("div",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        zero = h * 0
        return h + zero / zero.norm(dim=-1, keepdim=True)  # fault


class AngleAtOrigin(Faulty):
    """An angle by hand, at the origin: 0/0 (torch.atan2 itself is safe there)."""

    ops = ("div",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        zero = h - h
        return h + torch.atan(zero / zero)  # fault


class StdOfOne(Faulty):
    """The standard deviation of one element, unbiased, is 0/0."""

    ops = ("std",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        one = h[:, :1]
        return h / one.std(dim=-1, keepdim=True)  # fault


class SpreadOfEqual(Faulty):
    """The root of a variance that is 0 (torch.std itself is safe there)."""

    ops = ("sqrt",)

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        flat = h * 0 + 1
        return h + flat.var(-1, keepdim=True).sqrt()  # fault


class MaskedSoftmax(Faulty):
    """A softmax over a row that is masked out altogether."""

    ops = ("softmax",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        scores = h.masked_fill(torch.ones_like(h, dtype=torch.bool), -math.inf)
        return h * scores.softmax(-1)  # fault


class MaskedSoftmaxMended(Faulty):
    """The same, its NaN replaced in the forward: the backward has it all the same."""

    ops = ("softmax",)

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        scores = h + torch.full_like(h, -math.inf)
        weights = functional.softmax(scores, dim=-1)  # fault
        return h + torch.nan_to_num(weights)


class ExpOverflow(Faulty):
    """exp of 1,000 is infinite; the NaN comes later, from Inf/Inf."""

    ops = ("exp",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        raised = torch.exp(1000 * h.abs() + 100)  # fault
        return raised / raised.sum(-1, keepdim=True)


class HalfOverflow(Faulty):
    """100,000 is beyond float16."""

    ops = ("to", "mul")
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        large = 1e5 * (h + 2)
        small = large.to(torch.float16)  # fault
        return small.float() - 1


class HalfProduct(Faulty):
    """A product that float16 cannot hold."""

    ops = ("mul",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        half = (300 + h).half()
        product = half * half  # fault
        return product.float()


class PowerOfNegative(Faulty):
    """A root of a negative number."""

    ops = ("pow",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        return (h - 2) ** 0.5  # fault


class PowerExponent(Faulty):
    """The derivative of 0 ** y in its exponent asks for log 0 times 0 ** y."""

    ops = ("pow",)

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        base = (h * 0).abs()
        return torch.pow(base, h.abs() * 0 + 0.5) + h  # fault


class AcosAtOne(Faulty):
    """The derivative of acos at 1 is infinite."""

    ops = ("acos",)

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        cosine = functional.cosine_similarity(h, h.detach(), dim=-1).clamp(-1, 1)
        ones = cosine / cosine
        return h + torch.acos(ones).unsqueeze(-1)  # fault


class AsinBeyondOne(Faulty):
    """asin is not defined beyond 1."""

    ops = ("asin",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.asin(h + 2)  # fault


class ReciprocalOfZero(Faulty):
    """1/0."""

    ops = ("reciprocal",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        return h * torch.reciprocal(h - h)  # fault


class RsqrtOfZero(Faulty):
    """A home-made normalisation without an epsilon."""

    ops = ("rsqrt",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        centred = h - h
        return h * torch.rsqrt(centred.square().mean(-1, keepdim=True))  # fault


class InPlaceLog(Faulty):
    """log_ overwrites the number that was at fault."""

    ops = ("log",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        y = (h * 0).abs()
        y.log_()  # fault
        return y


class SliceAssigned(Faulty):
    """Only one column is spoilt, through a view."""

    ops = ("div",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        y = h.clone()
        y[:, 0] = h[:, 0] / (h[:, 1] - h[:, 1])  # fault
        return y


class CumulativeProduct(Faulty):
    """A product that grows beyond float32."""

    ops = ("cumprod",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.cumprod(1e20 + h, dim=-1)  # fault


class MatrixProduct(Faulty):
    """A matrix product that overflows."""

    ops = ("matmul", "mm")
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        large = (h + 2) * 1e20
        return large @ large.T @ h  # fault


class LogSumExp(Faulty):
    """log of a sum of exponentials that all vanished."""

    ops = ("log",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        total = torch.exp(-1000 + h).sum(-1, keepdim=True)
        return h - torch.log(total)  # fault


class Variational(Faulty):
    """The spread of a variational encoder: exp of a log-variance that ran away."""

    ops = ("exp",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        mean, log_variance = h, 500 * (h + 2)
        spread = torch.exp(0.5 * log_variance)  # fault
        return mean + spread * 0


class InfTimesZero(Faulty):
    """0 times an infinite weight."""

    ops = ("mul",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        weights = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0]) * torch.tensor(math.inf)  # fault
        return h + weights


class XLogY(Faulty):
    """An entropy p·log p at p = 0."""

    ops = ("log",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        p = torch.relu(h) / (torch.relu(h).sum(-1, keepdim=True) + 1)
        return h - p * torch.log(p)  # fault


class GeometricMean(Faulty):
    """A root whose derivative at 0 is infinite, by pow."""

    ops = ("pow",)

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        product = h.prod(-1, keepdim=True) * 0
        return h + product.pow(1 / 6)  # fault


class Logit(Faulty):
    """logit of 1 is infinite."""

    ops = ("logit",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.logit(torch.sigmoid(h + 100))  # fault


class LogDeterminant(Faulty):
    """log of the determinant of a singular matrix."""

    ops = ("logdet", "log", "slogdet", "linalg_slogdet", "det", "linalg_det")
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        gram = h[:, :1] @ h[:, :1].T
        return h + torch.logdet(gram * 0)  # fault
