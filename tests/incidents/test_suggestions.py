"""Every entry of the catalogue, on the real operation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwatch.incidents.suggestions import SUGGESTIONS, suggestion_for
from gradwatch.localise.diagnosis.diagnose import diagnose
from gradwatch.localise.diagnosis.tensor_values import describe
from gradwatch.localise.held_calls.model_recorder import ModelRecorder
from gradwatch.localise.replay.step_replay import replay
from gradwatch.records.finding import PHASES, Finding, Phase

INF = math.inf
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "where-trap": (lambda x: torch.where(x > 9, torch.log(x * 0), x),),
    "mean-of-nothing": (
        lambda x: x[:0].mean() + x,
        lambda x: functional.mse_loss(x[:0], x[:0]) + x,
        lambda x: functional.cross_entropy(x[:0], torch.zeros(0, dtype=torch.long)) + x,
        lambda x: functional.binary_cross_entropy(x[:0].sigmoid(), x[:0].detach()) + x,
        lambda x: functional.binary_cross_entropy_with_logits(x[:0], x[:0].detach()) + x,
    ),
    "every-label-ignored": (
        lambda x: functional.cross_entropy(x, torch.full((len(x),), -100)) + x,
        lambda x: functional.cross_entropy(x, torch.zeros(len(x)).long(), torch.tensor([0.0, 1.0, 1.0])) + x,
    ),
    "half-overflow-to": (lambda x: (x.abs() * 1e6 + 1e5).half().float(),),
    "half-overflow": (
        lambda x: ((x.abs() + 300).half() * (x.abs() + 300).half()).float(),
        lambda x: ((x.abs() + 300).half() @ (x.abs() + 300).half().T).float(),
    ),
    "softmax-fully-masked": (
        lambda x: x.masked_fill(x < INF, -INF).softmax(-1),
        lambda x: x.masked_fill(x < INF, -INF).log_softmax(-1),
    ),
    "softmax-backward-masked": (lambda x: x + torch.nan_to_num((x + torch.full_like(x, -INF)).softmax(-1)),),
    "logsumexp-of-nothing": (
        lambda x: x + torch.nan_to_num((x + torch.full_like(x, -INF)).logsumexp(-1, True)),
    ),
    "log-of-negative": (lambda x: torch.log(x.abs() * -1 - 1), lambda x: torch.log2(-x.abs() - 1)),
    "log-of-zero": (lambda x: torch.log(x * 0), lambda x: torch.log1p(x * 0 - 1)),
    "sqrt-of-negative": (lambda x: torch.sqrt(-x.abs() - 1), lambda x: torch.rsqrt(-x.abs() - 1)),
    "sqrt-at-zero": (lambda x: torch.sqrt(x * 0),),
    "reciprocal-of-zero": (lambda x: torch.rsqrt(x * 0), lambda x: 1 / (x * 0)),
    "zero-over-zero": (lambda x: (x * 0) / (x * 0).sum(),),
    "division-by-zero": (lambda x: (x.abs() + 1) / (x * 0),),
    "pow-of-negative": (lambda x: (-x.abs() - 1) ** 0.5,),
    "pow-at-zero": (lambda x: (x * 0) ** 0.5,),
    "pow-overflow": (lambda x: (x.abs() + 1e10) ** 8,),
    "exp-overflow": (lambda x: torch.exp(x.abs() + 100), lambda x: torch.cosh(x + 200)),
    "norm-at-zero": (lambda x: torch.linalg.vector_norm((x.abs() + 1) * 1e38, dim=-1, keepdim=True),),
    "arc-beyond-one": (lambda x: torch.acos(x.abs() + 2),),
    "arc-at-one": (lambda x: torch.asin(x * 0 + 1),),
    "logit-at-the-edge": (
        lambda x: torch.logit(x * 0 + 1),
        lambda x: torch.atanh(x * 0 + 1),
        lambda x: torch.erfinv(x * 0 + 1),
    ),
    "std-of-one": (lambda x: x[:, :1].std(-1, keepdim=True), lambda x: x[:, :1].var(-1, keepdim=True)),
    "cross-entropy-of-inf": (lambda x: torch.xlogy(x.abs() + 1, x * 0),),
    "decomposition": (lambda x: torch.logdet(x[:3, :3] * 0), lambda x: torch.linalg.eigh(x.T @ x * 0)[1]),
    "gamma-pole": (lambda x: torch.lgamma(x * 0), lambda x: torch.digamma(x * 0 - 1)),
    "running-product": (lambda x: torch.cumprod(x.abs() + 1e20, -1), lambda x: (x.abs() + 1e20).prod()),
    "infinity-times-zero": (lambda x: x * 0 * torch.tensor(INF),),
    "infinity-minus-infinity": (lambda x: (x + torch.tensor(INF)) - torch.tensor(INF),),
    "running-variance": (
        lambda x: functional.batch_norm(
            x, torch.zeros(3), torch.tensor([1.0, -1.0, 1.0]), torch.ones(3), torch.zeros(3)
        ),
    ),
    "norm-layer": (lambda x: functional.layer_norm((x + 1) * 1e30, (3,)),),
    "matrix-product-overflow": (lambda x: (x.abs() + 1e25) @ (x.abs() + 1e25).T,),
    "number-not-finite": (
        lambda x: x * float("nan"),
        lambda x: x + float("nan"),
        lambda x: x + torch.tensor(math.nan),
    ),
    "large-operands": (lambda x: x * 1e30 * 1e30,),
    "large-numbers": (lambda x: (x.abs() * 1e38 + 3e38).sum(),),
    "general": (lambda x: torch.tan(x * 0 + 1e38) * 0 + torch.nn.functional.softplus(x, beta=0.0),),
}
BY_PHASE = {
    "exploding",
    "vanishing",
    "input-not-finite",
    "parameter-not-finite",
    "tensor-not-finite",
    "buffer-not-finite",
    "loss-side",
    "infinite-outputs",
    "after-backward",
    "irreproducible",
    "exploding-outputs",
    "multiplying-operation",
    "vanishing-outputs",
    "place-not-shown",
    "activations",
    "learning-rate-jump",
}
# Safe in this torch at the point they are named for; kept for the torches in which they are not.
SAFE_HERE = {"atan2-at-origin"}


class Applied(nn.Module):
    """One layer, and a function of what it gives."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("table", torch.zeros(3))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x) + self.table)


