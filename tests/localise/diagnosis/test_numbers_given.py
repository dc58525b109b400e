"""Numbers that are not finite, given to an operation: they are named as that, and a mask of -inf is not blamed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.incidents.explanation import sentence
from gradwatch.records.finding import Finding
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept

RULES = "version: 1\nrules: {r: {detect: {kind: nonfinite}, do: [skip_step, localise]}}\n"
TABLE = torch.tensor([torch.inf, 1.0, 1.0])


class Logits(nn.Module):
    """Three logits a row, of which a subclass makes something."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("scale", torch.tensor([torch.inf, 1.0, 1.0]))
        self.register_buffer("causal", torch.full((5, 5), -torch.inf).triu(1))
        self.kept = [torch.tensor([torch.nan, 1.0, 1.0])]
        self.table = np.array([np.inf, 1, 1], dtype=np.float32)

    def forward(self, x: Tensor) -> Tensor:
        """What `body` makes of finite logits."""
        return self.body(self.leave(torch.tanh(self.enter(x))))

    def body(self, h: Tensor) -> Tensor:
        """To be overridden."""
        raise NotImplementedError


Body = Callable[[Logits, Tensor], Tensor]


def attended(model: Logits, h: Tensor) -> Tensor:
    """Rows that attend to those before them: the mask is right, the logarithm is not."""
    return torch.log(torch.softmax(h @ h.T + model.causal, -1) @ h - 10)


def computed_before(model: Logits, h: Tensor) -> Tensor:
    """A number of Python's that an operation of the forward has made infinite."""
    return h * (h.detach() * 0 + 1000).exp().sum().item()


NUMBERS: dict[str, tuple[Body, str]] = {
    "tensor-inf": (lambda _, h: h + torch.tensor([torch.inf, 0, 0]), "tensor"),
    "tensor-nan": (lambda _, h: h + torch.tensor([torch.nan, 0, 0]), "tensor"),
    "tensor-matmul": (lambda _, h: h @ torch.full((3, 1), 1.0).new_tensor([[torch.inf], [0], [0]]), "tensor"),
    "scalar-tensor": (lambda _, h: h * torch.tensor(torch.inf), "tensor"),
    "full": (lambda _, h: h + torch.full((3,), torch.inf), "full"),
    "full-like-nan": (lambda _, h: h + torch.full_like(h.detach(), torch.nan), "full_like"),
    "python-inf": (lambda _, h: h * float("inf"), "mul"),
    "python-nan": (lambda _, h: h * float("nan"), "mul"),
    "numpy-scalar": (lambda _, h: h * np.float32("inf"), "mul"),
    "from-numpy": (lambda model, h: h * torch.from_numpy(model.table), "tensor"),
    "as-tensor": (lambda model, h: h * torch.as_tensor(model.table), "tensor"),
    "alpha": (lambda _, h: torch.add(h, h.detach(), alpha=torch.inf), "add"),
    "from-item": (computed_before, "mul"),
}
TENSORS: dict[str, tuple[Body, str, str]] = {
    "buffer": (lambda model, h: h * model.scale, "buffer", "scale"),
    "in-a-list": (lambda model, h: h * model.kept[0], "tensor", "kept"),
    "global": (lambda _, h: h * TABLE, "tensor", "TABLE"),
}
MASKS: dict[str, tuple[Body, str, str]] = {
    "all-masked": (lambda _, h: torch.softmax(h + torch.tensor([-torch.inf] * 3), -1), "forward", "softmax"),
    "causal": (attended, "forward", "log"),
    "zero-times-inf": (lambda _, h: (h * 0) * torch.tensor([torch.inf, 1, 1]), "forward", "mul"),
}


def squared(outputs: Tensor) -> Tensor:
    """A loss that leaves nothing out."""
    return outputs.square().mean()


def timed(outputs: Tensor) -> Tensor:
    """The same; because it reads a clock, nothing runs it again."""
    return squared(outputs) + 0 * time.monotonic()


def found(body: Body, loss: Callable[[Tensor], Tensor], run_dir: Path) -> Finding:
    """The cause of a step of a model with that body."""
    torch.manual_seed(0)
    model, sink = type("Net", (Logits,), {"body": body})(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = gradwatch.watch(
        model, optimizer, rules=parse_rules(RULES), sinks=[sink], run_dir=run_dir, strict=True
    )
    for _ in range(1):
        loss(model(torch.randn(5, 4))).backward()
        optimizer.step()
    watch.close()
    return sink.records[0].findings[0]


@pytest.mark.parametrize("case", NUMBERS)
def test_a_number_that_an_operation_was_given_is_named_as_that(case: str, tmp_path: Path) -> None:
    """Whether written out, from numpy or from `item()`: with the operation it was given to, and the module."""
    body, op = NUMBERS[case]
    finding = found(body, squared, tmp_path)
    assert (finding.phase, finding.op, finding.module) == ("number", op, "Net"), finding
    assert finding.frames[0].file == __file__
    assert "given to" in sentence(finding)
    assert ("may have been computed from that of exp" in finding.note) == (case == "from-item")


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_from_before_the_forward_has_its_name(case: str, tmp_path: Path) -> None:
    """A buffer, a tensor in an attribute, or a global of the model's file."""
    body, phase, name = TENSORS[case]
    finding = found(body, squared, tmp_path)
    assert (finding.phase, finding.operands[0].name) == (phase, name), finding


@pytest.mark.parametrize("case", MASKS)
def test_an_infinity_on_purpose_is_not_blamed(case: str, tmp_path: Path) -> None:
    """What makes NaN of it is, or another operation that has nothing to do with it."""
    body, phase, op = MASKS[case]
    finding = found(body, squared, tmp_path)
    assert (finding.phase, finding.op) == (phase, op), finding


@pytest.mark.parametrize("case", ["tensor-inf", "full", "python-inf", "from-numpy", "buffer", "global"])
def test_infinite_outputs_are_not_called_finite(case: str, tmp_path: Path) -> None:
    """Where the loss cannot be run again, the outputs are told to be infinite, and of what."""
    body = (NUMBERS.get(case) or TENSORS[case])[0]
    finding = found(body, timed, tmp_path)
    assert finding.phase == "outputs", finding
    whence = f"a number given to {NUMBERS[case][1]}" if case in NUMBERS else TENSORS[case][2]
    assert whence in finding.note, finding.note
    assert "finite outputs" not in sentence(finding).replace("infinite outputs", "")


def test_a_product_with_a_masked_logit_is_the_loss_code_s(tmp_path: Path) -> None:
    """The entropy of logits that a mask made -inf: 0 · inf in the loss is at fault, not the mask."""

    def entropy(logits: Tensor) -> Tensor:
        return (logits.softmax(-1) * logits.log_softmax(-1)).sum()

    def masked(_: Logits, h: Tensor) -> Tensor:
        return h.masked_fill(torch.tensor([True, False, False]), -torch.inf)

    finding = found(masked, entropy, tmp_path)
    assert (finding.phase, finding.op, finding.module) == ("forward", "mul", ""), finding


def plain(_: Logits, h: Tensor) -> Tensor:
    """Outputs that are finite."""
    return h


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_a_number_that_loss_code_was_given_is_named_as_that(number: float, tmp_path: Path) -> None:
    """A finite loss is multiplied by it: the backward of that did nothing wrong."""
    finding = found(plain, lambda outputs: squared(outputs) * number, tmp_path)
    assert (finding.phase, finding.op, finding.module) == ("number", "mul", ""), finding
    assert finding.frames[0].file == __file__
