"""Gradients written to without their version moving (`.data`, numpy): noticed, read again, clipped by the truth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import gradwatch
from gradwatch.reading.batched_norms import CpuReader
from gradwatch.reading.cpu_norms import CpuNorms
from gradwatch.reading.gradient_writes import WriteProbes
from gradwatch.reading.row_sums import RowBuffer
from gradwatch.reading.row_sums_by_blas import SquareRows
from gradwatch.reading.row_sums_by_torch import NormRows
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept
from tests.support.recorder import norms_of

OBSERVES = "version: 1\nrules:\n  nf: {detect: {kind: nonfinite, of: norm}, do: [skip_step]}\n"
CLIPS = "version: 1\nclip: {total: {method: norm, max_norm: 0.5}}\n"
BACKWARD = (
    "version: 1\nrules:\n  far:\n    detect: {kind: above, of: norm, threshold: 1e4}\n"
    "    do: [clip: {to: 1e4, at: backward}]\n"
)
Change = Callable[[nn.Module], None]


def clamped(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad.data.clamp_(-0.01, 0.01)  # type: ignore[union-attr]


def divided(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad.data /= 8  # type: ignore[union-attr]


def by_numpy(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad.numpy()[...] *= 0.01  # type: ignore[union-attr]


def clamped_and_clipped(model: nn.Module) -> None:
    clamped(model)
    clip_grad_norm_(model.parameters(), 0.3)


def clamped_and_not_clipped(model: nn.Module) -> None:
    clamped(model)
    clip_grad_norm_(model.parameters(), 1e9)


def clipped_and_noised(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), 1.0)
    for param in model.parameters():
        param.grad.data.add_(0.05)  # type: ignore[union-attr]


def some_in_place(model: nn.Module) -> None:
    """One gradient changed where its version tells, the others where it does not."""
    divided(model)
    model[0].weight.grad.mul_(2)  # type: ignore[index, union-attr, operator]


CHANGES: list[Change] = [
    clamped,
    divided,
    by_numpy,
    clamped_and_clipped,
    clamped_and_not_clipped,
    clipped_and_noised,
    some_in_place,
]


def train(change: Change, rules: str, layers: int = 1, steps: int = 12) -> tuple[list[Any], list[Any]]:
    """(records, (norms before the step, norms the optimizer got), both float64) of every step."""
    torch.manual_seed(0)
    middle = [part for _ in range(layers) for part in (nn.Tanh(), nn.Linear(24, 24))]
    model = nn.Sequential(nn.Linear(40, 24), *middle, nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    sink, truth = Kept(), []
    with gradwatch.watch(model, optimizer, rules=parse_rules(rules), sinks=[sink], strict=True):
        for _ in range(steps):
            optimizer.zero_grad()
            (model(torch.randn(5, 40)).square().mean() * 40).backward()
            change(model)
            found = norms_of(model.named_parameters())
            optimizer.step()
            truth.append((found, norms_of(model.named_parameters())))
    return sink.records, truth


def total(norms: dict[str, float]) -> float:
    return float(np.sqrt(np.square(list(norms.values())).sum()))


@pytest.mark.parametrize(
    "layers", [1, 20]
)  # 20: the marks are thinned, and versions are those of the pattern
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_the_optimizer_gets_is_told_whatever_way_it_was_written(change: Change, layers: int) -> None:
    """`norm_applied` is the float64 norm at the step, though no version, or only torch's own clip's, tells of it."""
    records, truth = train(change, OBSERVES, layers)
    for record, (found, _) in zip(records, truth, strict=True):
        names, values = record.snapshot.sites.names, record.snapshot.column("norm_applied").values
        assert dict(zip(names, values.tolist(), strict=True)) == pytest.approx(found, rel=1e-4)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_clip_of_ours_goes_by_what_is_really_there(change: Change) -> None:
    """The total after the step is the smaller of the bound and what the user left: never scaled by stale numbers."""
    _, truth = train(change, CLIPS)
    for found, got in truth:
        assert total(got) == pytest.approx(min(0.5, total(found)), rel=1e-4)


def test_a_nan_written_through_data_is_skipped_in_its_own_step() -> None:
    """Judged by the gradient that the optimizer would get, not by the one that backward left."""
    steps = iter(range(6))

    def poisoned(model: nn.Module) -> None:
        if next(steps) == 3:
            model[0].weight.grad.data.fill_(float("nan"))  # type: ignore[index, union-attr, operator]

    records, _ = train(poisoned, OBSERVES, steps=6)
    assert [record.decision.skip for record in records] == [False] * 3 + [True] + [False] * 2


def test_what_nobody_changed_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calm path costs one batched read of the gradients a step, sentinels or not."""
    reads: Counter[CpuReader] = (
        Counter()
    )  # one reader for the gradients, and one for the rare looks at the weights
    read = CpuReader.read

    def counted(self: CpuReader, grads: Any) -> Any:
        reads[self] += 1
        return read(self, grads)

    monkeypatch.setattr(CpuReader, "read", counted)
    train(lambda model: None, OBSERVES, steps=9)
    assert max(reads.values()) == 9


