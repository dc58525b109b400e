"""Which batch it was: a hash anybody can compute, positions where they were told, and nothing made up."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

import gradwatch
from gradwatch.incidents import explanation
from gradwatch.journal import read_journal
from gradwatch.localise.held_calls import batch_identity as hashing
from gradwatch.records.finding import Batch, Finding
from gradwatch.session.watch import session_of
from gradwatch.sinks.journal import JournalSink
from tests.incidents.bundle.cases import BAD, Fragile, Run, batch, rules
from tests.support.kept import Kept


def by_hand(*arrays: np.ndarray[Any, Any]) -> str:
    """The hash as its documentation says, by numpy and hashlib alone."""
    state = hashlib.blake2b(digest_size=16)
    for array in arrays:
        state.update(f"{array.dtype.name}[{','.join(map(str, array.shape))}]".encode())
        state.update(array.astype(array.dtype.newbyteorder("<")).tobytes("C"))
    return state.hexdigest()


@given(
    st.lists(st.integers(0, 3), max_size=3), st.sampled_from(["float32", "float64", "int64", "uint8", "bool"])
)
def test_the_hash_is_what_it_is_said_to_be(shape: list[int], dtype: str) -> None:
    """Against an independent computation, in any shape and layout, in containers and keywords."""
    array = (np.arange(int(np.prod(shape))) % 2).astype(dtype).reshape(shape)
    tensor = torch.from_numpy(array.copy())
    other = np.array([1.5, -2.0], np.float32)
    expected = by_hand(array, other)
    assert gradwatch.batch_hash(tensor, torch.from_numpy(other)) == expected
    assert gradwatch.batch_hash([tensor], "text", 3, more={"x": torch.from_numpy(other)}) == expected
    turned = torch.from_numpy(array.T.copy()).permute(list(reversed(range(len(shape)))))
    assert gradwatch.batch_hash(turned, torch.from_numpy(other)) == expected


def test_batches_that_differ_have_other_hashes() -> None:
    """One bit, the shape, the dtype, the order: all of it counts; a sparse one is what it stands for."""
    x = torch.zeros(2, 3)
    y = x.clone()
    y[1, 2] = -0.0
    others = [y, x.reshape(3, 2), x.double(), x.int(), torch.zeros(2, 4)]
    hashes = {gradwatch.batch_hash(one) for one in (x, *others)}
    assert len(hashes) == 6
    assert gradwatch.batch_hash(x, y) != gradwatch.batch_hash(y, x)
    eye = torch.eye(3)
    assert gradwatch.batch_hash(eye.to_sparse()) == gradwatch.batch_hash(eye)
    conj = torch.tensor([1 + 2j])
    assert gradwatch.batch_hash(conj.conj()) == gradwatch.batch_hash(torch.tensor([1 - 2j]))


def test_beyond_the_cap_the_first_bytes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said in `complete`; a change beyond them is not seen, one within is."""
    monkeypatch.setattr(hashing, "MOST_BYTES", 16)
    x = torch.arange(8.0)
    whole = hashing.fingerprint((x,), {})
    assert (whole.nbytes, whole.complete) == (32, False)
    state = hashlib.blake2b(b"float32[8]" + struct.pack("<4f", 0, 1, 2, 3), digest_size=16)
    assert whole.hash == state.hexdigest()
    y = x.clone()
    y[6] = 9
    assert hashing.fingerprint((y,), {}).hash == whole.hash
    y[3] = 9
    assert hashing.fingerprint((y,), {}).hash != whole.hash


class Numbered(Dataset[Any]):
    """Samples that know their position: how a dataset tells which ones made a batch."""

    def __init__(self, bad: int) -> None:
        self.x = torch.randn(48, 4)
        self.x[bad, 0] = BAD

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, position: int) -> tuple[int, torch.Tensor]:
        return position, self.x[position]