def found(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor] = torch.sum) -> Finding:
    """One step of `model`, localised."""

    def failed(*error: object) -> None:
        raise AssertionError(error)

    holding = ModelRecorder(model, failed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about std of one element
        loss(model(x)).backward()
        finding = diagnose(replay([(model, call) for call in holding.calls], [model], failed))
    holding.close()
    return finding


@pytest.mark.parametrize(
    ("remedy", "function"), [(name, one) for name, each in FUNCTIONS.items() for one in each]
)
def test_operation_gets_its_remedy(remedy: str, function: Callable[[Tensor], Tensor]) -> None:
    """The operation that the entry is about, gone wrong as the entry says, is met by that entry."""
    torch.manual_seed(0)
    finding = found(Applied(function), torch.randn(5, 4))
    told = suggestion_for(finding)
    assert told is not None, finding
    assert told.id == remedy, finding


def test_what_was_there_before_gets_its_remedy() -> None:
    """A batch, a weight or a buffer that is not finite, the loss side, and infinite outputs are told apart."""
    torch.manual_seed(0)
    spoilt = torch.full((5, 4), math.nan)
    ids = [suggestion_for(found(Applied(torch.tanh), spoilt))]
    model = Applied(torch.tanh)
    with torch.no_grad():
        model.layer.weight[0, 0] = math.nan
    ids.append(suggestion_for(found(model, torch.randn(5, 4))))
    model = Applied(torch.tanh)
    model.table[1] = math.nan
    ids.append(suggestion_for(found(model, torch.randn(5, 4))))
    ids.append(
        suggestion_for(found(Applied(torch.tanh), torch.randn(5, 4), lambda out: (out - out).sqrt().sum()))
    )
    ids.append(
        suggestion_for(found(Applied(lambda h: h - math.inf), torch.randn(5, 4), lambda h: h.square().sum()))
    )
    assert [one.id for one in ids if one] == [
        "input-not-finite",
        "parameter-not-finite",
        "buffer-not-finite",
        "loss-side",
        "infinite-outputs",
    ]


def test_small_operands_have_not_grown() -> None:
    """A loss times infinity: nothing there is large, and no learning rate is blamed."""
    operands = describe("gradient in", torch.ones(())), describe("saved self", torch.tensor(1.2))
    finding = Finding(
        "backward", "replay", op="mul", operands=operands, result=describe("out", torch.tensor(INF))
    )
    told = suggestion_for(finding)
    assert told is not None
    assert told.id == "general"


@pytest.mark.parametrize(
    "phase", [phase for phase in PHASES if phase not in ("unknown", "forward", "backward")]
)
def test_only_operations_are_said_to_have_made_it(phase: Phase) -> None:
    """What was there before the operation has a reason of its own; "out of finite ones" is said of operations alone."""
    told = suggestion_for(Finding(phase, "replay", op="sub", module="a"))
    assert told is not None
    assert phase in told.phases
    assert "out of finite ones" not in told.why


@pytest.mark.parametrize("phase", ["exploding", "activations"])
def test_a_learning_rate_that_jumped_comes_first(phase: Phase) -> None:
    """Whatever the norms show of the place: neither the batch nor a normalisation is blamed then."""
    told = suggestion_for(
        Finding(phase, "norms", module="a", at_outputs=phase == "exploding", lr_jumped_at=7)
    )
    assert told is not None
    assert told.id == "learning-rate-jump"


def test_every_entry_is_tried() -> None:
    """No entry stands in the catalogue that nothing here calls forth."""
    assert {remedy.id for remedy in SUGGESTIONS} == (FUNCTIONS.keys() - {"general"}) | BY_PHASE | SAFE_HERE
