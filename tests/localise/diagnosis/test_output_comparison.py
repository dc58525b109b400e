"""Outputs too large to be copied are compared by sums of their rows: any bit of them, at a part of their memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.localise.diagnosis.output_comparison import LargeOutput
from gradwatch.localise.held_calls.kept_row_sums import MOST_ROWS, row_sums, rows_of
from gradwatch.localise.held_calls.random_generators import NONE
from gradwatch.localise.held_calls.recorded_call import Call
from gradwatch.records.finding import Finding
from gradwatch.rules.files import parse_rules
from tests.localise.replay import faulty_processor
from tests.support.kept import Kept

RULES = "version: 1\nrules: {r: {detect: {kind: nonfinite}, do: [skip_step, localise]}}\n"
BAD_STEP = 3


class Net(nn.Module):
    """An output of 256 KiB, of rows that know nothing of each other; the processor may write `value` into one."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.enter, self.leave, self.dropout = nn.Linear(4, 512), nn.Linear(512, 1024), nn.Dropout(0.3)
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        """With dropout behind it."""
        out: Tensor = self.dropout(self.leave(self.body(torch.tanh(self.enter(x)))))
        return out

    def body(self, h: Tensor) -> Tensor:
        """A processor that may fail."""
        return faulty_processor.relu(h, value=self.value)


class Logs(Net):
    """Which has a logarithm, of 0 where inputs are large."""

    def body(self, h: Tensor) -> Tensor:
        """Right, and not finite."""
        return torch.log(1 + h)


def trained(model: Net, directory: Path, inputs: float = 1.0) -> list[Finding]:
    """Five steps, at one of which the processor computes one row wrongly, or inputs are multiplied."""
    faulty_processor.disarm()
    optimizer, kept = torch.optim.SGD(model.parameters(), 1e-3), Kept()
    watch = gradwatch.watch(
        model, optimizer, rules=parse_rules(RULES), sinks=[kept], run_dir=directory, strict=True
    )
    for step in range(5):
        bad = step == BAD_STEP
        if bad:
            faulty_processor.arm()
        loss = model(torch.randn(64, 4) * (inputs if bad else 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    watch.close()
    return [finding for record in kept.records for finding in record.findings]


@pytest.mark.parametrize("value", [torch.nan, 1e30])
def test_a_row_that_was_computed_wrongly_once_is_irreproducible(value: float, tmp_path: Path) -> None:
    """One of 64 rows, NaN or far too large (and its square infinite)."""
    torch.manual_seed(0)
    (finding,) = trained(Net(value), tmp_path)
    assert finding.phase == "irreproducible", finding
    assert "in 4 of 256 parts" in finding.note, finding.note
    assert finding.operands[0].shape == (64, 1024)


def test_what_comes_again_is_deterministic(tmp_path: Path) -> None:
    """With dropout; of an output of which no copy was kept."""
    torch.manual_seed(0)
    (finding,) = trained(Logs(0.0), tmp_path, inputs=1e6)
    assert (finding.phase, finding.op, finding.deterministic) == ("forward", "log", True), finding


@pytest.mark.parametrize(
    ("by", "differs"), [(1.001, False), (1.0, False), (100.0, True), (torch.inf, True), (torch.nan, True)]
)
def test_a_row_that_is_another_by_little_is_no_cause(by: float, differs: bool) -> None:
    """A row that is multiplied; it did not come again in any case but one."""
    torch.manual_seed(0)
    again = torch.randn(64, 1024)
    seen = again.clone()
    seen[3] *= by
    sums, sums_again = row_sums(seen), row_sums(again)
    assert sums is not None
    assert sums_again is not None
    call = Call(0, 0, (), {}, [], NONE, {}, {}, True, None)
    output = LargeOutput(call, nn.Linear(1, 1), 0, sums, sums_again, rows_of(again, sums_again))
    assert output.differs is differs
    assert output.is_same is (by == 1)
    assert output.rows_again.numel() > 1000


SHAPES = [(64, 512), (256, 4096), (100_000, 10), (2, 3, 128, 128), (3, 7, 1024)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_single_bit_is_noticed(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of any element, in memory of any order; the sums take little."""
    torch.manual_seed(0)
    tensor = torch.randn(shape).to(dtype)
    for one in (tensor, tensor.transpose(0, 1), tensor.flip(0)):
        sums = row_sums(one)
        assert sums is not None
        assert 1 < sums.bits.numel() <= MOST_ROWS
        assert sums.nbytes <= 0.02 * one.nbytes
        again = row_sums(one.clone(memory_format=torch.preserve_format))
        assert again is not None
        assert torch.equal(again.bits, sums.bits)
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[one.element_size()]
        other = one.clone(memory_format=torch.preserve_format)
        other.view(bits)[tuple(int(n * 0.7) for n in one.shape)] ^= 1
        flipped = row_sums(other)
        assert flipped is not None
        assert int((flipped.bits != sums.bits).sum()) == 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2000, 20)[:, :10],  # gaps
        torch.ones(1).expand(40_000),
        torch.ones(4, 10_000, dtype=torch.int64),
        torch.ones(33, 1001),  # no whole words
        torch.ones(20_001)[1:],  # which begin in the middle of one
        torch.ones(0, 4),
    ],
    ids=["gaps", "expanded", "integers", "odd", "offset", "empty"],
)
def test_what_cannot_be_divided_has_no_sums(tensor: Tensor) -> None:
    """Nothing is kept of it, and nothing raised."""
    assert row_sums(tensor) is None
