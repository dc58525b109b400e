"""The hash of a batch: equal for equal bytes only, whatever the tensors are, and heard in a training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradwatch
from gradwatch.capture.columns import batch_hash as hashing
from gradwatch.capture.columns.batch_hash import batch_hash
from gradwatch.reading.async_copy import host_value
from gradwatch.rules.files import parse_rules
from gradwatch.session.watch import session_of
from tests.reading.test_foreach_norms import WAITING, Operations
from tests.support.kept import Kept

AGAIN = "version: 1\nrules:\n  again: {detect: {kind: same_batch}}\n"
RULES = f"{AGAIN}  cause: {{detect: {{kind: nonfinite}}, do: [localise]}}\n"


def numbers(*tensors: Tensor) -> float:
    """The hash as a number."""
    found = batch_hash(tensors)
    assert found is not None
    return host_value(found)


@pytest.fixture(params=["host", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Operations of the host, or those that leave the numbers on a device."""
    if request.param == "device":
        monkeypatch.setattr(hashing, "on_host", lambda tensor: False)
    return str(request.param)


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_every_element_counts(dtype: torch.dtype) -> None:
    """A copy has the same hash; with one element changed, or two exchanged, it has another."""
    torch.manual_seed(0)
    batch = torch.randn(7, 5).mul(3).to(dtype) if dtype is not torch.bool else torch.randn(7, 5) > 0
    whole = numbers(batch)
    assert whole == numbers(batch.clone()) == numbers(batch.t().contiguous().t())
    seen = {whole}
    for k in range(batch.numel()):
        other = batch.clone()
        other.view(-1)[k] = ~other.view(-1)[k] if dtype is torch.bool else other.view(-1)[k] + 1
        seen.add(numbers(other))
    assert len(seen) == 1 + batch.numel()
    first, second = batch.view(-1)[0].item(), batch.view(-1)[1].item()
    exchanged = batch.clone()
    exchanged.view(-1)[:2] = exchanged.view(-1)[:2].flip(0)
    assert (numbers(exchanged) == whole) == (first == second)


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize(
    ("one", "other"),
    [([0, 0, 2, 1, 2], [1, 2, 2, 0, 2]), ([5, 7, 7, 5], [7, 5, 5, 7]), ([1, 2], [2, 1]), ([0], [0, 0])],
)
def test_places_do_not_cancel(one: list[int], other: list[int]) -> None:
    """The same tokens at places whose sums are alike are other batches."""
    assert numbers(torch.tensor(one)) != numbers(torch.tensor(other))


