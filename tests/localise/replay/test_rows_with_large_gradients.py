"""The rows of a batch that carry a gradient which is finite but large: found where they are few, and are samples."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.localise.replay.cause_among_ranks import chosen
from gradwatch.records.finding import Finding, Layer
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept

ROWS, BAD = 16, 11
RULES = """
version: 1
rules:
  large: {detect: {kind: above, of: total_norm, threshold: 1e3}, do: [ACTION]}
"""
LossOf = Callable[[Any, bool], Tensor]


def trained(net: nn.Module, loss_of: LossOf, action: str = "localise: {by: replay}", micro: int = 1) -> Any:
    """(the first finding, weights at the end) of a training whose third step is bad."""
    torch.manual_seed(0)
    optimizer, kept = torch.optim.SGD(net.parameters(), 1e-9), Kept()
    rules = parse_rules(RULES.replace("[ACTION]", f"[{action}]" if action else "[]"))
    with gradwatch.watch(net, optimizer, rules=rules, sinks=[kept], strict=True) as gw:
        for step in range(5):
            optimizer.zero_grad()
            for part in range(micro):
                gw.batch([1000 * part + row for row in range(ROWS)])
                (loss_of(net, step == 2 and part == max(0, micro - 2)) / micro).backward()
            optimizer.step()
    findings = [one for record in kept.records for one in record.findings]
    return findings[0] if findings else None, [param.detach().clone() for param in net.parameters()]


def target(net: nn.Module, bad: bool, size: int = 4) -> Tensor:
    """A regression in which one target is in other units."""
    x, y = torch.randn(ROWS, size), torch.randn(ROWS, 1)
    if bad:
        y[BAD] *= 1e6
    return nn.functional.mse_loss(net(x), y)


def test_the_row_of_a_micro_batch() -> None:
    """The call, the row and its position, with the part that is its own."""
    finding, _ = trained(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), target, micro=3)
    assert (finding.phase, finding.call, finding.samples) == ("exploding", 1, (BAD,))
    assert finding.share > 0.99
    assert finding.batch.indices[BAD] == 1000 + BAD
    assert f"positions {1000 + BAD} in the dataset), 100.0% of the gradient" in finding.carriers


def times_all(net: nn.Module, bad: bool) -> Tensor:
    """A loss that is larger for every row."""
    return nn.functional.mse_loss(net(torch.randn(ROWS, 4)), torch.randn(ROWS, 1)) * (1e6 if bad else 1)


def test_no_row_but_the_micro_batch_where_all_rows_carry_it() -> None:
    """Of several calls the one that made the gradient; none of its rows."""
    finding, _ = trained(nn.Linear(4, 1), times_all, micro=3)
    assert (finding.call, finding.samples, finding.share > 0.9) == (1, (), True)
    assert finding.batch.indices[0] == 1000


def test_no_batch_where_all_calls_carry_it() -> None:
    """A loss that is large in every micro-batch: none of them is named."""
    finding, _ = trained(nn.Linear(4, 1), lambda net, bad: times_all(net, True), micro=3)
    assert (finding.samples, finding.share, finding.batch) == ((), 0.0, None)


class InPlace(nn.Module):
    """Writes into what it is given, and looks tokens up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, sparse=True)
        self.body = nn.Sequential(
            nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)
        )

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """One row a sample."""
        x = x.clone().mul_(2)
        return self.body(self.embed(tokens).add(x))


def with_tokens(net: nn.Module, bad: bool) -> Tensor:
    """A row whose numbers are out of range."""
    x, tokens = torch.randn(ROWS, 4), torch.randint(0, 9, (ROWS,))
    if bad:
        x[BAD] *= 1e6
    return net(x, tokens).square().mean()


def test_writes_in_place_and_sparse_gradients() -> None:
    """Are of no consequence."""
    finding, _ = trained(InPlace(), with_tokens)
    assert finding.samples == (BAD,)


class Shuffled(nn.Module):
    """Looks its tokens up in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows of the outputs are those of other samples."""
        return self.head(self.embed(tokens.flip(0)))


class Indexed(Shuffled):
    """Looks them up where no module shows it."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows of the outputs are those of other samples."""
        return self.head(self.embed.weight[tokens.flip(0)])


def of_tokens(net: nn.Module, bad: bool) -> Tensor:
    """One target is in other units."""
    y = torch.randn(ROWS, 1)
    if bad:
        y[BAD] *= 1e6
    return nn.functional.mse_loss(net(torch.randint(0, 9, (ROWS,))), y)


class Attending(nn.Module):
    """Rows that look at each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Mixed."""
        h = self.layer(x)
        return self.head(torch.softmax(h @ h.t(), -1) @ h)


@pytest.mark.parametrize(
    ("net", "loss_of"), [(Shuffled, of_tokens), (Indexed, of_tokens), (Attending, target)]
)
def test_a_row_of_the_outputs_that_is_no_sample(net: type[nn.Module], loss_of: LossOf) -> None:
    """None is named."""
    finding, _ = trained(net(), loss_of)
    assert (finding.samples, finding.share > 0.9) == ((), True)


