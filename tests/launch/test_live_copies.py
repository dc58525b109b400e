"""Copies of a model that live side by side, some of them replaced now and then: none gets the series of another."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from gradwatch.journal import read_journal
from tests.launch.test_auto_watch import NET, ended
from tests.launch.test_training import run

SCRIPT = (
    NET
    + """
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

def made(size):
    model = copy.deepcopy(net)
    return [model, torch.optim.Adam(model.parameters(), 1e-4), size]

pairs = [made(1e2 ** k) for k in range(3)]  # told apart by the size of their losses

def changed(i, j):
    if sys.argv[1] == "order":
        pairs[i], pairs[j] = pairs[j], pairs[i]
    elif sys.argv[1] == "replaced":
        pairs[i] = made(pairs[i][2])
    elif sys.argv[1] == "two":  # one after the other, the later one first
        pairs[j] = made(pairs[j][2])
        pairs[i] = made(pairs[i][2])
    elif sys.argv[1] == "copied":  # model and optimizer at once
        pairs[i] = list(copy.deepcopy(tuple(pairs[i])))
    elif sys.argv[1] == "assigned":
        states = [copy.deepcopy(pairs[k][0].state_dict()) for k in (i, j)]
        for k, state in zip((j, i), states):
            pairs[k][0].load_state_dict(state, assign=True)
            pairs[k][1] = torch.optim.Adam(pairs[k][0].parameters(), 1e-4)
    elif sys.argv[1] == "together":
        pairs[:] = [made(size) for *_, size in pairs]

def step(model, optimizer, size):
    optimizer.zero_grad()
    (size * (model(torch.randn(16, 8)) - 5).square().mean()).backward()
    optimizer.step()

for t in range(80):
    if t % 7 == 3:
        changed(t % 3, (t + 1) % 3)
    for k in range(3):
        step(*pairs[k])
"""
)
SAID = "gradwatch cannot tell which new model replaces which"


@pytest.mark.parametrize("change", ["order", "replaced", "two", "copied", "assigned"])
def test_each_has_a_number_and_names_of_its_own(tmp_path: Path, change: str) -> None:
    """One number and one name for the losses of one size, and no baseline that begins anew."""
    done = run(tmp_path, SCRIPT, change)
    ended(done)
    assert "rebaselined" not in done.stderr
    assert SAID not in done.stderr
    assert series(tmp_path) == {
        (0, "Sequential.0.weight", 1): 80,
        (1, "Sequential1.0.weight", 2): 80,
        (2, "Sequential2.0.weight", 3): 80,
    }


def test_successors_that_cannot_be_told_apart_are_said_once(tmp_path: Path) -> None:
    """Three that are gone at once, and three that come: they go on in their order, which the log says once."""
    done = run(tmp_path, SCRIPT, "together")
    ended(done)
    assert done.stderr.count(SAID) == 1
    assert "rebaselined" not in done.stderr
    assert {
        number: sum(n for (k, *_), n in series(tmp_path).items() if k == number) for number in range(3)
    } == {
        0: 80,
        1: 80,
        2: 80,
    }


def series(tmp_path: Path) -> Counter[tuple[int, str, int]]:
    """(optimizer, first name, size of the norm as a power of 100) of every Record."""
    (journal,) = read_journal(tmp_path / "runs" / "r")
    found: Counter[tuple[int, str, int]] = Counter()
    for one in journal.records():
        snapshot = one.record.snapshot
        total = math.sqrt(float((snapshot.norm**2).sum()))
        found[snapshot.optimizer, snapshot.sites.names[0], round(math.log10(total) / 2)] += 1
    return found
