"""The rows of a batch at fault: planted one by one, in the data, in a label, in a loss that has no slope for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.records.finding import Finding
from tests.localise.test_in_the_loop import rules
from tests.support.kept import Kept

ROWS = 16


def findings(kind: str, row: int, micro: int = 1) -> list[Finding]:
    """Those of a training with one bad row, in its last micro-batch but one if there are several, at step 3."""
    torch.manual_seed(row)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3, bias=kind != "length"))
    optimizer, kept = torch.optim.SGD(net.parameters(), 0.01), Kept()
    gw = gradwatch.watch(net, optimizer, rules=rules(), sinks=[kept], strict=True)
    for step in range(5):
        for part in range(micro):
            bad = step == 3 and part == max(0, micro - 2)
            gw.batch([1000 * part + n for n in range(ROWS)])
            loss = _loss(kind, net, row if bad else None)
            (loss / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    gw.close()
    return [finding for record in kept.records for finding in record.findings]


def _loss(kind: str, net: nn.Module, row: int | None) -> Tensor:
    x, y, seen = torch.randn(ROWS, 5), torch.randn(ROWS, 3), torch.ones(ROWS, 1)
    if row is not None and kind == "pixel":
        x[row, 2] = float("nan")
    if row is not None and kind == "label":
        y[row, 1] = float("nan")
    if row is not None and kind == "length":
        seen[row] = 0
    out = net(x)
    if kind == "length":
        return (out * seen).square().sum(1).sqrt().mean()
    return (out - y).square().mean()


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize(
    ("kind", "row"), [("pixel", 0), ("pixel", 9), ("pixel", 15), ("label", 4), ("label", 12), ("length", 7)]
)
def test_the_row_that_was_planted(kind: str, row: int, micro: int) -> None:
    """The row, and its position in the dataset, of the micro-batch that it was in."""
    finding = findings(kind, row, micro)[0]
    # Not run again: a finite loss of a micro-batch that the loop has left, a label that a function drew for itself.
    assert (finding.phase == "loss") is (kind == "label" or (kind == "length" and micro > 1))
    assert finding.samples == (row,)
    position = 1000 * max(0, micro - 2) + row
    assert finding.carriers == f"row {row} of the batch (dimension 0; positions {position} in the dataset)"


def trained(net: nn.Module, loss_of: Callable[[nn.Module, bool], Tensor]) -> Finding:
    """The only finding of a training whose second step is bad."""
    torch.manual_seed(0)
    optimizer, kept = torch.optim.SGD(net.parameters(), 0.01), Kept()
    with gradwatch.watch(net, optimizer, rules=rules(), sinks=[kept], strict=True):
        for step in range(3):
            loss = loss_of(net, step == 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = [one for record in kept.records for one in record.findings]
    return found[0] if len(found) == 1 else Finding("unknown", "replay", note=f"{len(found)} findings")


def divided_by_a_count(net: nn.Module, bad: bool) -> Tensor:
    """A mean over the rows that count."""
    mask = torch.zeros(ROWS, 1) if bad else torch.ones(ROWS, 1)
    return (net(torch.randn(ROWS, 5)).square() * mask).sum() / mask.sum()


def test_no_row_where_every_row_is_at_fault() -> None:
    """A loss that divides by a count of zero makes all rows NaN: none is named."""
    finding = trained(nn.Linear(5, 3), divided_by_a_count)
    assert (finding.op, finding.samples) == ("div", ())


class LastStep(nn.Module):
    """A recurrent layer that is given time first, and a layer for its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.RNN(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        """One row a sample."""
        return self.head(self.recurrent(x)[0][-1])


class Masked(nn.Module):
    """Choices of which a mask forbids some."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """One row a sample."""
        return torch.softmax(self.layer(x) + mask, -1)


@pytest.mark.parametrize("time", [6, 7])
def test_a_row_of_time_is_no_sample(time: int) -> None:
    """Where time comes first, the row of the NaN is a time step: no row is named."""

    def loss_of(net: nn.Module, bad: bool) -> Tensor:
        x = torch.randn(time, 6, 4)
        if bad:
            x[3, 2, 0] = float("nan")
        return net(x).square().mean()

    finding = trained(LastStep(), loss_of)
    assert (finding.phase, finding.samples) == ("input", ())


def masked(net: nn.Module, bad: bool) -> Tensor:
    """A loss that divides row 4 by 0, where row 0 has only one choice."""
    mask, count = torch.zeros(6, 4), torch.ones(6)
    mask[0, 1:] = -torch.inf
    if bad:
        count[4] = 0
    return (net(torch.randn(6, 4), mask).sum(1) * 0 / count).sum()


def test_a_mask_of_infinities_is_at_no_fault() -> None:
    """The row of which the loss makes NaN is named, and not that whose mask is -inf."""
    finding = trained(Masked(), masked)
    assert (finding.op, finding.samples) == ("div", (4,))


class Tired(nn.Module):
    """Takes a logarithm, and raises when it is called for the third time on numbers that it has none of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.calls: Iterator[int] = itertools.count(1)  # nothing puts it back

    def forward(self, x: Tensor) -> Tensor:
        """One row a sample."""
        if bool((x < 0).any()) and next(self.calls) == 3:
            raise RuntimeError("too tired")
        return self.layer(torch.log(x))


def test_rows_that_cannot_be_looked_at() -> None:
    """The operation is told; that its row is not known, and why, too."""

    def loss_of(net: nn.Module, bad: bool) -> Tensor:
        x = torch.rand(ROWS, 5) + 0.1
        if bad:
            x[4] = -1
        return net(x).square().mean()

    finding = trained(Tired(), loss_of)
    assert (finding.op, finding.samples) == ("log", ())
    assert "which rows of the batch are at fault is not known: RuntimeError: too tired" in finding.note