def read_of(grads: list[torch.Tensor | None]) -> CpuNorms:
    return CpuNorms(CpuReader().read(grads), np.zeros(len(grads)), 1.0)


@pytest.mark.parametrize("sizes", [(3, 5, 7, 9), (10000, 20000), (3, 10000), (0, 4), (4096,) * 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sentinels_agree_exactly_with_what_was_read(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Untouched gradients always agree, equal elements (where float32 sums drift most) and NaN included; scaled
    ones only with their factor.
    """
    for fill in (lambda n: torch.randn(n), lambda n: torch.full((n,), 0.1)):
        grads: list[torch.Tensor | None] = [fill(n).to(dtype) for n in sizes]
        grads.append(None)
        sentinels, read = WriteProbes(np.array([*sizes, 6])), read_of(grads)
        assert sentinels.agree(grads, read, 1.0)
        for grad in grads[:-1]:
            grad.data *= 0.5  # type: ignore[union-attr]
        assert not sentinels.agree(grads, read, 1.0)
        assert sentinels.agree(grads, read, 0.5)
        broken: list[torch.Tensor | None] = [torch.full((n,), float("nan"), dtype=dtype) for n in sizes]
        assert not sentinels.agree([*broken, None], read, 0.5)
        assert sentinels.agree([*broken, None], read_of([*broken, None]), 1.0)


@pytest.mark.parametrize("kind", [SquareRows, NormRows])
@pytest.mark.parametrize("sizes", [(5, 9, 300), (5, 9, 300, 7)])
@pytest.mark.parametrize("change", ["signs", "one bit", "other memory", "nothing"])
def test_what_a_read_has_kept_tells_of_every_bit(
    kind: type[RowBuffer], sizes: tuple[int, ...], change: str
) -> None:
    """Read one by one or laid out together: also what leaves every norm as it was is noticed."""
    grads: list[torch.Tensor | None] = [torch.randn(n) for n in sizes]
    reader, sentinels = CpuReader(lambda: kind), WriteProbes(np.array(sizes))
    assert sentinels.agree(grads, CpuNorms(reader.read(grads), np.zeros(len(grads)), 1.0), 1.0)  # chooses
    read = CpuNorms(reader.read(grads), np.zeros(len(grads)), 1.0)
    grad = grads[2]
    assert grad is not None
    if change == "signs":
        grad.data.neg_()
    elif change == "one bit":
        grad.numpy().view(np.int32)[7] ^= 1
    elif change == "other memory":
        grad.data = grad.data.clone().neg_()
    assert sentinels.agree(grads, read, 1.0) == (change == "nothing")


def test_large_gradients_are_not_kept_by_a_read() -> None:
    """What has more than one row is compared by its norm: no copy of megabytes waits for that."""
    grads: list[torch.Tensor | None] = [torch.randn(1 << 16), torch.randn(1 << 17)]
    reader, sentinels = CpuReader(), WriteProbes(np.array([1 << 16, 1 << 17]))
    for factor in (1.0, 0.5):
        read = CpuNorms(reader.read(grads), np.zeros(len(grads)), 1.0)
        assert read.rows.same_bits(sentinels._chosen or [0], grads) is None
        for grad in grads:
            grad.data.mul_(factor)  # type: ignore[union-attr]
        assert sentinels.agree(grads, read, 1.0) == (factor == 1.0)


def test_what_a_later_read_has_laid_out_is_not_taken_for_an_earlier_one() -> None:
    """The copies of a read are gone with the next one by the same plan: then norms are compared."""
    grads: list[torch.Tensor | None] = [torch.randn(n) for n in (5, 9, 300, 7)]
    reader, sentinels = CpuReader(), WriteProbes(np.array([5, 9, 300, 7]))
    read = CpuNorms(reader.read(grads), np.zeros(len(grads)), 1.0)
    assert sentinels.agree(grads, read, 1.0)
    for grad in grads:
        grad.data.mul_(0.5)  # type: ignore[union-attr]
    reader.read(grads)
    assert read.rows.same_bits([0], grads) is None
    assert not sentinels.agree(grads, read, 1.0)


def test_sentinels_that_are_zero_say_nothing_and_others_are_chosen() -> None:
    """Zero stays zero whatever it is multiplied by: where all are, the norms are asked, which then choose anew."""
    grads: list[torch.Tensor | None] = [torch.ones(4), torch.ones(4)]
    reader, sentinels = CpuReader(), WriteProbes(np.array([4, 4]))

    def read_again(now: list[torch.Tensor | None]) -> CpuNorms:
        return CpuNorms(reader.read(now), np.zeros(2), 1.0)

    assert sentinels.agree(grads, read_again(grads), 1.0)
    zeros: list[torch.Tensor | None] = [torch.zeros(4), torch.zeros(4)]
    assert sentinels.agree(zeros, read_again(zeros), 1.0)
    assert not sentinels._chosen
    read = read_again(grads)
    for grad in grads:
        grad.data.mul_(0.5)  # type: ignore[union-attr]
    assert not sentinels.agree(grads, read, 1.0)


def test_what_was_kept_for_sentinels_is_given_once() -> None:
    """It does not wait for the norms to be asked for, steps later; then these are compared."""
    grads: list[torch.Tensor | None] = [torch.ones(4)]
    reader, sentinels = CpuReader(), WriteProbes(np.array([4]))
    for _ in range(2):
        read = CpuNorms(reader.read(grads), np.zeros(1), 1.0)
        assert sentinels.agree(grads, read, 1.0)
    assert read.rows.same_bits([0], grads) is None
    assert CpuNorms(reader.read(grads), np.zeros(1), 1.0).rows.same_bits([0], grads)


def test_sentinels_are_few_small_and_spread() -> None:
    """At most three, of at most 4,096 elements where there are any, one from each part of the capture."""
    sizes = np.array([9000, *[8] * 30, 9000])
    grads: list[torch.Tensor | None] = [torch.randn(n) for n in sizes]
    sentinels = WriteProbes(sizes)
    assert sentinels.agree(grads, read_of(grads), 1.0)
    chosen = sentinels._chosen
    assert len(chosen) == 3
    assert all(sizes[k] == 8 for k in chosen)
    assert [1 + 10 * part <= k < 11 + 10 * part for part, k in enumerate(chosen)] == [True] * 3


def test_what_was_overheard_is_not_trusted_where_a_hook_may_replace_the_gradient() -> None:
    """A post-accumulate hook of the user's puts another gradient, version 0, in place of the one we heard."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 400), nn.Tanh(), nn.Linear(400, 1))
    optimizer, sink = torch.optim.SGD(model.parameters(), 0.0), Kept()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 0.1))  # type: ignore[operator]
    with gradwatch.watch(model, optimizer, rules=parse_rules(BACKWARD), sinks=[sink], strict=True):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 600)).sum().backward()
            truth = norms_of(model.named_parameters())
            optimizer.step()
    snapshot = sink.records[-1].snapshot
    told = dict(zip(snapshot.sites.names, snapshot.norm.tolist(), strict=True))
    assert told == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("found", [1.0, 2.0, float("inf"), float("nan")])