def test_the_cause_names_the_samples_of_the_batch(tmp_path: Path) -> None:
    """Told by the dataset through `Watch.batch`, shuffled: in the Finding, the journal, the page; the hash too."""
    torch.manual_seed(3)
    loader = DataLoader(Numbered(bad=17), batch_size=6, shuffle=True)
    model = Fragile()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    kept, at = Kept(), {}
    with gradwatch.watch(
        model,
        optimizer,
        rules=rules("batch: true"),
        sinks=[kept, JournalSink()],
        run_dir=tmp_path,
        strict=True,
    ) as gw:
        for step, (positions, x) in enumerate(loader):
            if 17 in positions:  # the fault looks at the first row
                turned = (positions == 17).nonzero().item()
                positions, x = positions.roll(-turned), x.roll(-turned, 0)
                at = {"step": step, "positions": tuple(positions.tolist()), "hash": gradwatch.batch_hash(x)}
            gw.batch(positions)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        directory = Path(gw.run.directory)
    (finding,) = (one for record in kept.records for one in record.findings)
    assert finding.batch == Batch(at["hash"], 96, True, at["positions"], 6)
    (journal,) = read_journal(directory)
    (again,) = journal.findings()
    assert again.batch == finding.batch
    page = "\n".join(explanation.page(finding))
    assert (
        f"batch {at['hash']} (96 bytes), positions {', '.join(map(str, at['positions']))} in the dataset"
        in page
    )


def test_positions_are_those_of_the_call_at_fault(tmp_path: Path) -> None:
    """Told per micro-batch: the one at fault is named, not the last; a step later they are forgotten."""
    calls = iter(range(1000))

    def before(gw: Any, step: int) -> None:
        number = next(calls)
        if step != 5:
            gw.batch([number, number + 1])

    run = Run(tmp_path, rules(), bad=(4, 5), micro=3, before=before)
    finding = run.document.incident.finding
    assert finding is not None
    assert finding.batch is not None
    assert finding.batch.indices == (14, 15)
    later = Run(
        tmp_path / "b", rules(), bad=(5,), before=lambda gw, step: gw.batch([1]) if step == 4 else None
    )
    told = later.document.incident.finding
    assert told is not None
    assert told.batch is not None
    assert told.batch.indices is None
    assert "positions in the dataset not known" in str(told.batch)


def test_what_is_no_list_of_numbers_is_counted_and_harmless(tmp_path: Path) -> None:
    """A fault of the caller's must not reach training: the incident has no batch then."""
    run = Run(tmp_path, rules(""), before=lambda gw, step: gw.batch("abc"), strict=False)
    assert run.errors.get("localise", 0) + run.errors.get("bundle", 0) >= 1
    assert run.document.incident.finding is not None
    assert run.document.incident.finding.batch is None


def test_many_samples_are_counted_and_the_first_ones_kept() -> None:
    """4,096 of them at most; a sentence names 16."""
    found = hashing.fingerprint((torch.ones(1),), {}, range(10_000))
    assert found.samples == 10_000
    assert found.indices == tuple(range(4096))
    assert str(found).endswith("14, 15 and 9,984 more in the dataset")


def test_the_same_batch_in_a_bundle_has_the_same_hash(tmp_path: Path) -> None:
    """What `Watch` computed from what it held is what anybody computes from the loader."""
    run = Run(tmp_path, rules(""))
    (call,) = run.document.calls
    assert call.batch is not None
    assert call.batch.hash == gradwatch.batch_hash(batch(4, bad=True))


@pytest.mark.parametrize("closed", [True, False])
def test_without_a_rule_that_asks_nothing_is_remembered(closed: bool, tmp_path: Path) -> None:
    """`Watch.batch` on a watch that localises nothing, or is closed, does nothing."""
    from gradwatch.rules.files import parse_rules

    plain = parse_rules("version: 1\nrules: {r: {detect: {kind: nonfinite}}}\n")
    gw = gradwatch.watch(Fragile(), rules=plain, sinks=[], run_dir=tmp_path, strict=True)
    if closed:
        gw.close()
    gw.batch([1, 2])
    attached = session_of(gw).attached
    assert (attached is None) is closed
    assert attached is None or attached.causes is None  # there is nobody who could remember
    gw.close()


def test_a_finding_with_a_batch_survives_its_document() -> None:
    """As the journal writes it; one from before there were batches reads as one without."""
    finding = Finding("forward", "replay", batch=Batch("ab", 3, False, (1, 2), 2))
    assert Finding.from_dict(finding.to_dict()) == finding
    old = finding.to_dict()
    del old["batch"]
    assert Finding.from_dict(old).batch is None
    for wrong in ({"hash": 1, "indices": "x"}, {"nonsense": 1}, 3, {"indices": 3}):
        with pytest.raises(ValueError):
            Finding.from_dict({**finding.to_dict(), "batch": wrong})