@pytest.mark.usefixtures("where")
@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 2), max_size=20), min_size=2, max_size=8))
def test_small_numbers_do_not_collide(rows: list[list[int]]) -> None:
    """Batches of tokens that differ have hashes that differ, though their sums are alike; no float is made of them."""
    hashes = {tuple(row): numbers(torch.tensor(row, dtype=torch.int64)) for row in rows if row}
    assert len(set(hashes.values())) == len(hashes)
    assert all(float(int(value)) == value for value in hashes.values())


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float64])
def test_slices_of_a_data_set_have_the_hash_of_their_copies(dtype: torch.dtype) -> None:
    """Wherever in memory they begin, and however long they are."""
    data = torch.arange(90).reshape(30, 3).to(dtype)
    for start, end in ((0, 2), (1, 3), (1, 9), (3, 11), (5, 6)):
        assert numbers(data[start:end]) == numbers(data[start:end].clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_of_a_large_batch_every_byte_counts_too(dtype: torch.dtype, start: int) -> None:
    """Where it is hashed row by row: an element changed, two exchanged, rows of zeros and a one in another order."""
    torch.manual_seed(0)
    batch = (torch.randn(70_000 + start) * 3).to(dtype)[start:]
    seen = {numbers(batch)}
    assert numbers(batch.clone()) in seen
    places = [0, 1, 255, 256, 511, 40_000, 69_998, 69_999]
    for k in places:
        other = batch.clone()
        other[k] += 1
        seen.add(numbers(other))
    assert len(seen) == 1 + len(places)
    ones = torch.eye(256).to(dtype).repeat(2, 1)
    orders = [torch.randperm(512) for _ in range(50)]
    assert len({numbers(ones[order]) for order in orders}) == 50


def test_a_batch_in_fifty_is_hashed_by_the_default_pack(tmp_path: Path) -> None:
    """The rule fires once the loader has come to a halt for 150 steps, and not where all data is one batch."""
    torch.manual_seed(1)
    data = torch.randn(120, 4, 6)
    pack = "version: 1\nextends: [default]\n"
    events, hashes, reasons = trained(tmp_path / "a", lambda step: data[min(step, 119)], 320, pack)
    assert [step for step, found in enumerate(hashes) if found is not None] == [*range(0, 320, 50)]
    found = [(event.kind, event.step) for event in events if event.rule == "same-batch"]
    assert found == [("pending", 200), ("firing", 250)]
    assert "same-batch" not in reasons
    events, _, _ = trained(tmp_path / "b", lambda step: data[0], 320, pack)
    assert not [event for event in events if event.rule == "same-batch"]


def test_the_hash_is_made_at_the_cadence_of_its_rules(tmp_path: Path) -> None:
    """Between the steps of a rule with `every` nothing is read of the batch; `within` counts those that are."""
    rules = RULES.replace("{kind: same_batch}", "{kind: same_batch}, every: 3, for: 2")
    events, hashes, _ = trained(tmp_path, lambda step: torch.ones(4, 6), 12, rules)
    assert [step for step, found in enumerate(hashes) if found is not None] == [0, 3, 6, 9]
    assert [event.step for event in events if event.kind == "firing"] == [6]


def test_more_than_one_part_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a large tensor give the sum of the whole, and nothing waits."""
    batch = torch.randn(1001)
    monkeypatch.setattr(hashing, "on_host", lambda tensor: False)
    whole = numbers(batch)
    monkeypatch.setattr(hashing, "AT_ONCE", 100)
    with Operations() as operations:
        parts = batch_hash([batch])
    assert parts is not None
    assert host_value(parts) == whole
    assert not [name for name in operations.names if name in WAITING]


@pytest.mark.parametrize(
    "odd",
    [torch.eye(3).to_sparse(), torch.empty(2, device="meta"), nn.Parameter(torch.zeros(2)), None],
    ids=["sparse", "meta", "subclass", "nothing"],
)
def test_what_cannot_be_read_has_no_hash(odd: Any) -> None:
    """Nor has a batch of which only a part can be read."""
    assert batch_hash([] if odd is None else [torch.ones(3), odd]) is None
    assert batch_hash([torch.ones(0, 3)]) is None


def trained(tmp_path: Path, batches: Callable[[int], Tensor], steps: int = 8, rules: str = RULES) -> Any:
    """The events of one training, its hashes, and the rules without data."""
    torch.manual_seed(0)
    model, kept = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gradwatch.watch(model, optimizer, rules=parse_rules(rules), run_dir=tmp_path, sinks=[kept]) as gw:
        for step in range(steps):
            optimizer.zero_grad()
            model(batches(step)).square().mean().backward()
            optimizer.step()
        reasons = dict(session_of(gw).account().no_data)
    events = [event for record in kept.records for event in record.verdict.events]
    hashes = [record.snapshot.scalars.get("batch_hash") for record in kept.records]
    assert gw.health.errors() == {}
    return events, hashes, reasons


def test_a_loop_that_never_asks_for_the_next_batch_is_told(tmp_path: Path) -> None:
    """At the third step with the batch of the one before; other batches, or augmented ones, are not."""
    torch.manual_seed(1)
    data = torch.randn(8, 4, 6)
    events, hashes, reasons = trained(tmp_path / "a", lambda step: data[min(step, 3)])
    assert [(event.rule, event.step, event.value) for event in events if event.kind == "firing"] == [
        ("again", 6, 1.0)
    ]
    assert len(set(hashes)) == 4
    assert "again" not in reasons
    events, hashes, _ = trained(tmp_path / "b", lambda step: data[step])
    assert not events
    assert len(set(hashes)) == 8
    events, _, _ = trained(tmp_path / "c", lambda step: data[0] + 1e-6 * step)
    assert not events


def test_batches_that_come_again_later_are_found_within_so_many(tmp_path: Path) -> None:
    """`within` looks back; the value is how many batches ago it was."""
    torch.manual_seed(1)
    data = torch.randn(4, 4, 6)
    rules = RULES.replace("same_batch", "same_batch, within: 5")
    events, _, _ = trained(tmp_path, lambda step: data[step % 4], 12, rules)
    fired = [(event.step, event.value) for event in events if event.kind == "firing"]
    assert fired == [(6, 4.0)]


def test_without_held_calls_it_says_so(tmp_path: Path) -> None:
    """Where no rule holds what the model was called with there is no hash, and the account says why."""
    _, hashes, reasons = trained(tmp_path, lambda step: torch.ones(4, 6), 4, AGAIN)
    assert set(hashes) == {None}
    assert "kept until the step" in reasons["again"]


def test_a_batch_that_was_written_to_since_has_no_hash(tmp_path: Path) -> None:
    """It would be that of other numbers than the model was given."""
    torch.manual_seed(0)
    model, kept = nn.Linear(6, 1), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gradwatch.watch(model, optimizer, rules=parse_rules(RULES), run_dir=tmp_path, sinks=[kept]):
        for step in range(4):
            batch = torch.randn(4, 6)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            if step % 2:
                batch.zero_()
            optimizer.step()
    held = [record.snapshot.scalars.get("batch_hash") is not None for record in kept.records]
    assert held == [True, False, True, False]


class Given:
    """A batch that only its model can look into."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


class GivenCallable(Given):
    """One that can be called, as batches of graphs can."""

    def __call__(self) -> Tensor:
        return self.values


class Lenient(nn.Module):
    """Takes a batch in any form, beside a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, batch: Any, mask: Tensor) -> Tensor:
        batch = batch[0] if isinstance(batch, tuple) else batch
        values = batch.values if isinstance(batch, Given) else torch.as_tensor(batch)
        out: Tensor = self.layer(values * mask)
        return out


@pytest.mark.parametrize(
    ("form", "hashes"),
    [
        (Given, 1),
        (GivenCallable, 1),
        (Tensor.numpy, 1),
        (Tensor.requires_grad_, 6),
        (lambda batch: (batch, SimpleNamespace(width=6, kinds=["a"])), 6),
    ],
    ids=[
        "an object",
        "an object that can be called",
        "an array",
        "a leaf that wants a gradient",
        "a configuration beside it",
    ],
)
def test_what_comes_beside_the_batch_is_not_taken_for_it(
    form: Callable[[Tensor], Any], hashes: int, tmp_path: Path
) -> None:
    """A mask that is the same at each step is no batch that is: where the batch cannot be read there is no hash."""
    torch.manual_seed(0)
    model, kept, mask = Lenient(), Kept(), torch.ones(6)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gradwatch.watch(model, optimizer, rules=parse_rules(RULES), run_dir=tmp_path, sinks=[kept]):
        for _ in range(6):
            optimizer.zero_grad()
            model(form(torch.randn(4, 6)), mask).square().mean().backward()
            optimizer.step()
    assert len({record.snapshot.scalars.get("batch_hash") for record in kept.records}) == hashes
    assert not [event for record in kept.records for event in record.verdict.events]