@pytest.mark.parametrize("read", [1.0, float("inf"), float("nan")])
def test_a_sentinel_agrees_with_the_same_norm_and_what_was_not_finite_with_what_is_not(
    read: float, found: float
) -> None:
    """Close to infinity is no agreement: a gradient that overflowed and was clamped since is another one."""
    sentinels = WriteProbes(np.array([4]))
    assert sentinels.agree([torch.tensor([1.0, 0.0, 0.0, 0.0])], CpuNorms.of(np.array([1.0]), {}), 1.0)
    reading = CpuNorms.of(np.array([read]), {})
    same = read == found or not (np.isfinite(read) or np.isfinite(found))
    assert sentinels.agree([torch.tensor([found, 0.0, 0.0, 0.0])], reading, 1.0) == same


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_step_that_overflowed_and_was_clamped_is_clipped_by_what_is_left(bad: float) -> None:
    """`nan_to_num_` and `clamp_` through `.data` after an overflow: told as it was read, and clipped as it is."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sink, x = Kept(), torch.randn(4, 3)
    with gradwatch.watch(model, optimizer, rules=parse_rules(CLIPS), sinks=[sink], listen=None, strict=True):
        for step in range(6):
            optimizer.zero_grad()
            overflowing = model.parameters() if step == 4 else ()
            handles = [param.register_hook(lambda grad: torch.full_like(grad, bad)) for param in overflowing]
            model(x).pow(2).sum().backward()
            for handle in handles:
                handle.remove()
            for param in model.parameters():
                param.grad.data.nan_to_num_(1.0).clamp_(-1, 1)  # type: ignore[union-attr]
            before = [param.detach().clone() for param in model.parameters()]
            optimizer.step()
            moved = [(a - b.detach()).norm() ** 2 for a, b in zip(before, model.parameters(), strict=True)]
            assert float(sum(moved)) ** 0.5 <= 0.1 * 0.5 * 1.0001
    record = sink.records[4]
    assert not np.isfinite(record.snapshot.total_norm)
    assert record.snapshot.total_norm_applied == pytest.approx(0.5, rel=1e-4)