class InAnotherThread(nn.Module):
    """Looks tokens up, while another thread looks others up in a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 1)
        self.raised: list[BaseException] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """One row a sample."""
        thread = threading.Thread(target=self.look_up, args=(nn.Embedding(9, 4),))
        thread.start()
        thread.join()
        return self.head(self.embed(tokens))

    def look_up(self, table: nn.Embedding) -> None:
        """As a script does that prepares something else."""
        try:
            table(torch.randint(0, 9, (ROWS,), generator=torch.Generator()))
        except BaseException as error:
            self.raised.append(error)


def test_what_another_thread_computes_is_no_part_of_it() -> None:
    """A lookup in another thread, of as many rows, takes none of the named row away."""
    net = InAnotherThread()
    finding, _ = trained(net, of_tokens)
    assert (finding.samples, net.raised) == ((BAD,), [])


class Mapped(InAnotherThread):
    """Another thread looks many up at once."""

    def look_up(self, table: nn.Embedding) -> None:
        """With tensors that have no memory of their own."""
        try:
            torch.func.vmap(table)(torch.zeros(3, ROWS, dtype=torch.long))
        except BaseException as error:
            self.raised.append(error)


def test_another_thread_is_not_disturbed() -> None:
    """Its tensors may have no memory that could be asked for."""
    net = Mapped()
    trained(net, of_tokens)
    assert net.raised == []


def penalised(net: nn.Module, bad: bool) -> Tensor:
    """A penalty on the weights that is too large by far."""
    weights = sum(param.square().sum() for param in net.parameters())
    return nn.functional.mse_loss(net(torch.randn(ROWS, 4)), torch.randn(ROWS, 1)) + weights * (
        1e6 if bad else 0
    )


def test_a_batch_does_not_carry_what_a_penalty_made() -> None:
    """The gradient comes of the weights alone: no part of it is said to be the batch's."""
    torch.manual_seed(1)
    finding, _ = trained(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), penalised)
    assert (finding.samples, finding.share) == ((), 0.0)


def test_a_batch_does_not_carry_what_a_call_made_that_is_not_held() -> None:
    """Of three micro-batches two were not kept, of which one made the gradient: said, and none is named."""
    action = "localise: {by: replay, max_bytes: 100}"
    finding, _ = trained(nn.Linear(4, 1), times_all, action, micro=3)
    assert (finding.samples, finding.share) == ((), 0.0)
    assert "2 earlier micro-batches were not kept (max_bytes)" in finding.note


def test_a_call_that_cannot_be_run_again_is_noted() -> None:
    """The profile is of the others: said, and no batch is named."""
    given: list[Tensor] = []

    def loss_of(net: nn.Module, bad: bool) -> Tensor:
        if given:
            given.pop().zero_()
        x, y = torch.randn(ROWS, 4), torch.randn(ROWS, 1)
        if bad:
            given.append(x)
        return nn.functional.mse_loss(net(x), y) * (1e6 if bad else 1)

    finding, _ = trained(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), loss_of, micro=3)
    assert (finding.samples, finding.share) == ((), 0.0)
    assert "1 of 3 calls not run again: an input was written into" in finding.note


def test_two_rules_that_ask_for_different_causes() -> None:
    """On one step: each is told its own, and not what was found for the other."""
    both = """
version: 1
rules:
  falls: {detect: {kind: below, of: total_norm, threshold: 1e30}, do: [localise: {by: replay}]}
  large: {detect: {kind: above, of: total_norm, threshold: 1e3}, do: [localise: {by: replay}]}
"""
    torch.manual_seed(0)
    net, kept = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), Kept()
    optimizer = torch.optim.SGD(net.parameters(), 1e-9)
    with gradwatch.watch(net, optimizer, rules=parse_rules(both), sinks=[kept], strict=True):
        target(net, True).backward()
        optimizer.step()
    found = {one.rule: one for record in kept.records for one in record.findings}
    assert (found["falls"].phase, found["falls"].samples) == ("vanishing", ())
    assert (found["large"].phase, found["large"].samples) == ("exploding", (BAD,))


class Once(torch.autograd.Function):
    """A function whose backward can be run once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same."""
        ctx.kept = [x]
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Forgets."""
        ctx.kept.pop()
        return grad * 2


class Forgetful(nn.Module):
    """Uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """One row a sample."""
        return self.b(Once.apply(self.a(x)))


def test_a_backward_that_can_be_run_once() -> None:
    """The profile is told all the same, and why no row is."""
    finding, _ = trained(Forgetful(), target)
    assert (finding.phase, finding.samples) == ("exploding", ())
    assert "which rows of the batch carry the gradient is not known: IndexError" in finding.note


@pytest.mark.parametrize(
    ("net", "loss_of"), [(InPlace, with_tokens), (Forgetful, target), (Attending, target)]
)
def test_the_training_does_not_notice(net: type[nn.Module], loss_of: LossOf) -> None:
    """Weights end as they do without a search."""
    torch.manual_seed(1)
    one = net()
    torch.manual_seed(1)
    other = net()
    (_, searched), (_, plain) = trained(one, loss_of), trained(other, loss_of, action="")
    assert all(torch.equal(a, b) for a, b in zip(searched, plain, strict=True))


def spiked(rows: tuple[int, ...], share: float) -> Finding:
    """As a rank finds it."""
    return Finding("exploding", "replay", profile=(Layer("0", "Linear", 1, 1),), samples=rows, share=share)


@pytest.mark.parametrize(
    ("made", "rank", "rows"),
    [
        ([-0.5, 100.0], 1, (7,)),
        ([100.0, 1.0], 0, (3,)),
        ([50.0, 50.0], 0, ()),
        ([100.0, None], 0, ()),
    ],
)
def test_the_rank_that_made_most_of_it(made: list[float | None], rank: int, rows: tuple[int, ...]) -> None:
    """Its rows are named, if they carry most of what all ranks made, and if that is known of all."""
    finding = chosen([spiked((3,), 0.95), spiked((7,), 0.95)], made)
    assert (finding.rank, finding.samples, finding.share >= 0.9) == (rank, rows, bool(rows))
